"""Learning curves: return of each episode against steps, and against the episode at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.report.charts.line_chart import Chart, line_chart
from mage_async.report.charts.number_format import words
from mage_async.report.charts.plot_area import Point, Series
from mage_async.results.run_files import RunRecords

SETS = {
    "heldout": ("held-out", "heldout"),
    "train": ("train", "train"),
    "heldout_blind": ("blind", "blind"),
    "heldout_swapped": ("swapped", "swapped"),
    "heldout_unguided": ("unguided", "unguided"),
}
"""Evaluation sets: the word and the colour for each, the most important first."""


def learning_curves(records: RunRecords) -> list[tuple[str, Chart | None]]:
    """Held-out and train by caption, on the same scale, with the references."""
    captions = {
        "heldout": "held-out tasks; dashed: references, last episode",
        "train": "train tasks; faint: the batch of every step",
    }
    span = _span(records)
    return [(said, _curve(records, split, said, span)) for split, said in captions.items()]


def environment_curves(records: RunRecords) -> list[tuple[str, Chart | None]]:
    """Held-out returns of each environment of a mix, by caption; each on its own scale."""
    points = curve_points(records, "heldout")
    names = points[0][1].get("parts", {}).get("environment", {}) if points else {}
    return [(name, _environment_curve(points, name)) for name in names]


def _environment_curve(points: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> Chart | None:
    own = [(version, score["parts"]["environment"][name]) for version, score in points]
    return line_chart(_episodes(own), described=f"return of each episode against steps, {name}")


def _episodes(points: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Series]:
    """A line an episode through versions and what was measured of them."""
    num_episodes = len(points[0][1]["return_by_episode"]) if points else 0
    return [
        Series(
            f"episode {episode + 1}",
            [(float(version), score["return_by_episode"][episode]) for version, score in points],
            episode_css(episode, num_episodes),
            [score["ci95_by_episode"][episode] for _, score in points],
            has_dots=True,
        )
        for episode in range(num_episodes)
    ]


def adaptation(
    evaluation: Mapping[str, Any], references: Mapping[str, Sequence[float]]
) -> Chart | None:
    """Return against episode, of every set; the controls stay below what they take away."""
    num_episodes = len(evaluation["heldout"]["return_by_episode"])
    series = [
        Series(label, _numbered(values), "reference")
        for label, values in grouped(references).items()
    ]
    for name, (label, css) in reversed(SETS.items()):
        if name in evaluation:
            score = evaluation[name]
            points = _numbered(score["return_by_episode"])
            series.append(Series(label, points, css, score["ci95_by_episode"], has_dots=True))
    named = [(float(k), f"episode {k}") for k in range(1, num_episodes + 1)]
    return line_chart(series, described="return of each episode, by set", x_names=named)


def grouped(references: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """References by label; those of equal values share one."""
    names: dict[tuple[float, ...], list[str]] = {}
    for name, values in references.items():
        names.setdefault(tuple(round(value, 6) for value in values), []).append(words(name))
    return {", ".join(same): values for values, same in names.items()}


def _numbered(values: Sequence[float]) -> list[Point]:
    return [(float(number), value) for number, value in enumerate(values, 1)]


def _curve(records: RunRecords, split: str, title: str, span: tuple[float, float]) -> Chart | None:
    series = [*_levels(records, split), *(_batches(records) if split == "train" else [])]
    series += _episodes(curve_points(records, split))
    described = f"return of each episode against steps, {title}"
    return line_chart(series, described=described, y_span=span)


def curve_points(records: RunRecords, split: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Versions and scores of the curve, the final evaluation last."""
    points = {line["version"]: line["sets"][split] for line in records.curve}
    if records.evaluation:
        points[records.evaluation["version"]] = records.evaluation["sets"][split]
    return sorted(points.items())


def episode_css(episode: int, num_episodes: int) -> str:
    """One of five colours from the first episode's to the last's."""
    return f"e{round(4 * episode / (num_episodes - 1)) if num_episodes > 1 else 4}"


def _batches(records: RunRecords) -> list[Series]:
    """The noisy return of each step's own batch, drawn faintly and without a label."""
    num_episodes = len(records.metrics[0]["return_by_episode"]) if records.metrics else 0
    return [
        Series(
            "",
            [(float(line["step"]), line["return_by_episode"][k]) for line in records.metrics],
            f"faint {episode_css(k, num_episodes)}",
        )
        for k in range(num_episodes)
    ]


def _levels(records: RunRecords, split: str) -> list[Series]:
    """References of the last episode, level over all steps."""
    references = records.evaluation.get("references", {}).get(split, {})
    last = max([1, *(line["step"] for line in records.metrics[-1:])])
    levels = grouped({name: values[-1:] for name, values in references.items()})
    return [
        Series(label, [(0.0, value), (float(last), value)], "reference")
        for label, (value,) in levels.items()
    ]


def _span(records: RunRecords) -> tuple[float, float]:
    """One range for both splits."""
    values = [
        value
        for split in ("train", "heldout")
        for _, score in curve_points(records, split)
        for value in score["return_by_episode"]
    ]
    values += [value for line in records.metrics for value in line["return_by_episode"]]
    for references in records.evaluation.get("references", {}).values():
        values += [row[-1] for row in references.values()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin
