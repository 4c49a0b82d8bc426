"""Draw the sweep of Scout as an SVG: probing by discount, with a panel for each price of
probing."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

WIDTH, HEIGHT, MARGIN, LEFT = 300, 190, 40, 46
"""Size of a panel, and the margins around panels and at the left, in pixels."""
COLOURS = {"differential": "#0b6e99", "cumulative_paper": "#c4591b"}
LEAST, MOST = 0.45, 1.02
"""Discounts at the left and right end of the axis."""
TOP = 1.2
"""Probes per dial at the top of the axis."""


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Return the SVG: a dot for each seed, a line for their mean, a dashed line for the exact
    threshold."""
    costs = sorted({row["cost"] for row in rows}, reverse=True)
    body = "".join(_panel(rows, cost, number) for number, cost in enumerate(costs))
    size = f'width="{len(costs) * (WIDTH + MARGIN) + MARGIN}" height="{HEIGHT + 2 * MARGIN}"'
    style = "text{font:11px sans-serif;fill:#444}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def _panel(rows: Sequence[dict[str, Any]], cost: float, number: int) -> str:
    left = LEFT + number * (WIDTH + MARGIN)
    parts = [
        f'<g transform="translate({left},{MARGIN})">',
        _text(0, -22, f"probes per dial, episodes 1 + 2; a probe costs {cost:g}"),
        f'<path d="M0 0V{HEIGHT}H{WIDTH - 20}" fill="none" stroke="#888"/>',
    ]
    parts += [_text(-26, _y(value) + 4, f"{value:g}") for value in (0, 0.5, 1)]
    parts += [_text(_x(at) - 8, HEIGHT + 16, f"{at:g}") for at in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    parts.append(_text(WIDTH / 2 - 80, HEIGHT + 32, "discount between episodes"))
    for place, (credit, colour) in enumerate(COLOURS.items()):
        own = [row for row in rows if (row["credit"], row["cost"]) == (credit, cost)]
        parts += _curve(own, colour)
        parts.append(_text(8, 8 + 14 * place, credit.removesuffix("_paper"), colour))
    return "".join(parts) + "</g>"


def _curve(rows: Sequence[dict[str, Any]], colour: str) -> list[str]:
    """Return the dots, the line and the threshold of one credit."""
    points = [(_x(row["discount"]), _y(fmean(row["probing"]))) for row in rows]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    parts += [
        f'<circle cx="{_x(row["discount"]):.1f}" cy="{_y(value):.1f}" r="2.5" fill="{colour}"/>'
        for row in rows
        for value in row["probing"]
    ]
    if rows and rows[0]["threshold"] is not None:
        at = _x(rows[0]["threshold"])
        dashes = f'stroke="{colour}" stroke-dasharray="4 3"'
        parts.append(f'<path d="M{at:.1f} 0V{HEIGHT}" {dashes}/>')
    return parts


def _x(discount: float) -> float:
    return (discount - LEAST) / (MOST - LEAST) * (WIDTH - 20)


def _y(probing: float) -> float:
    return HEIGHT - min(probing, TOP) / TOP * HEIGHT


def _text(x: float, y: float, words: str, colour: str = "#444") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" style="fill:{colour}">{words}</text>'
