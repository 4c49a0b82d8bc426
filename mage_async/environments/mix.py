"""Mix several environments into one, so that one run trains on all of them.

Each group of trials plays one component, which the option `parts` calls a part, with its rules,
rewards, script and `Facts`. A task variant of a mix is written `label/variant`, such as
`hangman/cold`. `component_of`, `component_task` and `label_of` also accept an environment that is
no mix, so that callers need not distinguish.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mage_async.environments.environment import Environment, Facts, Play, Split
from mage_async.environments.game_references import mean_of
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import MIX, Task

References = dict[str, tuple[float, ...]]
"""Known returns by name, one value for each episode."""
_KEYS = ("name", "label", "share", "options")
"""Keys of a component's table."""


@dataclass(frozen=True, slots=True)
class MixComponent:
    """Describe one environment of a mix, its name there, and its share of the training groups."""

    name: str
    """Name in the catalogue, or `module:Class`."""
    label: str
    """Name of the component in task variants and reports."""
    environment: Environment
    share: int
    """Number of training groups that play this component, out of the sum of all shares; with 0 the
    component is only evaluated.
    """

    def member(self, own: str) -> str:
        """Return the mix's name for the component's task variant `own`, such as `hangman/cold`."""
        return f"{self.label}/{own}"


class Mix(Environment):
    """Play several environments in one run.

    Args:
        parts: Table for each component: its `name` in the catalogue, or `module:Class`; optionally
            `options`; `share`, the number of groups that play it (default 1; with 0 the component
            is evaluated and never trained on); and `label`, its name in reports.

    Raises:
        ConfigError: an element is not such a table, no component is trained on, or two have the
            same label.
    """

    steps_per_part = 0
    """Number of steps for which a curriculum grants groups of each component before it moves to the
    next. The last component lasts until the end of the run. `assembly.py` sets it. With 0, which is
    no curriculum, components take turns by their shares.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        if not isinstance(parts, list | tuple):
            raise ConfigError(f"mix: `parts` must be a list of tables, got {parts!r}")
        self.parts = tuple(_component(table) for table in parts)
        self._references: dict[tuple[Split, int], dict[str, References]] = {}
        """References of the components by label, for each split and number of episodes."""
        labels = [part.label for part in self.parts]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ConfigError(f"mix: two parts are called {min(twice)!r}: give one a `label`")
        if not any(part.share for part in self.parts):
            raise ConfigError("mix: no part has a `share` above 0, so none would be trained on")
        self.facts = _facts([part.environment.facts for part in self.parts])

    def part(self, member: str) -> tuple[MixComponent, str]:
        """Return the component of a task variant, and the component's own name for the variant.

        Raises:
            EnvironmentFault: no component has that label.
        """
        label, _, own = member.partition("/")
        for part in self.parts:
            if part.label == label:
                return part, own
        labels = ", ".join(part.label for part in self.parts)
        raise EnvironmentFault(f"mix: {member!r} must begin with one of {labels}, and a slash")

    def members(self, split: Split) -> tuple[str, ...]:
        """Return the task variants of all components, such as `hangman/cold`."""
        return tuple(
            part.member(own) for part in self.parts for own in part.environment.members(split)
        )

    def family(self, member: str) -> str:
        """Return `label/kind`: the component's label, and the variant's kind in the component."""
        part, own = self.part(member)
        return part.member(part.environment.family(own))

    def seats(self) -> tuple[int, ...]:
        """Return all seats that the components have."""
        return tuple(sorted({seat for part in self.parts for seat in part.environment.seats()}))

    def rules(self) -> str:
        """Return the rules of all components; a prompt holds only those of the component that is
        played.
        """
        return "\n\n".join(f"{part.label}: {part.environment.rules()}" for part in self.parts)

    def begin(self, task: Task, episode: int) -> Play:
        """Start an episode of the component that the task variant belongs to."""
        part, own = component_task(self, task)
        return part.begin(own, episode)

    def script(self, source: random.Random) -> None:
        """Return None: a warm start uses the script of the component that a task belongs to."""
        return None

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the replacements that the component declares; see `Environment.swaps`."""
        part, own = self.part(member)
        return tuple(part.member(other) for other in part.environment.swaps(own, split))

    def references(self, split: Split, num_episodes: int) -> References:
        """Return the references whose names all components have, as means over the components; each
        value is per unit of its component.
        """
        known = list(self.own_references(split, num_episodes).values())
        names = [name for name in known[0] if all(name in each for each in known)]
        return {name: mean_of([each[name] for each in known]) for name in names}

    def own_references(self, split: Split, num_episodes: int) -> dict[str, References]:
        """Return the references of each component, by label; they are computed once."""
        key = split, num_episodes
        if key not in self._references:
            self._references[key] = {
                part.label: part.environment.references(split, num_episodes) for part in self.parts
            }
        return self._references[key]


def component_of(environment: Environment, member: str) -> Environment:
    """Return the environment of a task variant: a mix's component, or the given environment
    itself.
    """
    return environment.part(member)[0].environment if isinstance(environment, Mix) else environment


def component_task(environment: Environment, task: Task) -> tuple[Environment, Task]:
    """Return the component that a task plays, and the task with the names that the component itself
    uses.
    """
    if not isinstance(environment, Mix):
        return environment, task
    part, own = environment.part(task.member)
    named = replace(task, environment=part.environment.facts.name, member=own)
    return part.environment, named


def label_of(environment: Environment, member: str) -> str | None:
    """Return the label of the component of a task variant; None if the environment is no mix."""
    return environment.part(member)[0].label if isinstance(environment, Mix) else None


def _component(table: Mapping[str, Any]) -> MixComponent:
    """Check a component's table and load its environment."""
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(f"mix: a part must be a table with the `name` it plays, got {table!r}")
    if unknown := [key for key in table if key not in _KEYS]:
        raise ConfigError(
            f"mix: a part has no key `{unknown[0]}`; there are {', '.join(_KEYS)}, and options of "
            "the environment itself belong in `options`"
        )
    share = table.get("share", 1)
    if not isinstance(share, int) or isinstance(share, bool) or share < 0:
        raise ConfigError(f"mix: `share` must be a whole number from 0, got {share!r}")
    options = table.get("options", {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"mix: `options` of a part must be a table, got {options!r}")
    # Import it here, because the catalogue depends on `user_calls`, which depends on this module.
    from mage_async.environments import catalogue

    environment = catalogue.load(table["name"], **options)
    if isinstance(environment, Mix):
        raise ConfigError("mix: a mix cannot be a part of another; name its parts here")
    label = table.get("label", environment.facts.name)
    if not isinstance(label, str) or not re.fullmatch(r"[\w.:-]+", label):
        raise ConfigError(f"mix: a `label` must be one word without a slash, got {label!r}")
    return MixComponent(table["name"], label, environment, share)


def _facts(every: Sequence[Facts]) -> Facts:
    """Return facts that hold for every component; bounds are per unit."""
    least = [None if each.min_return is None else each.min_return / each.units for each in every]
    most = [None if each.max_return is None else each.max_return / each.units for each in every]
    return Facts(
        name=MIX,
        num_seats=max(each.num_seats for each in every),
        max_turns=max(each.max_turns for each in every),
        min_return=None if None in least else min(each for each in least if each is not None),
        max_return=None if None in most else max(each for each in most if each is not None),
        has_chance=any(each.has_chance for each in every),
        words=tuple(dict.fromkeys(word for each in every for word in each.words)),
        has_open_text=any(each.has_open_text for each in every),
    )
