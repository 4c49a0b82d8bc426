"""Run training with processes that are killed and stopped, and a disk that is filled.

All messages between the learner and its peers pass a tap (`tap.py`), which records what the peers
were told and can damage messages. After a kill of the whole run, the journal loses some of what no
peer was told of (`torn_tail.py`), as a power cut would have it.
"""

import atexit
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.chaos.jumping_clock import jumping_clock
from bench.chaos.tap import Mischief, Tap
from bench.chaos.tapped_run import TAP
from bench.chaos.torn_tail import tear
from bench.lib.processes import command_lines
from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines

# Module that a process of a role runs, by which it is found.
MODULES = {
    "actor": "mage_services.actor.actor",
    "learner": "mage_services.learner.learner",
    "follower": "mage_services.learner.rank_worker",
    "evaluator": "mage_services.actor.evaluator",
    "supervisor": "bench.chaos.tapped_run",
    "engine": "mage_services.engines.sglang.server",
}
# By default, the supervisor gives a process up that was restarted a few times.
NO_LIMIT_ON_RESTARTS = ("supervision.max_restarts=100000",)
LOOK_S = 0.02
"""Seconds between two looks at the run."""


class Victim:
    """Start a run, harm its processes, and wait for its steps.

    Args:
        root: The run directory.
        settings: Changes to the quickstart's configuration.
        actors: Number of actors.
        given: Options of `bench.chaos.kills`: `seed`, `disk`, `frames`, `clock`, `patience_s`.
    """

    def __init__(self, root: Path, settings: list[str], actors: int, given: Any) -> None:
        self.run, self.actors = RunDirectory(root.resolve()), actors
        self.config = config_file.load(config_file.find(None), [*settings, *NO_LIMIT_ON_RESTARTS])
        check(self.config)
        self.run.logs.mkdir(parents=True)
        self.run.checkpoints.mkdir()
        self.run.config.write_text(config_file.dump(self.config))
        self.source = random.Random(given.seed)
        self.num_full = 0
        """How often the journal's disk was filled."""
        if given.disk:
            self.run.journal.mkdir()
            small = ("mount", "-t", "tmpfs", "-o", f"size={given.disk}m", "tmpfs")
            subprocess.run([*small, str(self.run.journal)], check=True)
        sockets = Path(tempfile.mkdtemp(prefix="mage-tap-"))
        mischief = Mischief(given.frames, random.Random(given.seed)) if given.frames else None
        self.tap = Tap(sockets / "tap", self.run.root / "sockets" / "work", mischief)
        self.environment = os.environ | {TAP: f"ipc://{sockets / 'tap'}"}
        if given.clock:
            self.environment |= jumping_clock(sockets)
        self.patience_s = given.patience_s
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self.torn: list[int] = []
        """Bytes cut off or appended at the journal's end after each kill of the whole run."""
        self._stopped: list[tuple[float, int]] = []
        """Stopped processes: when each is to go on, and its id."""
        self._full_until = 0.0
        self.process = self._start()
        atexit.register(lambda: self.process.poll() is None and self.process.terminate())

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.config.learner.steps

    def step(self) -> int:
        """Return the last step in the run's metrics."""
        lines = read_lines(self.run.metrics)
        return lines[-1]["step"] if lines else 0

    def kill(self, role: str) -> bool:
        """Kill one process of a role with SIGKILL; return False if there is none."""
        found = self._pids(role)
        if not found:
            return False
        os.kill(self.source.choice(found), signal.SIGKILL)
        self.kills[role] += 1
        if role == "supervisor":
            self.process.wait()
            self._wait_for_the_end()
            self.torn.append(tear(self.run, self.tap, self.source))
            self.process = self._start()
        return True

    def stop(self, role: str, seconds: float) -> None:
        """Stop one process of a role with SIGSTOP; `look` continues it after `seconds`."""
        found = self._pids(role)
        if found:
            pid = self.source.choice(found)
            os.kill(pid, signal.SIGSTOP)
            self.stops[role] += 1
            self._stopped.append((time.monotonic() + seconds, pid))

    def fill(self, seconds: float) -> None:
        """Fill the journal's disk; `look` removes the filling file after `seconds`."""
        self.num_full += 1
        self._full_until = time.monotonic() + seconds
        with self._filler.open("wb", buffering=0) as out, suppress(OSError):
            while True:
                out.write(bytes(1024))

    @property
    def _filler(self) -> Path:
        return self.run.journal / "filler"

    def look(self) -> None:
        """Sleep briefly; continue stopped processes and empty the disk when it is time.

        Raises:
            SystemExit: the run failed.
        """
        self._continue()
        if self._filler.exists() and time.monotonic() >= self._full_until:
            self._filler.unlink()
        if self.process.poll() not in (None, 0):
            self.give_up(f"the run ended with {self.process.returncode}")
        time.sleep(LOOK_S)

    def wait_for(self, step: int) -> float:
        """Wait until the run has trained a step, or has ended; return the seconds that took.

        Raises:
            SystemExit: there was no step for `--patience-s` seconds, or the run failed.
        """
        began = seen = time.monotonic()
        last = self.step()
        while last < step and self.process.poll() is None:
            self.look()
            if (now := self.step()) != last:
                last, seen = now, time.monotonic()
            if time.monotonic() - seen > self.patience_s and last < self.steps:
                self.give_up(f"no step for {self.patience_s:g} s after step {last}")
        return time.monotonic() - began

    def finish(self) -> None:
        """Wait for the end of the run."""
        self.wait_for(sys.maxsize)
        self.look()

    def give_up(self, reason: str) -> None:
        """End the program, because the run hangs or has failed."""
        self.process.terminate()
        print((self.run.root.parent / "output").read_text()[-3000:])
        sys.exit(f"FAILED: {reason}; see {self.run.root}")

    def _start(self) -> "subprocess.Popen[bytes]":
        script = [sys.executable, "-m", MODULES["supervisor"], str(self.run.root)]
        with (self.run.root.parent / "output").open("ab") as out:
            return subprocess.Popen(
                [*script, "--actors", str(self.actors)],
                stdout=out,
                stderr=out,
                env=self.environment,
            )

    def _wait_for_the_end(self) -> None:
        """Wait until all processes have ended, which end with their supervisor."""
        while any(self._pids(role) for role in MODULES):
            # A process that was stopped early has not yet asked the kernel to end it with its
            # parent; it ends once it goes on.
            self._continue()
            time.sleep(LOOK_S)

    def _continue(self) -> None:
        for due, pid in [one for one in self._stopped if one[0] <= time.monotonic()]:
            self._stopped.remove((due, pid))
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # the process was killed while it was stopped

    def _pids(self, role: str) -> list[int]:
        names = {MODULES[role], str(self.run.root)}
        return [pid for pid, words in command_lines() if names <= set(words)]
