"""The process of one tracker: reads what a run writes down, and tells the tracker.

    python -m mage_services.tracking.follower RUN_DIR --name wandb --to PROJECT --alive-fd N

The run writes its files whether or not somebody reads them, so nothing that a tracker does can
delay or end a run; and what a tracker was not told, because it raised or hung, is still there for
the next try. `mage train` holds the other end of a pipe. When the pipe closes, however `mage train`
ended, this process tells what is left, and after `--end-s` seconds the kernel ends the process.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mage_async.config import config_file
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, read_document, read_lines
from mage_async.results.tracked import Point, of_end, of_evaluation, of_step
from mage_services.processes.priority import WATCHER, give_way, give_way_no_more
from mage_services.tracking.position import Position, new_position, read_position, write_position
from mage_services.tracking.tracker import TrackedRun, Tracker, open_tracker

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 4.0, 60.0
"""Between tries, where the tracker raises; twice as long after each."""
MOST_BYTES = 1 << 20
"""Read and told at once; a line has some 5 kB."""


@dataclass(slots=True)
class Follower:
    """Tells one tracker of one run."""

    run: RunDirectory
    name: str
    target: str
    ended: threading.Event
    """Nothing more is written to the run's files."""

    def follow(self) -> bool:
        """Tell the tracker until the run has ended; whether the tracker was told everything."""
        position = self._position()
        tracker, num_faults = None, 0
        while True:
            is_last = self.ended.is_set()
            try:
                tracker = tracker or open_tracker(self.name, self._tracked(position))
                self._tell(tracker, position, is_last)
                if is_last:
                    tracker.close()
                    return True
                num_faults = 0
            except Exception as fault:  # other people's code: anything; the next try opens it anew
                traceback.print_exc()
                tracker, num_faults = None, num_faults + 1
                self._note(position, fault)
                if is_last:
                    return False
            self.ended.wait(tracker.every_s if tracker else _pause_s(num_faults))

    def _position(self) -> Position:
        """Where an earlier process came to; a new one is written down before anybody is told."""
        position = read_position(self.run, self.name)
        if position is None:
            position = new_position(read_lines(self.run.metrics))
            write_position(self.run, self.name, position)
        return position

    def _tracked(self, position: Position) -> TrackedRun:
        config = msgspec.to_builtins(config_file.load_recorded(self.run.config))
        folder, name = self.run.tracking, self.run.root.name
        began, step = position.began, position.step
        return TrackedRun(self.target, name, position.id, folder, config, began, step)

    def _tell(self, tracker: Tracker, position: Position, is_last: bool) -> None:
        """Tell what is new, and write down how far that was."""
        while True:
            steps, metrics_bytes = _read(self.run.metrics, position.metrics_bytes)
            curve, curve_bytes = _read(self.run.curve, position.curve_bytes)
            if (metrics_bytes, curve_bytes) == (position.metrics_bytes, position.curve_bytes):
                break
            steps = [record for record in steps if record["step"] > position.step]
            tracker.send([*map(of_step, steps), *map(of_evaluation, curve)])
            position.metrics_bytes, position.curve_bytes = metrics_bytes, curve_bytes
            position.step = max([position.step, *(record["step"] for record in steps)])
            self._write(position)
        summary = read_document(self.run.summary) if is_last else {}
        if summary.get("complete") and summary["steps"] > position.end_step:
            tracker.send([self._end(summary)])
            position.end_step = summary["steps"]
            self._write(position)

    def _end(self, summary: Record) -> Point:
        return of_end(summary, read_document(self.run.learner)["train_s"])

    def _write(self, position: Position) -> None:
        position.fault = ""
        write_position(self.run, self.name, position)

    def _note(self, position: Position, fault: Exception) -> None:
        position.fault = f"{type(fault).__name__}: {fault}"[:500]
        position.num_faults += 1
        write_position(self.run, self.name, position)


def _pause_s(num_faults: int) -> float:
    """After so many faults in a row."""
    return min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2 ** (num_faults - 1))


def _read(file: Path, start: int) -> tuple[list[Record], int]:
    """Finished lines from a byte on, at least one where there is one; and the byte behind them.

    Where no line ends before that byte, a resumed learner has cut the file and written on: then all
    lines are read again.
    """
    if not file.is_file():
        return [], start
    with file.open("rb") as lines:
        lines.seek(max(0, start - 1))
        if start and lines.read(1) != b"\n":
            start = lines.seek(0)
        whole = [line for line in lines.readlines(MOST_BYTES) if line.endswith(b"\n")]
    return [json.loads(line) for line in whole], start + sum(map(len, whole))


def _watch(alive: int, ended: threading.Event, end_s: float) -> None:
    """Wait until `mage train` has closed its end of the pipe, and then limit what is left.

    The timer is the kernel's: its signal ends a process whose tracker never returns.
    """
    while os.read(alive, 1):
        continue
    signal.setitimer(signal.ITIMER_REAL, end_s)
    give_way_no_more()
    ended.set()


def main() -> int:
    """Follow a run; 0 where the tracker was told everything, else 1."""
    parser = argparse.ArgumentParser(description="Tell a tracker of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--to", required=True)
    parser.add_argument("--alive-fd", type=int, required=True)
    parser.add_argument("--end-s", type=float, required=True)
    given = parser.parse_args()
    give_way(WATCHER)
    ended = threading.Event()
    watch = (given.alive_fd, ended, given.end_s)
    threading.Thread(target=_watch, args=watch, name="end of the run", daemon=True).start()
    run = RunDirectory(given.run_dir)
    with (run.tracking / f"{given.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier life's process may still be telling
        return 0 if Follower(run, given.name, given.to, ended).follow() else 1


if __name__ == "__main__":
    sys.exit(main())
