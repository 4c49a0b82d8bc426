"""What trackers are told of a run: numbers by name, read from the files that a run writes anyway.

A name begins with where the number comes from, and ends as `mage_async/results/metrics.py` and
`mage_async/results/score.py` name it: `train/entropy` of a step, `evaluation/heldout/...` of a
point of the curve, `final/heldout_blind/...` of the end. The parts of a list are numbered from 1,
as episodes are: `train/return_by_episode_3`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mage_async.results.run_files import Record

OF_A_SET = (
    "return_by_episode",
    "ci95_by_episode",
    "won_by_episode",
    "won_within",
    "invalid_actions_per_trial",
    "cut_short",
)
"""What is told of a set of tasks; the rest, as returns by member, is in the run's own files."""
OF_THE_END = ("wall_s", "processor_s", "throughput", "staleness", "prefix_cache")


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers that belong to one policy version."""

    step: int
    time_s: float
    """Since the learner began to train."""
    values: dict[str, float]


def of_step(record: Record) -> Point:
    """A line of `metrics.jsonl`."""
    values = {name: value for name, value in record.items() if name != "step"}
    return Point(record["step"], record["time_s"], dict(flat(values, "train")))


def of_evaluation(record: Record) -> Point:
    """A line of `evaluations.jsonl`: one measurement while training."""
    return Point(record["version"], record["time_s"], dict(_sets(record["sets"], "evaluation")))


def of_end(summary: Record, time_s: float) -> Point:
    """The summary of a run that came to its end, after `time_s` of training."""
    whole = {name: summary[name] for name in OF_THE_END if name in summary}
    values = dict(_sets(summary["evaluation"], "final")) | dict(flat(whole, "final"))
    return Point(summary["steps"], time_s, values)


def flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """All numbers of a tree, by path; what is no number is left out."""
    for name, value in tree.items():
        path = f"{prefix}/{name}"
        if isinstance(value, Mapping):
            yield from flat(value, path)
        elif isinstance(value, list):
            yield from flat({f"{name}_{n}": part for n, part in enumerate(value, 1)}, prefix)
        elif isinstance(value, int | float):
            yield path, float(value)


def _sets(sets: Mapping[str, Record], prefix: str) -> Iterator[tuple[str, float]]:
    for name, score in sets.items():
        told = {key: score[key] for key in OF_A_SET if key in score}
        yield from flat(told, f"{prefix}/{name}")
