"""Ladders of harder tasks: options of an environment in order of difficulty, by name.

An environment declares `ladders`, such as `{"boxes": ({"boxes": 1}, {"boxes": 2}, …)}`. A policy
that was trained on one rung is measured on those above (LaMer, arXiv 2512.16848, figure 4).
"""

import inspect
from collections.abc import Mapping
from typing import Any

from mage_async.environments.environment import Environment
from mage_async.environments.reset_step import ResetStep
from mage_async.errors import ConfigError


def harder(
    name: str, environment: Environment, options: Mapping[str, Any], ladder: str
) -> list[dict[str, Any]]:
    """Options of the rungs above that of an environment, the nearest first.

    Args:
        name: of the environment, as the configuration says it.
        options: of the environment.
        ladder: its name; empty: the first that is declared.

    Raises:
        ConfigError: there is no such ladder, or the environment stands on no rung of it, or on the
            highest.
    """
    ladders: Mapping[str, Any] = getattr(environment, "ladders", {})
    if not ladders:
        raise ConfigError(f"environment {name!r} declares no `ladders` of harder tasks")
    ladder = ladder or next(iter(ladders))
    if ladder not in ladders:
        raise ConfigError(
            f"environment {name!r} has no ladder {ladder!r}; there are {', '.join(ladders)}"
        )
    own = {**_defaults(environment), **options}
    rungs = [dict(rung) for rung in ladders[ladder]]
    at = [place for place, rung in enumerate(rungs) if rung[ladder] == own.get(ladder)]
    if not at or at[0] + 1 == len(rungs):
        known = ", ".join(str(rung[ladder]) for rung in rungs)
        raise ConfigError(
            f"environment {name!r}: {ladder} = {own.get(ladder)} has no harder rung; the ladder is "
            f"{known}"
        )
    return rungs[at[0] + 1 :]


def _defaults(environment: Environment) -> dict[str, Any]:
    """Options of a class that have defaults."""
    kind = environment.kind if isinstance(environment, ResetStep) else type(environment)
    parameters = inspect.signature(kind).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}
