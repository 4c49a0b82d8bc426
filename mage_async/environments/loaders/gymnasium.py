"""Load `gymnasium:ID`: any registered environment of Gymnasium whose spaces have a text form.

A task is a seed of Gymnasium's: the same task starts and continues the same way in all episodes of
a trial. Observations and actions are converted between values and text; Gymnasium's toy text
environments are described in words.
"""

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mage_async.environments.environment import check_flag, check_texts
from mage_async.environments.loaders.loader import TURNS, episode_class, library
from mage_async.environments.user_calls import as_config_error
from mage_async.errors import ConfigError

# Without Gymnasium, this import raises a `ConfigError` that says how to install it.
spaces = library("gymnasium.spaces", "gymnasium")
_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*4[0-9]m(.)\x1b\[0m")
"""Character on a coloured background, in terminal escape codes."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Any terminal escape code of a colour."""
_ANSI = "ansi"
"""Name of Gymnasium's render mode for drawings as text."""

MAX_NUMBERS = 64
"""Largest number of numbers in an observation."""
MAX_ACTIONS = 1000
"""Largest number of actions that are listed."""
_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces whose values are arrays of numbers."""
Write = Callable[[Any], str]
"""Returns an observation as text."""
Read = Callable[[str], Any]
"""Returns the action that a text names; None if it names none."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """Hold data shared by all episodes."""

    make: Callable[[int], Any]
    """Creates an environment with the options of a task."""
    renders: bool
    """Whether observations also show what the environment draws as text."""
    read: Read
    write: Callable[[Any, Any], str]
    """Returns an observation as text; called with the environment without wrappers, and the
    observation.
    """


class Episode:
    """Play one episode in an environment of Gymnasium that is made for it."""

    legal_actions: tuple[str, ...] | None = None
    """Legal actions; None if they are not listed."""
    shared: _Shared
    _env: Any = None

    def reset(self, seed: int, task: int) -> str:
        """Create the environment, and reset it with the task as Gymnasium's seed."""
        self._env = self.shared.make(task)
        observation, _ = self._env.reset(seed=task)
        return self._text(observation)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the action of a text; a text that is no action is refused and changes nothing."""
        value = self.shared.read(action)
        if value is None:
            refusal = f"{action!r:.60} is no action of {self._env.action_space!r:.100}"
            return refusal, 0.0, False, False, {"is_valid": False}
        observation, reward, terminated, truncated, _ = self._env.step(value)
        return self._text(observation), float(reward), bool(terminated), bool(truncated), {}

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()

    def script(self, source: random.Random) -> Callable[[str], str] | None:
        """Return a script that draws any action; None if actions are not listed."""
        listed = self.legal_actions
        return (lambda observation: source.choice(listed)) if listed else None

    def _text(self, observation: Any) -> str:
        """Return an observation as text, with the drawing if the option `render` is set."""
        text = self.shared.write(self._env.unwrapped, observation)
        return f"{text}\n{_drawn(self._env.render())}" if self.shared.renders else text


def load(
    identity: str,
    /,
    *,
    turns: int = TURNS,
    actions: Sequence[str] = (),
    rules: str = "",
    render: bool = False,
    make: Mapping[str, Any] | None = None,
) -> type:
    """Return a class of episodes.

    Args:
        identity: Registered id, such as `Taxi-v4`; `module:ID` imports the module first.
        turns: Largest number of steps in an episode.
        actions: Words for the actions of a `Discrete` space, in order of their numbers.
        rules: Rules in words; by default the first paragraph of the environment's docstring.
        render: Whether observations also show what the environment draws as text.
        make: Arguments of `gymnasium.make`.

    Raises:
        ConfigError: there is no such environment, it has no text form, or Gymnasium is missing.
    """
    name = f"gymnasium:{identity}"
    check_flag(name, "render", render)
    check_texts(name, "actions", actions)
    if "" in actions or len(set(actions)) < len(actions):
        raise ConfigError(f"{name}: `actions` must be different words, got {list(actions)}")
    with as_config_error(name):
        # No trial plays this environment: only its spaces and docstring are read.
        probe = _made(identity, make or {}, False, 0)
        probe.close()
    own = probe.unwrapped
    if render and _ANSI not in own.metadata.get("render_modes", ()):
        raise ConfigError(f"environment {name!r}: cannot be drawn as text; set `render = false`")
    toy = TOYS.get(type(own).__name__)
    legal, read = reader(name, probe.action_space, tuple(actions) or (toy.actions if toy else ()))
    write = toy.write if toy else _ignoring_environment(writer(name, probe.observation_space))
    described = toy.rules if toy else _rules_from_docstring(own)
    make_for = partial(_made, identity, make or {}, render)
    return episode_class(
        Episode,
        name,
        shared=_Shared(make_for, render, read, write),
        max_turns=turns,
        legal_actions=legal or None,
        rules=rules or f"{described} {_instruction(legal, probe)}",
    )


def _made(identity: str, options: Mapping[str, Any], renders: bool, task: int) -> Any:
    """Create an environment for a task.

    The option `desc = "random"` makes a random map by FrozenLake's own generator, the same in all
    episodes of a task.
    """
    options = dict(options)
    if options.get("desc") == "random":
        frozen_lake = library("gymnasium.envs.toy_text.frozen_lake", "gymnasium")
        size = 8 if options.pop("map_name", "4x4") == "8x8" else 4
        options["desc"] = frozen_lake.generate_random_map(size=size, seed=task)
    mode = {"render_mode": _ANSI} if renders else {}
    gymnasium = library("gymnasium", "gymnasium")
    return gymnasium.make(identity, disable_env_checker=True, **mode, **options)


def _ignoring_environment(write: Callable[[Any], str]) -> Callable[[Any, Any], str]:
    """Return `write` with a first parameter for the environment, which it ignores."""
    return lambda _, observation: write(observation)


def _instruction(legal: Sequence[str], probe: Any) -> str:
    """Return the sentence about actions in the prompt."""
    if legal:
        return f"Answer with one of: {', '.join(legal)}."
    return f"Answer with an action of {probe.action_space!r:.200}, its numbers parted by spaces."


def _rules_from_docstring(own: Any) -> str:
    """Return the first paragraph of the environment's docstring, or the name of its class."""
    lines = (inspect.getdoc(type(own)) or "").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).strip()
    return " ".join(text.partition("\n\n")[0].split()) or type(own).__name__


def _drawn(text: str) -> str:
    """Return a drawing without colours; coloured backgrounds become brackets."""
    return _COLOUR.sub("", _HIGHLIGHTED.sub(r"[\1]", text)).strip("\n")


# The functions below convert values of Gymnasium's spaces to text and back.


def writer(name: str, space: Any) -> Write:
    """Return the function that writes observations of a space as text. Numbers have four digits.

    Raises:
        ConfigError: the space has no sensible text form, such as an image.
    """
    if isinstance(space, spaces.Text):
        return str
    if isinstance(space, spaces.Discrete):
        return _number
    if isinstance(space, _ARRAYS) and len(space.shape) <= 2:
        if np.prod(space.shape) <= MAX_NUMBERS:
            return _array
    elif isinstance(space, spaces.Tuple):
        parts = [writer(name, each) for each in space.spaces]
        return lambda value: ", ".join(
            write(each) for write, each in zip(parts, value, strict=True)
        )
    elif isinstance(space, spaces.Dict):
        named = {key: writer(name, each) for key, each in space.spaces.items()}
        return lambda value: "\n".join(
            f"{key}: {write(value[key])}" for key, write in named.items()
        )
    raise ConfigError(
        f"environment {name!r}: its observations, {_short(space)}, have no text form: numbers in "
        f"at most two dimensions, {MAX_NUMBERS} of them at most, and text have one"
    )


def reader(name: str, space: Any, words: tuple[str, ...]) -> tuple[tuple[str, ...], Read]:
    """Return the texts that are actions, empty if they cannot be listed, and the function that
    reads a text.

    Args:
        words: Words for the actions of a `Discrete` space, one for each; empty for their numbers.

    Raises:
        ConfigError: the space has no text form, or the words do not fit.
    """
    if isinstance(space, spaces.Discrete) and space.n <= MAX_ACTIONS:
        numbers = range(int(space.start), int(space.start + space.n))
        texts = words or tuple(str(number) for number in numbers)
        if len(texts) != len(numbers):
            raise ConfigError(
                f"environment {name!r}: `actions` must be {len(numbers)} words, got {len(texts)}"
            )
        return texts, dict(zip(texts, numbers, strict=True)).get
    if words:
        raise ConfigError(
            f"environment {name!r}: `actions` are words for a Discrete space, not {_short(space)}"
        )
    if isinstance(space, spaces.Text):
        return (), lambda text: text if space.contains(text) else None
    if isinstance(space, _ARRAYS) and len(space.shape) == 1 and space.shape[0] <= MAX_NUMBERS:
        return (), lambda text: _read_array(space, text)
    raise ConfigError(
        f"environment {name!r}: its actions, {_short(space)}, have no text form: a choice of at "
        f"most {MAX_ACTIONS}, one row of numbers, and text have one"
    )


def _number(value: Any) -> str:
    """Return a number as text, with four digits if it has a fraction."""
    return f"{float(value):.4g}" if isinstance(value, float | np.floating) else str(int(value))


def _array(value: Any) -> str:
    """Return an array as text, a line for each row."""
    rows = np.atleast_2d(value)
    return "\n".join(" ".join(_number(each) for each in row) for row in rows)


def _read_array(space: Any, text: str) -> Any:
    """Return the array that a text names; None if it is not in the space."""
    try:
        numbers = np.array(text.replace(",", " ").split(), dtype=np.float64)
    except ValueError:
        return None
    with np.errstate(all="ignore"):  # the type may not hold the number
        action = numbers.astype(space.dtype)
    is_whole = np.issubdtype(space.dtype, np.floating) or bool((action == numbers).all())
    # A space without bounds contains infinity.
    return action if is_whole and np.isfinite(action).all() and space.contains(action) else None


def _short(space: Any) -> str:
    """Return a space as text of at most 100 characters."""
    return f"{space!r:.100}"


# The code below describes Gymnasium's toy text environments in words.


_TILES = {b"S": "the start", b"F": "ice", b"H": "a hole", b"G": "the goal"}
_PLACES = ("Red", "Green", "Yellow", "Blue", "in the taxi")


@dataclass(frozen=True, slots=True)
class Toy:
    """Describe a toy environment in words: its own observations and actions are numbers without a
    meaning to a reader.
    """

    rules: str
    actions: tuple[str, ...]
    """Words for the actions, in order of their numbers."""
    write: Callable[[Any, Any], str]
    """Returns an observation as text; called with the environment without wrappers, and the
    observation.
    """


def _taxi_text(taxi: Any, state: Any) -> str:
    """Return the state of Taxi as text."""
    row, column, passenger, destination = taxi.decode(state)
    at = _PLACES[passenger]
    return f"taxi at row {row}, column {column}; passenger {at}; to {_PLACES[destination]}"


def _lake_text(lake: Any, state: Any) -> str:
    """Return the state of FrozenLake as text."""
    row, column = divmod(int(state), lake.ncol)
    return f"row {row}, column {column}: {_TILES[bytes(lake.desc[row, column])]}"


def _cliff_text(cliff: Any, state: Any) -> str:
    """Return the state of CliffWalking as text."""
    row, column = divmod(int(state), cliff.shape[1])
    return f"row {row}, column {column}"


def _blackjack_text(_: Any, observed: Any) -> str:
    """Return the state of Blackjack as text."""
    mine, dealer, has_ace = (int(each) for each in observed)
    ace = "a usable ace" if has_ace else "no usable ace"
    return f"your sum {mine}, {ace}; the dealer shows {dealer}"


TOYS = {
    "TaxiEnv": Toy(
        "A taxi drives on 5 × 5 squares with walls. Bring the passenger from Red (row 0, column "
        "0), Green (row 0, column 4), Yellow (row 4, column 0) or Blue (row 4, column 3) to one of "
        "the others: +20 there, -1 a step, -10 for a pickup or dropoff that is not possible.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _taxi_text,
    ),
    "FrozenLakeEnv": Toy(
        "Cross a frozen lake from the start in row 0, column 0 to the goal in the last row and "
        "column, which pays 1. A hole ends the episode. The ice may be slippery: a move may then "
        "lead to the side.",
        ("left", "down", "right", "up"),
        _lake_text,
    ),
    "CliffWalkingEnv": Toy(
        "Walk on 4 × 12 squares from row 3, column 0 to row 3, column 11. The squares between the "
        "two in row 3 are a cliff: -100, and back to the start. A step costs 1.",
        ("up", "right", "down", "left"),
        _cliff_text,
    ),
    "BlackjackEnv": Toy(
        "Blackjack: come closer to 21 than the dealer, and not above. A win pays 1, a loss -1.",
        ("stick", "hit"),
        _blackjack_text,
    ),
}
"""Toy environments in words, by the name of the class."""
