"""What pages ask of a run: lists from its index, and whole trials from its journal."""

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from mage_async.errors import RunError, WireError
from mage_async.pages.listed import IndexProgress, ListedGroup, ListedTrial
from mage_async.protocol.journal_records import read
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import Trial
from mage_services.view.index.index_file import connect

Record = dict[str, Any]
_REWARDS = msgspec.json.Decoder(list[float])
_GROUPS = "number, version, member, seat, seed, peer, epoch, num_trials, step, dropped"
_TRIALS = (
    "trials.grp, trials.number, rewards, num_turns, num_tokens, num_invalid, oldest, newest, "
    "duration_s, step, member"
)
_JOINED = f"SELECT {_TRIALS} FROM groups JOIN trials ON trials.grp = groups.number"


class RunReader:
    """Open while one page is made; a page of its own thread opens its own."""

    def __init__(self, run: RunDirectory) -> None:
        self.run, self._index = run, connect(run)

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._index.close()

    def progress(self) -> IndexProgress:
        """How far the index has come."""
        (read_bytes,) = self._one("SELECT coalesce(sum(read), 0) FROM files")
        files = [*self.run.journal.glob("*.log"), self.run.metrics, self.run.curve]
        return IndexProgress(read_bytes, sum(map(_size, files)))

    def last_step(self) -> int:
        """The newest step that the index knows; 0 for none."""
        newest = "SELECT max(coalesce((SELECT max(number) FROM steps), 0),"
        return self._one(f"{newest} coalesce((SELECT max(step) FROM groups), 0))")[0]

    def metrics(self, at_most: int) -> list[Record]:
        """Metrics of the steps, oldest first; of more than `at_most` evenly spaced ones."""
        ends = "SELECT (SELECT min(number) FROM steps), (SELECT max(number) FROM steps)"
        low, high = self._one(ends)  # apart, each is a look at one end of the table
        if low is None:
            return []
        every = max(1, -(-(high - low + 1) // at_most))
        wanted = {*range(low, high + 1, every), high}
        return self._records("steps", sorted(wanted))

    def newest_metrics(self, at_most: int) -> list[Record]:
        """Metrics of the newest steps, oldest first."""
        rows = "SELECT record FROM steps ORDER BY number DESC LIMIT ?"
        found = [_record(row[0]) for row in self._index.execute(rows, (at_most,))]
        return found[::-1]

    def step(self, number: int) -> Record:
        """Metrics of one step; empty where there are none."""
        return next(iter(self._records("steps", [number])), {})

    def curve(self, at_most: int) -> list[Record]:
        """Evaluations while training, oldest first; of many evenly spaced ones."""
        found = [row[0] for row in self._index.execute("SELECT number FROM curve ORDER BY number")]
        every = max(1, -(-len(found) // at_most))
        return self._records("curve", sorted({*found[::every], *found[-1:]}))

    def config_of(self, step: int) -> str:
        """The configuration by which a step was computed, as TOML.

        Raises: RunError: the index has not read so far.
        """
        before = "SELECT config FROM heads WHERE version < ? ORDER BY segment DESC LIMIT 1"
        found = self._one(before, (step,))
        if found is None:
            raise RunError(f"the journal has no configuration of step {step}")
        return found[0]

    def groups_of(self, step: int) -> list[ListedGroup]:
        """The groups of a step, in order of grant."""
        return self._groups("WHERE step = ? ORDER BY number", (step,))

    def groups_in_flight(self, at_most: int) -> list[ListedGroup]:
        """The newest groups that no step has trained, among them those that were dropped."""
        last = self._one("SELECT coalesce(max(number), 0) FROM groups")[0]
        wanted = "WHERE step IS NULL AND number > ? ORDER BY number DESC LIMIT ?"
        return self._groups(wanted, (last - 100 * at_most, at_most))

    def group(self, number: int) -> ListedGroup:
        """One group.

        Raises: RunError: the index does not know it.
        """
        found = self._groups("WHERE number = ?", (number,))
        if not found:
            raise RunError(f"group {number} is not in the index of {self.run.root}")
        return found[0]

    def trials_of(self, groups: Sequence[int]) -> list[ListedTrial]:
        """The trials of some groups, in order."""
        marks = ",".join("?" * len(groups))
        return self._trials(f"{_JOINED} WHERE groups.number IN ({marks}) ORDER BY 1, 2", groups)

    def trials_between(self, first: int, last: int, at_most: int) -> list[ListedTrial]:
        """Trials of the steps from `first` to `last`, the newest first; at most so many."""
        wanted = "WHERE step BETWEEN ? AND ? ORDER BY step DESC, number DESC"
        groups = self._index.execute(f"SELECT number FROM groups {wanted}", (first, last))
        found: list[ListedTrial] = []
        for (number,) in groups:  # the index has this order, so no more is read than is wanted
            if len(found) >= at_most:
                break
            found += self.trials_of([number])
        return found[:at_most]

    def load(self, group: int, number: int) -> Trial:
        """A whole trial, from the journal, whose record may have both seats of a play.

        Raises:
            RunError: its segment of the journal was deleted, or is damaged there.
        """
        where = "SELECT segment, place, size FROM trials WHERE grp = ? AND number = ?"
        found = self._index.execute(where, (group, number)).fetchone()
        if found is None:
            raise RunError(f"trial {number} of group {group} is not in the index of the run")
        file = self.run.journal / f"{found['segment']:08}.log"
        try:
            with file.open("rb") as source:
                body = os.pread(source.fileno(), found["size"], found["place"])
            record = read(body)
        except FileNotFoundError:
            raise RunError(
                f"{file} was deleted, and the trial with it; `journal.max_bytes` says how much a "
                "run keeps"
            ) from None
        except (WireError, IndexError) as fault:
            raise RunError(f"{file} is damaged at byte {found['place']}: {fault}") from fault
        assert isinstance(record, TrialResult)
        return next(trial for trial in record.trials() if trial.index == number)

    def _groups(self, wanted: str, values: Sequence[Any]) -> list[ListedGroup]:
        rows = self._index.execute(f"SELECT {_GROUPS} FROM groups {wanted}", values)
        return [ListedGroup(*row) for row in rows]

    def _trials(self, wanted: str, values: Sequence[Any]) -> list[ListedTrial]:
        return [
            ListedTrial(row[0], row[1], _REWARDS.decode(row[2]), *row[3:])
            for row in self._index.execute(wanted, values)
        ]

    def _records(self, table: str, numbers: Sequence[int]) -> list[Record]:
        marks = ",".join("?" * len(numbers))
        rows = f"SELECT record FROM {table} WHERE number IN ({marks}) ORDER BY number"
        return [_record(row[0]) for row in self._index.execute(rows, numbers)]

    def _one(self, query: str, values: Sequence[Any] = ()) -> Any:
        return self._index.execute(query, values).fetchone()


@lru_cache(maxsize=1024)
def _record(line: str) -> Record:
    """A line of metrics or of the curve, which is only read: pages that follow a run ask for the
    same ones every second.
    """
    return json.loads(line)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
