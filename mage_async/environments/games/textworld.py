"""Play TextWorld: text adventures that TextWorld generates (a house, a kitchen, coins).

Rules: one command a turn; the first observation states the goal. When the game's score rises, the
reward is the rise divided by the highest possible score, so a won game has earned 1. The places of
things are hidden; the game is the same in all episodes. Generating a game takes some seconds; games
are kept in the user's cache.
"""

import importlib
import re
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mage_async.environments.environment import check_one_of, check_whole, numbered
from mage_async.environments.games.text_game import TextGames
from mage_async.environments.loaders.loader import IsolatedRandomState, library
from mage_async.user_modules import cache_folder

CHALLENGES: dict[str, dict[str, Any]] = {
    "tw-simple": {"rewards": "dense", "goal": "brief", "test": False},
    "tw-coin_collector": {"level": 5},
    "tw-treasure_hunter": {"level": 5},
    "tw-cooking": {
        **{"recipe": 1, "take": 1, "go": 1, "split": None},
        **{"cook": False, "cut": False, "open": False, "drop": False},
    },
}
"""Challenges of TextWorld, with the settings of their generator."""
_STATUS_LINE = re.compile(r"^>.*", re.MULTILINE | re.DOTALL)
"""The game's prompt `>` at the end of its text, with the status line that follows it."""


class _Session:
    """Play one game on TextWorld's engine.

    Args:
        number: Number of the game, which seeds the engine's random numbers.
    """

    def __init__(self, engine: Any, file: Path, number: int) -> None:
        self._random_state, self._best_score = IsolatedRandomState(number), 0.0
        requested = engine.EnvInfos(admissible_commands=True, score=True, max_score=True)
        with self._random_state:
            self._game = engine.start(str(file), requested)
            self._state = self._game.reset()
        self.observation = _strip_banner(self._state.feedback)

    def legal(self) -> Sequence[str]:
        """Return the commands that have an effect."""
        commands: Sequence[str] = self._state["admissible_commands"]
        return commands

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return the observation, the rise of the score above its previous maximum as a share of
        the highest score, and whether the game is over.
        """
        with self._random_state:
            self._state, score, is_over = self._game.step(action)
        risen = max(0.0, score - self._best_score)
        self._best_score += risen
        return _strip_banner(self._state.feedback), risen / self._state.max_score, bool(is_over)


class TextWorld(TextGames):
    """Play TextWorld; the task variant is a game, such as `game-17`.

    Args:
        challenge: Name of one of TextWorld's challenges, such as `tw-cooking`.
        games: Number of games, a quarter of them held out.
        turns: Largest number of turns in an episode.

    Raises:
        ConfigError: an option is out of its range, or TextWorld is not installed.
    """

    def __init__(self, challenge: str = "tw-simple", games: int = 64, turns: int = 20) -> None:
        check_one_of("textworld", "challenge", challenge, tuple(CHALLENGES))
        check_whole("textworld", "games", games, 8, 1_000_000)
        check_whole("textworld", "turns", turns, 1, 1000)
        self._engine, self._challenge = library("textworld", "textworld"), challenge
        super().__init__("textworld", numbered("game", games), turns, "look")

    def session(self, game: str) -> _Session:
        """Start a game; generate it if it is not in the cache."""
        number = int(game.removeprefix("game-"))
        return _Session(self._engine, self._file(number), number)

    def kind(self, game: str) -> str:
        """Return the challenge."""
        return self._challenge

    def rules(self) -> str:
        """Return the rules in plain words; the first observation states the goal."""
        return (
            "You play a text adventure: answer with one command, such as look, inventory, "
            "go east, open fridge, take apple, examine table. The game says what is asked for; "
            f"what you achieve of it counts up to 1. An episode ends after {self._turns} turns. "
            "The game is the same in all episodes."
        )

    def _file(self, number: int) -> Path:
        """Return the file of a game; generate it if it is not in the cache."""
        folder = cache_folder() / f"textworld-{version('textworld')}"
        file = folder / f"{self._challenge}-{number}.z8"
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as working:
                self._make(number, Path(working) / file.name)
                for suffix in (".json", ".z8"):  # `.z8` last: its presence marks a complete game
                    made = Path(working) / file.with_suffix(suffix).name
                    made.replace(file.with_suffix(suffix))
        return file

    def _make(self, number: int, file: Path) -> None:
        """Generate a game into a file; its number is the seed."""
        # TextWorld registers a challenge as its description, its generator and its arguments.
        make = importlib.import_module("textworld.challenges").CHALLENGES[self._challenge][1]
        options = self._engine.GameOptions()
        options.seeds, options.path = number, str(file)
        settings = dict(CHALLENGES[self._challenge])
        if self._challenge == "tw-cooking":
            settings["recipe_seed"] = number
        with IsolatedRandomState(number):
            self._engine.generator.compile_game(make(settings, options), options)


def _strip_banner(feedback: str) -> str:
    """Return the game's text without its banner (drawn with dollar signs) and its status line."""
    lines = _STATUS_LINE.sub("", feedback).splitlines()
    after = max((number for number, line in enumerate(lines, 1) if "$$" in line), default=0)
    return "\n".join(lines[after:]).strip() or "nothing"
