"""Feed mutated inputs to every decoder, and look for crashes, hangs and large allocations.

    python -m bench.chaos.fuzz [--inputs 1000000] [--coverage]     5 minutes; 15 with --coverage

A seeded mutator makes inputs for each target of `tests/helpers/fuzzing`, which may raise its own
error classes only. The program measures the CPU time of each input, the memory of every hundredth
(tracemalloc), and the growth of the process. With `--coverage` every target also runs under
libFuzzer (`pip install atheris`, Python 3.11 … 3.13), which keeps inputs that reach new lines of
this project. Without atheris, a line says so, and only the mutator runs.

The last line is the verdict; the exit status is 1 if it is not "no crash, no hang".
"""

import faulthandler
import importlib.util
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import tracemalloc
from pathlib import Path
from typing import Any

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.config import config_file
from tests.helpers.fuzzing.mutation import mutate
from tests.helpers.fuzzing.targets import Target, targets

SHARES = {"wire": 0.4, "trial frames": 0.3, "journal": 0.26, "configuration": 0.04}
"""Shares of the inputs; a configuration takes a hundred times as long as a message."""
HANG_S = 1.0
"""CPU seconds above which an input counts as a hang."""
LIMIT_BYTES = 4 * 2**20
"""Largest allowed memory of one input."""
TRACED_EVERY = 100
"""Of so many inputs the memory of one is measured, because tracing is slow."""
DEAD_S = 60.0
"""CPU seconds for a thousand inputs, after which the process prints its stack and ends."""
COVERAGE = "bench.chaos.fuzz_coverage"
"""The program that fuzzes one target with libFuzzer."""


def fuzz(target: Target, num_inputs: int, seed: int) -> dict[str, Any]:
    """Feed mutated inputs to a target; return counts, times and memory."""
    source = random.Random(f"{target.name} {seed}")
    crashes: list[str] = []
    num_sound = num_hangs = most_bytes = 0
    slowest_s = 0.0
    began, memory = time.perf_counter(), _peak_kib()
    for number in range(num_inputs):
        if number % 1000 == 0:
            signal.setitimer(signal.ITIMER_PROF, DEAD_S)
        data = mutate(target.seeds, source)
        is_traced = number % TRACED_EVERY == 0
        if is_traced:
            tracemalloc.start()
        at = time.thread_time()
        try:
            num_sound += target.feed(data)
        except Exception:  # any exception is a finding
            crashes.append(f"{data.hex()}\n{traceback.format_exc()}")
        took = time.thread_time() - at
        if is_traced:
            most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        slowest_s = max(slowest_s, took)
        num_hangs += took > HANG_S
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    took = time.perf_counter() - began
    for crash in crashes[:3]:
        print(crash, file=sys.stderr)
    return {
        "inputs": num_inputs,
        "sound": num_sound,
        "inputs_per_s": num_inputs / took,
        "slowest_ms": slowest_s * 1000,
        "largest_allocation_bytes": most_bytes,
        "process_grew_kib": _peak_kib() - memory,
        "crashes": len(crashes),
        "hangs": num_hangs,
    }


def fuzz_by_coverage(target: Target, num_inputs: int, seed: int) -> dict[str, Any]:
    """Fuzz a target with libFuzzer, in a process of its own, because libFuzzer never returns."""
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(target.seeds):
            Path(folder, f"seed-{number}").write_bytes(data)
        arguments = [target.name, folder, str(num_inputs), str(seed)]
        command = [sys.executable, "-m", COVERAGE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Done (\d+) runs in (\d+) second", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    if done.returncode or found is None:
        print(done.stderr[-4000:], file=sys.stderr)
    num_runs, took = (int(found[1]), max(1, int(found[2]))) if found else (0, 1)
    peak = re.findall(r"peak_rss_mb:\s*(\d+)", done.stderr)
    return {
        "inputs": num_runs,
        "inputs_per_s": num_runs / took,
        "edges_first": int(covered[0]) if covered else 0,
        "edges_last": int(covered[-1]) if covered else 0,
        "peak_rss_mib": int(peak[-1]) if peak else 0,
        "crashes": int(done.returncode != 0),
        "hangs": int("timeout" in done.stderr),
    }


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def print_row(how: str, name: str, row: dict[str, Any]) -> None:
    """Print one line of the table."""
    other_figures = {
        key: value for key, value in row.items() if key not in ("inputs", "inputs_per_s")
    }
    text = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value:,}"
        for key, value in other_figures.items()
    )
    print(f"{how:<9} {name:<14} {row['inputs']:>9,} inputs {row['inputs_per_s']:>8,.0f}/s  {text}")


def main() -> None:
    """Fuzz every target, print the table, and write the figures."""
    parser = option_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", action="store_true", help="with atheris too")
    given = parser.parse_args()
    has_atheris = importlib.util.find_spec("atheris") is not None
    if given.coverage and not has_atheris:
        print("atheris is not installed (pip install atheris): the seeded mutator alone")
    figures: dict[str, Any] = {"seed": given.seed, "mutator": {}, "coverage": {}}
    # SIGPROF, the signal of the timer in `fuzz`, prints the stack and then, as without a handler
    # (`chain`), ends the process.
    faulthandler.register(signal.SIGPROF, chain=True)
    for target in targets(config_file.find(None)):
        count = round(given.inputs * SHARES[target.name])
        figures["mutator"][target.name] = row = fuzz(target, count, given.seed)
        print_row("mutator", target.name, row)
        if given.coverage and has_atheris:
            figures["coverage"][target.name] = row = fuzz_by_coverage(target, count, given.seed)
            print_row("coverage", target.name, row)
    conclude(figures, given.inputs)


def conclude(figures: dict[str, Any], num_inputs: int) -> None:
    """Write the figures, print the verdict, and exit with 1 if anything was found."""
    rows = [*figures["mutator"].values(), *figures["coverage"].values()]
    crashes, hangs = (sum(row[name] for row in rows) for name in ("crashes", "hangs"))
    most = max(row["largest_allocation_bytes"] for row in figures["mutator"].values())
    total = sum(row["inputs"] for row in rows)
    figures |= {"inputs": total, "limit_bytes": LIMIT_BYTES}
    is_good = not crashes and not hangs and most <= LIMIT_BYTES
    if num_inputs >= 1_000_000:  # a shorter run is a try
        write_baseline("fuzz", figures)
    found = f"{crashes} crashes, {hangs} hangs" if crashes or hangs else "no crash, no hang"
    print(
        f"{total:,} inputs: {found}, largest allocation {most / 1024:,.0f} KiB "
        f"(limit {LIMIT_BYTES // 1024:,} KiB)"
    )
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
