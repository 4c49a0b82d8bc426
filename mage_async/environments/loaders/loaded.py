"""What the loaders have in common: a library that may be missing, and a class made for a name."""

import importlib
import random
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mage_async.environments.text_games.text_game import OwnLuck
from mage_async.errors import ConfigError

HELDOUT_SHARE = 5
"""One task in so many is held out, the last ones of a list."""
TURNS = 32
"""Most steps of an episode, where the option `turns` does not say otherwise."""


def library(module: str, extra: str) -> ModuleType:
    """A library that is installed by an extra; importing it draws no luck of ours.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with OwnLuck(0):
            return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this environment needs {module}: pip install 'mage_async[{extra}]' ({error})"
        ) from None


class ListedActions:
    """Episodes whose actions may be listed: then a script tries any of them, for a warm start."""

    legal_actions: tuple[str, ...] = ()

    def script(self, source: random.Random) -> Callable[[str], str] | None:
        """Any action; None where they are not listed."""
        listed = self.legal_actions
        return (lambda observation: source.choice(listed)) if listed else None


def declared(episode: type, name: str, **parts: Any) -> type:
    """A class of episodes for one name of a library.

    Args:
        episode: has `reset` and `step`.
        name: as the configuration says it.
        parts: what a class with `reset` and `step` may declare, and what its episodes need.
    """
    return type(re.sub(r"\W", "_", name), (episode,), {"name": name, **parts})
