"""Draw `bench/learning.svg`, the returns of each episode, from the figures in `baselines/`.

    python -m bench.learning.picture           2 seconds

Each environment has a panel with the return of each episode on held-out tasks: means over seeds
with 95 % bands. Memory is worth the distance between the green line and the others: `blind` has no
memory of earlier episodes, `swapped` meets another opponent in the last one, and single-episode RL
was trained on as many episodes."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lib.baseline import FOLDER, ROOT
from bench.lib.options import option_parser
from mage_async.pages.charts import Chart, Series, line_chart
from mage_async.pages.templating import fill, svg
from mage_async.results.intervals import interval

FILE = ROOT / "bench" / "learning.svg"
WIDTH, HEIGHT, TOP, GAP = 460, 250, 26, 14
"""Size of a panel's chart, height of its title, and distance between panels, in pixels."""
STYLE = f"""
#all {{ background: var(--card); width: auto; font-family: system-ui, "DejaVu Sans", sans-serif; }}
.panel {{ width: {WIDTH}px; height: {HEIGHT}px; }} .panel svg {{ width: 100%; height: 100%; }}
.name {{ fill: var(--ink); font-size: 14px; font-weight: 600; }}
"""
# Lines of a panel: labels, and names of reference returns or of evaluation sets.
REFERENCES = (("best response", "best_response"), ("knows all, forgets", "without_memory"))
LINES = (("blind", "heldout_blind"), ("swapped", "heldout_swapped"), ("held-out", "heldout"))
Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """Name an environment's panel, and the figures that it shows."""

    title: str
    baseline: str
    case: str
    control: str


PANELS = (
    Panel("Rock–paper–scissors", "learning", "quickstart", "single episode"),
    Panel("Scout: looking costs 2 now", "learning", "scout", "scout, single episode"),
    Panel("Kuhn poker", "learning", "kuhn", "kuhn, single episode"),
    Panel("Tic-tac-toe", "learning_tictactoe", "tictactoe", "tictactoe, single episode"),
)


def main() -> None:
    """Draw the figures of the baselines."""
    option_parser(__doc__).parse_args()
    charts = [(panel.title, _chart(panel, _summaries(panel))) for panel in PANELS]
    FILE.write_text(draw(charts))
    print(f"written to {FILE.name}")


def draw(charts: Sequence[tuple[str, Chart | None]]) -> str:
    """Return the SVG of charts with their titles, two in a row."""
    rows = -(-len(charts) // 2)
    width, height = 2 * WIDTH + 3 * GAP, rows * (HEIGHT + TOP + GAP) + GAP
    drawn = [_panel(number, title, chart) for number, (title, chart) in enumerate(charts)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" id="all"><style>{fill("style.css")}{STYLE}</style>'
        f"{''.join(drawn)}</svg>\n"
    )


def _panel(number: int, title: str, chart: Chart | None) -> str:
    across, down = GAP + number % 2 * (WIDTH + GAP), GAP + number // 2 * (HEIGHT + TOP + GAP)
    return (
        f'<g transform="translate({across},{down})"><text y="14" class="name">{title}</text>'
        f'<svg class="panel" y="{TOP}" width="{WIDTH}" height="{HEIGHT}">'
        f"{svg(chart)}</svg></g>"
    )


def _chart(panel: Panel, known: dict[str, list[Summary]]) -> Chart | None:
    """Return the chart of a panel. References are drawn first, so that measured lines lie on
    top."""
    runs, controls = known[panel.case], known[panel.control]
    references = runs[0]["references"]["heldout"]
    series = [
        Series(label, _numbered(references[name]), "reference")
        for label, name in REFERENCES
        if name in references
    ]
    series.append(_series("single-episode RL", controls, "heldout", "accent"))
    series += [_series(label, runs, name, name.removeprefix("heldout_")) for label, name in LINES]
    episodes = [(float(k), f"episode {k}") for k in range(1, len(series[-1].points) + 1)]
    return line_chart(series, alt_text=f"{panel.title}, by episode", x_names=episodes)


def _series(label: str, runs: Sequence[Summary], name: str, css: str) -> Series:
    """Return the line of each episode's mean over seeds, with its interval."""
    returns = [run["evaluation"][name]["return_by_episode"] for run in runs]
    return mean_line(label, list(enumerate(zip(*returns, strict=True), 1)), css)


def mean_line(label: str, values: Sequence[tuple[float, Sequence[float]]], css: str) -> Series:
    """Return the line of means over seeds, with 95 % bands; without bands for one seed.

    Args:
        values: for each x, the value of each seed.
    """
    pairs = [(x, interval(list(by_seed))) for x, by_seed in values]
    points = [(float(x), mean) for x, (mean, _) in pairs]
    halves = [half for _, (_, half) in pairs if math.isfinite(half)]
    return Series(label, points, css, halves, has_dots=True)


def _numbered(values: Iterable[float]) -> list[tuple[float, float]]:
    return [(float(number), value) for number, value in enumerate(values, 1)]


def _summaries(panel: Panel) -> dict[str, list[Summary]]:
    """Return the summaries of all seeds, by case."""
    known = json.loads((FOLDER / f"{panel.baseline}_cpu2.json").read_text())["summaries"]
    return {
        case: list(runs.values()) if isinstance(runs, dict) else runs
        for case, runs in known.items()
    }


if __name__ == "__main__":
    main()
