"""Send a run to one tracker, in a process that reads the files that the run writes.

    python -m mage_services.tracking.tracker_worker RUN_DIR TRACKER PIPE_FD END_S

TRACKER is the tracker's table of the configuration, as JSON.

The run writes its files whether or not this process reads them, so a tracker can neither delay nor
end a run, and points that were not sent, because the tracker raised or hung, are still there for
the next try. `mage train` holds the other end of a pipe. When the pipe closes, however `mage train`
ended, this process sends the rest, and after END_S seconds the kernel ends it.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from mage_async.config import config_file
from mage_async.config.components import TRACKERS, decode_component
from mage_async.config.schema import Tracking
from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, read_document, read_lines, write_whole
from mage_services.processes.child_process import end_in_words, module_command
from mage_services.processes.cores_and_memory import WATCHER, lower_priority, restore_priority
from mage_services.tracking.tracker import Point, Send, TrackedRun, Tracker

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 4.0, 60.0
"""Seconds of pause after a tracker's exception, before the next try: after the first exception, and
the largest number. The pause doubles with each further exception.
"""
MAX_BYTES = 1 << 20
"""Number of bytes of lines that are read and sent at once; a line has about 5 kB."""


class Position(msgspec.Struct):
    """Record how much of a run was sent to a tracker; the tracker's next process continues there.

    It is the content of the file `tracking/NAME.json`.
    """

    id: str
    """Id of the tracker's own run."""
    began: float
    """Time at which training began, in seconds since 1970. The times of points are counted from
    here.
    """
    step: int = 0
    """Last step that was sent."""
    metrics_bytes: int = 0
    """Number of bytes of `metrics.jsonl` that were sent, up to the end of a line."""
    curve_bytes: int = 0
    """Number of bytes of `evaluations.jsonl` that were sent."""
    end_step: int = -1
    """Step of the last summary that was sent; -1 if none was. A run without a step ends at 0."""
    fault: str = ""
    """Last exception of the tracker; "" once a later try has succeeded."""
    num_faults: int = 0
    """Number of exceptions of the tracker, over all processes of the tracker."""


def file_name(tracker: Tracker) -> str:
    """Return a tracker's kind as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", tracker.kind)


def read_position(run: RunDirectory, name: str) -> Position | None:
    """Return the position of one tracker; None if nothing was sent yet.

    Raises:
        RunError: the file is damaged.
    """
    file = run.tracking / f"{name}.json"
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Position)
    except msgspec.DecodeError as error:
        raise RunError(
            f"{file} is damaged: {error}; delete it, and the tracker begins a new run"
        ) from None


def write_position(run: RunDirectory, name: str, position: Position) -> None:
    """Replace the file of a position as a whole."""
    # Not synced to the disk, because the run's journal would have to wait for the sync. After a
    # loss of power a few points are sent again.
    write_whole(run.tracking / f"{name}.json", msgspec.json.encode(position), is_durable=False)


@dataclass(slots=True)
class TrackerWorker:
    """Send one run to one tracker."""

    run: RunDirectory
    tracker: Tracker
    ended: threading.Event
    """Event that is set when nothing more is written to the run's files."""

    @property
    def name(self) -> str:
        """Name of the tracker's files."""
        return file_name(self.tracker)

    def follow(self) -> bool:
        """Send new points until the run has ended; return whether everything was sent."""
        position, pause_s = self._position(), SHORTEST_PAUSE_S
        while True:
            is_last = self.ended.is_set()
            try:
                with self.tracker.open(self._tracked_run(position)) as send:
                    while True:
                        # Checked before the files are read: lines that the run writes after this
                        # check are read in the next round.
                        is_last = self.ended.is_set()
                        self._send(send, position, is_last)
                        pause_s = SHORTEST_PAUSE_S
                        if is_last:
                            break
                        self.ended.wait(self.tracker.every_s)
                return True
            # The tracker's library may raise anything; the next try opens the tracker again.
            except Exception as fault:
                traceback.print_exc()
                position.fault = f"{type(fault).__name__}: {fault}"[:500]
                position.num_faults += 1
                write_position(self.run, self.name, position)
                if is_last:
                    return False
            self.ended.wait(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _position(self) -> Position:
        """Return the position that an earlier process recorded; without one, record a new one."""
        position = read_position(self.run, self.name)
        if position is None:
            metrics = read_lines(self.run.metrics)
            trained_s = metrics[-1]["time_s"] if metrics else 0.0
            position = Position(uuid.uuid4().hex, time.time() - trained_s)
            write_position(self.run, self.name, position)
        return position

    def _tracked_run(self, position: Position) -> TrackedRun:
        """Return the description of the run that the tracker is opened with."""
        config = msgspec.to_builtins(config_file.load_recorded(self.run.config))
        folder, name = self.run.tracking, self.run.root.name
        return TrackedRun(name, position.id, folder, config, position.began, position.step)

    def _send(self, send: Send, position: Position, is_last: bool) -> None:
        """Send the new lines of the run's files, and write the position after each batch."""
        while True:
            steps, metrics_bytes = _read(self.run.metrics, position.metrics_bytes)
            curve, curve_bytes = _read(self.run.curve, position.curve_bytes)
            if (metrics_bytes, curve_bytes) == (position.metrics_bytes, position.curve_bytes):
                break
            # A resumed learner may have cut steps that were sent, and computed them again.
            steps = [record for record in steps if record["step"] > position.step]
            send([*map(step_point, steps), *map(evaluation_point, curve)])
            position.metrics_bytes, position.curve_bytes = metrics_bytes, curve_bytes
            position.step = max([position.step, *(record["step"] for record in steps)])
            self._advance(position)
        summary = read_document(self.run.summary) if is_last else {}
        if summary.get("complete") and summary["steps"] > position.end_step:
            send([final_point(summary, read_document(self.run.learner)["train_s"])])
            position.end_step = summary["steps"]
            self._advance(position)

    def _advance(self, position: Position) -> None:
        """Record a position up to which sending has succeeded."""
        position.fault = ""
        write_position(self.run, self.name, position)


def _read(file: Path, start: int) -> tuple[list[Record], int]:
    """Return the records of the finished lines from byte `start` on, at most about `MAX_BYTES` of
    lines, and the offset after them.

    If no line ends just before `start`, a resumed learner has cut the file and continued it:
    then all lines are read again.
    """
    if not file.is_file():
        return [], start
    with file.open("rb") as lines:
        lines.seek(max(0, start - 1))
        if start and lines.read(1) != b"\n":
            start = lines.seek(0)
        whole = [line for line in lines.readlines(MAX_BYTES) if line.endswith(b"\n")]
    return [json.loads(line) for line in whole], start + sum(map(len, whole))


def _watch(pipe: int, ended: threading.Event, end_s: float) -> None:
    """Wait until `mage train` has closed its end of the pipe, then limit the time of this process.

    The timer is the kernel's: its signal ends a process whose tracker never returns.
    """
    while os.read(pipe, 1):  # nothing is ever written: it blocks until the other end is closed
        continue
    signal.setitimer(signal.ITIMER_REAL, end_s)
    restore_priority()
    ended.set()


def main() -> int:
    """Follow a run; return 0 if everything was sent, else 1."""
    run_dir, configured, pipe, end_s = sys.argv[1:]
    lower_priority(WATCHER)
    ended = threading.Event()
    watch = (int(pipe), ended, float(end_s))
    threading.Thread(target=_watch, args=watch, name="end of the run", daemon=True).start()
    tracker, run = decode_component(TRACKERS, json.loads(configured)), RunDirectory(Path(run_dir))
    with (run.tracking / f"{file_name(tracker)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of an earlier start may still be sending
        return 0 if TrackerWorker(run, tracker, ended).follow() else 1


# The points that trackers receive. A name begins with the origin of the number and ends with the
# name that `results/metrics.py` or `results/score.py` gives it: `train/entropy` (a step),
# `evaluation/heldout/...` (a point of the curve), `final/heldout_blind/...` (the end). Elements of
# a list are numbered from 1, as episodes are: `train/return_by_episode_3`.

TRACKED_OF_A_SET = (
    *("return_by_episode", "ci95_by_episode", "won_by_episode", "won_within"),
    *("invalid_actions_per_trial", "cut_short"),
)
"""Scores of a set of evaluated tasks, such as the held-out ones, that trackers receive. The run's
files have more scores, such as returns by member.
"""
TRACKED_OF_THE_END = ("wall_s", "processor_s", "throughput", "staleness", "prefix_cache")
"""Keys of the summary that trackers receive."""


def step_point(record: Record) -> Point:
    """Return the point of a line of `metrics.jsonl`."""
    values = {name: value for name, value in record.items() if name != "step"}
    return Point(record["step"], record["time_s"], dict(flat(values, "train")))


def evaluation_point(record: Record) -> Point:
    """Return the point of a line of `evaluations.jsonl`."""
    return Point(record["version"], record["time_s"], dict(_sets(record["sets"], "evaluation")))


def final_point(summary: Record, time_s: float) -> Point:
    """Return the point of a finished run's summary, after `time_s` seconds of training."""
    whole = {name: summary[name] for name in TRACKED_OF_THE_END if name in summary}
    values = dict(_sets(summary["evaluation"], "final")) | dict(flat(whole, "final"))
    return Point(summary["steps"], time_s, values)


def flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the path and value of every number in a tree; skip other values, and tables, which are
    lists of rows.
    """
    for name, value in tree.items():
        path = f"{prefix}/{name}"
        if isinstance(value, Mapping):
            yield from flat(value, path)
        elif isinstance(value, list) and not any(isinstance(part, list) for part in value):
            yield from flat({f"{name}_{n}": part for n, part in enumerate(value, 1)}, prefix)
        elif isinstance(value, int | float):
            yield path, float(value)


def _sets(sets: Mapping[str, Record], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the path and value of each score that trackers receive, for each set of tasks."""
    for name, score in sets.items():
        tracked = {key: score[key] for key in TRACKED_OF_A_SET if key in score}
        yield from flat(tracked, f"{prefix}/{name}")


# The functions below run in `mage train`: they start the processes with the run, and let them go on
# at its end.

END_S = 60.0
"""Seconds after the end of a run at which its trackers' processes are ended, whatever they do."""


def trackers_of(tracking: Tracking) -> dict[str, Tracker]:
    """Return the configured trackers by the name of their files.

    Raises:
        ConfigError: the package of one is not installed.
    """
    keys = [key for key in tracking.__struct_fields__ if key != "wait_s"]
    trackers = {key: tracker for key in keys if (tracker := getattr(tracking, key)) is not None}
    for key, tracker in trackers.items():
        tracker.check_installed(key)
    return {file_name(tracker): tracker for tracker in trackers.values()}


@contextmanager
def tracked(
    run: RunDirectory, trackers: Mapping[str, Tracker], wait_s: float, say: Callable[[str], None]
) -> Iterator[Callable[[], Iterable[str]]]:
    """Run the trackers' processes while the run goes on; return a function that returns what is
    new about them since its last call, as sentences.

    At the end, wait for the processes for at most `wait_s` seconds in all, and report each tracker
    that has not sent everything; its process goes on without this one.

    Args:
        trackers: Result of `trackers_of`.
    """
    if not trackers:
        yield tuple
        return
    processes = start(run, trackers, END_S)
    try:
        yield partial(processes.news, run)
    finally:
        processes.end(wait_s)
        for sentence in processes.unfinished(run):
            say(sentence)


@dataclass(slots=True)
class TrackerProcesses:
    """Hold the trackers' processes of one start of a run."""

    processes: Mapping[str, subprocess.Popen[bytes]]
    """Processes by the name of the tracker's files."""
    pipe: int
    """Our end of the pipe that the processes watch."""
    _failing: set[str] = field(default_factory=set)
    """Trackers whose failure was reported, and that have received nothing since."""

    def news(self, run: RunDirectory) -> Iterator[str]:
        """Yield a sentence about each tracker that fails or has recovered since the last call."""
        for name, process in self.processes.items():
            try:
                position = read_position(run, name)
                fault = position.fault if position else ""
            except (OSError, RunError) as error:
                fault = str(error)
            cure = "it is tried again"
            if (code := process.poll()) is not None:
                fault = fault or f"its process {end_in_words(code)}"
                cure = f"`mage track {run.root}` sends the rest"
            if fault and name not in self._failing:
                self._failing.add(name)
                yield f"{name} does not receive the run ({fault}; see {_log(run, name)}): {cure}"
            elif not fault and name in self._failing:
                self._failing.remove(name)
                yield f"{name} receives the run again"

    def end(self, wait_s: float) -> None:
        """Signal to the processes that the run has ended, and wait for at most `wait_s` seconds."""
        os.close(self.pipe)
        until = time.monotonic() + wait_s
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def unfinished(self, run: RunDirectory) -> Iterator[str]:
        """Yield a sentence about each tracker that may not have received everything."""
        for name, process in self.processes.items():
            position = read_position(run, name)
            steps, fault = (position.step, position.fault) if position else (0, "")
            why = f" ({fault})" if fault else ""
            so_far = f"{name} has received {steps} steps so far{why}"
            rest = f"`mage track {run.root}` sends the rest"
            if process.poll() is None:
                yield f"{so_far}, and receives more for up to {END_S:g} s; after that, {rest}"
            elif process.returncode:
                yield f"{so_far}, and no more (see {_log(run, name)}): {rest}"


def start(run: RunDirectory, trackers: Mapping[str, Tracker], end_s: float) -> TrackerProcesses:
    """Start a process per tracker; each ends at most `end_s` seconds after this process."""
    run.tracking.mkdir(exist_ok=True)
    # A plain pipe instead of the protocol of child_process.py: trackers outlive this process and
    # exchange no messages with it. When the pipe closes, all of them know that the run has ended.
    reading, writing = os.pipe()  # children inherit neither end, except `reading` by `pass_fds`
    defaults = {"MLFLOW_DISABLE_TELEMETRY": "true"}  # the user's own variable has precedence
    own = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    processes = {}
    try:
        for name, tracker in trackers.items():
            configured = msgspec.json.encode(tracker).decode()
            arguments = (str(run.root), configured, str(reading), str(end_s))
            command = module_command("mage_services.tracking.tracker_worker", *arguments)
            with _log(run, name).open("ab") as log:
                processes[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reading,),
                    start_new_session=True,  # Ctrl-C is for `mage train`
                    env=defaults | os.environ | own,
                )
    finally:
        os.close(reading)
    return TrackerProcesses(processes, writing)


def _log(run: RunDirectory, name: str) -> Path:
    """Return the log of a tracker's process."""
    return run.log_of(f"tracker-{name}")


if __name__ == "__main__":
    sys.exit(main())
