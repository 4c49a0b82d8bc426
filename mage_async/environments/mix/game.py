"""A mix: an environment made of others, whose members are those of all of them.

Each group of trials plays one part; its rules, its rewards and its script are the part's own, and
so are the unit and the wins of its returns. What a mix adds is which part a group plays.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.environments import catalogue
from mage_async.environments.environment import Facts, Play, Split
from mage_async.environments.mix.parts import Mixed, Part, References
from mage_async.environments.scripted_returns import mean_of
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

_KEYS = ("name", "label", "share", "options")


class Mix(Mixed):
    """Environments side by side.

    Args:
        parts: a table for each: its `name` in the catalogue, or `module:Class`; where wanted
            `options`; `share`, how many of the groups play this part (1; with 0 the part is
            evaluated and never trained on); `label`, its name in reports.

    Raises:
        ConfigError: a part is not such a table, no part is trained on, or two have one label.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        if not isinstance(parts, list | tuple):
            raise ConfigError(f"mix: `parts` must be a list of tables, got {parts!r}")
        self.parts = tuple(_part(each) for each in parts)
        self._known: dict[tuple[Split, int], dict[str, References]] = {}
        labels = [part.label for part in self.parts]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ConfigError(f"mix: two parts are called {min(twice)!r}: give one a `label`")
        if not any(part.share for part in self.parts):
            raise ConfigError("mix: no part has a `share` above 0, so none would be trained on")
        self.facts = _facts([part.environment.facts for part in self.parts])

    def members(self, split: Split) -> tuple[str, ...]:
        """Members of all parts, such as `hangman/cold`."""
        return tuple(
            part.member(own) for part in self.parts for own in part.environment.members(split)
        )

    def family(self, member: str) -> str:
        """The part's label, and the kind within the part."""
        part, own = self.part(member)
        return part.member(part.environment.family(own))

    def seats(self) -> tuple[int, ...]:
        """Seats of any part."""
        return tuple(sorted({seat for part in self.parts for seat in part.environment.seats()}))

    def rules(self) -> str:
        """The rules of all parts; an agent is told those of the part that is played."""
        said = (f"{part.label}: {part.environment.rules()}" for part in self.parts)
        return "\n\n".join(said)

    def begin(self, task: Task, episode: int) -> Play:
        """An episode of the part that the member belongs to."""
        part, own = self.part(task.member)
        name = part.environment.facts.name
        return part.environment.begin(Task(name, own, task.seed, task.seat), episode)

    def script(self, source: random.Random) -> None:
        """A mix has no script; each of its parts may have one."""
        return None

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Members of the same part."""
        part, own = self.part(member)
        return tuple(part.member(other) for other in part.environment.swaps(own, split))

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Means over the parts of the values that all of them know, each per unit of its part."""
        known = list(self.own_references(split, num_episodes).values())
        names = [name for name in known[0] if all(name in each for each in known)]
        return {name: mean_of([each[name] for each in known]) for name in names}

    def own_references(self, split: Split, num_episodes: int) -> dict[str, References]:
        """The values that each part knows, by label; they are computed once."""
        key = split, num_episodes
        if key not in self._known:
            self._known[key] = {
                part.label: part.environment.references(split, num_episodes) for part in self.parts
            }
        return self._known[key]


def _part(given: Mapping[str, Any]) -> Part:
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ConfigError(f"mix: a part must be a table with the `name` it plays, got {given!r}")
    if unknown := [key for key in given if key not in _KEYS]:
        raise ConfigError(
            f"mix: a part has no key `{unknown[0]}`; there are {', '.join(_KEYS)}, and what the "
            "environment itself takes stands in `options`"
        )
    share = given.get("share", 1)
    if not isinstance(share, int) or isinstance(share, bool) or share < 0:
        raise ConfigError(f"mix: `share` must be a whole number from 0, got {share!r}")
    options = given.get("options", {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"mix: `options` of a part must be a table, got {options!r}")
    environment = catalogue.load(given["name"], **options)
    if isinstance(environment, Mixed):
        raise ConfigError("mix: a mix cannot be a part of another; name its parts here")
    label = given.get("label", environment.facts.name)
    if not isinstance(label, str) or not re.fullmatch(r"[\w.:-]+", label):
        raise ConfigError(f"mix: a `label` must be one word without a slash, got {label!r}")
    return Part(given["name"], label, environment, share)


def _facts(every: Sequence[Facts]) -> Facts:
    """What holds for every part; bounds are per unit."""
    least = [None if each.min_return is None else each.min_return / each.units for each in every]
    most = [None if each.max_return is None else each.max_return / each.units for each in every]
    return Facts(
        name="mix",
        num_seats=max(each.num_seats for each in every),
        max_turns=max(each.max_turns for each in every),
        min_return=None if None in least else min(each for each in least if each is not None),
        max_return=None if None in most else max(each for each in most if each is not None),
        units=1,
        has_chance=any(each.has_chance for each in every),
        words=tuple(dict.fromkeys(word for each in every for word in each.words)),
        has_open_text=any(each.has_open_text for each in every),
    )
