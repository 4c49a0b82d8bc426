"""Harder tasks than those a policy was trained on: its score on each rung of a ladder.

LaMer (arXiv 2512.16848, figure 4) measures policies on more boxes of Sokoban and more mines of
MineSweeper than they were trained on.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from mage_async.results.score import Score


class Rung(msgspec.Struct, frozen=True):
    """Held-out tasks of one difficulty."""

    label: str
    options: dict[str, Any]
    """Of the environment, beside the run's own; empty for the tasks as trained."""
    score: Score


class Harder(msgspec.Struct, frozen=True):
    """From the tasks as trained to the hardest."""

    ladder: str
    rungs: list[Rung]


def label_of(options: Mapping[str, Any]) -> str:
    """The name of a rung, such as `boxes 3`."""
    return ", ".join(f"{name} {value}" for name, value in options.items())
