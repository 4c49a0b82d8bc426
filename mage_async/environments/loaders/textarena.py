"""Load `textarena:GAME`: one-player games of TextArena, only those in `TITLES`, which were tried.

A task is a seed. TextArena draws from the global random state, which is isolated while it runs.
`reset` and `step` are coroutines although they never wait: all coroutines run in one thread, so no
two calls of TextArena use that state at once.
"""

import copy
import itertools
from typing import Any

from mage_async.environments.loaders.loader import (
    TURNS,
    IsolatedRandomState,
    episode_class,
    library,
)
from mage_async.environments.user_calls import as_config_error
from mage_async.errors import ConfigError

TITLES = (
    *("2048", "Bandit", "Blackjack", "Crosswords", "FifteenPuzzle", "FrozenLake"),
    *("GuessTheNumber", "LightsOut", "LogicPuzzle", "Mastermind", "Minesweeper", "PegJump"),
    *("RushHour", "Secretary", "Set", "Sokoban", "Sudoku", "TowerOfHanoi"),
)
"""Names of games; a version, such as `-v0-hard`, follows the name."""
_CELLS = tuple(f"[{row} {column}]" for row in range(5) for column in range(5))
_DIRECTIONS = ("[up]", "[down]", "[left]", "[right]")
ACTIONS: dict[str, tuple[str, ...]] = {
    "FifteenPuzzle-v0": _DIRECTIONS,
    "FrozenLake-v0": _DIRECTIONS,
    "GuessTheNumber-v0": tuple(f"[{number}]" for number in range(1, 21)),
    "LightsOut-v0": _CELLS,
    "Mastermind-v0": tuple(f"[{' '.join(code)}]" for code in itertools.permutations("123456", 4)),
    "TowerOfHanoi-v0": tuple(f"[{a} {b}]" for a, b in itertools.permutations("ABC", 2)),
}
"""Actions of the games that have a short list; the others take any text. Which of them are legal
depends on the turn.
"""
_ONCE = ("GuessTheNumber-v0", "Mastermind-v0")
"""Games that refuse an action only if it was taken before."""

_WORD_LISTS = (
    *("Wordle", "Hangman", "WordSearch", "WordLadder", "WordChains", "SpellingBee"),
    *("Codenames", "LetterAuction", "DontSayIt"),
)
"""Names of games that download word lists."""
_JUDGED = ("Debate", "TwentyQuestions", "GuessWho", "ScenarioPlanning")
"""Names of games that call a language model over the network."""


class Episode:
    """Play one game; every call of the simulator uses the game's own random state.

    An object is reset once.
    """

    identity: str
    """Name and version by which TextArena makes the game."""
    legal_actions: tuple[str, ...] | None
    """Actions that are legal now; of the class, all actions of the game; None if the game takes any
    text.
    """
    takes_once: bool
    """Whether each listed action is legal until it is taken."""

    async def reset(self, seed: int, task: int) -> str:
        """Start the game whose seed is the task. `seed` is unused: a game's chance depends on the
        task alone.
        """
        self._random_state = IsolatedRandomState(task)
        with self._random_state:
            self._game = _arena().make(self.identity)
            self._game.reset(num_players=1, seed=task)
            text, _ = _read_messages(self._game)
            self._list_legal()
        return text

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action; the game pays at its end.

        Returns:
            Observation, reward, terminated, truncated and info, as in Gymnasium.
        """
        with self._random_state:
            is_over, _ = self._game.step(action)
            text, is_valid = _read_messages(self._game)
            self._list_legal(action)
        reward = float(self._game.state.rewards[0]) if is_over else 0.0
        return text, reward, bool(is_over), False, {"is_valid": is_valid}

    def _list_legal(self, taken: str = "") -> None:
        """Update `legal_actions`: remove the one taken, or try each on a copy of the game."""
        if self.legal_actions is not None and self.takes_once:
            self.legal_actions = tuple(each for each in self.legal_actions if each != taken)
        elif listed := type(self).legal_actions:
            # No game says which actions it accepts, so a copy of the game tries each of them.
            with IsolatedRandomState(0):
                self.legal_actions = tuple(filter(self._is_accepted, listed))

    def _is_accepted(self, action: str) -> bool:
        """Return whether the game accepts an action now."""
        tried = copy.deepcopy(self._game)
        tried.step(action)
        return _read_messages(tried)[1]


def _read_messages(game: Any) -> tuple[str, bool]:
    """Return a game's messages since the last turn, and whether it accepted that turn's action."""
    _, messages = game.get_observation()
    refusal = _arena().ObservationType.GAME_ADMIN
    is_refused = any(kind is refusal for _, _, kind in messages)
    ended_by_it = game.state.game_info[0]["invalid_move"]  # of player 0, the only one
    # A sender below 0 is the game itself.
    text = "\n".join(message for sender, message, _ in messages if sender < 0)
    return text, not (is_refused or ended_by_it)


def load(game: str, /, *, turns: int = TURNS) -> type:
    """Return a class of games; a game's hidden initial state is its task variant.

    Args:
        game: Version of one of `TITLES`, such as `Mastermind-v0`.
        turns: Largest number of steps in an episode.

    Raises:
        ConfigError: the game is not on the list, or TextArena is not installed.
    """
    name, title = f"textarena:{game}", game.partition("-")[0]
    if title not in TITLES:
        raise ConfigError(f"environment {name!r} {_why_not(title)}; there are {', '.join(TITLES)}")
    # `-raw` is a game without TextArena's wrappers, which rewrite observations. A version that does
    # not exist fails here; `as_config_error` turns what TextArena raises into a ConfigError.
    with as_config_error(name), IsolatedRandomState(0):
        _arena().make(f"{game}-raw")
    return episode_class(
        Episode,
        name,
        identity=f"{game}-raw",
        max_turns=turns,
        legal_actions=ACTIONS.get(game),
        takes_once=game in _ONCE,
        rules=f"You play {title}, which says its own rules. Answer with what it asks for, brackets "
        "included. The game begins in the same way in all episodes.",
    )


def _why_not(title: str) -> str:
    """Return why a game is not on the list."""
    if title in _WORD_LISTS:
        return "fetches word lists from the network (python -m nltk.downloader words)"
    if title in _JUDGED:
        return "asks a judge over the network"
    return "is not on the list of games for one player that were tried"


def _arena() -> Any:
    return library("textarena", "textarena")
