"""Whom the agent met in training: rating, games and return of every member, best rated first."""

from collections.abc import Mapping
from typing import Any

from mage_async.report.markup import Markup, join, tag
from mage_async.report.numbers import signed
from mage_async.tasks.population import version_of

Standing = Mapping[str, Any]


def population_table(table: Mapping[str, Any], units: int) -> Markup:
    """`table` is what `League.table` remembers; returns are per unit of the environment."""
    standings: Mapping[str, Standing] = table["standings"]
    ordered = sorted(standings.items(), key=lambda each: -each[1]["rating"])
    met = [(name, each) for name, each in ordered if each["groups"]]
    rows = [_row(name, each, units, table["rivals"]) for name, each in met]
    names = ("member", "Elo rating", "groups", "episodes", "agent's return", "of late")
    head = tag("thead", tag("tr", *(tag("th", name) for name in names)))
    agent = tag("tr", tag("th", "the agent, at last"), _number(f"{table['rating']:.0f}"))
    note = tag(
        "p",
        "A group is a game, scored by where its mean return lies in the declared range; 400 points "
        "are 10 to 1. Versions of the policy are kept where they are in bold.",
        cls="note",
    )
    body = tag("tbody", agent, *rows)
    return join(note, tag("div", tag("table", head, body), cls="scroll"))


def _row(name: str, standing: Standing, units: int, kept: list[int]) -> Markup:
    label = tag("b", name) if version_of(name) in kept else name
    mean = standing["total"] / max(1, standing["episodes"]) / units
    return tag(
        "tr",
        tag("th", label),
        _number(f"{standing['rating']:.0f}"),
        _number(f"{standing['groups']:,}"),
        _number(f"{standing['episodes']:,}"),
        _number(signed(mean)),
        _number(signed(standing["recent"] / units)),
    )


def _number(text: str) -> Markup:
    return tag("td", text.replace("-", "−"), cls="number")
