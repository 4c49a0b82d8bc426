"""One group in flight: its grant, the actor that plays it, and the results that have arrived.

`ledger.py` decides about slots; this file holds the state of one, and the message that grants it.
"""

import math
from dataclasses import dataclass
from typing import Self

from mage_async.protocol.journal_records import Granted
from mage_async.protocol.messages import GroupGrant
from mage_async.tasks.seats import task_of
from mage_async.trajectory import Group, Guidance, Task, Trial


@dataclass(slots=True)
class Slot:
    """One group in flight."""

    grant: int
    task: Task
    num_episodes: int
    version: int
    epoch: int
    peer: str | None
    """The actor that plays it; None while it is lapsed, complete or in training."""
    deadline: float
    trials: list[Trial | None]
    granted: float = 0.0
    """When, the last time."""
    num_beside: int = 1
    """Groups in play then, itself among them."""
    num_expired: int = 0
    max_turns: int = 0
    """Most turns of an episode; 0: no limit but the environment's."""
    guidance: Guidance | None = None
    """What the first trials are told of earlier tasks."""

    @classmethod
    def redone(cls, granted: Granted) -> Self:
        """As a record of the journal tells; nothing has come in, and no deadline runs."""
        message = granted.grant
        return cls(
            grant=message.grant,
            task=Task(message.environment, message.member, message.seed, message.seat),
            num_episodes=message.num_episodes,
            version=granted.version,
            epoch=message.epoch,
            peer=granted.peer,
            deadline=math.inf,
            trials=[None] * message.num_trials,
            max_turns=message.max_turns,
            guidance=message.guidance,
        )

    def task_of(self, index: int) -> Task:
        """The task that a trial has to be of: where the policy plays both seats, every second trial
        has the other one.
        """
        return task_of(self.task, index)

    def is_complete(self) -> bool:
        """All of its trials are here."""
        return None not in self.trials

    def held(self) -> tuple[int, ...]:
        """Indices of the trials that are here."""
        return tuple(i for i, trial in enumerate(self.trials) if trial is not None)

    def group(self) -> Group:
        """The complete group."""
        trials = tuple(t for t in self.trials if t is not None)
        return Group(self.grant, self.version, trials, self.guidance)

    def memory_of(self, index: int) -> int | None:
        """Version of the graph memory that a trial has to be told of; None: of none."""
        told = self.guidance
        return told.version if told is not None and index < told.num_guided else None

    def message(self, deadline_s: float, lag: int) -> GroupGrant:
        """What its peer is told; `lag`: actors get weights of so many steps ago."""
        return GroupGrant(
            grant=self.grant,
            epoch=self.epoch,
            environment=self.task.environment,
            member=self.task.member,
            seat=self.task.seat,
            seed=self.task.seed,
            num_trials=len(self.trials),
            num_episodes=self.num_episodes,
            version=max(0, self.version - lag),
            deadline_s=deadline_s,
            held=self.held(),
            max_turns=self.max_turns,
            guidance=self.guidance,
        )
