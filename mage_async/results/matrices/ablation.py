"""The cells of a matrix of runs, those of an ablation of staleness, and a finished run's figures.

A cell of the matrix is one whole run in a folder of its own. A cell is done when its summary says
so; a later call runs the missing cells and reads the finished ones.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mage_async.admission.staleness import OLDEST_AGE
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import Record, RunRecords, read_document, read_records

BOUND_OF = {"sync": 0, "one_step": 1}
"""Rules that have a bound of their own, whatever the configuration says: one cell, not one a bound.
"""
AVERAGED = (
    "over_bound_share",
    "k3_mean",
    "effective_share",
    "clipped_share",
    "masked_share",
    "entropy",
)
"""Metrics averaged over steps, which train equally many trials."""


class Compared(Protocol):
    """What is compared in a matrix; runs that differ in their seed only have the same.

    Settings can be sorted and hashed, and are of one kind in a matrix.
    """

    def label(self) -> str:
        """The setting in a few words."""
        ...

    def folder(self) -> str:
        """The same for a file name; no other setting of the matrix has it."""
        ...

    def assignments(self) -> list[str]:
        """What it changes in the configuration, as `key=value`."""
        ...

    def columns(self) -> dict[str, Any]:
        """What it is, for a table."""
        ...

    def place(self) -> float:
        """Where it stands on the axis of the chart of returns."""
        ...

    def place_name(self) -> str:
        """The same among those of one method, for a legend."""
        ...

    def method(self) -> str:
        """Settings of one method differ in their place only; a chart joins them by a line."""
        ...

    def flow(self) -> str:
        """Settings of one flow have tokens of the same ages."""
        ...

    def allowed_age(self) -> int | None:
        """The largest age that it is meant to allow, in steps; None: it is not about ages."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What an ablation of staleness compares."""

    rule: str
    correction: str
    lag: int
    bound: int

    def place(self) -> int:
        """The largest age that the rule means to allow, in steps."""
        return self.bound + self.lag

    def allowed_age(self) -> int:
        """The same."""
        return self.place()

    def label(self) -> str:
        """The setting in a few words."""
        lag = f", lag {self.lag}" if self.lag else ""
        return f"{self.rule} {self.bound}, {self.correction}{lag}"

    def place_name(self) -> str:
        """The bound, and what is added to it."""
        return f"{self.bound}" + (f" + lag {self.lag}" if self.lag else "")

    def method(self) -> str:
        """How staleness is bounded and treated."""
        return f"{self.rule}, {self.correction}"

    def flow(self) -> str:
        """Corrections do not change ages."""
        lag = f", lag {self.lag}" if self.lag else ""
        return f"{self.rule} {self.bound}{lag}"

    def folder(self) -> str:
        """Part of a file name."""
        lag = f"-lag{self.lag}" if self.lag else ""
        return f"{self.rule}-{self.bound}-{self.correction}{lag}"

    def assignments(self) -> list[str]:
        """What it changes in the configuration."""
        masked = [f"learner.correction.max_age={self.place()}"]
        return [
            f"admission.rule={self.rule}",
            f"admission.max_staleness={self.bound}",
            f"admission.lag={self.lag}",
            f"learner.correction={self.correction}",
            *(masked if self.correction == "age_mask" else []),
        ]

    def columns(self) -> dict[str, Any]:
        """For a table."""
        return {
            "rule": self.rule,
            "correction": self.correction,
            "lag": self.lag,
            "bound": self.bound,
        }


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix."""

    setting: Compared
    seed: int

    def name(self) -> str:
        """Its folder."""
        return f"{self.setting.folder()}-seed{self.seed}"

    def assignments(self) -> list[str]:
        """What it changes in the configuration."""
        return [f"seed={self.seed}", *self.setting.assignments()]


def cells(
    *,
    bounds: Iterable[int],
    rules: Iterable[str],
    corrections: Iterable[str],
    lags: Iterable[int],
    seeds: Iterable[int],
) -> list[Cell]:
    """Every bound with every rule, correction, lag and seed, none twice; a seed's cells together,
    so that an interrupted matrix is one of fewer seeds.
    """
    product = itertools.product(seeds, lags, bounds, rules, corrections)
    found = (
        Cell(Setting(rule, correction, lag, BOUND_OF.get(rule, bound)), seed)
        for seed, lag, bound, rule, correction in product
    )
    return list(dict.fromkeys(found))


def is_done(run: RunDirectory) -> bool:
    """Whether a cell's run came to its end."""
    return bool(read_document(run.summary).get("complete"))


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished run says."""

    cell: Cell
    figures: dict[str, float]
    """Figures by name; the last episode's returns first."""
    curve: list[tuple[int, float, float]]
    """After each step: trials trained, seconds of training, return of the batch's last episode."""
    ages: list[dict[int, float]]
    """The share of each age among all tokens, then among those of each episode."""

    def row(self) -> dict[str, Any]:
        """Flat, for a table."""
        return self.cell.setting.columns() | {"seed": self.cell.seed} | self.figures


def read_cell(cell: Cell, run: RunDirectory) -> Finished:
    """Read a run that is done.

    Raises: RunError: a file of it is damaged.
    """
    records, summary = read_records(run), read_document(run.summary)
    return Finished(cell, _figures(records, summary), _curve(records), _ages(records))


def bounds_that_did_not_act(finished: Iterable[Finished]) -> str:
    """A sentence on the settings in which no token was as old as the bound allows; empty where
    there are none.

    Age is then not what they differ in, whatever their returns say: where actors are slower than
    the learner, nothing waits long enough.
    """
    oldest = dict[tuple[Compared, int], float]()
    for run in finished:
        allowed = run.cell.setting.allowed_age()
        if allowed is not None:
            own = run.cell.setting, allowed
            oldest[own] = max(oldest.get(own, 0.0), run.figures["staleness_max"])
    idle = [own for own in oldest if oldest[own] < own[1]]
    if not idle:
        return ""
    bound = max(allowed for _, allowed in idle)
    reached = max(oldest[own] for own in idle if own[1] == bound)
    return (
        f"In {len(idle)} of {len(oldest)} settings no token was as old as the bound allows (at "
        f"{bound} steps: {reached:g} at most): there it limited nothing, and what tells them apart "
        "is chance. `--lags` sets the age itself."
    )


def _figures(records: RunRecords, summary: Record) -> dict[str, float]:
    stale, trials = summary["staleness"], summary["trials"]
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
        "staleness_mean": stale["mean"],
        "staleness_max": stale["max"],
        **{n: statistics.fmean(record[n] for record in records.metrics) for n in AVERAGED},
        **first,
        "dropped_share": trials["dropped"] / max(1, trials["granted"]),
        "wasted_share": stale.get("wasted_share", math.nan),
        "length_bias": stale.get("length_bias", math.nan),
    }


def _curve(records: RunRecords) -> list[tuple[int, float, float]]:
    rules = records.config.admission
    batch = rules.groups_per_step * rules.trials_per_group
    return [
        (record["step"] * batch, record["time_s"], record["return_by_episode"][-1])
        for record in records.metrics
    ]


def _ages(records: RunRecords) -> list[dict[int, float]]:
    endings = ["", *(f"_episode_{k + 1}" for k in range(records.config.trial.episodes))]
    return [_histogram(records.metrics, ending) for ending in endings]


def _histogram(metrics: Sequence[Record], ending: str) -> dict[int, float]:
    """Mean share of each age over the steps that say it."""
    shares: dict[int, float] = {}
    for record in metrics:
        for age in range(OLDEST_AGE + 1):
            share = record.get(f"token_share_age_{age}{ending}", 0.0)
            if share:
                shares[age] = shares.get(age, 0.0) + share / len(metrics)
    return shares
