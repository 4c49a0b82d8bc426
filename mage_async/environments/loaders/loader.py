"""What the loaders share: optional libraries, classes created for a name, servers' addresses and
observations.
"""

import importlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from mage_async.environments.random_state import IsolatedRandomState
from mage_async.errors import ConfigError

HELDOUT_SHARE = 5
"""One task in so many is held out, the last ones of a list."""
TURNS = 32
"""Default of the option `turns`, the largest number of steps in an episode."""


def library(module: str, extra: str) -> ModuleType:
    """Import an optional library without drawing from the global random state.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with IsolatedRandomState(0):
            return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this environment needs {module}: pip install 'mage_async[{extra}]' ({error})"
        ) from None


class ListedActions:
    """Base of episodes that may list their actions; a script for a warm start then tries any of
    them.
    """

    legal_actions: tuple[str, ...] = ()

    def script(self, source: random.Random) -> Callable[[str], str] | None:
        """Return a script that draws any action; `None` if they are not listed."""
        listed = self.legal_actions
        return (lambda observation: source.choice(listed)) if listed else None


def declared(episode: type, name: str, **parts: Any) -> type:
    """Create a class of episodes for one name of a library.

    Args:
        episode: has `reset` and `step`.
        name: as in the configuration.
        parts: optional declarations of such a class, and attributes that its episodes need.
    """
    return type(re.sub(r"\W", "_", name), (episode,), {"name": name, **parts})


@dataclass(frozen=True, slots=True)
class Observed:
    """A server's answer to `reset` or `step`."""

    text: str
    reward: float
    is_done: bool
    is_valid: bool = True
    legal_actions: tuple[str, ...] = ()


def address_of(library: str, url: str) -> str:
    """Return a server's address with a slash at its end.

    Raises:
        ConfigError: it is no address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        name = f"{library}:{url}"
        raise ConfigError(f"environment {name!r}: write it as {library}:http://HOST:PORT")
    return f"{url.rstrip('/')}/"


def texts_of(value: object) -> tuple[str, ...] | None:
    """Return a list of texts, such as legal actions, as a tuple; `None` if the value is none."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return None
