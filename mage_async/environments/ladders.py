"""Find easier and harder tasks, by changing one option of an environment along a ladder.

A ladder (`Environment.ladders`) lists settings of an option, its rungs, from the easiest to the
hardest. Error messages name the allowed values.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from mage_async.environments.environment import Environment
from mage_async.environments.user_class import ResetStep
from mage_async.errors import ConfigError


def harder(
    name: str, environment: Environment, options: Mapping[str, Any], ladder: str
) -> list[dict[str, Any]]:
    """Return the options of the rungs above an environment's own, the nearest first.

    A policy trained on one rung is measured on those above (LaMer, arXiv 2512.16848, figure 4). An
    environment declares its rungs in `ladders`, such as `{"boxes": ({"boxes": 1}, {"boxes": 2},
    …)}`.

    Args:
        name: Name of the environment, as in the configuration.
        options: Options of the environment.
        ladder: Name of the ladder; "" for the first one.

    Raises:
        ConfigError: there is no such ladder, or the options are on no rung of it, or on the
            highest.
    """
    option, rungs, own_index = _own_rung(name, environment, options, ladder)
    if own_index + 1 == len(rungs):
        raise ConfigError(
            f"environment {name!r}: {option} = {rungs[own_index][option]} has no harder rung; the "
            f"ladder is {_values(option, rungs)}"
        )
    return rungs[own_index + 1 :]


def curriculum(
    name: str, environment: Environment, options: Mapping[str, Any], ladder: str
) -> list[dict[str, Any]]:
    """Return the components of a mix, one for each rung of a ladder up to the environment's own.

    The arguments are those of `harder`.

    Raises:
        ConfigError: there is no such ladder, or the options are on no rung of it, or on the
            lowest.
    """
    option, rungs, own_index = _own_rung(name, environment, options, ladder)
    if not own_index:
        raise ConfigError(
            f"environment {name!r}: {option} = {rungs[0][option]} is the easiest rung of the "
            f"ladder, which is {_values(option, rungs)}: a curriculum needs a harder one in "
            "environment.options"
        )
    return [
        {"name": name, "label": f"{option}-{rung[option]}", "options": {**options, **rung}}
        for rung in rungs[: own_index + 1]
    ]


def _own_rung(
    name: str, environment: Environment, options: Mapping[str, Any], ladder: str
) -> tuple[str, list[dict[str, Any]], int]:
    """Return the option in which the rungs of a ladder differ, the rungs, and the index of the
    environment's own rung.
    """
    ladders: Mapping[str, Any] = getattr(environment, "ladders", {})
    if not ladders:
        raise ConfigError(f"environment {name!r} declares no `ladders` of harder tasks")
    ladder = ladder or next(iter(ladders))
    if ladder not in ladders:
        raise ConfigError(
            f"environment {name!r} has no ladder {ladder!r}; there are {', '.join(ladders)}"
        )
    rungs = [dict(rung) for rung in ladders[ladder]]
    first = rungs[0] if rungs else {}
    option = ladder if ladder in first else next(iter(first), ladder)
    if not rungs or not all(option in rung for rung in rungs):
        raise ConfigError(
            f"environment {name!r}: the ladder {ladder!r} needs rungs that all set {option!r}, "
            f"such as {{{option!r}: 3}}, got {rungs}"
        )
    own = {**_defaults(environment), **options}.get(option)
    indices = [index for index, rung in enumerate(rungs) if rung[option] == own]
    if not indices:
        raise ConfigError(
            f"environment {name!r}: {option} = {own} is on no rung of the ladder "
            f"{_values(option, rungs)}"
        )
    return option, rungs, indices[0]


def _values(option: str, rungs: list[dict[str, Any]]) -> str:
    """Return a ladder's values of an option as text."""
    return ", ".join(str(rung[option]) for rung in rungs)


def _defaults(environment: Environment) -> dict[str, Any]:
    """Return the default options of an environment's class."""
    kind = environment.kind if isinstance(environment, ResetStep) else type(environment)
    parameters = inspect.signature(kind).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}
