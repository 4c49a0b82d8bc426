"""A sweep: which values of which keys are combined, every one, some at random, or one at a time.

`KEY=V1,V2` names the values of a key, `KEY=LOW..HIGH` a range of numbers, and `KEY=LOW..HIGH:log`
one in which each factor of ten has the same weight. The order of the keys is that of the command.
"""

import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Any

from mage_async.errors import ConfigError
from mage_async.results.matrices.ablation import Cell

LONGEST_FOLDER = 120
_UNSAFE = re.compile(r"[^\w.+=,-]")
_RANGE = re.compile(r"(?P<low>[^.\s][^\s]*?)\.\.(?P<high>[^:\s]+)(?P<log>:log)?")
_PARTS = re.compile(r'(?:\[[^\]]*\]|"[^"]*"|[^,\["])+')
"""Values between commas; a list or a quoted text is one."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two bounds, both among them; whole ones where both bounds are."""

    low: float
    high: float
    is_log: bool
    is_whole: bool

    def draw(self, source: random.Random) -> str:
        """A number at random."""
        ends = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        drawn = source.uniform(*ends)
        return self.text(math.exp(drawn) if self.is_log else drawn)

    def text(self, number: float) -> str:
        """A number, as a configuration writes it."""
        return str(round(number)) if self.is_whole else f"{number:.4g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A key, and what it may be."""

    key: str
    choices: tuple[str, ...] | Range


@dataclass(frozen=True, slots=True, order=True)
class Combination:
    """A value for each key: one setting of a sweep."""

    x: float
    """Of the first key: the number, or which of the values, from 0."""
    values: tuple[tuple[str, str], ...]

    def label(self) -> str:
        """Each key with its value."""
        return _joined(self.values, ", ")

    def folder(self) -> str:
        """The same for a file name; a short digest tells apart what would be spelled alike."""
        said = _joined(self.values, ",")
        safe = _UNSAFE.sub("_", said)[:LONGEST_FOLDER]
        told_apart = f"{safe}-{blake2s(said.encode(), digest_size=3).hexdigest()}"
        return safe if safe == said else told_apart

    def assignments(self) -> list[str]:
        """Each key with its value."""
        return [f"{key}={value}" for key, value in self.values]

    def columns(self) -> dict[str, Any]:
        """Each key with its value."""
        return dict(self.values)

    def place(self) -> float:
        """On the axis of the first key."""
        return self.x

    def place_name(self) -> str:
        """The first key's value."""
        return self.values[0][1]

    def method(self) -> str:
        """The other keys with their values."""
        return _joined(self.values[1:], ", ")

    def flow(self) -> str:
        """Any key may change ages."""
        return self.label()

    def allowed_age(self) -> None:
        """A sweep promises no age."""
        return


def axis_of(text: str) -> Axis:
    """`KEY=V1,V2`, `KEY=LOW..HIGH` or `KEY=LOW..HIGH:log`.

    Raises: ConfigError: it is none of them.
    """
    key, equals, said = text.partition("=")
    values = tuple(value.strip() for value in _PARTS.findall(said))
    if not equals or not key.strip() or not all(values) or not values:
        raise ConfigError(f"--over takes KEY=V1,V2 or KEY=LOW..HIGH, got {text!r}")
    if found := _RANGE.fullmatch(said.strip()):
        return Axis(key.strip(), _range(text, found["low"], found["high"], bool(found["log"])))
    if len(set(values)) < len(values):
        raise ConfigError(f"--over {text}: a value stands there twice")
    return Axis(key.strip(), values)


def _range(text: str, low: str, high: str, is_log: bool) -> Range:
    try:
        made = Range(float(low), float(high), is_log, low.isdigit() and high.isdigit())
    except ValueError:
        raise ConfigError(f"--over {text}: a range is of two numbers") from None
    if not made.low < made.high or (is_log and made.low <= 0):
        above = " and above 0" if is_log else ""
        raise ConfigError(f"--over {text}: the bounds of a range must rise{above}")
    return made


def grid(axes: Sequence[Axis]) -> list[Combination]:
    """Every value with every other.

    Raises: ConfigError: a key has a range, of which there is no every value.
    """
    for axis in axes:
        if isinstance(axis.choices, Range):
            raise ConfigError(
                f"--over {axis.key}: a range is drawn from; add --random N or --search N"
            )
    products = itertools.product(*(axis.choices for axis in axes))
    return [combination(axes, values) for values in products]


def drawn(axes: Sequence[Axis], count: int, seed: int) -> list[Combination]:
    """So many combinations at random, none twice; fewer where there are fewer. The first ones are
    the same however many are asked for.
    """
    source, found = random.Random(seed), dict[Combination, None]()
    for _ in range(100 * count):
        if len(found) < count:
            found[combination(axes, [_draw(axis, source) for axis in axes])] = None
    return list(found)


def _draw(axis: Axis, source: random.Random) -> str:
    if isinstance(axis.choices, Range):
        return axis.choices.draw(source)
    return source.choice(axis.choices)


def combination(axes: Sequence[Axis], values: Sequence[str]) -> Combination:
    """These values of these keys."""
    pairs = zip(axes, values, strict=True)
    return Combination(_x(axes[0], values[0]), tuple((axis.key, value) for axis, value in pairs))


def _x(axis: Axis, value: str) -> float:
    if isinstance(axis.choices, Range):
        return float(value)
    numbers = [_number(choice) for choice in axis.choices]
    at = axis.choices.index(value)
    number = numbers[at]
    return float(at) if None in numbers or number is None else number


def _number(text: str) -> float | None:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and math.isfinite(found) else None


def sweep_cells(found: Iterable[Combination], seeds: Iterable[int]) -> list[Cell]:
    """Every combination with every seed; a seed's cells together, as those of an ablation."""
    wanted = list(found)
    return [Cell(each, seed) for seed in dict.fromkeys(seeds) for each in wanted]


def _joined(values: Sequence[tuple[str, str]], between: str) -> str:
    return between.join(f"{key}={value}" for key, value in values)
