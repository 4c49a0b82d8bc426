"""Runs beside each other: the list of them, and the difference of two configurations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from markupsafe import Markup

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.pages.frame import Frame, run_address
from mage_async.pages.templating import fill
from mage_async.report.charts.line_chart import line_chart
from mage_async.report.charts.number_format import signed
from mage_async.report.charts.plot_area import Series

MOST_DRAWN = 9
"""Runs in one chart; there are so many colours."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run in a list; `fault` says why it cannot be read."""

    name: str
    environment: str = ""
    seed: int = 0
    state: str = ""
    step: int = 0
    steps: int = 0
    curve: Sequence[tuple[int, float, float]] = ()
    """Version, and return of the last held-out episode with its half-width at 95 %."""
    changed: float = 0.0
    """When something was last written, in seconds since 1970."""
    fault: str = ""


def runs_page(frame: Frame, runs: Sequence[ListedRun]) -> Markup:
    """All runs, with the held-out curves of the first ones in one chart."""
    drawn = [run for run in runs if run.curve][:MOST_DRAWN]
    series = [
        Series(
            run.name,
            [(float(version), value) for version, value, _ in run.curve],
            f"s{number}",
            [half for _, _, half in run.curve],
            has_dots=True,
        )
        for number, run in enumerate(drawn)
    ]
    described = "held-out return of the last episode against steps, by run"
    rows = [(run, run_address(run.name), _last(run)) for run in runs]
    return fill("runs.html", frame=frame, rows=rows, chart=line_chart(series, described=described))


def _last(run: ListedRun) -> str:
    return signed(run.curve[-1][1]) if run.curve else ""


def config_page(
    frame: Frame, config: Config, names: Sequence[str], other: str, against: Config | None
) -> Markup:
    """The resolved configuration, and what another run's says otherwise."""
    return fill(
        "config.html",
        frame=frame,
        text=config_file.dump(config),
        names=names,
        other=other,
        rows=None if against is None else differences(config, against),
    )


def differences(one: Config, other: Config) -> list[tuple[str, str, str]]:
    """Keys that differ, with both values; "–" where a configuration does not have the key."""
    left, right = _flat(msgspec.to_builtins(one)), _flat(msgspec.to_builtins(other))
    names = [*left, *(name for name in right if name not in left)]
    pairs = [(name, left.get(name, "–"), right.get(name, "–")) for name in names]
    return [(name, str(a), str(b)) for name, a, b in pairs if a != b]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
