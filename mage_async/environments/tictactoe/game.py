"""Tic-tac-toe against a hidden opponent; one game an episode, from either seat."""

import random
from typing import Literal, get_args

from mage_async.environments.cell_sets import in_rows
from mage_async.environments.environment import Chance, Environment, Facts, Script, Split
from mage_async.environments.openspiel.engine import engine
from mage_async.environments.options import check_one_of
from mage_async.environments.tictactoe.duel import TicTacToeDuel
from mage_async.environments.tictactoe.opponents import (
    CARELESS_HELDOUT,
    CARELESS_TRAIN,
    GAME,
    HELDOUT,
    TRAIN,
    mover,
    taken_lightly,
)
from mage_async.environments.tictactoe.play import (
    CELLS,
    INVALID,
    MAX_TURNS,
    MINE,
    RESULTS,
    SEATS,
    THEIRS,
    TicTacToePlay,
    View,
)
from mage_async.environments.tictactoe.script import TicTacToeExplorer, TicTacToeScript
from mage_async.environments.tictactoe.values import references
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

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
_WORDS = {"board": (MINE, THEIRS), "news": SEATS}


class TicTacToe(Environment):
    """Tic-tac-toe; the opponent's way to play is what a trial has to find out.

    Args:
        simulations: of the searching opponent to train on; 0 for none.
        heldout_simulations: of the one held out; 0 for none.
        opponents: `mixed`, named ones and those two, or `careless`, 336 (84 of them held out) that
            only play well where the agent's first cell is not one of three that they take lightly.
        view: see the whole `board` after each turn, or only the `news`: the opponent's cell.

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
        train = _search("simulations", simulations)
        heldout = _search("heldout_simulations", heldout_simulations)
        if train and train == heldout:
            raise ConfigError(f"tictactoe: {train[0]!r} cannot be trained on and held out")
        check_one_of("tictactoe", "opponents", opponents, get_args(Opponents))
        check_one_of("tictactoe", "view", view, get_args(View))
        self._are_careless, self._view = opponents == "careless", view
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": CARELESS_TRAIN if self._are_careless else (*TRAIN, *train),
            "heldout": CARELESS_HELDOUT if self._are_careless else (*HELDOUT, *heldout),
        }
        self._known = frozenset((*self._splits["train"], *self._splits["heldout"]))
        self._game = engine().load_game(GAME)
        self.facts = Facts(
            name="tictactoe",
            num_seats=2,
            max_turns=MAX_TURNS,
            min_return=-1.0,
            max_return=1.0,
            units=1,
            has_chance=not self._are_careless,
            words=(*CELLS, *_WORDS[view], *RESULTS.values(), INVALID),
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Names of the opponents, such as `mcts-100` or `careless-centre-one-two-nine`."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """random, preferred, mcts, minimax or careless."""
        self._check(member)
        return member.partition("-")[0]

    def seats(self) -> tuple[int, ...]:
        """The seat that moves first."""
        return (0, 1)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES.format(view=_VIEWS[self._view])

    def laid_out(self, said: str) -> str:
        """A row of the board a line."""
        return in_rows(said, 3, INVALID)

    def begin(self, task: Task, episode: int) -> TicTacToePlay:
        """Start a game; in seat 1 the opponent has moved already."""
        self._check(task.member)
        chance = Chance(task.seed, episode)
        move, state = mover(task.member, chance), self._game.new_initial_state()
        return TicTacToePlay(state, move, task.seat, self._view, chance)

    def duel(self, task: Task, episode: int) -> TicTacToeDuel:
        """Start a game against a rival."""
        chance, state = Chance(task.seed, episode), self._game.new_initial_state()
        return TicTacToeDuel(state, task.seat, self._view, chance)

    def script(self, source: random.Random) -> Script:
        """Completes its own lines and blocks the other's with a care drawn for the trial; against
        careless opponents, which always answer alike, it also repeats the moves that have won.
        """
        if self._are_careless:
            return TicTacToeExplorer(source, source.choice((0.5, 1.0)), 0.95)
        return TicTacToeScript(source, source.choice((0.0, 0.5, 1.0)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """All others of the split; careless ones only if they share no cell taken lightly."""
        self._check(member)
        lightly = taken_lightly(member)
        return tuple(
            each
            for each in self._splits[split]
            if each != member and not lightly & taken_lightly(each)
        )

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Exact values per episode, as far as known, see `tictactoe_values`."""
        values = references(self._splits[split])
        return {name: (each,) * num_episodes for name, each in values.items()}

    def _check(self, member: str) -> None:
        if member not in self._known:
            example = self._splits["train"][0]
            raise EnvironmentFault(
                f"tictactoe: nobody is called {member!r}, as is e.g. {example!r}"
            )


def _search(name: str, simulations: object) -> tuple[str, ...]:
    """The searching opponent with so many simulations, if any."""
    if not isinstance(simulations, int) or isinstance(simulations, bool) or simulations < 0:
        raise ConfigError(f"tictactoe: `{name}` must be a whole number from 0, got {simulations!r}")
    return (f"mcts-{simulations}",) if simulations else ()
