"""Known values of an environment, which an evaluation keeps beside what a policy earns."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mage_async.environments.environment import Environment, Split
from mage_async.environments.mix.parts import Mixed, References
from mage_async.environments.scripted_returns import half_widths_of


def references(environment: Environment, num_episodes: int) -> dict[str, Any]:
    """Known values of both splits, for a person to compare with."""
    splits: tuple[Split, Split] = ("train", "heldout")
    return with_errors({split: environment.references(split, num_episodes) for split in splits})


def with_errors(known: Mapping[str, References]) -> dict[str, Any]:
    """References by split, and beside them the half-widths at 95 % of those that were sampled."""
    errors = {split: half_widths_of(values) for split, values in known.items()}
    said = {"references": dict(known)}
    return said | ({"reference_ci95": errors} if any(errors.values()) else {})


def by_environment(environment: Environment, num_episodes: int) -> dict[str, Any]:
    """References and facts of each part of a mix; nothing of an environment alone."""
    if not isinstance(environment, Mixed):
        return {}
    known = {
        split: environment.own_references(split, num_episodes) for split in ("train", "heldout")
    }
    parts = {
        part.label: {
            "is_trained_on": part.share > 0,
            **with_errors({split: values[part.label] for split, values in known.items()}),
            "environment": asdict(part.environment.facts),
        }
        for part in environment.parts
    }
    return {"environments": parts}
