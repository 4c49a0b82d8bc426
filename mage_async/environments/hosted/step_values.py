"""What `reset` and `step` of a user's class return, checked: Gymnasium's order, text in, text out.

Raises everywhere: `CallFault`, which begins with the place of the call.
"""

import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from mage_async.environments.environment import fault_of_text
from mage_async.errors import CallFault

_ORDER = "observation, reward, terminated[, truncated, info]"


class Step(NamedTuple):
    """What a step led to."""

    observation: str
    reward: float
    is_done: bool
    info: Mapping[str, Any]


def reset_value(place: str, value: Any) -> str:
    """The observation of `observation` or `(observation, info)`."""
    if isinstance(value, tuple) and len(value) == 2:
        value, _ = value
    return _text(place, value)


def step_value(place: str, value: Any) -> Step:
    """The parts of `observation, reward, terminated[, truncated, info]`."""
    if not isinstance(value, tuple) or not 3 <= len(value) <= 5:
        raise CallFault(f"{place} must return {_ORDER}, got {_short(value)}")
    observation, reward, terminated, *rest = value
    truncated = rest[0] if rest else False
    info = rest[1] if len(rest) == 2 else {}
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise CallFault(f"{place} must return a finite reward, got {_short(reward)}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not _is_flag(flag):
            raise CallFault(f"{place} must return True or False as {name}, got {flag!r:.60}")
    if not isinstance(info, Mapping):
        raise CallFault(f"{place} must return a dictionary as info, got {_short(info)}")
    said = _text(place, observation)
    return Step(said, float(reward), bool(terminated) or bool(truncated), info)


def _text(place: str, value: Any) -> str:
    if fault := fault_of_text(value):
        raise CallFault(f"{place} {fault}")
    return str(value).strip()


def _is_flag(value: Any) -> bool:
    """A `bool`, also numpy's, which is no subclass."""
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _short(value: Any) -> str:
    """A number as it is, of anything else the type: its text may be long, or raise."""
    is_number = isinstance(value, numbers.Real)
    return str(value) if is_number else f"a value of type {type(value).__name__}"
