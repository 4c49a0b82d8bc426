"""Runs to compare: an *arm* is all runs that differ in nothing but their seed.

Intervals over runs are Student's, at 95 %, half-widths; a single run has none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mage_async.config.schema import Config
from mage_async.errors import RunError
from mage_async.results import intervals
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import RunRecords, read_document, read_records

APART = ("seed", "journal.", "supervision.", "transport.")
"""Keys that make no other arm: they change neither what is learned nor how fast."""
SUMMARY_PARTS = ("environment", "seed", "complete")
"""Parts that the summary of every run has, whatever became of the run."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A run and what its summary says."""

    records: RunRecords
    summary: Mapping[str, Any]


def read_run(place: RunDirectory) -> Run:
    """A run's records and its summary.

    Raises:
        RunError: it is no run, or has no summary yet.
    """
    records = read_records(place)
    if not place.summary.is_file():
        raise RunError(f"{place.root} has no {place.summary.name}: it has not ended")
    summary = read_document(place.summary)
    missing = [name for name in SUMMARY_PARTS if name not in summary]
    if missing:
        raise RunError(f"{place.summary} lacks {', '.join(missing)}: it is damaged")
    return Run(records, summary)


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """Runs with one configuration, by seed."""

    settings: Mapping[str, Any]
    """What this arm's configuration says of the keys in which the arms differ."""
    runs: Sequence[Run]

    @property
    def label(self) -> str:
        """Those keys and values in one line, each key as short as it can be."""
        known = {key: value for key, value in self.settings.items() if value is not None}
        said = [f"{_short(key)} {_said(value)}" for key, value in known.items()]
        return ", ".join(said) or "all runs"

    def values(self, *path: str | int) -> list[float]:
        """One number of every run's summary, of those that have it."""
        found = (_lookup(run.summary, path) for run in self.runs)
        return [value for value in found if value is not None]


def arms(runs: Iterable[Run]) -> list[Arm]:
    """Sort runs into arms, in the order in which each arm first appears; seeds ascend."""
    flat = [(run, _flat(run.records.config)) for run in runs]
    differing = _differing([settings for _, settings in flat])
    found: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run, settings in flat:
        own = {key: settings.get(key) for key in differing}
        found.setdefault(repr(own), (own, []))[1].append(run)
    return [
        Arm(own, sorted(members, key=lambda run: run.records.config.seed))
        for own, members in found.values()
    ]


def paired(first: Arm, second: Arm, *path: str | int) -> list[float]:
    """Second minus first, seed by seed, for seeds that both have once."""
    return intervals.paired(_by_seed(second, path), _by_seed(first, path))


def _by_seed(arm: Arm, path: Sequence[str | int]) -> dict[int, float]:
    rows = [(run.records.config.seed, _lookup(run.summary, path)) for run in arm.runs]
    return {seed: value for seed, value in rows if value is not None}


def _flat(config: Config) -> dict[str, Any]:
    """Every key by its path, without those that make no arm."""
    pending, found = [("", msgspec.to_builtins(config))], {}
    while pending:
        where, tree = pending.pop(0)
        for key, value in tree.items():
            path = f"{where}{key}"
            if isinstance(value, dict):
                pending.append((f"{path}.", value))
            elif not path.startswith(APART):
                found[path] = "none" if value is None else value
    return found


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if _differs(key, settings)]


def _differs(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a key tells arms apart; a key that only some kinds of a table have does not, where
    those that have it agree.
    """
    has_kinds = any(f"{key.rpartition('.')[0]}.kind" in each for each in settings)
    return len({repr(each.get(key)) for each in settings if key in each or not has_kinds}) > 1


def _short(key: str) -> str:
    """A key's last name; of a correction's kind, `correction`."""
    *_, table, last = ("", *key.split("."))
    return table if last == "kind" and table == "correction" else last


def _lookup(tree: Any, path: Sequence[str | int]) -> float | None:
    for name in path:
        if isinstance(name, str):
            tree = tree.get(name) if isinstance(tree, Mapping) else None
        else:
            tree = tree[name] if tree else None
    return tree


def _said(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value)) or "all"
    return f"{value:g}" if isinstance(value, float) else str(value)
