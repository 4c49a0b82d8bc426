"""What the coordinator needs: a journal, a source of tasks, and a few numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mage_async.admission.ledger import SlotLedger
from mage_async.config.schema import Curriculum
from mage_async.graph_memory.memory import GraphMemory
from mage_async.protocol.journal_records import Head, Record
from mage_async.tasks.population import League
from mage_async.trajectory import Task
from mage_services.weights.weight_store import is_measured


class Journal(Protocol):
    """What the coordinator needs of `JournalFile`."""

    def append(self, record: Record, then: Callable[[], None] | None = None) -> None:
        """Write a record behind all earlier ones; call `then` when it is durable."""

    def after(self, then: Callable[[], None]) -> None:
        """Call `then` when all that was appended so far is durable."""

    async def settled(self) -> None:
        """Wait until all that was appended so far is durable. Cancellation leaves nothing."""

    def why_full(self) -> str:
        """Why no more trials may be taken in; empty while they may."""

    def roll(self, head: Callable[[], Head]) -> None:
        """Begin a new segment, if it is time; between two steps."""


class Tasks(Protocol):
    """The source of the n-th group's task: a `TaskStream`, or a `Matchmaker` over one."""

    def task(self, number: int) -> Task:
        """The task of the `number`-th group."""
        ...


@dataclass(frozen=True, slots=True)
class CoordinatorRules:
    """What the coordinator needs of the configuration."""

    num_episodes: int
    deadline_s: float
    max_drops_in_a_row: int
    evaluate_every: int
    last_version: int
    config: str = ""
    """As TOML, for the journal."""
    curriculum: Curriculum | None = None

    def is_measured(self, version: int) -> bool:
        """Whether the evaluator is to play with a version."""
        return is_measured(version, every=self.evaluate_every, last=self.last_version)


def head_of(
    ledger: SlotLedger, rules: CoordinatorRules, league: League, memory: GraphMemory
) -> Head:
    """All that a new segment of the journal has to begin with."""
    return msgspec.structs.replace(
        ledger.head(rules.config, rules.deadline_s),
        population=league.table() if league.is_on else None,
        memory=memory.table() if memory.is_on else None,
    )
