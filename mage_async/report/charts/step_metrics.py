"""Metrics over the steps: staleness against its bound, and every other metric as a small chart."""

from collections.abc import Sequence
from dataclasses import dataclass

from mage_async.report.charts.learning_curves import episode_css
from mage_async.report.charts.line_chart import Chart, line_chart, small_chart
from mage_async.report.charts.number_format import figure, words
from mage_async.report.charts.plot_area import Series
from mage_async.results.metrics import METRICS
from mage_async.results.run_files import Record, RunRecords
from mage_async.results.summary import weighted_mean

THROUGHPUT = (
    "trials_per_s",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
    "trial_s",
    "train_s",
    "waiting_s",
    "prefix_hit_rate",
    "groups_in_flight",
)
POLICY = (
    "entropy",
    "loss",
    "grad_norm",
    "clipped_share",
    "mean_weight",
    "logprob_gap_mean",
    "invalid_actions_per_trial",
    "learning_rate",
)


@dataclass(frozen=True, slots=True)
class MetricChart:
    """A small chart of one metric, with its meaning and its mean."""

    label: str
    meaning: str
    mean: str
    chart: Chart | None


def staleness(metrics: Sequence[Record], bound: int) -> Chart | None:
    """Mean and largest staleness of each step's tokens, its mean by episode, and the bound; None
    where no step was trained.
    """
    steps = [float(line["step"]) for line in metrics]
    if not steps:
        return None
    series = [
        Series("bound", [(steps[0], float(bound)), (steps[-1], float(bound))], "reference"),
        _series(metrics, "staleness_max", "max", "swapped"),
    ]
    num_episodes = len(metrics[0]["return_by_episode"])
    for episode in range(num_episodes):
        name, css = f"staleness_mean_episode_{episode + 1}", episode_css(episode, num_episodes)
        series.append(_series(metrics, name, f"episode {episode + 1}", f"thin {css}"))
    series.append(_series(metrics, "staleness_mean", "mean", "heldout"))
    described = "staleness of the tokens of each step, in steps"
    return line_chart(series, described=described, y_span=(-0.1, max(1.0, bound) * 1.15 + 0.1))


def metric_charts(records: RunRecords, names: Sequence[str]) -> list[MetricChart]:
    """A small chart for each of the metrics that some step recorded."""
    return [
        _small(records, name) for name in names if any(name in line for line in records.metrics)
    ]


def _small(records: RunRecords, name: str) -> MetricChart:
    unit, meaning = METRICS[name]
    points = [(float(line["step"]), float(line[name])) for line in records.metrics if name in line]
    unit = "" if unit in ("1", "share", "1/s") else f" {unit}"
    label = words(f"{name.removesuffix('_s')}_time" if unit == " s" else name)
    chart = small_chart(points, described=f"{label}: {meaning}")
    return MetricChart(label, meaning, f"{figure(_mean(records, name))}{unit}", chart)


def _mean(records: RunRecords, name: str) -> float:
    """Over time for what happens in time, so that it is the summary's; else over steps."""
    steps = zip(records.metrics, records.step_s(), strict=True)
    pairs = [(line[name], seconds) for line, seconds in steps if name in line]
    is_rate = name.endswith("_per_s")
    weights = [seconds if is_rate else 1.0 for _, seconds in pairs]
    return weighted_mean([value for value, _ in pairs], weights)


def _series(metrics: Sequence[Record], name: str, label: str, css: str) -> Series:
    points = [(float(line["step"]), line[name]) for line in metrics if name in line]
    return Series(label, points, css)
