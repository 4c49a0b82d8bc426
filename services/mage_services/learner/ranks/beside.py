"""What all ranks write together while they train.

Every rank has a thread for publications and one for checkpoints, so that neither waits for the
other. All ranks are told of each piece of work in the same order; each does its part, and it is
done when all of them have.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import distributed
from torch.distributed import ProcessGroup

from mage_async.learning.ranks.orders import Ranks
from mage_async.policy.checkpoint import writing

T = TypeVar("T")


class RankGone(Exception):
    """Another rank has ended; the gang says which, and how."""


class Beside:
    """One such thread. All ranks make theirs in the same order."""

    def __init__(self, name: str) -> None:
        self._group = distributed.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def begin(
        self, what: str, work: Callable[[ProcessGroup], None], then: Callable[[], T]
    ) -> "Future[T]":
        """Do this rank's part, and when all ranks have done theirs, what is to be done then.

        Args:
            what: begins to say what is written, as of `writing`.

        Raises, where the result is asked for:
            RunError: it cannot be written.
            RankGone: a rank has ended.
        """
        return self._thread.submit(self._together, what, work, then)

    def _together(
        self, what: str, work: Callable[[ProcessGroup], None], then: Callable[[], T]
    ) -> T:
        with writing(what):
            try:
                work(self._group)
                distributed.barrier(group=self._group)
            except RuntimeError as error:  # of a connection: a file gives an OSError
                raise RankGone(str(error)) from error
            return then()


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank that has joined the others."""

    ranks: Ranks
    publishing: Beside
    saving: Beside


def joined(ranks: Ranks) -> Joined:
    """Make the threads of a rank, as all ranks do at once."""
    return Joined(ranks, Beside("publish"), Beside("checkpoint"))
