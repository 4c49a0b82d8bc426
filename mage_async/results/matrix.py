"""Describe a matrix of runs (`mage ablate`, `mage sweep`): its cells, and the figures of finished
runs.

A cell of the matrix is one whole run in a folder of its own. It is done when its summary says so; a
later call runs the missing cells and reads the finished ones.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from mage_async.assembly import check, unused_warm_start, with_warm_start
from mage_async.config import config_file
from mage_async.config.schema import BOUND_OF, Config, check_source
from mage_async.policy_version import OLDEST_AGE
from mage_async.results.intervals import interval
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, RunRecords, read_document, read_records

AVERAGED = (
    "over_bound_share",
    "k3_mean",
    "effective_share",
    "clipped_share",
    "masked_share",
    "entropy",
)
"""Metrics whose mean over steps is a figure of a run. All steps train equally many trials."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Describe one setting that the runs of a matrix compare; runs that differ only in their seed
    have the same setting.

    `staleness_setting` makes those of `mage ablate`, `combination` those of `mage sweep`.
    """

    key: tuple[Any, ...]
    """Identity of the setting, and its order among the others of the matrix."""
    label: str = field(compare=False)
    """The setting in a few words."""
    folder: str = field(compare=False)
    """Beginning of the names of the folders of its runs, unique in the matrix."""
    assignments: Sequence[str] = field(compare=False)
    """Changes to the configuration, as `key=value`."""
    columns: Mapping[str, Any] = field(compare=False)
    """Values of the varied keys by their name, which are columns of the table of runs."""
    place: float = field(compare=False)
    """Position on the x axis of the chart of returns."""
    place_name: str = field(compare=False)
    """Text for `place` in the legend of a chart with one method."""
    method: str = field(compare=False)
    """Name of the line on which a chart draws the setting: settings of one line differ in `place`.
    """
    flow: str = field(compare=False)
    """Settings with equal `flow` train on tokens of the same ages, so their age figures are pooled.
    """
    allowed_age: int | None = field(default=None, compare=False)
    """Largest age in steps that the setting allows; None if it does not limit ages."""


def staleness_setting(rule: str, correction: str, lag: int, bound: int) -> Setting:
    """Return a setting of an ablation of staleness.

    Args:
        rule: Name of the admission rule.
        correction: Name of the off-policy correction.
        lag: Number of steps added to every token's age.
        bound: Value of `admission.max_staleness`, in steps.
    """
    age, lag_text = bound + lag, f", lag {lag}" if lag else ""
    # The correction `age_mask` has a bound of its own, which becomes that of the setting.
    mask_bound = [f"learner.correction.max_age={age}"] if correction == "age_mask" else []
    return Setting(
        key=(rule, correction, lag, bound),
        label=f"{rule} {bound}, {correction}{lag_text}",
        folder=f"{rule}-{bound}-{correction}" + (f"-lag{lag}" if lag else ""),
        assignments=[
            f"admission.rule={rule}",
            f"admission.max_staleness={bound}",
            f"admission.lag={lag}",
            f"learner.correction={correction}",
            *mask_bound,
        ],
        columns={"rule": rule, "correction": correction, "lag": lag, "bound": bound},
        place=age,
        place_name=f"{bound}" + (f" + lag {lag}" if lag else ""),
        method=f"{rule}, {correction}",
        flow=f"{rule} {bound}{lag_text}",  # corrections do not change ages
        allowed_age=age,
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """Describe one run of the matrix."""

    setting: Setting
    seed: int

    def name(self) -> str:
        """Return the name of the run's folder."""
        return f"{self.setting.folder}-seed{self.seed}"

    def assignments(self) -> list[str]:
        """Return the changes to the configuration, as `key=value`."""
        return [f"seed={self.seed}", *self.setting.assignments]


def cells(
    *,
    bounds: Iterable[int],
    rules: Iterable[str],
    corrections: Iterable[str],
    lags: Iterable[int],
    seeds: Iterable[int],
) -> list[Cell]:
    """Return the cells of an ablation: every bound with every rule, correction, lag and seed.

    All cells of a seed come before those of the next one, so that an interrupted matrix is a
    complete matrix of fewer seeds.
    """
    product = itertools.product(seeds, lags, bounds, rules, corrections)
    # A rule with a bound of its own gives one cell, not one for each bound.
    found = (
        Cell(staleness_setting(rule, correction, lag, BOUND_OF.get(rule, bound)), seed)
        for seed, lag, bound, rule, correction in product
    )
    return list(dict.fromkeys(found))


def is_done(run: RunDirectory) -> bool:
    """Return whether a cell's run is complete."""
    return bool(read_document(run.summary).get("complete"))


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Hold the figures of a finished run."""

    cell: Cell
    figures: dict[str, float]
    """Figures by name, beginning with the return of the last episode."""
    curve: list[tuple[int, float, float]]
    """For each step: number of trials trained so far, seconds of training, and return of the
    batch's last episode.
    """
    ages: list[dict[int, float]]
    """Share of tokens by age in steps: among all tokens, then among the tokens of each episode."""

    def row(self) -> dict[str, Any]:
        """Return setting, seed and figures as one row of a table."""
        return dict(self.cell.setting.columns) | {"seed": self.cell.seed} | self.figures


def read_cell(cell: Cell, run: RunDirectory) -> FinishedRun:
    """Read a run that is done.

    Raises:
        RunError: a file of the run is damaged.
    """
    records, summary = read_records(run), read_document(run.summary)
    return FinishedRun(cell, _figures(records, summary), _curve(records), _ages(records))


def unreached_bounds_sentence(finished: Iterable[FinishedRun]) -> str:
    """Return a sentence about the settings in which no token was as old as the bound allows, or "".

    In such settings the bound had no effect, so differences between their returns are random. This
    happens if actors are slower than the learner, because then no trial waits long enough to become
    old.
    """
    oldest = dict[tuple[Setting, int], float]()
    for run in finished:
        allowed = run.cell.setting.allowed_age
        if allowed is not None:
            key = run.cell.setting, allowed
            oldest[key] = max(oldest.get(key, 0.0), run.figures["staleness_max"])
    unused = [(setting, allowed) for (setting, allowed), age in oldest.items() if age < allowed]
    if not unused:
        return ""
    bound = max(allowed for _, allowed in unused)
    reached = max(oldest[key] for key in unused if key[1] == bound)
    return (
        f"In {len(unused)} of {len(oldest)} settings no token was as old as the bound allows (at "
        f"{bound} steps: {reached:g} at most): there it limited nothing, and what tells them apart "
        "is chance. `--lags` sets the age itself."
    )


def _figures(records: RunRecords, summary: Record) -> dict[str, float]:
    """Return the figures of a run by name; NaN if the run did not record it."""
    staleness, trials = summary["staleness"], summary["trials"]
    last = {
        f"{split}_last_return": summary["evaluation"][split]["return_by_episode"][-1]
        for split in ("heldout", "train")
    }
    first = {
        f"{name}_episode_1": statistics.fmean(
            record.get(f"{name}_episode_1", 0.0) for record in records.metrics
        )
        for name in ("over_bound_share", "masked_share")
    }
    return {
        **last,
        "wall_s": summary["wall_s"],
        "processor_s": summary.get("processor_s", math.nan),
        "trials_per_s": summary["throughput"]["trials_per_s"],
        "staleness_mean": staleness["mean"],
        "staleness_max": staleness["max"],
        **{n: statistics.fmean(record[n] for record in records.metrics) for n in AVERAGED},
        **first,
        "dropped_share": trials["dropped"] / max(1, trials["granted"]),
        "wasted_share": staleness.get("wasted_share", math.nan),
        "length_bias": staleness.get("length_bias", math.nan),
    }


def _curve(records: RunRecords) -> list[tuple[int, float, float]]:
    """Return a point for each step; see `FinishedRun.curve`."""
    admission = records.config.admission
    batch = admission.groups_per_step * admission.trials_per_group
    return [
        (record["step"] * batch, record["time_s"], record["return_by_episode"][-1])
        for record in records.metrics
    ]


def _ages(records: RunRecords) -> list[dict[int, float]]:
    """Return shares of tokens by age; see `FinishedRun.ages`."""
    suffixes = ["", *(f"_episode_{k + 1}" for k in range(records.config.trial.episodes))]
    return [_histogram(records.metrics, suffix) for suffix in suffixes]


def _histogram(metrics: Sequence[Record], suffix: str) -> dict[int, float]:
    """Return the share of tokens of each age, as a mean over steps.

    Args:
        suffix: Suffix of the metric's name, such as "_episode_1"; "" for all episodes.
    """
    shares: dict[int, float] = {}
    for record in metrics:
        for age in range(OLDEST_AGE + 1):
            if share := record.get(f"token_share_age_{age}{suffix}", 0.0):
                shares[age] = shares.get(age, 0.0) + share / len(metrics)
    return shares


@dataclass(frozen=True, slots=True)
class Subject:
    """Describe what a matrix is about, for its page."""

    heading: str
    axis: str
    """Label of the x axis, on which settings have their `place`."""
    is_about_staleness: bool = False
    """Whether runs with different bounds on staleness are compared, so that the page shows how old
    the weights were that sampled each token."""


STALENESS = Subject("What staleness costs", "bound plus lag, steps", is_about_staleness=True)
"""Subject of `mage ablate`."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Hold a matrix whose configurations have been checked."""

    root: Path
    title: str
    configs: dict[Cell, Config]
    num_actors: int
    parallel: int
    """Number of runs at once."""
    for_s: float
    """Seconds after the first start after which no further run is started."""
    subject: Subject = STALENESS

    def run_of(self, cell: Cell) -> RunDirectory:
        """Return the directory of a cell's run."""
        return RunDirectory(self.root / cell.name())

    def log_of(self, cell: Cell) -> Path:
        """Return the file with the output of a cell's run."""
        return self.root / f"{cell.name()}.log"

    def failures_of(self, cell: Cell) -> Path:
        """Return the file that has one line for each failure of a cell's run."""
        return self.root / f"{cell.name()}.failures"

    def num_failures(self, cell: Cell) -> int:
        """Return the number of failures of a cell's run, over all calls."""
        file = self.failures_of(cell)
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def finished_runs(self) -> list[FinishedRun]:
        """Read the runs that are done.

        Raises:
            RunError: a file of a run is damaged.
        """
        runs = [(cell, self.run_of(cell)) for cell in self.configs]
        return [read_cell(cell, run) for cell, run in runs if is_done(run)]


def checked_configs(
    file: Path,
    wanted: Iterable[Cell],
    assignments: list[str],
    method: str | None,
    say: Callable[[str], None],
) -> dict[Cell, Config]:
    """Return the checked configuration of each cell.

    Args:
        file: Configuration that all cells begin with.
        assignments: Changes of all cells, as `key=value`; a cell's own changes come after them.
        method: Name of a method of the papers, applied to the file first.
        say: Called with a sentence about each cell whose automatic warm start leaves out keys.

    Raises:
        MageError: a cell cannot be run; the message names the key and the reason.
    """
    configs = {}
    for cell in wanted:
        config = config_file.load(file, [*assignments, *cell.assignments()], method)
        check(config)
        check_source(config.policy)
        # A run records its configuration in this form, so a cell that is run already is recognised.
        configs[cell] = with_warm_start(config)
        if unused := unused_warm_start(config, configs[cell]):
            say(unused)
    return configs


# The functions below group finished runs for tables and charts.

POINTS = 15
"""Number of points of a smoothed learning curve."""
RunsBySetting = Mapping[Setting, Sequence[FinishedRun]]


def by_setting(finished: Iterable[FinishedRun]) -> dict[Setting, list[FinishedRun]]:
    """Group runs that differ only in their seed; settings and seeds ascend."""
    ordered = sorted(finished, key=lambda run: (run.cell.setting, run.cell.seed))
    return {key: list(runs) for key, runs in groupby(ordered, lambda run: run.cell.setting)}


def by_flow(runs: RunsBySetting) -> dict[str, list[FinishedRun]]:
    """Group runs whose tokens have the same ages, by `Setting.flow`."""
    found = defaultdict[str, list[FinishedRun]](list)
    for setting, same in runs.items():
        found[setting.flow] += same
    return found


def by_method(runs: RunsBySetting) -> dict[str, list[Setting]]:
    """Group the settings that a chart joins by one line, by `Setting.method`."""
    found = defaultdict[str, list[Setting]](list)
    for setting in runs:
        found[setting.method].append(setting)
    return found


def values(runs: Sequence[FinishedRun], name: str) -> list[float]:
    """Return one figure of each run."""
    return [run.figures[name] for run in runs]


def smooth(
    runs: Sequence[FinishedRun], x_of: Callable[[tuple[int, float, float]], float]
) -> list[tuple[float, float, float]]:
    """Return a learning curve of at most `POINTS` points, each a mean over neighbouring steps.

    Returns:
        Tuples of x, mean return over the runs, and the 95 % half-width of that mean.
    """
    length = min(len(run.curve) for run in runs)
    size = max(1, math.ceil(length / POINTS))
    points = []
    for start in range(0, length, size):
        parts = [run.curve[start : start + size] for run in runs]
        means = [sum(point[2] for point in part) / len(part) for part in parts]
        x = sum(x_of(part[-1]) for part in parts) / len(parts)
        points.append((x, *interval(means)))
    return points


def mean_shares(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean share of each age, over the runs that recorded any."""
    known = [part for part in parts if part]
    ages = sorted({age for part in known for age in part})
    return {age: sum(part.get(age, 0.0) for part in known) / len(known) for age in ages}
