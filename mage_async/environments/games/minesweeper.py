"""Play MineSweeper: every episode of a trial has the same mines.

Rules: the agent opens one cell a turn. A cell without a mine shows how many of its neighbours have
one; a mine ends the episode. The places of the mines are hidden. They, and the opening that starts
an episode, are the same in all episodes, so all that an episode has shown, even a lost one, helps
to win a later one. With `opening = "own"` the agent opens the first cell itself. The mines
then keep away from this cell and its neighbours, and depend on it: after the same first cell they
are the same in all episodes. Cells are numbers, row by row from 0; a set of cells is an integer
(`game.py`).
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache, partial
from string import ascii_lowercase
from typing import Literal, get_args

from mage_async.environments.environment import (
    Chance,
    Outcome,
    Split,
    check_flag,
    check_one_of,
    check_whole,
    hold_out,
)
from mage_async.environments.games.game import (
    Game,
    SoloPlay,
    TrialScript,
    cells_of,
    facts_of,
    in_rows,
    ladders_of,
    set_of,
)
from mage_async.trajectory import Task

View = Literal["board", "news"]
Opening = Literal["shared", "own"]

SHOWN = ("clear", "one", "two", "three", "four", "five", "six", "seven", "eight")
"""Words for what an open cell shows, by the number of mines around it."""
STRUCK, WON, LOST, OVER, INVALID = "mine", "win", "lose", "over", "invalid"


@dataclass(frozen=True, slots=True)
class Rewards:
    """Hold the rewards of a turn, as in LaMer (arXiv 2512.16848)."""

    win: float = 10.0
    """Reward for opening the last safe cell, in place of its other reward."""
    cascade: float = 2.0
    """Reward for opening more than one cell."""
    single: float = 0.5
    """Reward for opening one cell."""
    mine: float = -0.1
    invalid: float = -1.0


REWARDS = Rewards()
WIN_REWARDS = Rewards(win=1.0, cascade=0.0, single=0.0, mine=0.0, invalid=0.0)
"""Rewards with `wins_only`."""
_RULES = """A board of {size} rows of {size} cells hides {mines} mines. You open one cell a turn.
A cell has two letters: its row, then its column, both from a to {last}.
{view}
An open cell shows how many of its up to eight neighbours have a mine: clear, one, two, and so on.
Opening a clear cell opens everything around it. Opening a mine loses; opening all others wins.
{rewards} An episode ends after {turns} turns.
{opening}"""
_REWARDS = """\
Winning earns {win:g}; opening several cells at once {cascade:g}, one cell {single:g}, a mine
{mine:g}, what is not the name of a closed cell {invalid:g}."""
_WIN = "Winning earns 1, nothing else does."
_OPENINGS = {
    "shared": "The mines, and the cells that are open at the beginning, are the same in all "
    "episodes.",
    "own": "The first cell that you open and those around it have no mine.\n"
    "After the same first cell the mines are the same in all episodes.",
}
_VIEWS = {
    "board": "You see the cells row by row; a closed one shows its name.",
    "news": "You see each newly opened cell and what it shows.",
}

MINE = -1
"""Value of a cell with a mine; the value of any other cell is its number of neighbouring mines."""


@cache
def cell_names(size: int) -> tuple[str, ...]:
    """Return the name of each cell: the letters of its row and its column, both from `a`."""
    letters = ascii_lowercase[:size]
    return tuple(row + column for row in letters for column in letters)


@cache
def neighbours(size: int) -> tuple[int, ...]:
    """Return the set of neighbours of each cell, up to eight."""

    def around(row: int, column: int) -> int:
        rows = range(max(0, row - 1), min(size, row + 2))
        columns = range(max(0, column - 1), min(size, column + 2))
        block = sum(1 << (r * size + c) for r in rows for c in columns)
        return block & ~(1 << (row * size + column))

    return tuple(around(row, column) for row in range(size) for column in range(size))


@dataclass(frozen=True, slots=True)
class Board:
    """Hold the mines, and for each cell what it shows and which cells open with it."""

    shown: tuple[int, ...]
    """For each cell, `MINE`, or the number of mines around it."""
    opens: tuple[int, ...]
    """For each cell, the set of cells that open with it: the cell itself, and the neighbourhoods of
    all connected cells that show 0.
    """
    safe: int
    """Set of the cells without a mine."""

    def openings(self) -> list[int]:
        """Return the cells with which an episode may begin: safe, and not opening the whole
        board.
        """
        return [cell for cell in cells_of(self.safe) if self.opens[cell] != self.safe]

    def num_clicks(self) -> int:
        """Return the smallest number of cells to open by hand (3BV, a measure of difficulty)."""
        clicks, opened = 0, 0
        for cell in sorted(cells_of(self.safe), key=lambda cell: self.shown[cell] != 0):
            # Cells that show 0 come first: each of them opens a whole region. `opened >> cell & 1`
            # is 1 if the cell is open already.
            clicks += not opened >> cell & 1
            opened |= self.opens[cell]
        return clicks


class MineSweeperPlay(SoloPlay):
    """Play one episode: the opening is made, then one cell a turn. The anchor, which is equal for
    equal states, is the visible board.

    Args:
        size: Number of cells in a row.
        board_of: Returns the board after a first cell.
        opening: Cell that is open at the beginning; None: the agent opens the first one.
        turns: Largest number of turns.
        view: Content of observations.
        chance: Record of the draws; the only draw is that of a shared opening.
        wins_only: Whether winning pays 1 and nothing else does.
    """

    def __init__(
        self,
        size: int,
        board_of: Callable[[int], Board],
        opening: int | None,
        turns: int,
        view: View,
        chance: Chance,
        *,
        wins_only: bool = False,
    ) -> None:
        self.size, self._board_of = size, board_of
        self._turns_left, self._view, self.chance = turns, view, chance
        self._rewards = WIN_REWARDS if wins_only else REWARDS
        self._names = cell_names(size)
        self._faces = list(self._names)
        self.chosen: list[int] = []
        """Cells opened by the agent, in order, including a mine."""
        self.opened = 0
        """Set of the open cells."""
        self.struck: int | None = None
        """Cell with the mine that ended the episode; None if none did."""
        self.first: int | None = None
        """The agent's first cell, on which the mines depend; None if they do not, or not yet."""
        self.observation = self._begin(opening)

    def _begin(self, opening: int | None) -> str:
        """Make the opening, if it is not the agent's; return the first observation."""
        if opening is not None:
            self._board = self._board_of(opening)
            return self._show(self._open(opening))
        return self.anchor if self._view == "board" else ""

    @property
    def anchor(self) -> str:
        """What each open cell shows, and the name of each closed one, row by row."""
        return " ".join(self._faces)

    def shown(self, cell: int) -> int:
        """Return the number that an open cell shows."""
        assert self.opened >> cell & 1, "the cell is closed"
        return self._board.shown[cell]

    def closed(self) -> list[int]:
        """Return the cells that may be opened."""
        every = (1 << len(self._faces)) - 1
        return [] if self.is_over else list(cells_of(every & ~self.opened))

    def actions(self) -> Sequence[str]:
        """Return the names of the closed cells."""
        return [self._names[cell] for cell in self.closed()]

    def apply(self, action: str) -> Outcome:
        """Open a cell; an invalid action opens none but uses up the turn."""
        self._turns_left -= 1
        is_valid = action in self.actions()
        if is_valid:
            shown, reward, end = self._choose(self._names.index(action))
        else:
            shown = INVALID if self._view == "news" else f"{INVALID} {self.anchor}"
            reward, end = self._rewards.invalid, ""
        end = end or ("" if self._turns_left else OVER)
        return Outcome(f"{shown} {end}".rstrip(), reward, is_valid, bool(end))

    def _choose(self, cell: int) -> tuple[str, float, str]:
        """Open a closed cell; return what is shown, the reward, and the end of the episode, if this
        is it.
        """
        if not self.opened:
            self.first, self._board = cell, self._board_of(cell)
        self.chosen.append(cell)
        if self._board.shown[cell] == MINE:
            self.struck = cell
            self._faces[cell] = STRUCK
            return self._show(1 << cell), self._rewards.mine, LOST
        fresh = self._open(cell)
        if self.opened == self._board.safe:
            return self._show(fresh), self._rewards.win, WON
        # `fresh & (fresh - 1)` is the set without its lowest cell: it is empty for a single cell.
        is_cascade = fresh & (fresh - 1)
        rewards = self._rewards
        return self._show(fresh), rewards.cascade if is_cascade else rewards.single, ""

    def _open(self, cell: int) -> int:
        """Open a safe cell and its cascade; return the set of newly opened cells."""
        fresh = self._board.opens[cell] & ~self.opened
        self.opened |= fresh
        for each in cells_of(fresh):
            self._faces[each] = SHOWN[self._board.shown[each]]
        return fresh

    def _show(self, fresh: int) -> str:
        """Return the whole board, or the name and number of each newly opened cell."""
        if self._view == "board":
            return self.anchor
        return " ".join(f"{self._names[cell]} {self._faces[cell]}" for cell in cells_of(fresh))


@dataclass(slots=True)
class MineSweeperScript(TrialScript[MineSweeperPlay]):
    """Open cells that earlier episodes have shown to be safe; then the cell least likely to have a
    mine, or any cell.

    Args:
        source: Random source.
        num_mines: Number of mines on the board.
        care: Probability of reasoning.
        memory: Probability of using earlier episodes, whose numbers, safe cells and struck mines
            still hold.
    """

    num_mines: int
    care: float
    memory: float

    def action(self, play: MineSweeperPlay) -> str:
        """Return the next cell."""
        names = cell_names(play.size)
        plays = self.plays if self.source.random() < self.memory else [play]
        if not play.opened:
            # The mines depend on the agent's first cell. If the newest first cell is repeated, they
            # lie where they lay in that episode.
            firsts = [each.first for each in plays if each.first is not None]
            return names[firsts[-1]] if firsts else self.source.choice(play.actions())
        plays = [each for each in plays if each.first == play.first]
        struck = {each.struck for each in plays if each.struck is not None}
        shown = {cell: each.shown(cell) for each in plays for cell in cells_of(each.opened)}
        closed = [cell for cell in play.closed() if cell not in struck]
        # Repeat the agent's safe choices, newest episode first. Each opens its whole cascade again.
        chosen = (cell for each in reversed(plays) for cell in each.chosen)
        for cell in chosen:
            if cell in closed and cell in shown:
                return names[cell]
        # Now every cell that an episode has shown to be safe is open: the closed cells are unknown.
        return names[self.source.choice(self._guesses(play.size, closed, shown, struck))]

    def _guesses(
        self, size: int, unknown: list[int], shown: Mapping[int, int], struck: set[int]
    ) -> list[int]:
        """Return the cells to choose from: with care, the unknown ones that are least likely to
        have a mine; else all unknown ones.
        """
        if self.source.random() >= self.care:
            return unknown
        chances = mine_chances(size, self.num_mines, shown, set_of(struck))
        least = min(chances[cell] for cell in unknown)
        return [cell for cell in unknown if chances[cell] <= least + 1e-9]


class MineSweeper(Game[int]):
    """Play MineSweeper; the task variant is a board, named after the cells of its mines, such as
    `ac-bd-fa`, or with `opening = "own"` an order of the cells in which mines are laid, such as
    `order-17`.

    Args:
        size: Number of rows and of columns: at least 3, or 4 with `opening = "own"`.
        mines: Number of mines; at most a quarter of the cells.
        turns: Largest number of turns in an episode.
        view: Content of observations: the whole `board`, or only `news`, the newly opened cells.
        boards: Number of boards, a quarter of them held out; fewer if there are not so many.
        opening: Whether the cells that are open at the beginning are the same in all episodes of a
            task (`shared`), or the agent opens the first one, around which there is no mine
            (`own`), as in ORBIT (arXiv 2602.04089).
        wins_only: Whether winning pays 1 and nothing else does.
        most_mines: With a tiny model, the vocabulary has every number that a cell can show on a
            board of this many mines, so that the model can also be evaluated on boards with more
            mines than `mines`. It always has the numbers that `mines` needs.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self,
        size: int = 6,
        mines: int = 3,
        turns: int = 7,
        view: View = "board",
        boards: int = 2048,
        opening: Opening = "shared",
        wins_only: bool = False,
        most_mines: int = 0,
    ) -> None:
        check_one_of("minesweeper", "opening", opening, get_args(Opening))
        # The agent's own first cell and its neighbours, up to nine cells, have no mine. A board of
        # 4x4 cells and its four mines have room for them.
        check_whole("minesweeper", "size", size, 4 if opening == "own" else 3, 26)
        most = size * size // 4
        check_whole("minesweeper", "mines", mines, 1, most)
        check_whole("minesweeper", "most_mines", most_mines, 0, most)
        check_whole("minesweeper", "turns", turns, 1, size * size)
        check_whole("minesweeper", "boards", boards, 8, 1_000_000)
        check_one_of("minesweeper", "view", view, get_args(View))
        check_flag("minesweeper", "wins_only", wins_only)
        self._size, self._num_mines, self._turns, self._view = size, mines, turns, view
        self._opening, self._wins_only = opening, wins_only
        names = cell_names(size)
        if opening == "own":
            variants = {f"order-{number}": number for number in range(boards)}
        else:
            variants = {
                "-".join(names[cell] for cell in cells_of(cells)): cells
                for cells in layouts(size, mines, boards)
            }
        self._cached = lru_cache(maxsize=4096)(partial(board_of, size))
        # Harder evaluations play up to 7 mines, or as many as a board of this size may have.
        self.ladders = ladders_of(mines=range(1, min(most, 7) + 1))
        largest = min(max(mines, most_mines), 8)
        words = (*names, *SHOWN[: largest + 1], STRUCK, WON, LOST, OVER, INVALID)
        rewards = WIN_REWARDS if wins_only else REWARDS
        returns = (turns * rewards.invalid, rewards.win + (turns - 1) * rewards.cascade)
        has_chance = opening == "shared"
        more = {"has_chance": has_chance, "win_reward": rewards.win}
        facts = facts_of("minesweeper", turns, words, returns, **more)
        super().__init__(facts, hold_out(variants), noun="board")

    def family(self, member: str) -> str:
        """Return `clicks-N`, the smallest number of cells to open by hand; with `opening = "own"`,
        where the first cell decides it, `own`.
        """
        return f"clicks-{self.board(member).num_clicks()}" if self._opening == "shared" else "own"

    def board(self, member: str, first: int = 0) -> Board:
        """Return the board of a task variant; `first`, the first cell that is opened, matters with
        `opening = "own"` alone.
        """
        variant = self.variant(member)
        if self._opening == "own":
            order = laid_in_order(self._size, variant)
            around = neighbours(self._size)[first] | 1 << first
            free = (cell for cell in order if not around >> cell & 1)
            variant = set_of(itertools.islice(free, self._num_mines))
        return self._cached(variant)

    def rules(self) -> str:
        """Return the rules in plain words, with the rewards."""
        return _RULES.format(
            size=self._size,
            mines=self._num_mines,
            last=cell_names(self._size)[-1][0],
            view=_VIEWS[self._view],
            turns=self._turns,
            rewards=_WIN if self._wins_only else _REWARDS.format(**asdict(REWARDS)),
            opening=_OPENINGS[self._opening],
        )

    def laid_out(self, observation: str) -> str:
        """Return a board with one row a line; news stay as they are."""
        return in_rows(observation, self._size, INVALID) if self._view == "board" else observation

    def begin(self, task: Task, episode: int) -> MineSweeperPlay:
        """Start an episode with the opening that all episodes of the task share."""
        chance, opening = Chance(task.seed, 0), None
        if self._opening == "shared":
            openings = self.board(task.member).openings()
            opening = openings[chance.choose("opening", (1,) * len(openings))]
        return MineSweeperPlay(
            self._size,
            partial(self.board, task.member),
            opening,
            self._turns,
            self._view,
            chance,
            wins_only=self._wins_only,
        )

    def script(self, source: random.Random) -> MineSweeperScript:
        """Return a script whose care and memory are drawn for the trial."""
        care, memory = source.choice((0.0, 0.5, 1.0)), source.choice((0.0, 0.5, 0.95))
        return self._player(care, memory, source)

    def best_script(self, source: random.Random) -> MineSweeperScript:
        """Return a script that reasons from everything the trial has shown."""
        return self._player(1.0, 1.0, source)

    def overlap(self, one: int, other: int) -> int:
        """Return the number of cells with a mine on both boards; 0 if the mines depend on the first
        cell.
        """
        return (one & other).bit_count() if self._opening == "shared" else 0

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return the mean returns of scripted players over 200 trials, per episode.

        `random` opens any cell, `solver_without_memory` the cell least likely to have a mine,
        `solver` does so with what earlier episodes have shown.
        """
        styles = {"random": (0.0, 0.0), "solver_without_memory": (1.0, 0.0), "solver": (1.0, 1.0)}
        players = {name: partial(self._player, *style) for name, style in styles.items()}
        return self.measured(split, num_episodes, **players)

    def _player(self, care: float, memory: float, source: random.Random) -> MineSweeperScript:
        """Return a script with this care and memory."""
        return MineSweeperScript(source, self._num_mines, care, memory)


@lru_cache(maxsize=4096)
def laid_in_order(size: int, number: int) -> tuple[int, ...]:
    """Return all cells in the order in which mines are laid, whose seed is `number`."""
    cells = list(range(size * size))
    random.Random(f"minesweeper/order/{size}/{number}").shuffle(cells)
    return tuple(cells)


def board_of(size: int, mines: int) -> Board:
    """Return the board for a set of mines."""
    around = neighbours(size)
    shown = tuple(
        MINE if mines >> cell & 1 else (around[cell] & mines).bit_count()
        for cell in range(size * size)
    )
    opens = [1 << cell for cell in range(size * size)]
    for cell, number in enumerate(shown):
        if number == 0:
            opens[cell] = _cascade(shown, around, cell)
    return Board(shown, tuple(opens), (1 << size * size) - 1 & ~mines)


def _cascade(shown: tuple[int, ...], around: tuple[int, ...], start: int) -> int:
    """Return the set of cells that open with a cell that shows 0."""
    opened, waiting = 1 << start, [start]
    while waiting:
        fresh = around[waiting.pop()] & ~opened
        opened |= fresh
        waiting += [cell for cell in cells_of(fresh) if shown[cell] == 0]
    return opened


def layouts(size: int, num_mines: int, most: int) -> list[int]:
    """Return sets of mines in random order: all of them, or `most`."""
    source = random.Random(f"minesweeper/{size}/{num_mines}")
    cells = range(size * size)
    if math.comb(len(cells), num_mines) <= most:
        every = [set_of(chosen) for chosen in itertools.combinations(cells, num_mines)]
        source.shuffle(every)
        return every
    drawn: dict[int, None] = {}
    while len(drawn) < most:
        drawn[set_of(source.sample(cells, num_mines))] = None
    return list(drawn)


# The code below computes probabilities of mines, by counting all layouts that agree with the
# numbers.


_Need = tuple[int, int]
"""A set of cells, and the number of mines among them."""


def mine_chances(
    size: int, num_mines: int, shown: Mapping[int, int], struck: int = 0
) -> dict[int, float]:
    """Return the probability of a mine at each closed cell that is not in `struck`, with all
    layouts equally likely.

    Args:
        size: Number of cells in a row.
        num_mines: Number of mines on the board.
        shown: Number shown by each open cell.
        struck: Set of cells known to have a mine.
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
    groups = _cell_groups(unknown, needs)
    counts = _LayoutCounts(groups, needs, num_mines - struck.bit_count())
    return {
        cell: mean / group.bit_count()
        for group, mean in zip(groups, counts.means(), strict=True)
        for cell in cells_of(group)
    }


def _cell_groups(unknown: int, needs: Sequence[_Need]) -> list[int]:
    """Group the cells that are constrained by the same numbers; the unconstrained cells come
    last.
    """
    groups: dict[tuple[int, ...], int] = {}
    for cell in cells_of(unknown):
        indices = tuple(i for i, (cells, _) in enumerate(needs) if cells >> cell & 1)
        groups[indices] = groups.get(indices, 0) | 1 << cell
    # False sorts before True, so the key puts the group without indices last.
    return [groups[indices] for indices in sorted(groups, key=lambda each: (not each, each))]


class _LayoutCounts:
    """Count, by backtracking, the layouts that agree with all numbers, and the mines of each group
    in them.
    """

    def __init__(self, groups: Sequence[int], needs: Sequence[_Need], num_mines: int) -> None:
        self._sizes = [group.bit_count() for group in groups]
        """Number of cells of each group."""
        self._needs_of = [
            [i for i, (cells, _) in enumerate(needs) if cells & each] for each in groups
        ]
        """For each group, the indices of the needs that hold its cells."""
        self._needed = [number for _, number in needs]
        """For each need, the number of mines that are not placed yet."""
        self._num_unfilled = [cells.bit_count() for cells, _ in needs]
        """For each need, the number of its cells in groups that are not filled yet."""
        self._sums = [0] * len(groups)
        """Number of mines of each group, summed over all layouts."""
        self._ways = 0
        """Number of layouts."""
        self._placed = [0] * len(groups)
        """Number of mines of each group in the layouts that are being counted."""
        self._place(0, num_mines, 1)
        assert self._ways, "no layout agrees with what was seen"

    def means(self) -> list[float]:
        """Return the expected number of mines of each group."""
        return [each / self._ways for each in self._sums]

    def _place(self, number: int, left: int, ways: int) -> None:
        """Place mines in group `number` and all later ones; `ways` is the number of layouts of
        mines in the earlier groups.
        """
        if number == len(self._sizes):
            if left == 0:
                self._ways += ways
                for group, placed in enumerate(self._placed):
                    self._sums[group] += ways * placed
            return
        size, needs = self._sizes[number], self._needs_of[number]
        for i in needs:
            self._num_unfilled[i] -= size
        # `_num_unfilled[i]` is now the number of cells of later groups: mines that do not fit into
        # them must lie in this group.
        least = max((self._needed[i] - self._num_unfilled[i] for i in needs), default=0)
        most = min((self._needed[i] for i in needs), default=left)
        if number == len(self._sizes) - 1:
            least = max(least, left)
        for placed in range(max(0, least), min(most, size, left) + 1):
            for i in needs:
                self._needed[i] -= placed
            self._placed[number] = placed
            self._place(number + 1, left - placed, ways * math.comb(size, placed))
            for i in needs:
                self._needed[i] += placed
        for i in needs:
            self._num_unfilled[i] += size
