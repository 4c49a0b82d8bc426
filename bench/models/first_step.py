"""Measure the time to the first step with a pretrained model, and the memory of the run.

    python -m bench.models.first_step MODEL_DIR           5 minutes on an idle machine, 6 GB

It starts `mage train --set policy.source=MODEL_DIR --set environment.name=rps` with no further
settings; MODEL_DIR holds SmolLM2-135M-Instruct. It counts the seconds from the command to the line
of the first step, which include the preflight check of the policy, reads the memory of all
processes once a second, and then ends the run. The exit status is 1 if the first step takes over 5
minutes, the processes hold over 6 GB, or the line does not say how many actions are valid.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.lib.processes import held_bytes

MOST_S, MOST_BYTES, EVERY_S = 300.0, 6_000_000_000, 1.0
"""Bounds of the time and of the memory, and seconds between two readings of the memory."""
# A line of the first step, and the share of valid actions in it.
STEP, SHARE = re.compile(r"step=1/\d+"), re.compile(r"valid=[\d.]+%")


def main() -> None:
    """Start the run, wait for its first step, and print time and memory."""
    given = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, "-m", "mage_async.launch", "--run-dir", f"{folder}/run"]
        train += ["--set", f"policy.source={given.model.resolve()}"]
        seconds, held, line = _until_first_step([*train, "--set", "environment.name=rps"])
    is_shown = SHARE.search(line) is not None
    print(
        f"{line}\nfirst step after {seconds:.0f} s; all processes held {held / 1e9:.2f} GB at most"
    )
    is_ok = seconds <= MOST_S and held <= MOST_BYTES and is_shown
    print("ok" if is_ok else "MISSED")
    write_baseline("first_step", {"seconds": seconds, "held_bytes": held, "line": line})
    sys.exit(not is_ok)


def _until_first_step(command: list[str]) -> tuple[float, int, str]:
    """Return the seconds to the first step, the most bytes held until then, and the step's line.

    Raises:
        RuntimeError: the run ended before.
    """
    began = time.monotonic()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run,
        _memory_readings() as readings,
    ):
        assert run.stdout is not None
        for line in run.stdout:
            if STEP.search(line):
                run.send_signal(signal.SIGINT)
                seconds = time.monotonic() - began
                run.stdout.read()  # until the run has ended
                return seconds, max(readings), line.strip()
    raise RuntimeError(f"the run ended with {run.returncode} and without a step")


@contextmanager
def _memory_readings() -> Iterator[list[int]]:
    """Collect the memory of all processes once a second, in a thread, until the context ends."""
    readings, is_over = [0], threading.Event()

    def read() -> None:
        while not is_over.wait(EVERY_S):
            readings.append(held_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield readings
    finally:
        is_over.set()
        reader.join()


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="SmolLM2-135M-Instruct")
    return parser.parse_args()


if __name__ == "__main__":
    main()
