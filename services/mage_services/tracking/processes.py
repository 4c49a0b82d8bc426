"""The processes of a run's trackers: started with the run, and left behind at its end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from mage_async.results.run_directory import RunDirectory
from mage_services.tracking.position import read_position

END_S = 60.0
"""From the end of a run to the end of its trackers' processes, whatever they do."""
Processes = Mapping[str, subprocess.Popen[bytes]]


@contextmanager
def followed(
    run: RunDirectory, targets: Mapping[str, str], wait_s: float, say: Callable[[str], None]
) -> Iterator[None]:
    """Have trackers told of a run while it goes on.

    At the end, the processes are waited for `wait_s` seconds at most, together, and a sentence is
    said of each that has not told everything; they tell what is left behind this process.

    Args:
        targets: by tracker, as `mage_services.tracking.tracker.targets` gives them.
    """
    if not targets:
        yield
        return
    followers = start(run, targets, END_S)
    try:
        yield
    finally:
        followers.end(wait_s)
        for sentence in followers.left(run):
            say(sentence)


@dataclass(slots=True)
class Followers:
    """The processes of one life of a run, by tracker."""

    processes: Processes
    alive: int
    """Our end of the pipe that they watch."""

    def end(self, wait_s: float) -> None:
        """Say that the run has ended, and wait so many seconds at most."""
        os.close(self.alive)
        until = time.monotonic() + wait_s
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def left(self, run: RunDirectory) -> Iterator[str]:
        """A sentence on each tracker that has not been told everything, as far as is known."""
        for name, process in self.processes.items():
            told = read_position(run, name)
            steps, fault = (told.step, told.fault) if told else (0, "")
            why = f" ({fault})" if fault else ""
            so_far = f"{name} was told of {steps} steps so far{why}"
            rest = f"`mage track {run.root}` tells the rest"
            if process.poll() is None:
                yield f"{so_far}, and is told on for up to {END_S:g} s; after that, {rest}"
            elif process.returncode:
                yield f"{so_far}, and no more (see {run.log_of(_log(name))}): {rest}"


def start(run: RunDirectory, targets: Mapping[str, str], end_s: float) -> Followers:
    """Start a process a tracker; each ends `end_s` seconds after this one at the latest."""
    run.tracking.mkdir(exist_ok=True)
    reading, writing = os.pipe()  # not inheritable, but for the end that is passed on
    try:
        found = {name: _start(run, name, to, reading, end_s) for name, to in targets.items()}
    finally:
        os.close(reading)
    return Followers(found, writing)


def _start(
    run: RunDirectory, name: str, target: str, alive: int, end_s: float
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mage_services.tracking.follower", str(run.root)]
    command += ["--name", name, "--to", target, "--alive-fd", str(alive), "--end-s", str(end_s)]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true"}  # a variable of the user's wins
    own = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with run.log_of(_log(name)).open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(alive,),
            start_new_session=True,  # Ctrl-C is for `mage train`
            env=quiet | os.environ | own,
        )


def _log(name: str) -> str:
    return f"tracker-{name}"
