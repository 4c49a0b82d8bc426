"""What the runs of a staleness matrix show: `runs.csv`, `report.html` and `return.svg`."""

import csv
import html
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, EDGE = 640, 320, 48
COLOURS = ("#2a6f97", "#d1495b", "#66a182", "#edae49", "#6d597a", "#444444", "#00798c", "#8d6a9f")
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t at 97.5 % by number of seeds."""
AVERAGED = (
    "over_bound_share",
    "over_bound_share_episode_1",
    "k3_mean",
    "effective_share",
    "clipped_share",
    "masked_share",
)
"""Of every step's record, averaged over steps (they train equally many trials)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix."""

    bound: int
    rule: str
    correction: str
    seed: int
    lag: int

    def name(self) -> str:
        """Its folder."""
        lag = f"-lag{self.lag}" if self.lag else ""
        return f"{self.rule}-{self.bound}-{self.correction}{lag}-seed{self.seed}"

    def assignments(self) -> list[str]:
        """What it changes in the configuration."""
        return [
            f"seed={self.seed}",
            f"admission.rule={self.rule}",
            f"admission.max_staleness={self.bound}",
            f"admission.lag={self.lag}",
            f"learner.correction={self.correction}",
            f"learner.max_age={self.bound}",
        ]

    def is_done(self, root: Path) -> bool:
        """Whether its run came to its end."""
        file = root / self.name() / "summary.json"
        return file.is_file() and json.loads(file.read_text())["complete"]

    def row(self, root: Path) -> dict[str, Any]:
        """What a finished run says, flat."""
        folder = root / self.name()
        summary = json.loads((folder / "summary.json").read_text())
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        trials = summary["trials"]
        return {
            "rule": self.rule,
            "bound": self.bound,
            "correction": self.correction,
            "lag": self.lag,
            "seed": self.seed,
            **{
                f"{split}_last_return": summary["evaluation"][split]["return_by_episode"][-1]
                for split in ("train", "heldout")
            },
            "wall_s": summary["wall_s"],
            "trials_per_s": summary["throughput"]["trials_per_s"],
            "staleness_mean": summary["staleness"]["mean"],
            "staleness_max": summary["staleness"]["max"],
            **{name: statistics.fmean(step[name] for step in steps) for name in AVERAGED},
            "dropped_share": trials["dropped"] / max(1, trials["granted"]),
        }


def write_report(root: Path, cells: Sequence[Cell]) -> None:
    """Write all three files from the runs that are done."""
    rows = [cell.row(root) for cell in cells if cell.is_done(root)]
    if not rows:
        return
    with (root / "runs.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    figure = _figure(_groups(rows))
    (root / "return.svg").write_text(figure)
    (root / "report.html").write_text(_page(rows, figure, len(cells)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width at 95 %; the half-width of one value is NaN."""
    if len(values) < 2:
        return values[0], math.nan
    scale = T95.get(len(values), 1.96) / math.sqrt(len(values))
    return statistics.fmean(values), scale * statistics.stdev(values)


Group = tuple[tuple[str, str, int, int], list[dict[str, Any]]]


def _groups(rows: Sequence[dict[str, Any]]) -> list[Group]:
    """Runs that differ in their seed only, by rule, correction, lag and bound."""
    found: dict[tuple[str, str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["rule"], row["correction"], row["lag"], row["bound"])
        found.setdefault(key, []).append(row)
    return sorted(found.items())


def _page(rows: Sequence[dict[str, Any]], figure: str, num_cells: int) -> str:
    measures = list(rows[0])[5:]
    head = ["rule", "correction", "lag", "bound", "seeds", *measures]
    lines = [_line("th", head)]
    for key, runs in _groups(rows):
        shown = [_shown(interval([run[name] for run in runs])) for name in measures]
        lines.append(_line("td", [*map(str, key), str(len(runs)), *shown]))
    return (
        "<!doctype html><meta charset=utf-8><title>Staleness</title>"
        "<style>body{font:14px system-ui;margin:2em}td,th{padding:2px 8px;text-align:right}"
        "th{border-bottom:1px solid}</style>"
        f"<h1>What staleness costs</h1><p>{len(rows)} of {num_cells} runs. Means over seeds, and"
        " half-widths at 95 %. Returns are of the last episode; staleness is in steps and weighted"
        " by tokens.</p>"
        f"{figure}<table>{''.join(lines)}</table>"
    )


def _line(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _shown(mean_and_width: tuple[float, float]) -> str:
    mean, width = mean_and_width
    return f"{mean:.3g}" if math.isnan(width) else f"{mean:.3g} ± {width:.2g}"


def _figure(groups: Sequence[Group]) -> str:
    """Held-out return of the last episode against the bound plus lag, a line a rule and
    correction.
    """
    points: dict[str, list[tuple[float, float, float]]] = {}
    for (rule, correction, lag, bound), runs in groups:
        mean, width = interval([run["heldout_last_return"] for run in runs])
        label = f"{rule}, {correction}"
        points.setdefault(label, []).append((bound + lag, mean, 0 if math.isnan(width) else width))
    most = max(x for line in points.values() for x, _, _ in line) or 1
    ends = [y + sign * w for line in points.values() for _, y, w in line for sign in (-1, 1)]
    low, high = min([*ends, 0.0]), max([*ends, 0.1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = EDGE + x / most * (WIDTH - 2 * EDGE)
        return across, HEIGHT - EDGE - (y - low) / (high - low) * (HEIGHT - 2 * EDGE)

    parts = [_axes(place, most, low, high)]
    for number, (label, line) in enumerate(points.items()):
        parts.append(_series(place, sorted(line), label, number))
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="system-ui" font-size="12">{body}</svg>'
    )


def _axes(place, most: float, low: float, high: float) -> str:
    (left, bottom), (right, top) = place(0, low), place(most, high)
    ticks = "".join(
        f'<text x="{left - 6}" y="{place(0, y)[1] + 4}" text-anchor="end">{y:.2f}</text>'
        for y in (low, (low + high) / 2, high)
    )
    ticks += "".join(
        f'<text x="{place(x, low)[0]}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>'
        for x in sorted({0, most / 2, most})
    )
    return (
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>{ticks}'
        f'<text x="{(left + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">bound + lag, steps'
        f'</text><text x="{left}" y="16">held-out return of the last episode</text>'
    )


def _series(place, line, label: str, number: int) -> str:
    colour = COLOURS[number % len(COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(x, y) for x, y, _ in line))
    bars = "".join(
        f'<path d="M{place(x, y - w)[0]:.1f} {place(x, y - w)[1]:.1f}V{place(x, y + w)[1]:.1f}"'
        f' stroke="{colour}"/><circle cx="{place(x, y)[0]:.1f}" cy="{place(x, y)[1]:.1f}" r="3"'
        f' fill="{colour}"/>'
        for x, y, w in line
    )
    legend = (
        f'<text x="{WIDTH - EDGE}" y="{24 + 15 * number}" fill="{colour}" text-anchor="end">'
        f"{html.escape(label)}</text>"
    )
    return f'<polyline points="{path}" fill="none" stroke="{colour}"/>{bars}{legend}'
