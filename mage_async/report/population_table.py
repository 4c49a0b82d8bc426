"""The members met in training: rating, games and return of each, best rated first."""

from collections.abc import Mapping
from typing import Any

from mage_async.report.charts.number_format import signed
from mage_async.report.page_table import PageTable, TableCell, TableRow
from mage_async.tasks.population import version_of

HEADS = ("member", "Elo rating", "groups", "episodes", "agent's return", "of late")
Standing = Mapping[str, Any]


def population_table(table: Mapping[str, Any], units: int) -> PageTable:
    """`table` is what `League.table` remembers; returns are per unit of the environment."""
    standings: Mapping[str, Standing] = table["standings"]
    ordered = sorted(standings.items(), key=lambda each: -each[1]["rating"])
    met = [(name, each) for name, each in ordered if each["groups"]]
    agent = TableRow("the agent, at last", [_number(f"{table['rating']:.0f}")])
    return PageTable(
        HEADS, [agent, *(_row(name, each, units, table["rivals"]) for name, each in met)]
    )


def _row(name: str, standing: Standing, units: int, kept: list[int]) -> TableRow:
    numbers = (
        f"{standing['rating']:.0f}",
        f"{standing['groups']:,}",
        f"{standing['episodes']:,}",
        signed(standing["total"] / max(1, standing["episodes"]) / units),
        signed(standing["recent"] / units),
    )
    return TableRow(name, [_number(text) for text in numbers], is_bold=version_of(name) in kept)


def _number(text: str) -> TableCell:
    return TableCell(text.replace("-", "−"))
