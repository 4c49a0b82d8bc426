"""What one rank does in a step."""

from dataclasses import dataclass

from mage_async.learning.packing import Sequenced
from mage_async.learning.ranks.orders import Step
from mage_async.learning.ranks.shares import packed


@dataclass(frozen=True, slots=True)
class Work:
    """See the module."""

    shares: list[list[Sequenced]]
    """Of each minibatch."""
    num_passes: list[int]
    """Which every rank makes of it."""
    scale: float

    def order(self) -> Step:
        """The same, for a follower."""
        return Step([packed(share) for share in self.shares], self.num_passes, self.scale)
