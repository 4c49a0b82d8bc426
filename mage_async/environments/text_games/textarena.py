"""Games of TextArena for one player, by an allow-list: those that need no network, and whose
actions are known.

Their rewards are from 0 to 1, paid at the end. TextArena draws from the global random state, which
is its own here while it runs.
"""

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

from mage_async.environments.options import check_whole
from mage_async.environments.text_games.text_game import OwnLuck, TextGames, number_of, numbered
from mage_async.errors import ConfigError

_CELLS = tuple(f"[{row} {column}]" for row in range(5) for column in range(5))
_WAYS = ("[up]", "[down]", "[left]", "[right]")
ACTIONS: dict[str, tuple[str, ...]] = {
    "FifteenPuzzle-v0": _WAYS,
    "FrozenLake-v0": _WAYS,
    "GuessTheNumber-v0": tuple(f"[{number}]" for number in range(1, 21)),
    "LightsOut-v0": _CELLS,
    "Mastermind-v0": tuple(f"[{' '.join(code)}]" for code in itertools.permutations("123456", 4)),
    "TowerOfHanoi-v0": tuple(f"[{a} {b}]" for a, b in itertools.permutations("ABC", 2)),
}
"""What may be answered in each allowed game."""

_WORD_LISTS = (
    *("Wordle", "Hangman", "WordSearch", "WordLadder", "WordChains", "SpellingBee"),
    *("Codenames", "LetterAuction", "DontSayIt"),
)
_JUDGED = ("Debate", "TwentyQuestions", "GuessWho", "ScenarioPlanning")


class _Session:
    """One game; every call of the engine has the game's own luck."""

    def __init__(self, arena: Any, game: str, number: int) -> None:
        self._actions, self._luck = ACTIONS[game], OwnLuck(number)
        with self._luck:
            self._game = arena.make(f"{game}-raw")
            self._game.reset(num_players=1, seed=number)
            self.observation = self._look()

    def legal(self) -> Sequence[str]:
        """All that may be answered; the game itself may still refuse it."""
        return self._actions

    def step(self, action: str) -> tuple[str, float, bool]:
        """Answer; the game pays at its end."""
        with self._luck:
            is_over, _ = self._game.step(action)
            said = self._look()
        reward = float(self._game.state.rewards[0]) if is_over else 0.0
        return said, min(1.0, max(0.0, reward)), bool(is_over)

    def _look(self) -> str:
        """What the game has said since the last turn."""
        _, messages = self._game.get_observation()
        return "\n".join(text for sender, text, *_ in messages if sender < 0)


class TextArena(TextGames):
    """A game of TextArena; its hidden beginning is what a trial has to find out.

    Args:
        game: one of the allow-list, such as `Mastermind-v0`.
        games: how many beginnings, a quarter of them held out.
        turns: most turns of an episode.

    Raises:
        ConfigError: the game is not on the list, an option is out of range, or TextArena is not
            installed.
    """

    def __init__(self, game: str = "Mastermind-v0", games: int = 512, turns: int = 12) -> None:
        check_whole("textarena", "games", games, 8, 1_000_000)
        check_whole("textarena", "turns", turns, 1, 1000)
        if game not in ACTIONS:
            raise ConfigError(f"textarena: {_why_not(game)}; there are {', '.join(ACTIONS)}")
        self._arena, self._game = _engine(), game
        super().__init__("textarena", numbered(games), turns, ACTIONS[game][0])

    def session(self, member: str) -> _Session:
        """Begin a game from its number."""
        return _Session(self._arena, self._game, number_of(member))

    def kind(self, member: str) -> str:
        """The game's own name."""
        return self._game.lower()

    def rules(self) -> str:
        """The game itself says them."""
        return (
            f"You play {self._game.partition('-')[0]}, which says its own rules. Answer with what "
            f"it asks for, brackets included. An episode ends after {self._turns} turns. The game "
            "begins in the same way in all episodes."
        )


def _why_not(game: str) -> str:
    """Why a game is not on the list."""
    title = game.partition("-")[0]
    if title in _WORD_LISTS:
        return f"{game!r} fetches word lists from the network (python -m nltk.downloader words)"
    if title in _JUDGED:
        return f"{game!r} asks a judge over the network"
    return f"{game!r} is not on the list of games that were tried"


def _engine() -> Any:
    try:
        with OwnLuck(0):
            return importlib.import_module("textarena")
    except ImportError as error:
        raise ConfigError(
            f"this environment needs TextArena: pip install 'mage_async[textarena]' ({error})"
        ) from None
