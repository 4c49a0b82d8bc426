"""Gymnasium's spaces as text: how a value is said, and how an action is read.

Numbers are said with four digits. A space that has no sensible text, such as an image, is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from mage_async.errors import ConfigError

MOST_NUMBERS = 64
"""Numbers of one observation that a reader can still take in."""
MOST_ACTIONS = 1000
_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
Say = Callable[[Any], str]
Read = Callable[[str], Any]
"""The action that a text means; None where it means none."""


def sayer(name: str, space: Space[Any]) -> Say:
    """How observations are said.

    Raises:
        ConfigError: the space has no text form.
    """
    if isinstance(space, spaces.Text):
        return str
    if isinstance(space, spaces.Discrete):
        return _number
    if isinstance(space, _ARRAYS) and len(space.shape) <= 2:
        if np.prod(space.shape) <= MOST_NUMBERS:
            return _array
    elif isinstance(space, spaces.Tuple):
        return _tuple_sayer([sayer(name, each) for each in space.spaces])
    elif isinstance(space, spaces.Dict):
        return _dict_sayer({key: sayer(name, each) for key, each in space.spaces.items()})
    raise ConfigError(
        f"environment {name!r}: its observations, {_short(space)}, have no text form: numbers in "
        f"at most two dimensions, {MOST_NUMBERS} of them at most, and text have one"
    )


def reader(name: str, space: Space[Any], words: tuple[str, ...]) -> tuple[tuple[str, ...], Read]:
    """The texts that are actions, empty where they cannot be listed, and what a text means.

    Args:
        words: one for each action of a `Discrete` space; empty: their numbers.

    Raises:
        ConfigError: the space has no text form, or the words do not fit.
    """
    if isinstance(space, spaces.Discrete) and space.n <= MOST_ACTIONS:
        numbers = range(int(space.start), int(space.start + space.n))
        said = words or tuple(str(number) for number in numbers)
        if len(said) != len(numbers):
            raise ConfigError(
                f"environment {name!r}: `actions` must be {len(numbers)} words, got {len(said)}"
            )
        return said, dict(zip(said, numbers, strict=True)).get
    if words:
        raise ConfigError(
            f"environment {name!r}: `actions` are words for a Discrete space, not {_short(space)}"
        )
    if isinstance(space, spaces.Text):
        return (), lambda text: text if space.contains(text) else None
    if isinstance(space, _ARRAYS) and len(space.shape) == 1 and space.shape[0] <= MOST_NUMBERS:
        return (), lambda text: _read_array(space, text)
    raise ConfigError(
        f"environment {name!r}: its actions, {_short(space)}, have no text form: a choice of at "
        f"most {MOST_ACTIONS}, one row of numbers, and text have one"
    )


def _number(value: Any) -> str:
    return f"{float(value):.4g}" if isinstance(value, float | np.floating) else str(int(value))


def _array(value: Any) -> str:
    rows = np.atleast_2d(value)
    return "\n".join(" ".join(_number(each) for each in row) for row in rows)


def _tuple_sayer(sayers: list[Say]) -> Say:
    return lambda value: ", ".join(say(each) for say, each in zip(sayers, value, strict=True))


def _dict_sayer(sayers: Mapping[str, Say]) -> Say:
    return lambda value: "\n".join(f"{key}: {say(value[key])}" for key, say in sayers.items())


def _read_array(space: Space[Any], text: str) -> Any:
    try:
        numbers = np.array(text.replace(",", " ").split(), dtype=np.float64)
    except ValueError:
        return None
    action = numbers.astype(space.dtype)
    is_whole = np.issubdtype(space.dtype, np.floating) or bool((action == numbers).all())
    return action if is_whole and space.contains(action) else None


def _short(space: Space[Any]) -> str:
    return f"{space!r:.100}"
