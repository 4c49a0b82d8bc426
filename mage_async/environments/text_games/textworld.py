"""TextWorld's own games, generated here and kept in the user's cache: a house, a kitchen, coins.

A game takes some seconds to be made, once. Each step of the score pays its share, so a game that is
won has paid 1.
"""

import importlib
import os
import re
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mage_async.environments.options import check_one_of, check_whole
from mage_async.environments.text_games.text_game import OwnLuck, TextGames, number_of, numbered
from mage_async.errors import ConfigError

CHALLENGES: dict[str, dict[str, Any]] = {
    "tw-simple": {"rewards": "dense", "goal": "brief", "test": False},
    "tw-coin_collector": {"level": 5},
    "tw-treasure_hunter": {"level": 5},
    "tw-cooking": {
        **{"recipe": 1, "take": 1, "go": 1, "split": None},
        **{"cook": False, "cut": False, "open": False, "drop": False},
    },
}
"""TextWorld's challenges, with the settings they are made with."""
_PROMPT = re.compile(r"^>.*", re.MULTILINE | re.DOTALL)


class _Session:
    """One game."""

    def __init__(self, engine: Any, file: Path, number: int) -> None:
        self._luck, self._best = OwnLuck(number), 0.0
        wanted = engine.EnvInfos(admissible_commands=True, score=True, max_score=True)
        with self._luck:
            self._game = engine.start(str(file), wanted)
            self._state = self._game.reset()
        self.observation = _told(self._state.feedback)

    def legal(self) -> Sequence[str]:
        """Commands that do something."""
        return self._state["admissible_commands"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """Do it; what the score has risen above what it ever was, as a share of the highest."""
        with self._luck:
            self._state, score, is_over = self._game.step(action)
        risen = max(0.0, score - self._best)
        self._best += risen
        return _told(self._state.feedback), risen / self._state.max_score, bool(is_over)


class TextWorld(TextGames):
    """TextWorld; where things are and what is asked for is what a trial has to find out.

    Args:
        challenge: one of TextWorld's, such as `tw-cooking`.
        games: how many are made, a quarter of them held out.
        turns: most turns of an episode.

    Raises:
        ConfigError: an option is out of its range, or TextWorld is not installed.
    """

    def __init__(self, challenge: str = "tw-simple", games: int = 64, turns: int = 20) -> None:
        check_one_of("textworld", "challenge", challenge, tuple(CHALLENGES))
        check_whole("textworld", "games", games, 8, 1_000_000)
        check_whole("textworld", "turns", turns, 1, 1000)
        self._engine, self._challenge = _load(), challenge
        super().__init__("textworld", numbered(games), turns, "look")

    def session(self, member: str) -> _Session:
        """Begin a game, made first where it is not in the cache."""
        number = number_of(member)
        return _Session(self._engine, self._file(number), number)

    def kind(self, member: str) -> str:
        """The challenge."""
        return self._challenge

    def rules(self) -> str:
        """The game itself says what is asked for."""
        return (
            "You play a text adventure: answer with one command, such as look, inventory, "
            "go east, open fridge, take apple, examine table. The game says what is asked for; "
            f"what you achieve of it counts up to 1. An episode ends after {self._turns} turns. "
            "The game is the same in all episodes."
        )

    def _file(self, number: int) -> Path:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "mage_async" / f"textworld-{version('textworld')}"
        file = folder / f"{self._challenge}-{number}.z8"
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as working:
                self._make(number, Path(working) / file.name)
                for suffix in (".json", ".z8"):  # the one that is looked for comes last
                    made = Path(working) / file.with_suffix(suffix).name
                    made.replace(file.with_suffix(suffix))
        return file

    def _make(self, number: int, file: Path) -> None:
        make = importlib.import_module("textworld.challenges").CHALLENGES[self._challenge][1]
        options = self._engine.GameOptions()
        options.seeds, options.path = number, str(file)
        settings = dict(CHALLENGES[self._challenge])
        if self._challenge == "tw-cooking":
            settings["recipe_seed"] = number
        with OwnLuck(number):
            self._engine.generator.compile_game(make(settings, options), options)


def _told(feedback: str) -> str:
    """What the game says, without its banner (drawn with dollar signs) and its status line."""
    lines = _PROMPT.sub("", feedback).splitlines()
    after = max((number for number, line in enumerate(lines, 1) if "$$" in line), default=0)
    return "\n".join(lines[after:]).strip() or "nothing"


def _load() -> Any:
    try:
        with OwnLuck(0):
            return importlib.import_module("textworld")
    except ImportError as error:
        raise ConfigError(
            f"this environment needs TextWorld: pip install 'mage_async[textworld]' ({error})"
        ) from None
