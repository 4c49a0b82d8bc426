"""Provide what loaders share. A loader is a file of this folder that turns another project's
library into environment classes. To add one, copy `textarena.py`, and add a line to `catalogue.py`.

The parts: import an optional library, create a class by its name, play episodes on a server, and
give each simulator that draws from the global random state a state of its own.
"""

import importlib
import random
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np

from mage_async.environments.environment import HELDOUT_EVERY, Split, check_whole
from mage_async.environments.tools import StepValue
from mage_async.errors import ConfigError

TURNS = 32
"""Default of the option `turns`, the largest number of steps in an episode."""


def library(module: str, extra: str) -> ModuleType:
    """Import an optional library without drawing from the global random state.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        with IsolatedRandomState(0):
            return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ConfigError(
            f"this environment needs {name}: pip install 'mage_async[{extra}]' ({error})"
        ) from None


class NumberedTasks:
    """Declare tasks that are indices into a list, such as the questions of a dataset."""

    num_tasks: int
    """Length of the list."""

    def members(self, split: Split) -> range:
        """Return the numbers of a split's tasks; the last quarter of the list is held out."""
        first_heldout = self.num_tasks - self.num_tasks // HELDOUT_EVERY
        return range(first_heldout) if split == "train" else range(first_heldout, self.num_tasks)


def episode_class(episode: type, name: str, max_turns: int, **parts: Any) -> type:
    """Create the class of episodes of one environment of a library.

    Args:
        episode: Class with `reset` and `step`.
        name: The environment's name in the configuration.
        max_turns: Largest number of steps in an episode, the option `turns`.
        parts: Optional declarations of such a class, and attributes that its episodes need.

    Raises:
        ConfigError: `turns` is out of its range.
    """
    check_whole(name, "turns", max_turns, 1, 100_000)
    own = {"name": name, "max_turns": max_turns, **parts}
    return type(re.sub(r"\W", "_", name), (episode,), own)


# The code below is shared by environments on servers.

SERVER_RULES = "You act in an environment step by step; what it says tells you what to do."
"""Rules of an environment on a server, unless the user gives some."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Hold a server's answer to `reset` or `step`."""

    text: str
    reward: float
    is_done: bool
    is_valid: bool = True
    legal_actions: tuple[str, ...] = ()


class ServerEpisode:
    """Play an episode on a server. Base class: a subclass adds `reset` and `step`, and says how an
    episode ends by `_end`.
    """

    url: str
    """Address of the server, with a slash at its end."""

    def __init__(self) -> None:
        self._http: Any = None
        """The `aiohttp.ClientSession`; None before the episode has begun."""
        self.legal_actions: tuple[str, ...] | None = None

    async def close(self) -> None:
        """End the episode on the server, and close the connection."""
        if self._http is not None:
            async with self._http:
                await self._end()

    async def _end(self) -> None:
        """End the episode on the server."""
        raise NotImplementedError

    def _step_value(self, seen: Observed) -> StepValue:
        """Keep the legal actions of an answer, and return the value of `step`."""
        self.legal_actions = seen.legal_actions or None
        return seen.text, seen.reward, seen.is_done, False, {"is_valid": seen.is_valid}


def server_episode_class(
    episode: type[ServerEpisode], library_name: str, url: str, max_turns: int, **parts: Any
) -> type:
    """Create a class of episodes on a server; see `episode_class`.

    Args:
        episode: Class of episodes that knows the server's protocol.
        library_name: Name before the colon in the environment's name, such as "openenv"; also the
            extra to install.
        url: Address of the server.
        max_turns, parts: See `episode_class`.

    Raises:
        ConfigError: the URL is no address, or aiohttp is missing.
    """
    name, address = f"{library_name}:{url}", urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"environment {name!r}: write it as {library_name}:http://HOST:PORT")
    library("aiohttp", library_name)
    return episode_class(episode, name, max_turns, url=f"{url.rstrip('/')}/", **parts)


def as_texts(value: object) -> tuple[str, ...] | None:
    """Return a list of texts, such as legal actions, as a tuple; None if the value is no such
    list.
    """
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return None


class IsolatedRandomState:
    """Give a simulator its own global random state, as a context manager.

    Wrap every call of a simulator that draws from `random` or `numpy.random`. The previous state is
    restored on exit. A simulator's calls are made one after another (its class sets
    `called = "in_turn"`, see `CallMode`), but a call that exceeded its deadline goes on while later
    ones are made. If it returns before them, they restore the state instead.
    """

    _entered: ClassVar["list[IsolatedRandomState]"] = []
    """Simulators whose calls have not ended; the last call has set the global state."""

    def __init__(self, seed: int) -> None:
        numbers = np.random.RandomState(seed)
        self._own: tuple[Any, Any] = random.Random(seed).getstate(), numbers.get_state()
        """States of `random` and `numpy.random` that the simulator continues with."""
        self._outside: tuple[Any, Any] | None = None
        """States that are restored when the call ends; None before the first call."""

    def __enter__(self) -> None:
        self._outside = random.getstate(), np.random.get_state()
        IsolatedRandomState._entered.append(self)
        _set_random_states(self._own)

    def __exit__(self, *_: object) -> None:
        """Keep the simulator's state and restore the previous one, unless a later call goes on."""
        assert self._outside is not None, "entered"
        entered = IsolatedRandomState._entered
        index = entered.index(self)
        del entered[index]
        if index < len(entered):
            # The call that was entered after this one, now at `index`, saved this simulator's
            # state. It has to restore the state before both calls instead.
            entered[index]._outside = self._outside
            return
        self._own = random.getstate(), np.random.get_state()
        _set_random_states(self._outside)


def _set_random_states(states: tuple[Any, Any]) -> None:
    """Set the global states of `random` and of `numpy.random`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
