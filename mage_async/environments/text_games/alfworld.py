"""ALFWorld on its own engine: problems made here, or those of a user's own folder.

A step takes about a tenth of a second, most of it to list the commands that are possible.
"""

import importlib
import json
import os
import random
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mage_async.environments.environment import Split
from mage_async.environments.options import check_whole
from mage_async.environments.text_games.alfworld_problems import Household
from mage_async.environments.text_games.text_game import OwnLuck, TextGames, number_of, numbered
from mage_async.errors import ConfigError

_HELDOUT_SHARE = 4  # one room in so many
_SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "heldout": ("valid_seen", "valid_unseen"),
}
_NOT_SUPPORTED = ("movable", "Sliced")  # by the engine, says its own loader


class _Session:
    """One game."""

    def __init__(self, engine: Any, wrapper: Any, file: Path) -> None:
        self._luck = OwnLuck(0)
        wanted = engine.EnvInfos(admissible_commands=True, won=True)
        with self._luck:
            self._game = engine.start(str(file), wanted, wrappers=[wrapper()])
            self._state = self._game.reset()
        self.observation = self._state.feedback.partition("=-\n")[2] or self._state.feedback

    def legal(self) -> Sequence[str]:
        """Commands that are possible, but for `help`."""
        return [each for each in self._state["admissible_commands"] if each != "help"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """Do it; the goal met pays 1."""
        with self._luck:
            self._state, _, is_over = self._game.step(action)
        return self._state.feedback, float(self._state["won"]), bool(is_over)


class AlfWorld(TextGames):
    """ALFWorld; where things are is what a trial has to find out.

    Args:
        data: folder of the published problems (`$ALFWORLD_DATA/json_2.1.1`), which is what papers
            report on; empty for problems made here, whose rooms differ between the splits.
        games: how many are made, a quarter of them held out.
        turns: most turns of an episode.

    Raises:
        ConfigError: there are no problems in the folder, an option is out of range, or ALFWorld is
            not installed.
    """

    def __init__(self, data: str = "", games: int = 256, turns: int = 10) -> None:
        check_whole("alfworld", "games", games, 8, 1_000_000)
        check_whole("alfworld", "turns", turns, 1, 1000)
        self._engine, self._wrapper = _load()
        self._data = Path(os.path.expandvars(data)).expanduser() if data else None
        self._household = Household()
        self._made = lru_cache(maxsize=1024)(self._make)
        listed = numbered(games) if self._data is None else _listed(self._data)
        self._heldout = frozenset(listed["heldout"])
        super().__init__("alfworld", listed, turns, "look")

    def session(self, member: str) -> _Session:
        """Begin a game."""
        if self._data is not None:
            return _Session(self._engine, self._wrapper, self._data / member / "game.tw-pddl")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{member}.tw-pddl"
            file.write_text(json.dumps(self._made(member)))
            return _Session(self._engine, self._wrapper, file)

    def kind(self, member: str) -> str:
        """The kind of its goal, such as `pick_heat_then_place_in_recep`."""
        if self._data is not None:
            return Path(member).parts[1].partition("-")[0]
        return self._made(member)["kind"]

    def rules(self) -> str:
        """The game itself says what is asked for."""
        return (
            "You are in a household. Answer with one command, such as go to fridge 1, open fridge "
            "1, take apple 1 from fridge 1, move apple 1 to countertop 1, heat apple 1 with "
            "microwave 1, clean, cool, use desklamp 1, examine, inventory, look. Your task met "
            f"counts 1. An episode ends after {self._turns} turns. The household and the task are "
            "the same in all episodes."
        )

    def _make(self, member: str) -> dict[str, str]:
        """Its problem: of one room in four where it is held out, of the others where not."""
        source = random.Random(f"alfworld/{number_of(member)}")
        is_heldout = member in self._heldout
        plans = [
            plan
            for number, plan in enumerate(self._household.plans())
            if (number % _HELDOUT_SHARE == 0) == is_heldout
        ]
        return self._household.problem(source.choice(plans), source)


def _listed(data: Path) -> dict[Split, tuple[str, ...]]:
    """Problems of the published folder that can be solved, by their folders."""
    listed: dict[Split, tuple[str, ...]] = {
        split: tuple(
            str(file.parent.relative_to(data))
            for part in parts
            for file in sorted((data / part).glob("**/game.tw-pddl"))
            if not any(word in str(file) for word in _NOT_SUPPORTED)
            and json.loads(file.read_text()).get("solvable")
        )
        for split, parts in _SPLITS.items()
    }
    lacking = [split for split, members in listed.items() if len(members) < 2]
    if lacking:
        parts = " or ".join(_SPLITS[lacking[0]])
        raise ConfigError(
            f"alfworld: found fewer than two solvable game.tw-pddl below {data} in {parts}; "
            "`data` is the folder that holds them, such as $ALFWORLD_DATA/json_2.1.1"
        )
    return listed


def _load() -> tuple[Any, Any]:
    try:
        with OwnLuck(0):
            module = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
            return importlib.import_module("textworld"), module.AlfredDemangler
    except ImportError as error:
        raise ConfigError(
            f"this environment needs ALFWorld: pip install 'mage_async[alfworld]' ({error})"
        ) from None
