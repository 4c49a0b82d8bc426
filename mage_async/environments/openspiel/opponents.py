"""Opponents of any two-player game, by name.

`random`; `mcts-N`, a search with N simulations; `cfr`, an equilibrium, which draws from its
probabilities; `cfr-greedy`, which does not, and so can be exploited; `best-response-random` and
`best-response-cfr-greedy`, which earn most against those two. All but the first two need a game
small enough to be solved whole.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from mage_async.environments.environment import Chance
from mage_async.environments.openspiel.engine import Mover, engine, searcher
from mage_async.environments.openspiel.policies import (
    Table,
    best_response,
    best_value,
    equilibrium,
    greedy,
)
from mage_async.errors import ConfigError

_SEARCH = re.compile(r"mcts-([1-9]\d{0,5})")
TABLES = ("cfr", "cfr-greedy", "best-response-random", "best-response-cfr-greedy")
_ADVICE = "write `random`, `mcts-100` (any number of simulations), " + ", ".join(
    f"`{each}`" for each in TABLES
)


def check_members(members: Sequence[str]) -> None:
    """Names of opponents.

    Raises:
        ConfigError: one is none.
    """
    for member in members:
        known = member == "random" or member in TABLES or _SEARCH.fullmatch(member)
        if not known:
            raise ConfigError(f"openspiel: no opponent is called {member!r}; {_ADVICE}")


def is_search(member: str) -> bool:
    """Whether a member searches by sampling."""
    return _SEARCH.fullmatch(member) is not None


def check_search(game: Any) -> None:
    """Whether a search can be run on a game at all.

    Raises:
        ConfigError: the engine cannot say what the hidden cards could be.
    """
    state = game.new_initial_state()
    while state.is_chance_node():
        state.apply_action(state.chance_outcomes()[0][0])
    try:
        searcher(game, 2, Chance(0, 0))(state)
    except engine().SpielError as error:
        raise ConfigError(f"openspiel: `mcts` cannot play {game}: {error}") from None


def family(member: str) -> str:
    """random, mcts, cfr or best-response."""
    return "best-response" if member.startswith("best-response") else member.partition("-")[0]


class Opponents:
    """The opponents of a game, in the other seat; tables are solved when first needed."""

    def __init__(self, game: Any, iterations: int) -> None:
        self._game, self._iterations = game, iterations
        self._table = cache(self._solve)

    def mover(self, member: str, chance: Chance) -> Mover:
        """How a member moves in one episode; what it leaves to luck is drawn from `chance`."""
        found = _SEARCH.fullmatch(member)
        if found:
            return searcher(self._game, int(found[1]), chance)
        if member == "random":
            return lambda state: _uniform(state, chance)
        table = self._table(member)
        return lambda state: _by_table(table, state, chance)

    def best_value(self, member: str) -> float:
        """What a best response to a member that does not search earns, both seats equally often."""
        table = {} if member == "random" else self._table(member)
        return sum(best_value(self._game, seat, table) for seat in range(2)) / 2

    def _solve(self, member: str) -> Table:
        if member == "cfr":
            return equilibrium(self._game, self._iterations)
        if member == "cfr-greedy":
            return greedy(self._table("cfr"))
        if member == "best-response-random":
            return best_response(self._game, {})
        return best_response(self._game, self._table("cfr-greedy"))


def _uniform(state: Any, chance: Chance) -> int:
    legal = state.legal_actions()
    return legal[chance.choose("opponent", (1,) * len(legal))]


def _by_table(table: Table, state: Any, chance: Chance) -> int:
    actions = table[state.information_state_string()]
    return actions[chance.choose("opponent", [weight for _, weight in actions])][0]
