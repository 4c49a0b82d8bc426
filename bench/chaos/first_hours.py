"""Start fifty runs that go wrong: how soon does the terminal name the cause and the cure?

    python -m bench.chaos.first_hours                          all, one after another, 35 minutes
    python -m bench.chaos.first_hours --only step_hangs --show      one, with what it prints
    python -m bench.chaos.first_hours --list

Each case of `bench/chaos/broken_runs.py` is a run of the tiny model with a broken environment,
model, machine or configuration. It is started as a person would start it, with its output in a
pipe. The program measures the seconds until the output has named both cause and cure (a regular
expression for each), from the start of the command, or from the harm if the case harms a running
run; the longest time without a line; and the outcome:

    ended      the command ended by itself
    goes on    it still ran at the end of the case, and Ctrl-C ended it
    HUNG       it should have ended by itself, or did not end after Ctrl-C
    LEFT N     it ended, and left N processes behind

A case whose result is in `--run-dir` is not run again.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.chaos.broken_runs import CASES, Case, Sandbox
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser

MARK = "MAGE_FIRST_HOUR"
"""An environment variable that every process of a case inherits, so that none is overlooked."""
LIMIT_S = 200.0
"""A case is over after so long, if it has neither ended nor named its cause."""
WATCH_S = 40.0
"""A run that goes on is watched for at least so long, so that a long silence is noticed."""
LEAVE_S = 15.0
"""Longest time that a command may take to end after Ctrl-C."""
WANTED_MEDIAN_S, WANTED_WORST_S, WANTED_SILENCE_S = 10.0, 60.0, 30.0
"""Bounds: time until cause and cure are named (median, worst case), and longest silence."""


@dataclass
class Terminal:
    """Collect the lines that a command prints, each with its time in seconds since the start."""

    process: "subprocess.Popen[str]"
    began: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    new_line: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        """Read until the command and all its child processes have closed their output."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.new_line:
                self.lines.append((time.monotonic() - self.began, line))
                self.new_line.notify_all()

    def matched_at(self, pattern: str, since: float = 0.0) -> float | None:
        """Return the time at which the lines since `since`, joined by spaces, first matched a
        pattern."""
        text, wanted = "", re.compile(pattern)
        for at, line in list(self.lines):
            if at >= since:
                text += " ".join(line.split()) + " "
                if wanted.search(text):
                    return at
        return None

    def silence(self, end: float) -> float:
        """Return the longest time without a line, from the start to `end`."""
        times = [0.0, *(at for at, _ in self.lines if at < end), end]
        return max(later - early for early, later in pairwise(times))


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case, and return what was measured."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    value = f"{case.name}.{os.getpid()}"
    sandbox, mark = Sandbox(folder, {MARK: value}), f"{MARK}={value}"
    sandbox.write_class(case.code)
    harming = None
    try:
        case.prepare(sandbox)
        began = time.monotonic()
        process = subprocess.Popen(
            sandbox.command(case),
            cwd=folder,
            env=os.environ | sandbox.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=sandbox.limit_file_size,
        )
        terminal = Terminal(process, began)
        reader = threading.Thread(target=terminal.read, daemon=True)
        reader.start()
        harmed_at, ended_at, named_at = 0.0, None, None
        # Watch the run: harm it once if the case does, note when cause and cure are named, and stop
        # when it has ended or the case has taken long enough.
        while True:
            with terminal.new_line:
                terminal.new_line.wait(0.05)  # seconds: the run may also end without a line
            now = time.monotonic() - began
            if case.harm is not None and harming is None:
                if terminal.matched_at(case.harm_after) is not None:
                    harmed_at = now
                    harming = threading.Thread(target=case.harm, args=(sandbox,), daemon=True)
                    harming.start()
                elif now > LIMIT_S:
                    break
            elif named_at is None:
                named_at = _named_at(case, terminal, harmed_at)
            if process.poll() is not None:
                ended_at = now
                break
            patience = WATCH_S if named_at is not None and not case.ends else LIMIT_S
            if now > harmed_at + patience:
                break
        sandbox.is_over.set()
        outcome = "ended"
        if ended_at is None:  # it still runs: press Ctrl-C
            process.send_signal(signal.SIGINT)
            ended_at = now
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
            outcome = "HUNG" if case.ends or process.poll() is None else "goes on"
        # The processes of a run that hung are no surprise; those of others should have ended.
        left = _marked(mark) if outcome != "HUNG" else []
        if left:
            time.sleep(1.0)  # children that end with their parent may take a moment
            left = _marked(mark)
        for pid in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reader.join(2.0)  # the last lines
        output = "".join(f"{at:7.1f} {line}" for at, line in terminal.lines)
        (folder / "output.txt").write_text(output)
        if named_at is None:  # the command may have named it in its last lines
            named_at = _named_at(case, terminal, harmed_at)
        missing = [
            what
            for what, pattern in (("cause", case.cause), ("cure", case.cure))
            if terminal.matched_at(pattern, harmed_at) is None
        ]
        return {
            "case": case.name,
            "named_s": None if named_at is None else round(named_at - harmed_at, 1),
            "missing": missing,
            "silence_s": round(terminal.silence(ended_at), 1),
            "outcome": f"LEFT {len(left)}" if left else outcome,
            "exit_status": process.poll() if outcome == "ended" else None,
        }
    finally:
        sandbox.is_over.set()
        sandbox.clean_up()


def _named_at(case: Case, terminal: Terminal, since: float) -> float | None:
    """Return the time at which the lines since `since` had named both cause and cure, or None."""
    cause, cure = (terminal.matched_at(each, since) for each in (case.cause, case.cure))
    return max(cause, cure) if cause is not None and cure is not None else None


def _marked(mark: str) -> list[int]:
    """Return the ids of the live processes that inherited a mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def shortfalls(row: dict[str, Any]) -> str:
    """Return a comma-separated list of the bounds that a case misses; "" if it misses none."""
    faults = [f"no {what}" for what in row["missing"]]
    if row["named_s"] is not None and row["named_s"] > WANTED_WORST_S:
        faults.append("late")
    if row["silence_s"] > WANTED_SILENCE_S:
        faults.append("silent")
    if row["outcome"] not in ("ended", "goes on"):
        faults.append(row["outcome"])
    return ", ".join(faults)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all cases."""
    named = [row["named_s"] for row in rows if row["named_s"] is not None]
    return {
        "num_cases": len(rows),
        "num_named": len(named),
        "named_s_median": round(statistics.median(named), 1) if named else None,
        "named_s_worst": max(named, default=None),
        "silence_s_worst": max(row["silence_s"] for row in rows),
        "num_hung": sum("HUNG" in row["outcome"] for row in rows),
        "num_left_processes": sum("LEFT" in row["outcome"] for row in rows),
    }


def main() -> None:
    """Run the cases, print the table, and exit with 1 if any falls short."""
    given = _arguments()
    if given.list:
        print("\n".join(CASES))
        return
    rows, names = [], given.only or list(CASES)
    for name in names:
        file = given.run_dir / f"{name}.json"
        if not file.exists() or given.only:
            row = measure(CASES[name], given.run_dir / name)
            file.write_text(json.dumps(row))
            if given.show:
                print((given.run_dir / name / "output.txt").read_text())
        row = json.loads(file.read_text())
        rows.append(row)
        seconds = "–" if row["named_s"] is None else f"{row['named_s']:.1f}"
        print(
            f"{name:<26}{seconds:>7} s  silent {row['silence_s']:>5.1f} s  {row['outcome']:<8}"
            f"  {shortfalls(row)}",
            flush=True,
        )
    figures = summary(rows)
    for name, value in figures.items():
        print(f"{name:<22}{value}")
    if not given.only:
        write_baseline("first_hours", {"load": os.getloadavg(), **figures, "cases": rows})
    median = figures["named_s_median"]
    is_well = not any(map(shortfalls, rows)) and median is not None and median <= WANTED_MEDIAN_S
    print("all bounds are kept" if is_well else "a bound is MISSED")
    sys.exit(0 if is_well else 1)


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=list(CASES), metavar="CASE", help="these alone"
    )
    parser.add_argument("--show", action="store_true", help="print what each case printed")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/first_hours"), metavar="DIR")
    return parser.parse_args()


if __name__ == "__main__":
    main()
