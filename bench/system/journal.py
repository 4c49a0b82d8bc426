"""Measure how many trials per second the journal writes to disk durably.

    python -m bench.system.journal                     20 seconds

Trials of 8,192 tokens (those of `bench.system.wire`) are appended to a journal in the directory for
temporary files as the coordinator does it: encoded, queued, written together, synced, and reported.
At most `IN_FLIGHT` wait at a time, because the groups in flight are bounded. For comparison, the
same bytes are written by one thread with an fdatasync for each trial, and without any. The variants
alternate.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.lib.baseline import verdict, write_baseline
from bench.lib.options import option_parser
from bench.system.wire import example
from mage_async.protocol.journal_records import first_segment_header
from mage_services.journal.record_bytes import encode_record
from mage_services.journal.writer import JournalFile

NUM_TRIALS, NUM_ROUNDS, IN_FLIGHT = 1000, 5, 128
LEAST_PER_S = 1000.0
"""Wanted number of durable trials per second."""


async def journal(folder: Path) -> tuple[float, int]:
    """Append all trials durably; return the seconds, and the number of syncs."""
    # A new journal without bounds on the size of the whole and of one segment.
    file = JournalFile(folder, [], first_segment_header(0, 0), 10**11, 10**11)
    credits, result = asyncio.Semaphore(IN_FLIGHT), example()
    began = time.perf_counter()
    for _ in range(NUM_TRIALS):
        await credits.acquire()
        file.append(result, credits.release)
    # Every trial has given its credit back once it is durable: wait for the last ones.
    for _ in range(IN_FLIGHT):
        await credits.acquire()
    took = time.perf_counter() - began
    syncs = file.num_syncs
    file.close()
    return took, syncs


def plain(folder: Path, sync: Callable[[int], None] | None) -> float:
    """Write the same trials one by one; return the seconds."""
    result = example()
    file = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT)
    began = time.perf_counter()
    for _ in range(NUM_TRIALS):
        os.write(file, b"".join(encode_record(result)))
        if sync is not None:
            sync(file)
    took = time.perf_counter() - began
    os.close(file)
    return took


def main() -> int:
    """Measure, print a table, write the baseline; return 1 if the bound is missed."""
    option_parser(__doc__).parse_args()
    seconds: dict[str, list[float]] = {"journal": [], "one sync each": [], "no sync": []}
    syncs: list[int] = []
    for _ in range(NUM_ROUNDS + 1):  # the first one warms up
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            took, count = asyncio.run(journal(folder))
            seconds["journal"].append(took)
            syncs.append(count)
            seconds["one sync each"].append(plain(folder, os.fdatasync))
            seconds["no sync"].append(plain(folder, None))
    rates = {name: sorted(NUM_TRIALS / s for s in row[1:]) for name, row in seconds.items()}
    record_bytes = sum(map(len, encode_record(example())))
    print(f"{record_bytes} bytes a record; {NUM_TRIALS / statistics.median(syncs):.0f} a sync")
    print(f"{'':<16}{'trials/s':>10}{'least':>10}{'most':>10}")
    for name, row in rates.items():
        print(f"{name:<16}{statistics.median(row):>10.0f}{row[0]:>10.0f}{row[-1]:>10.0f}")
    write_baseline("journal", {"trials_per_s": rates, "record_bytes": record_bytes})
    found = statistics.median(rates["journal"])
    is_met = found >= LEAST_PER_S
    return verdict([] if is_met else [f"{found:.0f} durable trials/s, at least {LEAST_PER_S:.0f}"])


if __name__ == "__main__":
    sys.exit(main())
