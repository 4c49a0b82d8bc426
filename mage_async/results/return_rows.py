"""Make the rows of the tables of returns in the terminal and on pages: one value for each episode.

The terminal and the pages take these rows from a run's summary, and differ only in their layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Score = Mapping[str, Any]
"""A score of a set of trials as plain data: see `mage_async/results/score.py`."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Hold the name of an evaluation set, and its explanation."""

    label: str
    short_note: str
    """Note after the label in the terminal; "" for none."""
    note: str
    """What the set shows, as a note on pages."""


SETS = {
    "heldout": EvaluationSet("held-out", "", "tasks that training never used"),
    "heldout_blind": EvaluationSet("blind", "no memory", "earlier episodes removed"),
    "heldout_swapped": EvaluationSet(
        "swapped", "new last", "another opponent or task in the last episode"
    ),
    "heldout_unguided": EvaluationSet("unguided", "no earlier tasks", "no memory of earlier tasks"),
    "train": EvaluationSet("train", "", "tasks it was trained on"),
}
"""Evaluation sets in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """Hold a labelled row with a value for each episode."""

    label: str
    values: Sequence[float]
    half_widths: Sequence[float] | None = None
    """95 % half-widths; None if the values are exact or no interval is known."""
    is_reference: bool = False
    """Whether these are known returns of the environment, not results of the run."""


def score_row(label: str, score: Score) -> EpisodeRow:
    """Return the returns of a score with their intervals."""
    return EpisodeRow(label, score["return_by_episode"], score["ci95_by_episode"])


def set_rows(scores: Mapping[str, Score]) -> dict[str, EpisodeRow]:
    """Return the returns of each evaluation set, by its name in `SETS`."""
    return {
        name: score_row(each.label, scores[name]) for name, each in SETS.items() if name in scores
    }


def reference_rows(known: Mapping[str, Any]) -> list[EpisodeRow]:
    """Return the known held-out returns, such as those of random play, for comparison.

    References that were sampled have intervals, exact ones have none.

    Args:
        known: A summary, or its part about one environment of a mix of environments.
    """
    half_widths = known.get("reference_ci95", {}).get("heldout", {})
    references = known.get("references", {}).get("heldout", {})
    return [
        EpisodeRow(name.replace("_", " "), values, half_widths.get(name), is_reference=True)
        for name, values in references.items()
    ]


@dataclass(frozen=True, slots=True)
class EnvironmentRows:
    """Hold the returns in one environment of a mix."""

    label: str
    sets: Mapping[str, EpisodeRow]
    """Rows of the evaluation sets by name."""
    references: Sequence[EpisodeRow]
    facts: Mapping[str, Any]
    """Facts of the environment, such as `units` and the bounds of its return."""


def environment_rows(summary: Mapping[str, Any]) -> list[EnvironmentRows]:
    """Return the rows of each environment of a mix; empty without a mix."""
    scores = summary.get("evaluation", {})
    found = []
    for name, known in summary.get("environments", {}).items():
        parts = {
            each: score["parts"]["environment"][name]
            for each, score in scores.items()
            if name in score.get("parts", {}).get("environment", {})
        }
        label = name if known["is_trained_on"] else f"{name} (not trained on)"
        rows = EnvironmentRows(label, set_rows(parts), reference_rows(known), known["environment"])
        found.append(rows)
    return found


def probe_rows(scores: Mapping[str, Score]) -> dict[str, EpisodeRow]:
    """Return the share of actions that only gather information, by evaluation set.

    Empty if the environment knows no such actions.
    """
    shares = {name: scores[name]["probes_by_episode"] for name in SETS if name in scores}
    if not any(map(any, shares.values())):
        return {}
    return {name: EpisodeRow(SETS[name].label, values) for name, values in shares.items()}


def diversity_row(diversity: Mapping[str, Any]) -> EpisodeRow:
    """Return the entropy of trajectories; see `mage_async/results/score.py`."""
    label = f"diversity, in nats, at most {diversity['most']:.2f}"
    return EpisodeRow(label, diversity["entropy_by_episode"], diversity["ci95_by_episode"])


def harder_rows(harder: Mapping[str, Any]) -> list[EpisodeRow]:
    """Return the returns on each rung of a ladder of harder tasks, first the tasks as trained."""
    return [score_row(rung["label"], rung["score"]) for rung in harder["rungs"]]
