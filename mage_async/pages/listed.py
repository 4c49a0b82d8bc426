"""What lists of groups and trials show, as an index has it."""

from collections.abc import Sequence
from dataclasses import dataclass

from mage_async.tasks.seats import num_seats


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A group; what no record that was read has said is None."""

    number: int
    version: int | None
    """Of the policy, when the group was granted."""
    member: str | None
    seat: int | None
    seed: str | None
    peer: str | None
    epoch: int | None
    """How often the group was granted before."""
    num_trials: int | None
    step: int | None
    """That trained the group; None: none yet."""
    dropped: str | None
    """Why the group was given up; None: it was not."""

    @property
    def both_seats(self) -> bool:
        """Whether the policy plays both seats, so that a play has two trials."""
        return self.member is not None and num_seats(self.member) > 1


@dataclass(frozen=True, slots=True)
class ListedTrial:
    """A trial that was taken in."""

    group: int
    number: int
    rewards: Sequence[float]
    """Of each episode, undiscounted."""
    num_turns: int
    num_tokens: int
    num_invalid: int
    oldest: int | None
    """The oldest version that drew one of its tokens."""
    newest: int | None
    duration_s: float
    step: int | None
    member: str | None


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How much of a run's files is in its index."""

    read: int
    """Bytes."""
    total: int

    @property
    def share(self) -> float:
        """From 0 to 1; what cannot be read, as a torn tail, is missing from it."""
        return self.read / self.total if self.total else 1.0
