"""Players of MineSweeper that reason from the numbers, and may remember earlier episodes.

The mines stay where they are for the whole trial, so each number that an earlier episode has shown
still holds, a cell that was safe is safe, and a mine that was struck is known.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mage_async.environments.cell_sets import cells_of, set_of
from mage_async.environments.environment import Play
from mage_async.environments.minesweeper.board import cell_names, neighbours
from mage_async.environments.minesweeper.play import MineSweeperPlay

_Need = tuple[int, int]
"""A set of cells, and how many of them have a mine."""


def mine_chances(
    size: int, num_mines: int, shown: Mapping[int, int], struck: int = 0
) -> dict[int, float]:
    """The probability of a mine at each closed cell, all layouts being equally likely.

    Args:
        size: cells in a row.
        num_mines: on the board.
        shown: by open cell, its number.
        struck: the set of cells known to have a mine.
    """
    around = neighbours(size)
    unknown = (1 << size * size) - 1 & ~struck
    for cell in shown:
        unknown &= ~(1 << cell)
    needs = [
        (around[cell] & unknown, number - (around[cell] & struck).bit_count())
        for cell, number in shown.items()
        if around[cell] & unknown
    ]
    groups = _alike(unknown, needs)
    counts = _Counts(groups, needs, num_mines - struck.bit_count())
    return {
        cell: mean / group.bit_count()
        for group, mean in zip(groups, counts.means(), strict=True)
        for cell in cells_of(group)
    }


def _alike(unknown: int, needs: Sequence[_Need]) -> list[int]:
    """Sets of cells that the same numbers speak of; those that none does come last."""
    groups: dict[tuple[int, ...], int] = {}
    for cell in cells_of(unknown):
        spoken = tuple(i for i, (cells, _) in enumerate(needs) if cells >> cell & 1)
        groups[spoken] = groups.get(spoken, 0) | 1 << cell
    return [groups[spoken] for spoken in sorted(groups, key=lambda each: (not each, each))]


class _Counts:
    """The number of layouts in which each group of cells has each number of mines."""

    def __init__(self, groups: Sequence[int], needs: Sequence[_Need], num_mines: int) -> None:
        self._sizes = [group.bit_count() for group in groups]
        self._speak = [[i for i, (cells, _) in enumerate(needs) if cells & each] for each in groups]
        self._needed = [number for _, number in needs]
        self._room = [cells.bit_count() for cells, _ in needs]
        self._sums = [0] * len(groups)
        self._ways, self._placed = 0, [0] * len(groups)
        self._place(0, num_mines, 1)
        assert self._ways, "no layout agrees with what was seen"

    def means(self) -> list[float]:
        """Expected number of mines of each group."""
        return [each / self._ways for each in self._sums]

    def _place(self, number: int, left: int, ways: int) -> None:
        if number == len(self._sizes):
            if left == 0:
                self._ways += ways
                for group, placed in enumerate(self._placed):
                    self._sums[group] += ways * placed
            return
        size, speak = self._sizes[number], self._speak[number]
        for i in speak:
            self._room[i] -= size
        least = max((self._needed[i] - self._room[i] for i in speak), default=0)
        most = min((self._needed[i] for i in speak), default=left)
        if number == len(self._sizes) - 1:
            least = max(least, left)
        for placed in range(max(0, least), min(most, size, left) + 1):
            for i in speak:
                self._needed[i] -= placed
            self._placed[number] = placed
            self._place(number + 1, left - placed, ways * math.comb(size, placed))
            for i in speak:
                self._needed[i] += placed
        for i in speak:
            self._room[i] += size


@dataclass(slots=True)
class MineSweeperScript:
    """Opens what earlier episodes have opened, in their order; then the cell least likely to have a
    mine, or just any.

    Args:
        source: its luck.
        num_mines: on the board.
        care: how often it reasons.
        memory: how often it knows what earlier episodes have shown.
    """

    source: random.Random
    num_mines: int
    care: float
    memory: float
    _plays: list[MineSweeperPlay] = field(default_factory=list)
    """The episodes of the trial so far."""

    def choose(self, play: Play) -> str:
        """The next cell."""
        assert isinstance(play, MineSweeperPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        remembers = self.source.random() < self.memory
        plays = self._plays if remembers else [play]
        struck = {each.struck for each in plays if each.struck is not None}
        shown = {cell: each.shown(cell) for each in plays for cell in cells_of(each.opened)}
        closed = [cell for cell in play.closed() if cell not in struck]
        again = (cell for each in reversed(plays) for cell in each.chosen)
        safe = next((cell for cell in again if cell in closed and cell in shown), None)
        if safe is None:
            safe = self.source.choice(self._unseen(play, closed, shown, struck))
        return cell_names(play.size)[safe]

    def _unseen(
        self, play: MineSweeperPlay, closed: list[int], shown: Mapping[int, int], struck: set[int]
    ) -> list[int]:
        """Cells to choose from where none is known to be safe."""
        if self.source.random() >= self.care:
            return closed
        mines = set_of(struck)
        chances = mine_chances(play.size, self.num_mines, shown, mines)
        least = min(chances[cell] for cell in closed)
        return [cell for cell in closed if chances[cell] <= least + 1e-9]
