"""The plan of one forward: the rows that it computes."""

from dataclasses import dataclass, field

import numpy as np

from mage_async.inference.model import PrefixCopy
from mage_async.inference.ragged import Rows


@dataclass(slots=True)
class Plan:
    """What the next forward computes: `counts[i]` tokens of `lanes[i]` from `starts[i]` on."""

    room: int
    """Tokens that may still be added."""
    lanes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    copies: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Lanes that take a prefix, by (source, length)"""

    def add(self, lane: int, start: int, count: int) -> None:
        """Compute some of a lane's tokens."""
        self.room -= count
        self.lanes.append(lane)
        self.starts.append(start)
        self.counts.append(count)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give a lane another's first tokens."""
        self.copies.setdefault((source, length), []).append(target)

    def rows(self) -> Rows:
        """The planned rows as arrays, longest first; equally long ones in order of their lanes, so
        that attention may read lanes where they lie.
        """
        lanes, starts, counts = (
            np.array(column, np.int64) for column in (self.lanes, self.starts, self.counts)
        )
        return Rows(lanes, starts, counts).take(np.lexsort((lanes, -counts)))

    def prefix_copies(self) -> list[PrefixCopy]:
        """The planned copies, in order, so that a prefix is received before it is lent on."""
        return [PrefixCopy(source, to, length) for (source, length), to in self.copies.items()]
