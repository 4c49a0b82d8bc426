"""Make policies for games of OpenSpiel: search by sampling, equilibria by counterfactual regret
minimisation (CFR), best responses; and the duel between two policies on an engine's state.

Only this module imports OpenSpiel, and only when one of its games is created. A table gives the
probability of each action in every information state. Solving Leduc poker takes ten seconds, so
tables are kept in the user's cache.
"""

import hashlib
import importlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mage_async.environments.environment import AGENT, OPPONENT, Chance, DuelSides, Side
from mage_async.errors import ConfigError
from mage_async.user_modules import cache_folder

Mover = Callable[[Any], int]
"""Returns one of the actions of an OpenSpiel state."""

INVALID, WIN, DRAW, LOSE = "invalid", "win", "draw", "lose"

_EXPLORATION = 1.4
"""Exploration constant of the search."""
_MEMORY_MB = 16
"""Largest memory of a search tree, in megabytes."""


def engine() -> Any:
    """Return OpenSpiel's module; it has no types.

    Raises:
        ConfigError: OpenSpiel is not installed.
    """
    try:
        return importlib.import_module("pyspiel")
    except ImportError as error:
        message = f'this environment needs OpenSpiel: pip install "mage_async[games]" ({error})'
        raise ConfigError(message) from None


def has_perfect_information(game: Any) -> bool:
    """Return whether the players see everything."""
    return bool(game.get_type().information == engine().GameType.Information.PERFECT_INFORMATION)


def searcher(game: Any, num_simulations: int, chance: Chance) -> Mover:
    """Return OpenSpiel's UCT search with one random playout per leaf; its seed is drawn from
    `chance`.

    With hidden cards, it searches over the cards that are possible.
    """
    # One of 256 seeds, drawn like any random event, so that a replay repeats the search.
    seed, spiel = chance.choose("search seed", (1,) * 256), engine()
    evaluator = spiel.RandomRolloutEvaluator(1, seed)
    if has_perfect_information(game):
        bot = spiel.MCTSBot(
            game,
            evaluator,
            _EXPLORATION,
            num_simulations,
            _MEMORY_MB,
            True,  # solves what it has searched to the end
            seed,
            False,  # prints nothing
        )
    else:
        bot = spiel.ISMCTSBot(seed, evaluator, _EXPLORATION, num_simulations)
    step: Mover = bot.step
    return step


Table = Mapping[str, Sequence[tuple[int, float]]]
"""For each information state, its actions with their probabilities."""


def equilibrium(game: Any, iterations: int) -> Table:
    """Return the average policy of `iterations` iterations of CFR, from the cache if it is
    there.
    """
    file = cache_folder() / "openspiel" / f"{_key(game, iterations)}.json"
    if file.is_file():
        table: Table = json.loads(file.read_text())
        return table
    solver = engine().CFRSolver(game)
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    table = dict(solver.tabular_average_policy().policy_table())
    # Where nothing can be written, as in a read-only home, every process solves the game itself.
    with suppress(OSError):
        _store(file, table)
    return table


def greedy(table: Table) -> Table:
    """Return the policy that always takes the most probable action, the first one of several."""
    return {
        known: [(max(actions, key=lambda each: each[1])[0], 1.0)]
        for known, actions in table.items()
    }


def best_response(game: Any, against: Table) -> Table:
    """Return the best response to a table, in either seat; an empty table means uniform play."""
    table: dict[str, list[tuple[int, float]]] = {}
    for seat in range(2):
        actions = _response(game, seat, against).get_best_response_actions()
        table |= {known: [(action, 1.0)] for known, action in actions.items()}
    return table


def best_value(game: Any, seat: int, against: Table) -> float:
    """Return the expected return of a best response in a seat."""
    return float(_response(game, seat, against).value_from_state(game.new_initial_state()))


def _response(game: Any, seat: int, against: Table) -> Any:
    """Return the engine's best response to a table. The table is passed as a mapping, because the
    engine copies a mapping but does not keep a policy object alive.
    """
    return engine().TabularBestResponse(game, seat, _complete(game, against))


def _complete(game: Any, table: Table) -> dict[str, list[tuple[int, float]]]:
    """Return the table with every information state and every legal action, as the engine requires;
    states without an entry are uniform.
    """
    complete: dict[str, list[tuple[int, float]]] = {}
    waiting = [game.new_initial_state()]
    while waiting:
        state = waiting.pop()
        if state.is_terminal():
            continue
        legal = state.legal_actions()
        waiting += [state.child(action) for action in legal]
        known = "" if state.is_chance_node() else state.information_state_string()
        if known and known not in complete:
            chances = dict(table[known]) if known in table else dict.fromkeys(legal, 1 / len(legal))
            complete[known] = [(action, chances.get(action, 0.0)) for action in legal]
    return complete


def _key(game: Any, iterations: int) -> str:
    """Return a digest of everything that a table depends on."""
    text = f"{game}/cfr/{iterations}/{version('open_spiel')}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _store(file: Path, table: Table) -> None:
    """Store a table in the cache under a temporary name, then rename it, so that no process reads
    half a table.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # A temporary name made of the process id would not be unique: processes in other containers, or
    # on other machines that share the home directory, may have the same id.
    with tempfile.TemporaryDirectory(dir=file.parent) as working:
        partial = Path(working) / file.name
        partial.write_text(json.dumps(table))
        partial.replace(file)


class EngineDuel(DuelSides):
    """Play a duel on an engine's state. A side that has used its turns before the game ends gets
    the smallest return, and the other side the opposite.

    Args:
        state: State of OpenSpiel before the first move.
        seat: Seat of the agent.
        turns: Largest number of turns of a side.
        is_scripted: Whether a script plays the opponent. The script has no limit of turns, and it
            still replies to the agent's last action.
    """

    def __init__(
        self, state: Any, seat: int, turns: int, chance: Chance, *, is_scripted: bool
    ) -> None:
        super().__init__(chance)
        self.state, self._seat, self._is_scripted = state, seat, is_scripted
        self._turns_left = [turns, math.inf if is_scripted else turns]
        """Number of turns left for the agent and for the opponent."""
        self._is_done = False
        """Whether the game is over."""

    @property
    def turn(self) -> Side | None:
        """The side to act; `None` when the game is over."""
        if self._is_done:
            return None
        return AGENT if self.state.current_player() == self._seat else OPPONENT

    def actions(self) -> dict[str, int]:
        """Return OpenSpiel's legal actions of the side to act, by name; empty when the game is
        over.
        """
        raise NotImplementedError

    def legal_actions(self) -> Sequence[str]:
        """Return the names of the legal actions, until the game is over."""
        return tuple(self.actions())

    def act(self, action: str) -> None:
        """Make a move; an invalid action makes none but uses up the turn."""
        self.move(self.actions().get(action))

    def move(self, number: int | None) -> None:
        """Make the move of a number; None stands for an invalid action."""
        side = self.turn
        assert side is not None, "the episode is done"
        self._turns_left[side] -= 1
        if number is None:
            self._mark_invalid(side)
            self._show(side, INVALID)
        else:
            self._apply(side, number)
        if self.state.is_terminal():
            returns = self.state.returns()
            self._end(float(returns[self._seat]), float(returns[1 - self._seat]))
            return
        following = self.turn
        assert following is not None, "a game that is not over is somebody's turn"
        # The side whose turns may be used up. Between two policies it is the side that has just
        # moved. Against a script it is the side that acts next: the script has no limit, and the
        # game ends only after it has answered the agent's last action.
        checked = following if self._is_scripted else side
        if self._turns_left[checked]:
            self._show_state(following)
            return
        game = self.state.get_game()
        least = float(game.min_utility())
        pays = min(-least, float(game.max_utility()))
        self._end(*(least, pays) if checked == AGENT else (pays, least))

    def _apply(self, side: Side, number: int) -> None:
        """Apply the legal move of a side, and the random events that follow it."""
        self.state.apply_action(number)

    def _show_state(self, side: Side) -> None:
        """Add the state, as a side sees it, to the side's next observation."""
        self._show(side, self.anchor(side))

    def _end(self, agent_return: float, opponent_return: float) -> None:
        """End the game, and show and pay each side its result."""
        self._is_done = True
        for side, earned in ((AGENT, agent_return), (OPPONENT, opponent_return)):
            self._show_state(side)
            result = WIN if earned > 0 else LOSE if earned < 0 else DRAW
            # The size of a result is shown unless it is 0 or 1, which the word already says.
            self._show(side, result if abs(earned) in (0, 1) else f"{result} {abs(earned):g}")
            self._pay(side, earned)
