"""Read what the last episode of a run's evaluations earned, and compare it with controls."""

import json
from collections.abc import Iterable
from math import hypot
from pathlib import Path
from typing import Any

Return = tuple[float, float]
"""Mean, and the half-width of its 95 % interval."""


def returns_of(run: Path) -> dict[str, Return]:
    """Return the returns of the last episode: by set of the final evaluation, and as "start" the
    held-out one before training, which is the first point of the learning curve.
    """
    curve, end = documents(run / "evaluations.jsonl"), run / "evaluation.json"
    sets = json.loads(end.read_text())["sets"] if end.exists() else {}
    if curve and curve[0]["version"] == 0:
        sets["start"] = curve[0]["sets"]["heldout"]
    return {
        name: (each["return_by_episode"][-1], each["ci95_by_episode"][-1])
        for name, each in sets.items()
    }


def is_above(end: Return, others: Iterable[Return]) -> bool:
    """Return whether a mean is above each of the others by more than the two intervals together."""
    return all(end[0] - other[0] > hypot(end[1], other[1]) for other in others)


def documents(file: Path) -> list[dict[str, Any]]:
    """Return the JSON documents of a file, one from each line; none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
