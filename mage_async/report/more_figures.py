"""LaMer's other figures of a run: trajectory diversity, and harder tasks than trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.report.charts.learning_curves import episode_css
from mage_async.report.charts.line_chart import Chart, line_chart
from mage_async.report.charts.number_format import percent
from mage_async.report.charts.plot_area import Series
from mage_async.report.page_table import PageTable, TableCell, TableRow

Rungs = Sequence[Mapping[str, Any]]


def more_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What of both was measured; empty parts where nothing was."""
    diversity, harder = summary.get("diversity"), summary.get("harder")
    return {
        "diversity": _diversity(diversity) if diversity else None,
        "harder": _harder(harder) if harder else None,
    }


def _diversity(found: Mapping[str, Any]) -> dict[str, Any]:
    rows = {
        "entropy, nats": list(
            zip(found["entropy_by_episode"], found["ci95_by_episode"], strict=True)
        ),
        "distinct trajectories": [(count, None) for count in found["distinct_by_episode"]],
    }
    said = f"{found['num_tasks']:,} held-out tasks, each played {found['repeats']} times; "
    return {
        "said": f"{said}at most {found['most']:.2f} nats",
        "table": _table("of a task", [_row(label, pairs) for label, pairs in rows.items()]),
    }


def _harder(found: Mapping[str, Any]) -> dict[str, Any]:
    rungs: Rungs = found["rungs"]
    return {
        "ladder": found["ladder"],
        "returns": _curves(rungs, "return_by_episode", "ci95_by_episode"),
        "wins": _curves(rungs, "won_by_episode"),
        "table": _table("return", [_row(rung["label"], _returns(rung)) for rung in rungs]),
        "won": _table("share won", [_row(rung["label"], _won(rung), "%") for rung in rungs]),
    }


def _returns(rung: Mapping[str, Any]) -> list[tuple[float, float]]:
    score = rung["score"]
    return list(zip(score["return_by_episode"], score["ci95_by_episode"], strict=True))


def _won(rung: Mapping[str, Any]) -> list[tuple[float, None]]:
    return [(share, None) for share in rung["score"]["won_by_episode"]]


def _curves(rungs: Rungs, name: str, half_widths: str = "") -> Chart | None:
    """A line an episode, over the rungs."""
    num_episodes = len(rungs[0]["score"][name])
    series = [
        Series(
            f"episode {episode + 1}",
            [(float(place), rung["score"][name][episode]) for place, rung in enumerate(rungs)],
            episode_css(episode, num_episodes),
            [rung["score"][half_widths][episode] for rung in rungs] if half_widths else (),
            has_dots=True,
        )
        for episode in range(num_episodes)
    ]
    named = [(float(place), rung["label"]) for place, rung in enumerate(rungs)]
    return line_chart(series, described=f"{name} against difficulty", x_names=named)


def _row(label: str, pairs: Sequence[tuple[float, float | None]], unit: str = "") -> TableRow:
    cells = [
        TableCell(
            percent(value) if unit else f"{value:.3f}", "" if half is None else f"± {half:.3f}"
        )
        for value, half in pairs
    ]
    return TableRow(label, cells)


def _table(head: str, rows: Sequence[TableRow]) -> PageTable:
    episodes = (f"episode {number}" for number in range(1, len(rows[0].cells) + 1))
    return PageTable([head, *episodes], rows)
