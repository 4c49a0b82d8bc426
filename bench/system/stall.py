"""Check that a run's memory does not grow while its learner is stopped for minutes.

    python -m bench.system.stall [--seconds 600]        11 minutes

In a run with four actors, the learner gets SIGSTOP after its third step. Actors play what they were
granted, and wait. The program reads the resident memory of every process; then the learner is
continued, and the run has to complete. `supervision.silence_s` is longer than the stall, because
the supervisor would end a silent learner. Memory counts as flat if its median in the last tenth of
the stall is within `FLAT` of that in the first tenth after the first minute.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.lib.processes import command_lines
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines

# A short run; 1.0 is no gate, so the warm start ends after its steps.
SETTINGS = (
    "warm_start.steps=8",
    "warm_start.gate=1.0",
    "warm_start.max_steps=8",
    "warm_start.trials=64",
    "warm_start.threads=1",
    "learner.steps=8",
    "evaluation.every=0",
    "evaluation.final_trials=24",
    "supervision.silence_s=100000.0",
)
FLAT, LOOK_S, SETTLED_S = 0.05, 2.0, 60.0
"""Largest change of memory that counts as none; seconds between two looks at it; seconds after
which the actors have played what they were granted."""


def processes(root: Path) -> dict[str, int]:
    """Return the process ids of a run, by name."""
    found = {}
    for pid, words in command_lines():
        if str(root) in words and "mage_async.launch" in words:
            found["supervisor"] = pid
        elif str(root) in words and "--name" in words:
            found[words[words.index("--name") + 1]] = pid
    return found


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise ProcessLookupError(pid)


def stall(root: Path, seconds: float) -> dict[str, list[tuple[float, int]]]:
    """Stop the learner for `seconds`; return (seconds since, KiB) of every process, by name."""
    pids, memory = processes(root), defaultdict(list)
    os.kill(pids["learner"], signal.SIGSTOP)
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        for name, pid in pids.items():
            memory[name].append((now, resident_kib(pid)))
        time.sleep(LOOK_S)
    os.kill(pids["learner"], signal.SIGCONT)
    assert processes(root) == pids, "a process was started anew"
    return dict(memory)


def change(rows: list[tuple[float, int]], seconds: float) -> float:
    """Return the growth of the median, from the first tenth after a minute to the last tenth."""
    tenth, settled = seconds / 10, min(SETTLED_S, seconds / 5)
    first = [kib for at, kib in rows if settled <= at < settled + tenth]
    last = [kib for at, kib in rows if at >= seconds - tenth]
    return statistics.median(last) / statistics.median(first) - 1


def main() -> None:
    """Stop a learner, and print the verdict."""
    parser = option_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    run = RunDirectory(Path(tempfile.mkdtemp(prefix="mage-stall-")).resolve() / "run")
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run.root)]
    command += ["--actors", "4", *(part for s in SETTINGS for part in ("--set", s))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while len(read_lines(run.metrics)) < 3:
            assert process.poll() is None, "the run ended early"
            time.sleep(0.05)
        memory = stall(run.root, given.seconds)
        code = process.wait()
    changes = {name: change(rows, given.seconds) for name, rows in memory.items()}
    for name, rows in sorted(memory.items()):
        # Of each process: its memory at the end of the stall, and by how much it has changed.
        print(f"{name:<12}{rows[-1][1] / 1024:>8.1f} MiB {changes[name]:>+8.2%}")
    steps = len(read_lines(run.metrics))
    is_flat = all(abs(one) <= FLAT for one in changes.values())
    write_baseline(
        "stall",
        {
            "seconds": given.seconds,
            "changes": changes,
            "steps": steps,
            "last_kib": {name: rows[-1][1] for name, rows in memory.items()},
        },
    )
    is_well = is_flat and code == 0 and steps == 8
    print(
        f"the run {'completed' if code == 0 and steps == 8 else 'FAILED'}; memory "
        f"{'is flat' if is_flat else 'GROWS'}"
    )
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
