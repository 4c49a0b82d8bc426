"""From the journal's records back to what the learner knew: its ledger, and what each step trained.

Pure: records in, decisions out. Reading files and computing steps is the caller's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from mage_async.admission.ledger import SlotLedger
from mage_async.admission.recalled import Recalled
from mage_async.config.schema import Config
from mage_async.errors import RunError
from mage_async.graph_memory.memory import GraphMemory
from mage_async.protocol.journal_records import Commit, Dropped, Granted, Head, Published, Record
from mage_async.protocol.messages import TrialResult
from mage_async.tasks.population import League
from mage_async.trajectory import Group

REPLAYED_DIFFERENTLY = "the configuration was changed"


@dataclass(frozen=True, slots=True)
class Committed:
    """One step of the journal."""

    commit: Commit
    groups: list[Group] | None
    """Groups of the step, in order of grant; None where the trials lie in deleted segments."""
    config: str
    """The configuration of the step, as TOML."""


class LastConfig:
    """Records as they pass by, and the configuration that the last head among them names."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = records
        self.config = ""

    def __iter__(self) -> Iterator[Record]:
        for record in self._records:
            if isinstance(record, Head):
                self.config = record.config
            yield record


def replay(
    records: Iterable[Record],
    ledger: SlotLedger,
    league: League,
    memory: GraphMemory | None = None,
) -> Iterator[Committed]:
    """Redo records on a new ledger, and yield each step; the first record is a `Head`.

    Afterwards the ledger holds what it held when the last record was written, and so do the league
    and the graph memory, which is compared with what the records say of it.

    Raises:
        RunError: the records contradict each other, or the memory comes out otherwise.
    """
    config, recalled = "", Recalled(memory or GraphMemory())
    for number, record in enumerate(records):
        match record:
            case Head():
                if number == 0:
                    ledger.begin(record)
                else:
                    ledger.keep_only(record)
                config = record.config
                league.begin(record.population)
                recalled.begin(record)
            case Granted():
                recalled.check_grant(record)
                ledger.redo_grant(record)
            case TrialResult():
                ledger.receive(record)
            case Dropped():
                ledger.redo_drop(record.grant, record.reason)
            case Commit():
                if record.version != ledger.version + 1:
                    raise RunError(
                        f"the journal has step {record.version} after {ledger.version}: records "
                        "between them are missing"
                    )
                groups = ledger.redo_commit(record)
                if groups is not None:
                    league.trained(groups)
                recalled.trained(record, groups)
                yield Committed(record, groups, config)
            case Published():
                league.published(record.version)


def plays_alike(one: Config, other: Config) -> bool:
    """Whether groups granted under one configuration can be trained under the other."""
    parts = ("seed", "environment", "trial", "transcript", "sampling", "admission")
    return all(
        msgspec.to_builtins(getattr(one, part)) == msgspec.to_builtins(getattr(other, part))
        for part in parts
    )


def first_difference(expected: Commit, tensors: dict[str, str]) -> str:
    """The name of the first tensor that differs from a commit's, in the commit's order."""
    names = [*expected.tensors, *(name for name in tensors if name not in expected.tensors)]
    return next(name for name in names if expected.tensors.get(name) != tensors.get(name))
