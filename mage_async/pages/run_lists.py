"""Pages about several runs in `mage view`: the list of runs, and a run's configuration next to
another's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.pages.charts import Series, line_chart, signed
from mage_async.pages.comparison import flat_config
from mage_async.pages.templating import Frame, fill, run_address

MAX_DRAWN = 9
"""Runs in one chart; there are as many colours."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run in a list; `fault` is why it cannot be read."""

    name: str
    environment: str = ""
    seed: int = 0
    state: str = ""
    step: int = 0
    steps: int = 0
    curve: Sequence[tuple[int, float, float]] = ()
    """Version, held-out return of the last episode, and its 95 % half-width."""
    changed: float = 0.0
    """Time of the last write, seconds since 1970."""
    fault: str = ""


def runs_page(frame: Frame, runs: Sequence[ListedRun]) -> Markup:
    """Return the list of all runs, with one chart of the held-out curves of the first ones."""
    drawn = [run for run in runs if run.curve][:MAX_DRAWN]
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
    rows = [
        (run, run_address(run.name), signed(run.curve[-1][1]) if run.curve else "") for run in runs
    ]
    return fill("runs.html", frame=frame, rows=rows, chart=line_chart(series, described=described))


def config_page(
    frame: Frame, config: Config, names: Sequence[str], other: str, against: Config | None
) -> Markup:
    """Return the page of a run's configuration.

    Args:
        names: names of the other runs, to choose one to compare with.
        other: the name that was chosen; empty: none.
        against: the configuration of that run.
    """
    return fill(
        "config.html",
        frame=frame,
        text=config_file.dump(config),
        names=names,
        other=other,
        rows=None if against is None else differences(config, against),
    )


def differences(one: Config, other: Config) -> list[tuple[str, str, str]]:
    """Return the keys that differ with both values; "–" if a configuration lacks the key."""
    left, right = flat_config(one), flat_config(other)
    pairs = [(key, left.get(key, "–"), right.get(key, "–")) for key in (left | right)]
    return [(key, str(a), str(b)) for key, a, b in pairs if a != b]
