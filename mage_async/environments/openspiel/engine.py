"""The only place that imports OpenSpiel, and only when a game of it is asked for."""

import importlib
from collections.abc import Callable
from typing import Any

from mage_async.environments.environment import Chance
from mage_async.errors import ConfigError

Mover = Callable[[Any], int]
"""Takes OpenSpiel's state, gives one of its actions."""

_EXPLORATION = 1.4
_MEMORY_MB = 16


def engine() -> Any:
    """OpenSpiel's module; it ships no types.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("pyspiel")
    except ImportError as error:
        message = f"this environment needs OpenSpiel: pip install open_spiel ({error})"
        raise ConfigError(message) from None


def searcher(game: Any, num_simulations: int, chance: Chance) -> Mover:
    """OpenSpiel's search by sampling (UCT with one random playout a leaf), its luck drawn once.

    Where cards are hidden, it searches over what they could be.
    """
    seed, spiel = chance.choose("search seed", (1,) * 256), engine()
    evaluator = spiel.RandomRolloutEvaluator(1, seed)
    if game.get_type().information == spiel.GameType.Information.PERFECT_INFORMATION:
        bot = spiel.MCTSBot(
            game,
            evaluator,
            _EXPLORATION,
            num_simulations,
            _MEMORY_MB,
            True,  # solves what it has searched to the end
            seed,
            False,
        )
    else:
        bot = spiel.ISMCTSBot(seed, evaluator, _EXPLORATION, num_simulations)
    return bot.step
