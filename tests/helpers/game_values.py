"""Exact values that tests and benchmarks hold games against.

MineSweeper: what an episode is worth to a player that knows the mines, and to one that forgets.
Both play optimally: they may open a cell late because it earns more then, and never lose on
purpose. Time grows with the number of boards times the cells they can be seen through: 30 boards of
4×4 take seconds, 560 a quarter of an hour.

Scout: from which discount on scouting in the first episode pays.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from mage_async.environments.games.game import cells_of
from mage_async.environments.games.minesweeper import MINE, REWARDS, Board
from mage_async.environments.games.scout import Payoffs


def earned(board: Board, opened: int, cell: int) -> float:
    """What opening a closed cell earns."""
    if board.shown[cell] == MINE:
        return REWARDS.mine
    after = opened | board.opens[cell]
    if after == board.safe:
        return REWARDS.win
    fresh = after & ~opened
    return REWARDS.cascade if fresh & (fresh - 1) else REWARDS.single


def knowing_value(board: Board, turns: int) -> float:
    """Best return of a player that knows the mines, mean over the openings."""

    @cache
    def best(opened: int, left: int) -> float:
        if left == 0 or opened == board.safe:
            return 0.0
        return max(
            earned(board, opened, cell) + best(opened | board.opens[cell], left - 1)
            for cell in cells_of(board.safe & ~opened)
        )

    openings = board.openings()
    return sum(best(board.opens[cell], turns) for cell in openings) / len(openings)


def forgetful_value(boards: Sequence[Board], turns: int) -> float:
    """Best return of a player that knows only the boards, each equally likely.

    The value bounds every player without memory of earlier episodes: on held-out boards, one that
    has somehow learned which boards are held out.
    """
    weights = [1 / len(board.openings()) / len(boards) for board in boards]
    total = 0.0
    for opening in range(len(boards[0].shown)):
        begun = [i for i, board in enumerate(boards) if opening in board.openings()]
        total += sum(
            _Forgetful(boards, weights).value(opened, alike, turns)
            for opened, alike in _told_apart(boards, begun, 0, opening)
        )
    return total


class _Forgetful:
    """The best of one episode, by what is open and which boards it may be."""

    def __init__(self, boards: Sequence[Board], weights: Sequence[float]) -> None:
        self._boards, self._weights = boards, weights
        self._known: dict[tuple[int, tuple[int, ...], int], float] = {}

    def value(self, opened: int, possible: tuple[int, ...], left: int) -> float:
        """Best return from here, times the weight of the boards that are possible."""
        key = (opened, possible, left)
        if key not in self._known:
            closed = ~opened & (1 << len(self._boards[0].shown)) - 1
            self._known[key] = max(
                self._after(opened, possible, cell, left) for cell in cells_of(closed)
            )
        return self._known[key]

    def _after(self, opened: int, possible: tuple[int, ...], cell: int, left: int) -> float:
        total = sum(self._weights[i] * earned(self._boards[i], opened, cell) for i in possible)
        if left == 1:
            return total
        going_on = [i for i in possible if not self._ends(i, opened, cell)]
        apart = _told_apart(self._boards, going_on, opened, cell)
        return total + sum(self.value(after, alike, left - 1) for after, alike in apart)

    def _ends(self, number: int, opened: int, cell: int) -> bool:
        board = self._boards[number]
        return board.shown[cell] == MINE or opened | board.opens[cell] == board.safe


def _told_apart(
    boards: Sequence[Board], possible: Sequence[int], opened: int, cell: int
) -> list[tuple[int, tuple[int, ...]]]:
    """What is open after a safe cell, and the boards that show the same there."""
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for i in possible:
        after = opened | boards[i].opens[cell]
        shown = tuple(boards[i].shown[each] for each in cells_of(after & ~opened))
        alike[after, shown].append(i)
    return [(after, tuple(same)) for (after, _), same in alike.items()]


def cumulative_weights(num_episodes: int, discount: float) -> tuple[float, ...]:
    """Weights of the discounted sum of episode returns (LaMer, arXiv 2512.16848)."""
    return tuple(discount**episode for episode in range(num_episodes))


def differential_weights(num_episodes: int, discount: float) -> tuple[float, ...]:
    """Weights of returns under the discounted sum of improvements on the episode before (MAGE)."""
    powers = cumulative_weights(num_episodes, discount)
    nexts = (*powers[1:], 0.0)
    return tuple(power - after for power, after in zip(powers, nexts, strict=True))


def cumulative_threshold(payoffs: Payoffs, num_episodes: int) -> float | None:
    """Discount above which scouting in the first episode beats passing under a sum of episodes.

    None where no discount up to 1 is enough.
    """
    lost, gained = payoffs.cost + payoffs.safe, 1 - payoffs.safe
    if gained * (num_episodes - 1) <= lost:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        later = sum(cumulative_weights(num_episodes, middle)[1:])
        low, high = (low, middle) if gained * later > lost else (middle, high)
    return high


def differential_threshold(payoffs: Payoffs) -> float:
    """Discount above which scouting in the first episode beats passing under differential rewards.

    Weights after the first episode add up to the discount g, the first has 1 - g: scouting earns
    g - (1 - g) cost, passing safe.
    """
    return (payoffs.cost + payoffs.safe) / (payoffs.cost + 1)


def gain_of_scouting(payoffs: Payoffs, weights: Sequence[float]) -> float:
    """What scouting in the first episode and naming the key ever after is worth beyond passing all
    along, per dial, by weights of the episodes.
    """
    return sum(weights[1:]) * (1 - payoffs.safe) - weights[0] * (payoffs.cost + payoffs.safe)
