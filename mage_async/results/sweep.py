"""Make the settings of a sweep: a grid of all values, or combinations drawn at random.

`KEY=V1,V2` names the values of a key, `KEY=LOW..HIGH` a range of numbers, and `KEY=LOW..HIGH:log` a
range in which each factor of ten has the same weight. Keys keep the order of the command line.
"""

import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mage_async.errors import ConfigError
from mage_async.results.matrix import Cell, Setting
from mage_async.results.run_directory import distinct_name

LONGEST_FOLDER = 120
"""Largest number of characters of a folder's name."""
_UNSAFE = re.compile(r"[^\w.+=,-]")
"""Characters that are replaced in a folder's name."""
_RANGE = re.compile(r"(?P<low>[^.\s][^\s]*?)\.\.(?P<high>[^:\s]+)(?P<log>:log)?")
"""Pattern of `LOW..HIGH` or `LOW..HIGH:log`."""
_LIST = r'\[(?:[^\[\]"]|"[^"]*"|\[[^\[\]]*\])*\]'
_PART = re.compile(rf'(?:{_LIST}|"[^"]*"|[^,\[\]"])+')
"""Pattern of one value between commas; a quoted text, or a list of values or lists, may hold commas
itself.
"""


@dataclass(frozen=True, slots=True)
class Range:
    """Describe numbers between two bounds, inclusive; whole numbers if both bounds are whole."""

    low: float
    high: float
    is_log: bool
    is_whole: bool

    def draw(self, source: random.Random) -> str:
        """Draw a number, and return it as text."""
        ends = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        drawn = source.uniform(*ends)
        return self.text(math.exp(drawn) if self.is_log else drawn)

    def text(self, number: float) -> str:
        """Return a number in the form that a configuration has."""
        return str(round(number)) if self.is_whole else f"{number:.4g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """Describe a key of the configuration and the values that a sweep gives it."""

    key: str
    choices: tuple[str, ...] | Range


def axis_of(text: str) -> Axis:
    """Parse `KEY=V1,V2`, `KEY=LOW..HIGH` or `KEY=LOW..HIGH:log`.

    Raises:
        ConfigError: the text has another form.
    """
    key, equals, given = text.partition("=")
    values = tuple(value.strip() for value in _PART.findall(given))
    # `findall` skips what is no value: an empty one, or a bracket or quote without its other end.
    is_read = re.fullmatch(f"{_PART.pattern}(?:,{_PART.pattern})*", given)
    if not equals or not key.strip() or not is_read or not all(values):
        raise ConfigError(f"--over takes KEY=V1,V2 or KEY=LOW..HIGH, got {text!r}")
    if match := _RANGE.fullmatch(given.strip()):
        return Axis(key.strip(), _range(text, match["low"], match["high"], bool(match["log"])))
    if len(set(values)) < len(values):
        raise ConfigError(f"--over {text}: a value stands there twice")
    return Axis(key.strip(), values)


def _range(text: str, low: str, high: str, is_log: bool) -> Range:
    """Return a range; raise a `ConfigError` if its bounds are not numbers, or do not rise."""
    try:
        are_whole = all(bound.removeprefix("-").isdigit() for bound in (low, high))
        parsed = Range(float(low), float(high), is_log, are_whole)
    except ValueError:
        raise ConfigError(f"--over {text}: a range is of two numbers") from None
    if not parsed.low < parsed.high or (is_log and parsed.low <= 0):
        above = " and above 0" if is_log else ""
        raise ConfigError(f"--over {text}: the bounds of a range must rise{above}")
    return parsed


def grid(axes: Sequence[Axis]) -> list[Setting]:
    """Return every combination of the values.

    Raises:
        ConfigError: a key has a range, whose values cannot be listed.
    """
    choices: list[tuple[str, ...]] = []
    for axis in axes:
        if isinstance(axis.choices, Range):
            raise ConfigError(
                f"--over {axis.key}: a range is drawn from; add --random N or --search N"
            )
        choices.append(axis.choices)
    return [combination(axes, values) for values in itertools.product(*choices)]


def drawn(axes: Sequence[Axis], count: int, seed: int) -> list[Setting]:
    """Draw `count` different combinations at random, or fewer if there are fewer.

    Combinations are drawn one after the other, so a larger `count` with the same `seed` begins with
    the same ones.
    """
    source, found = random.Random(seed), dict[Setting, None]()
    # The number of draws is bounded, because there may be fewer than `count` combinations.
    for _ in range(100 * count):
        if len(found) < count:
            found[combination(axes, [_draw(axis, source) for axis in axes])] = None
    return list(found)


def _draw(axis: Axis, source: random.Random) -> str:
    """Draw one value of an axis, as text."""
    if isinstance(axis.choices, Range):
        return axis.choices.draw(source)
    return source.choice(axis.choices)


def combination(axes: Sequence[Axis], values: Sequence[str]) -> Setting:
    """Return the setting with one value for each key; the first key is the x axis of the charts."""
    names = [axis.key for axis in axes]
    pairs = tuple(zip(names, values, strict=True))
    assignments = [f"{key}={value}" for key, value in pairs]
    x, label = _place_on_axis(axes[0], values[0]), ", ".join(assignments)
    return Setting(
        key=(x, pairs),
        label=label,
        folder=_folder(",".join(assignments)),
        assignments=assignments,
        columns=dict(pairs),
        place=x,
        place_name=values[0],
        method=", ".join(assignments[1:]),
        # Any key may change how old the trained tokens are, so age figures of different settings
        # are never pooled.
        flow=label,
    )


def _folder(text: str) -> str:
    """Return a text as a file name; a digest keeps texts apart that would be spelled alike."""
    return distinct_name(_UNSAFE.sub("_", text)[:LONGEST_FOLDER], text)


def _place_on_axis(axis: Axis, value: str) -> float:
    """Return a value's place on the x axis: the number itself, or its index among the choices if
    one of these is not a number.
    """
    if isinstance(axis.choices, Range):
        return float(value)
    numbers = [_number(choice) for choice in axis.choices]
    index = axis.choices.index(value)
    number = numbers[index]
    return float(index) if None in numbers or number is None else number


def _number(text: str) -> float | None:
    """Return a text as a finite number; None if it is not one."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and math.isfinite(found) else None


def sweep_cells(found: Iterable[Setting], seeds: Iterable[int]) -> list[Cell]:
    """Return every setting with every seed; cells of one seed follow one another."""
    wanted = list(found)
    return [Cell(each, seed) for seed in dict.fromkeys(seeds) for each in wanted]
