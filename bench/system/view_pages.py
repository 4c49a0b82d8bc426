"""Time the pages of `mage view`, with 10,000 trials and with 2 million, and their live updates.

    python -m bench.system.view_pages                  10 minutes, 6 GB for temporary files
    python -m bench.system.view_pages --small          1 minute, without the 2 million

Runs are synthetic: scripted trials of the quickstart (106 tokens, 12 turns, 2.8 KB), with grants
and commits, in a journal as a learner writes it, 144 trials in each step. `mage view` serves a run
in a process of its own, without an index at first. The pages are requested over HTTP: the run's
page as soon as the address is printed ("opens" counts from the start of the command), then all
pages while the index is built, then ROUNDS times when it is complete. Finally lines of metrics are
appended, one at a time ("live" counts from the write to the answer that has the new step, which is
requested after the server's event).
"""

import http.client
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.assembly import environment_of, trial_config_of
from mage_async.inference.chat_files import load_chat
from mage_async.protocol.codec import PROTOCOL
from mage_async.protocol.journal_records import (
    Commit,
    Granted,
    Record,
    first_segment_header,
)
from mage_async.protocol.limits import DEFAULT_LIMITS
from mage_async.protocol.messages import GroupGrant
from mage_async.protocol.trial_arrays import Frame, TrialHeader, TrialResult, pack_trial
from mage_async.results.run_directory import RunDirectory
from mage_async.trials.scripted_play import random_task, scripted_trial
from mage_services.journal.record_bytes import MAGIC, encode_record
from tests.helpers.made_up_runs import make_run

GROUPS, TRIALS, SEGMENT_BYTES, ROUNDS, STEPS_APPENDED = 18, 8, 2**26, 7, 10
"""Groups of a step, trials of a group, bytes of a file of the journal, requests of each page, and
steps that are appended while the page is open."""
NUM_SCRIPTED = 64
"""Number of different trials; groups repeat them in turn, because playing millions takes hours."""
SIZES = {"small": 70, "large": 13_889}
"""Steps of a run: 10,080 and 2,000,016 trials."""
WANTED = {"small": 0.3, "large": 0.5, "opens": 3.0, "live": 2.0}
"""Largest allowed seconds."""
Packed = tuple[TrialHeader, list[Frame]]
"""A trial as it goes over the network: its header, and its arrays."""


def made_run(root: Path, steps: int) -> RunDirectory:
    """Make a run of `steps` steps with its journal, and all lines of metrics but the last."""
    run = RunDirectory(root)
    config = make_run(run, steps=steps)
    environment, chat = environment_of(config), load_chat(run.policy)
    rules, source = (
        trial_config_of(config, environment, chat, config.trial.episodes),
        random.Random(0),
    )
    packed = []
    for _ in range(NUM_SCRIPTED):
        task = random_task(environment, "train", source)
        trial = scripted_trial(environment, task, 0, rules, chat)
        packed.append(pack_trial(TrialResult(0, 0, trial), DEFAULT_LIMITS))
    run.journal.mkdir()
    _write_journal(run.journal, run.config.read_text(), packed, steps)
    return run


def _write_journal(folder: Path, config: str, packed: list[Packed], steps: int) -> None:
    """Write the segments of a journal: for each step its groups, then its commit."""
    number, out = 0, None
    for step in range(1, steps + 1):
        if out is None or out.tell() > SEGMENT_BYTES:
            if out is not None:
                out.close()
            number += 1
            out = (folder / f"{number:08d}.log").open("wb")
            out.write(MAGIC)
            head = first_segment_header(step - 1, (step - 1) * GROUPS)
            _put(out, msgspec.structs.replace(head, config=config))
        grants = range((step - 1) * GROUPS, step * GROUPS)
        for grant in grants:
            _put_group(out, grant, step, packed[grant % len(packed)])
        _put(out, Commit(step, tuple(grants), "", {}, step * 0.5))
    assert out is not None
    out.close()


def _put_group(out: BinaryIO, grant: int, step: int, packed: Packed) -> None:
    """Write a grant and the results of its trials, which are copies of one trial."""
    header, arrays = packed
    task = header.task
    message = GroupGrant(
        grant, 0, task.environment, task.member, task.seat, task.seed, TRIALS,
        header.num_episodes, max(0, step - 2), 60.0,
    )  # fmt: skip
    _put(out, Granted("actor-0", max(0, step - 2), message))
    for index in range(TRIALS):
        own = msgspec.structs.replace(header, grant=grant, index=index)
        # The journal's own checksum protects a record, so the network's is not looked at.
        frames = [PROTOCOL, msgspec.msgpack.encode(own), *arrays, b"0000"]
        _put(out, TrialResult(grant, 0, None, frames))  # type: ignore[arg-type]


def _put(out: BinaryIO, record: Record) -> None:
    out.write(b"".join(encode_record(record)))


class Pages:
    """HTTP client of one server."""

    def __init__(self, address: str) -> None:
        _, _, host, token, _ = address.split("/")  # http://HOST/TOKEN/
        self._connection, self._base = http.client.HTTPConnection(host, timeout=120), f"/{token}/"

    def get(self, path: str) -> tuple[float, str]:
        """Request a page; return the seconds, and its text."""
        took, status, text = self._get(path)
        assert status == 200, f"{path}: {text}"
        return took, text

    def answered(self, path: str) -> float | None:
        """Return the seconds until a page is there; None if it is not indexed yet."""
        took, status, _ = self._get(path)
        return took if status == 200 else None

    def _get(self, path: str) -> tuple[float, int, str]:
        began = time.perf_counter()
        self._connection.request("GET", self._base + path)
        answer = self._connection.getresponse()
        text = answer.read().decode()
        return time.perf_counter() - began, answer.status, text

    def events(self, run: str = "run") -> http.client.HTTPResponse:
        """Return the stream of a run's events; of all runs for the name ""."""
        self._connection.request("GET", f"{self._base}events?run={run}")
        return self._connection.getresponse()


@contextmanager
def viewed(folder: Path) -> Iterator[tuple[str, float]]:
    """Serve a folder by `mage view`; yield the address, and the time of the command's start."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "mage_async.launch", "view", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], began
    finally:
        process.terminate()
        process.wait()


def paths_of(steps: int) -> list[str]:
    """Return the paths of all kinds of pages, of a step near the end, which is indexed first."""
    step, group = steps - 3, (steps - 4) * GROUPS + 5
    below = (
        "", f"step/{step}", f"step/{step}?bin=1", f"group/{group}", f"group/{group}/trial/3/turn/7",
        "trials", f"trials?first={max(1, step - 50)}&last={step}&bin=2", "trials?text=paper",
        "trials?text=zebra", "evaluation", "processes", "config", "play",
    )  # fmt: skip
    return ["", *(f"runs/run/{path}" for path in below)]


def measured(run: RunDirectory, steps: int) -> dict[str, float]:
    """Return the seconds of all pages, by name."""
    with viewed(run.root) as (address, began):
        pages = Pages(address)
        _, text = pages.get("runs/run/")
        figures = {"opens": time.perf_counter() - began}
        building: list[float] = []
        while "in the index so far" in text:
            took, text = pages.get("runs/run/")
            seconds = (pages.answered(path) for path in paths_of(steps)[2:])
            building += [took, *(one for one in seconds if one is not None)]
        figures |= {"index": time.perf_counter() - began}
        figures |= {"building, median": statistics.median(building or [0.0])}
        figures |= {"building, most": max(building, default=0.0)}
        for path in paths_of(steps)[1:]:
            name = path.removeprefix("runs/run/") or "overview"
            figures[name] = statistics.median(pages.get(path)[0] for _ in range(ROUNDS))
        return figures | {"live, most": max(live_delays(run, address))}


def live_delays(run: RunDirectory, address: str) -> Iterator[float]:
    """Append lines of metrics; yield the seconds from each write to the page that has the step."""
    events, pages = Pages(address).events(), Pages(address)
    last = msgspec.json.decode(run.metrics.read_bytes().splitlines()[-1])
    for _ in range(STEPS_APPENDED):
        last["step"] += 1
        began = time.perf_counter()
        with run.metrics.open("ab") as out:
            out.write(msgspec.json.encode(last) + b"\n")
        while f"batch of step {last['step']}" not in pages.get("runs/run/")[1]:
            while not events.readline().startswith(b"data"):
                pass
        yield time.perf_counter() - began


def verdict(name: str, figures: dict[str, float]) -> list[str]:
    """Return the bounds that were missed."""
    # The seconds to build the index have no bound; those of all pages have that of the run's size.
    limits = {"opens": WANTED["opens"], "live, most": WANTED["live"], "index": float("inf")}
    return [
        f"{name}, {what}: {took:.2f} s"
        for what, took in figures.items()
        if took > limits.get(what, WANTED[name])
    ]


def main() -> int:
    """Measure, print a table and write the baseline; return 1 if a page was too slow."""
    parser = option_parser(__doc__)
    parser.add_argument("--small", action="store_true", help="without the 2 million trials")
    given = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    missed: list[str] = []
    for name in ["small"] if given.small else SIZES:
        steps = SIZES[name]
        with tempfile.TemporaryDirectory() as folder:
            run = made_run(Path(folder) / "run", steps)
            found[name] = measured(run, steps)
        missed += verdict(name, found[name])
        print(f"{steps * GROUPS * TRIALS:,} trials")
        for what, took in found[name].items():
            print(f"  {what:<44}{took:>9.3f} s")
    write_baseline("view_pages", {"seconds": found})
    print(f"within the bounds: {'no: ' + '; '.join(missed) if missed else 'yes'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
