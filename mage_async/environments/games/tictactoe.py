"""Play tic-tac-toe on OpenSpiel's engine, against a hidden opponent.

Rules: one game an episode, from either seat; a win earns 1, a draw 0, a loss -1. The
opponent's way to play is hidden, and the same in all episodes. Cells are numbers, row by row from
0.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, Literal, get_args

from mage_async.environments.environment import (
    AGENT,
    OPPONENT,
    Chance,
    DuelPlay,
    Outcome,
    Script,
    Side,
    Split,
    Splits,
    check_one_of,
    named,
    other,
    split_by,
)
from mage_async.environments.games.game import Game, TrialScript, facts_of, in_rows
from mage_async.environments.games.openspiel_policies import (
    DRAW,
    INVALID,
    LOSE,
    WIN,
    EngineDuel,
    Mover,
    engine,
    searcher,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

View = Literal["board", "news"]

CELLS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SEAT_WORDS = ("first", "second")
MINE, THEIRS = "mine", "theirs"
MAX_TURNS = 8
"""Largest number of turns of a side, invalid ones included."""
NUMBERS = {cell: number for number, cell in enumerate(CELLS)}

GAME = "tic_tac_toe"

Opponents = Literal["mixed", "careless"]

_RULES = """You play tic-tac-toe; three of yours in a line win.
The cells are one two three, four five six, seven eight nine, row by row.
{view} Answer with the name of a free
cell. An invalid action leaves the board as it is. A game not finished in eight turns is lost. A win
counts 1, a draw 0, a loss -1. The opponent has its own way to play, the same in all episodes."""
_VIEWS = {
    "board": "You see the nine cells: mine, theirs, or the name of a free cell.",
    "news": "You see who moves first, the cells that the opponent takes, and how the game ends.",
}
_WORDS = {"board": (MINE, THEIRS), "news": SEAT_WORDS}
"""Words of observations in addition to the cells and the result, by view."""


class TicTacToeDuel(EngineDuel):
    """Play one game between two policies. The anchor, which is equal for equal states, is the
    board: nine words, row by row; each is `mine`, `theirs` or the name of a free cell.

    `is_scripted` says whether a script plays the opponent; see `EngineDuel`.
    """

    def __init__(
        self, state: Any, seat: int, view: View, chance: Chance, *, is_scripted: bool = False
    ) -> None:
        super().__init__(state, seat, MAX_TURNS, chance, is_scripted=is_scripted)
        self._view = view
        self.boards = list(CELLS), list(CELLS)
        """Words of the nine cells, for each side."""
        if view == "news":
            self._show(AGENT, SEAT_WORDS[seat])
            self._show(OPPONENT, SEAT_WORDS[1 - seat])
        self._show_state(AGENT if seat == 0 else OPPONENT)

    def anchor(self, side: Side) -> str:
        """Return the board as a side sees it."""
        return " ".join(self.boards[side])

    def actions(self) -> dict[str, int]:
        """Return the free cells by name, until the game is over."""
        board = () if self._is_done else self.boards[AGENT]
        return {cell: NUMBERS[cell] for cell in board if cell in NUMBERS}

    def _apply(self, side: Side, number: int) -> None:
        """Apply a move, and mark the cell on both boards."""
        self.state.apply_action(number)
        self.boards[side][number], self.boards[other(side)][number] = MINE, THEIRS
        if self._view == "news":
            self._show(other(side), CELLS[number])

    def _show_state(self, side: Side) -> None:
        """Add the board to a side's next observation, if observations show it."""
        if self._view == "board":
            self._show(side, self.anchor(side))


class TicTacToePlay(DuelPlay):
    """Play one game against a hidden opponent."""

    def __init__(self, state: Any, move: Mover, seat: int, view: View, chance: Chance) -> None:
        duel = TicTacToeDuel(state, seat, view, chance, is_scripted=True)
        self.board = duel.boards[AGENT]
        """Words of the nine cells, for the agent."""
        self.taken: list[str] = []
        """Cells of the agent, in the order in which it took them."""
        self.result: float | None = None
        """Result of the agent; None before the game is over."""
        super().__init__(duel, lambda: duel.move(move(state)))

    def act(self, action: str) -> Outcome:
        """Take a cell; an invalid action takes none but uses up the turn."""
        outcome = super().act(action)
        if outcome.is_valid:
            self.taken.append(action)
        if outcome.is_done:
            self.result = outcome.reward
        return outcome


_LINES = (
    *((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    *((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    *((0, 4, 8), (2, 4, 6)),
)
"""Cells of the eight lines."""


@dataclass(slots=True)
class TicTacToeScript(TrialScript[TicTacToePlay]):
    """Win or block if one move does, with probability `care`; else take any free cell."""

    care: float

    def action(self, play: TicTacToePlay) -> str:
        """Return the next action."""
        if self.source.random() < self.care:
            for whose in (MINE, THEIRS):
                completing = (cell for line in _LINES if (cell := _completes(play, line, whose)))
                if cell := next(completing, None):
                    return cell
        return self.source.choice(play.legal_actions())


@dataclass(slots=True)
class TicTacToeExplorer(TrialScript[TicTacToePlay]):
    """Repeat a game that was won; open with untried cells until one was won."""

    care: float
    """Probability of winning or blocking with one move, where earlier games suggest no move."""
    memory: float
    """Probability of using earlier games."""

    def action(self, play: TicTacToePlay) -> str:
        """Return the next action."""
        remembered = self._remembered(play) if self.source.random() < self.memory else []
        if remembered:
            return self.source.choice(remembered)
        return TicTacToeScript(self.source, self.care).action(play)

    def _remembered(self, play: TicTacToePlay) -> list[str]:
        """Return the free cells that earlier games suggest: the next one of a won game, or else an
        untried opening.

        Opponents of these games always answer alike, so a won game can be won again.
        """
        earlier = [each for each in self.plays[:-1] if each.taken]
        won = [each for each in earlier if each.result == 1.0]
        length = len(play.taken)
        again = [each.taken[length] for each in won if each.taken[:length] == play.taken]
        if won or length:
            return [cell for cell in again if cell in play.legal_actions()]
        tried = {each.taken[0] for each in earlier}
        return [cell for cell in play.legal_actions() if cell not in tried] if tried else []


def _completes(play: TicTacToePlay, line: tuple[int, ...], whose: str) -> str | None:
    """Return the free cell of a line whose other two cells are `whose`."""
    shown = [play.board[number] for number in line]
    if shown.count(whose) != 2:
        return None
    return next((cell for cell in shown if cell in NUMBERS), None)


CARES = (0.0, 0.5, 1.0)
"""Values of `TicTacToeScript.care`, one for a trial: random, middling and careful play."""
EXPLORER_CARES, EXPLORER_MEMORY = (0.5, 1.0), 0.95
"""Values of `TicTacToeExplorer.care`, one for a trial, and its `memory`: one move in twenty does
not use earlier games."""


class TicTacToe(Game[str]):
    """Play tic-tac-toe; the task variant is the opponent, such as `mcts-100` or
    `careless-centre-one-two-nine`.

    Args:
        simulations: Number of simulations of the searching opponent to train on; 0 for no such
            opponent.
        heldout_simulations: Number of simulations of the held-out searching opponent; 0 for no such
            opponent.
        opponents: Set of opponents: `mixed`, which are eight of known style and the two that
            search, or `careless`, which are 336 (84 of them held out) that play well only if the
            agent's first cell is not one of three that they take lightly.
        view: Content of observations: the whole `board`, or only `news`, the opponent's cell.

    Raises:
        ConfigError: an option is out of its range, both searching opponents are the same, or
            OpenSpiel is not installed.
    """

    def __init__(
        self,
        simulations: int = 100,
        heldout_simulations: int = 1000,
        opponents: Opponents = "mixed",
        view: View = "board",
    ) -> None:
        train = _searching_opponent("simulations", simulations)
        heldout = _searching_opponent("heldout_simulations", heldout_simulations)
        if train and train == heldout:
            raise ConfigError(f"tictactoe: {train[0]!r} cannot be trained on and held out")
        check_one_of("tictactoe", "opponents", opponents, get_args(Opponents))
        check_one_of("tictactoe", "view", view, get_args(View))
        self._are_careless, self._view = opponents == "careless", view
        splits: Splits[str] = {
            "train": named((*TRAIN, *train)),
            "heldout": named((*HELDOUT, *heldout)),
        }
        if self._are_careless:
            splits = split_by(named(_CARELESS), _is_heldout_careless)
        self._game = engine().load_game(GAME)
        words = (*CELLS, *_WORDS[view], WIN, DRAW, LOSE, INVALID)
        more = {"has_chance": not self._are_careless}
        facts = facts_of("tictactoe", MAX_TURNS, words, (-1.0, 1.0), num_seats=2, **more)
        super().__init__(facts, splits, "opponent")

    def family(self, member: str) -> str:
        """Return the kind of the opponent: random, preferred, mcts, minimax or careless."""
        return self.variant(member).partition("-")[0]

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _RULES.format(view=_VIEWS[self._view])

    def laid_out(self, observation: str) -> str:
        """Return the board with one row a line; news, which have fewer words, stay as they are."""
        return in_rows(observation, 3, INVALID)

    def begin(self, task: Task, episode: int) -> TicTacToePlay:
        """Start a game; in seat 1 the opponent has moved already."""
        chance = Chance(task.seed, episode)
        move, state = mover(self.variant(task.member), chance), self._game.new_initial_state()
        return TicTacToePlay(state, move, task.seat, self._view, chance)

    def duel(self, task: Task, episode: int) -> TicTacToeDuel:
        """Start a game between two policies."""
        chance, state = Chance(task.seed, episode), self._game.new_initial_state()
        return TicTacToeDuel(state, task.seat, self._view, chance)

    def script(self, source: random.Random) -> Script:
        """Return a script that completes its own lines and blocks the other's, with a care drawn
        for the trial; against careless opponents, which always answer alike, it also repeats the
        moves that have won.
        """
        if self._are_careless:
            return TicTacToeExplorer(source, source.choice(EXPLORER_CARES), EXPLORER_MEMORY)
        return TicTacToeScript(source, source.choice(CARES))

    def overlap(self, one: str, other: str) -> int:
        """Return the number of cells that both opponents take lightly."""
        return len(taken_lightly(one) & taken_lightly(other))

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return exact values, equal in all episodes: `minimax`, and, if no opponent of the split
        searches, `random` and `best_response`, the best play against a known opponent.
        """
        values = references(self.members(split))
        return {name: (each,) * num_episodes for name, each in values.items()}


def _searching_opponent(name: str, simulations: object) -> tuple[str, ...]:
    """Return the name of the opponent that searches with this number of simulations; empty for 0.

    Raises:
        ConfigError: the value of the option `name` is no such number.
    """
    if not isinstance(simulations, int) or isinstance(simulations, bool) or simulations < 0:
        raise ConfigError(f"tictactoe: `{name}` must be a whole number from 0, got {simulations!r}")
    return (f"mcts-{simulations}",) if simulations else ()


# The hidden opponents follow. Most are functions of the board, and their moves have known
# probabilities; the moves of a search by sampling (`mcts-N`) have none. A careless opponent also
# looks at the agent's first cell: if that is one of the three that it takes lightly, it goes
# through its list of cells for the whole game; otherwise it plays perfectly, with its list deciding
# between moves of equal value. It makes no random moves.


Weights = Mapping[int, float]
"""Relative probabilities of the cells to which an opponent may move."""
_PREFERRED = {
    "preferred-centre": (4, 0, 2, 6, 8, 1, 3, 5, 7),
    "preferred-corners": (0, 2, 6, 8, 4, 1, 3, 5, 7),
    "preferred-edges": (1, 3, 5, 7, 4, 0, 2, 6, 8),
    "preferred-diagonal": (0, 4, 8, 2, 6, 1, 3, 5, 7),
    "preferred-antidiagonal": (2, 4, 6, 0, 8, 1, 3, 5, 7),
    "preferred-reverse": (8, 6, 2, 0, 4, 7, 5, 3, 1),
}
"""For each opponent of this kind, its cells in order of preference."""
TRAIN = ("random", *(f"preferred-{each}" for each in ("centre", "edges", "diagonal", "reverse")))
"""Opponents to train on, in addition to `mcts-N`."""
HELDOUT = ("preferred-corners", "preferred-antidiagonal", "minimax")
"""Held-out opponents, in addition to `mcts-N`."""
_LISTS = ("centre", "corners", "edges", "reverse")
"""Names of the preference lists of the careless opponents."""
_HELDOUT_SHAPES = ((0, 1, 3), (0, 2, 4), (0, 3, 6))
"""Shapes of the held-out sets of three cells. A shape represents all sets that arise by adding the
same number to all three cells, modulo 9; so every cell is in equally many held-out sets.
"""


_CARELESS = tuple(
    "-".join(("careless", which, *cells))
    for cells in itertools.combinations(CELLS, 3)
    for which in _LISTS
)
"""Names of the careless opponents: three cells that each takes lightly, and its list."""


def is_search(member: str) -> bool:
    """Return whether an opponent searches by sampling."""
    return member.startswith("mcts-")


@cache
def taken_lightly(member: str) -> frozenset[int]:
    """Return the first cells of the agent that make a careless opponent careless."""
    kind, _, rest = member.partition("-")
    names = rest.split("-")[1:] if kind == "careless" else ()
    return frozenset(map(CELLS.index, names))


def _is_heldout_careless(member: str) -> bool:
    """Return whether a careless opponent is held out, by the shape of its three cells."""
    cells = taken_lightly(member)
    # The smallest of the nine sets of a shape represents it.
    shape = min(tuple(sorted((cell + by) % 9 for cell in cells)) for by in range(9))
    return shape in _HELDOUT_SHAPES


def mover(member: str, chance: Chance) -> Mover:
    """Return an opponent's policy for one episode; its random moves are drawn from `chance`."""
    if is_search(member):
        game = engine().load_game(GAME)
        return searcher(game, int(member.removeprefix("mcts-")), chance)
    if member.startswith("careless-"):
        return lambda state: next(iter(weights(member, state)))
    return lambda state: _draw(weights(member, state), chance)


def style(member: str, taken: Sequence[int]) -> str:
    """Return an opponent's style after the agent has taken these cells: its own name, or the style
    that a careless opponent has switched to.
    """
    if not member.startswith("careless-"):
        return member
    which = member.split("-")[1]
    is_careless = bool(taken) and taken[0] in taken_lightly(member)
    return f"preferred-{which}" if is_careless else f"perfect-{which}"


def weights(member: str, state: Any) -> Weights:
    """Return the probabilities of the moves of an opponent that does not search by sampling."""
    # Moves alternate, so every second one is the agent's.
    taken = state.history()[1 - state.current_player() :: 2]
    kind, _, which = style(member, taken).partition("-")
    if kind == "random":
        return dict.fromkeys(state.legal_actions(), 1.0)
    if kind == "minimax":
        return dict.fromkeys(_best_cells(state), 1.0)
    cells = state.legal_actions() if kind == "preferred" else _best_cells(state)
    return {next(cell for cell in _PREFERRED[f"preferred-{which}"] if cell in cells): 1.0}


def _draw(cells: Weights, chance: Chance) -> int:
    """Draw a cell, even if there is only one, so that every move takes one random number."""
    return list(cells)[chance.choose("opponent", list(cells.values()))]


def _best_cells(state: Any) -> list[int]:
    """Return the cells that keep the game's value."""
    values = {cell: _solve(state.child(cell)) for cell in state.legal_actions()}
    return [cell for cell, value in values.items() if value == min(values.values())]


_SOLVED: dict[str, float] = {}
"""Value of each board that was solved, by its text: at most 5,478."""


def _solve(state: Any) -> float:
    """Return the value of a board to the side to move (or that would move, had the game not
    ended).
    """
    board = str(state)
    if board not in _SOLVED:
        children = [state.child(cell) for cell in state.legal_actions()]
        # At the end the side to move has lost, or it is a draw: one side's return is 1 and the
        # other's -1, or both are 0.
        _SOLVED[board] = (
            max(-_solve(child) for child in children) if children else -max(state.returns())
        )
    return _SOLVED[board]


# The code below computes exact values against opponents whose moves have known probabilities.


_Choose = Callable[[Sequence[float]], float]
"""Returns the value of the agent's turn from the values of its moves: their maximum, or their
mean.
"""


def references(members: Sequence[str]) -> dict[str, float]:
    """Return values against a uniform draw of `members`, by name.

    `minimax` is the least that perfect play earns. `random` and `best_response` (which knows the
    opponent) are exact, and omitted if an opponent searches by sampling. The agent takes both seats
    equally often.
    """
    values = {"minimax": 0.0}
    if not any(map(is_search, members)):
        values["random"] = sum(return_against(each, fmean) for each in members) / len(members)
        values["best_response"] = sum(return_against(each, max) for each in members) / len(members)
    return values


@cache
def return_against(member: str, choose: _Choose) -> float:
    """Return the return against a known opponent, as a mean over both seats: of the best play with
    `max`, of uniform legal moves with `fmean`.
    """
    start = engine().load_game(GAME).new_initial_state()
    return fmean(GameTree(member, seat, choose).value(start) for seat in (0, 1))


_KNOWN: dict[tuple[str, int, _Choose, str], float] = {}
"""Values by the opponent's style, the agent's seat, its choice of moves, and the board."""


class GameTree:
    """Search the game tree of the agent in one seat against an opponent."""

    def __init__(self, member: str, seat: int, choose: _Choose) -> None:
        self._member, self._seat, self._choose = member, seat, choose

    def value(self, state: Any) -> float:
        """Return the agent's expected return from a board on."""
        taken = state.history()[self._seat :: 2]
        # Before the agent's first cell a careless opponent's style is open, so the value belongs to
        # its own name.
        who = style(self._member, taken) if taken else self._member
        known = (who, self._seat, self._choose, str(state))
        if known not in _KNOWN:
            _KNOWN[known] = self._expand(state)
        return _KNOWN[known]

    def _expand(self, state: Any) -> float:
        """Return the value of a board by its children."""
        if state.is_terminal():
            return float(state.returns()[self._seat])
        if state.current_player() == self._seat:
            return self._choose([self.value(state.child(cell)) for cell in state.legal_actions()])
        cells = weights(self._member, state)
        earned = sum(weight * self.value(state.child(cell)) for cell, weight in cells.items())
        return earned / sum(cells.values())
