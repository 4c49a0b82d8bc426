"""Define tables as plain data, which `templates/parts.html` lays out, and make the tables of
returns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from mage_async.pages.charts import MINUS, percent, signed
from mage_async.results.intervals import half_text
from mage_async.results.summary import (
    SETS,
    EpisodeRow,
    diversity_row,
    environment_rows,
    harder_rows,
    probe_rows,
    reference_rows,
    score_row,
    set_rows,
)
from mage_async.tasks.league import version_of
from mage_async.trajectory import num_decimals

MOST_MEMBERS = 40
"""Largest number of members of a split that a table lists. If there are more, it lists those with
the lowest and the highest returns. A user's class without `members` has 1,024 training tasks, and a
few trials of each.
"""
MOST_SHOWN = 20
"""Largest number of members of a split in its table; the page folds the rest of those that it
lists.
"""


@dataclass(frozen=True, slots=True)
class TableCell:
    """Hold a number, with a small note after it."""

    text: str
    note: str = ""
    shade: float | None = None
    """Colour from -1, red, to 1, green; None for no colour."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """Hold a label and its cells; `css` is the CSS class of the row."""

    label: str
    cells: Sequence[TableCell]
    css: str = ""
    is_bold: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Hold the names of the columns, beginning with the column of labels, and the rows."""

    heads: Sequence[str]
    rows: Sequence[TableRow]


def episode_table(
    head: str,
    rows: Iterable[EpisodeRow],
    text: Callable[[float], str] | None = None,
    bound: float | None = None,
) -> Table:
    """Return a table with a column for each episode.

    Args:
        head: Head of the column of labels.
        text: Formats a value; None for returns, which have a sign and two or three digits.
        bound: Largest possible return in absolute value, which has the deepest colour: green for
            gains and red for losses. None for no colours.
    """
    rows, table_rows, num_episodes = [*rows], [], 0
    digits = num_decimals(value for row in rows for value in row.values)
    for row in rows:
        halves, num_episodes = row.half_widths or [], max(num_episodes, len(row.values))
        formatted = text or partial(signed, digits=digits if halves else digits - 1)
        cells = [
            TableCell(
                formatted(value),
                "" if half is None else f"± {half_text(half, digits)}",
                None if bound is None else max(-1.0, min(1.0, value / bound)),
            )
            for value, half in zip_longest(row.values, halves)
        ]
        table_rows.append(TableRow(row.label, cells, "quiet" if row.is_reference else ""))
    return Table([head, *(f"episode {k}" for k in range(1, num_episodes + 1))], table_rows)


def sets_tables(
    evaluation: Mapping[str, Any], summary: Mapping[str, Any], bound: float
) -> dict[str, Table | str | None]:
    """Return the tables of an evaluation: returns by set with references, wins, returns by seat,
    and probes (actions that only gather information); and a text on trials that were cut short.
    """
    heldout = evaluation["heldout"]
    seats = heldout.get("parts", {}).get("seat", {})
    seat_rows = [score_row(f"seat {name}", part) for name, part in seats.items()]
    probes = probe_rows(evaluation)
    rows = [*set_rows(evaluation).values(), *reference_rows(summary)]
    return {
        "sets": episode_table("set", rows, bound=bound),
        # Summaries of earlier versions do not say whether episodes are won.
        "wins": _wins_table(heldout, evaluation.get("heldout_blind"))
        if summary["environment"].get("has_wins", True)
        else None,
        "seats": episode_table("seat", seat_rows, bound=bound) if len(seats) > 1 else None,
        "cut": _cut_short(evaluation),
        "probes": episode_table("set", probes.values(), percent) if probes else None,
    }


def _wins_table(heldout: Mapping[str, Any], blind: Mapping[str, Any] | None) -> Table | None:
    """Return the table of held-out tasks by episode: the shares won, drawn and lost, and the share
    that was won in this or an earlier episode.

    None if every episode was won, or none was, with memory and without it: then the environment's
    `wins_above` does not distinguish good play from bad.

    The share won so far never decreases, even without learning. So a last row shows it for the
    control `blind`, the same policy without earlier episodes in its context: such episodes are
    independent retries.
    """
    won, lost = heldout["won_by_episode"], heldout["lost_by_episode"]
    # Rounding would leave a share such as -2.8e-17, which is printed as "-0 %".
    drawn = [max(0.0, round(1.0 - win - loss, 9)) for win, loss in zip(won, lost, strict=True)]
    rows = [
        EpisodeRow("won", won),
        EpisodeRow("drawn", drawn),
        EpisodeRow("lost", lost),
        EpisodeRow("won at least once so far", heldout["won_within"]),
    ]
    shares = [*won]
    if blind:
        shares += blind["won_by_episode"]
        rows.append(EpisodeRow("the same by independent retries", blind["won_within"]))
    if {percent(share) for share in shares} in ({percent(0.0)}, {percent(1.0)}):
        return None
    return episode_table("share", rows, percent)


def _cut_short(evaluation: Mapping[str, Any]) -> str:
    """Return the shares of trials that were cut short, by set, as text."""
    cut = {name: score["cut_short"] for name, score in evaluation.items() if score.get("cut_short")}
    return ", ".join(f"{percent(share)} of {SETS[name].label}" for name, share in cut.items())


def environment_tables(summary: Mapping[str, Any]) -> list[dict[str, Table | str]]:
    """Return a labelled table for each environment of a mix: its returns on the evaluation sets,
    and its references.
    """
    tables: list[dict[str, Table | str]] = []
    for environment in environment_rows(summary):
        facts = environment.facts
        largest = max(abs(facts["min_return"] or 0.0), abs(facts["max_return"] or 0.0))
        rows = [*environment.sets.values(), *environment.references]
        # An environment that declares no bounds of its returns gets the bound 1.
        table = episode_table("set", rows, bound=largest / facts["units"] or 1.0)
        tables.append({"label": environment.label, "table": table})
    return tables


def family_tables(sets: Mapping[str, Any], bound: float) -> list[dict[str, Table | str | int]]:
    """Return the tables of held-out and train returns by family and by member.

    If there are many members, only those with the lowest and the highest returns are listed:
    `MOST_SHOWN` of them in "members", the rest in "others", which the page folds.
    """

    def table(head: str, returns: Mapping[str, Sequence[float]]) -> Table:
        rows = [EpisodeRow(*item) for item in returns.items()]
        return episode_table(head, rows, bound=bound)

    tables: list[dict[str, Table | str | int]] = []
    for name in ("heldout", "train"):
        if name not in sets:
            continue
        listed = _extreme(sets[name]["by_member"], MOST_MEMBERS)
        shown = _extreme(listed, MOST_SHOWN)
        others = {member: listed[member] for member in listed if member not in shown}
        tables.append(
            {
                "label": SETS[name].label,
                "families": table("family", sets[name]["by_family"]),
                "members": table("member", shown),
                "others": table("member", others),
                "num_members": len(sets[name]["by_member"]),
            }
        )
    return tables


def _extreme(returns: Mapping[str, Sequence[float]], number: int) -> Mapping[str, Sequence[float]]:
    """Return `number` members, in order of their returns in the last episode: half of them with the
    lowest and half with the highest returns. If there are no more members than that, return all of
    them in their own order.
    """
    if len(returns) <= number:
        return returns
    ordered = sorted(returns, key=lambda member: returns[member][-1])
    half = number // 2
    return {member: returns[member] for member in (*ordered[:half], *ordered[-half:])}


def diversity_table(diversity: Mapping[str, Any]) -> Table:
    """Return the table of trajectory diversity: entropy, and the number of trajectories."""
    distinct = EpisodeRow("distinct trajectories", diversity["distinct_by_episode"])
    return episode_table(
        "diversity of a task's trajectories", [diversity_row(diversity), distinct], "{:.3f}".format
    )


def harder_tables(harder: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of returns and of wins on a ladder of harder tasks."""
    won = [EpisodeRow(each["label"], each["score"]["won_by_episode"]) for each in harder["rungs"]]
    return {
        "table": episode_table("return", harder_rows(harder)),
        "won": episode_table("share won", won, percent),
    }


MEMBER_HEADS = ("member", "Elo rating", "groups", "episodes", "agent's return", "recent mean")
"""Heads of the table of opponents and their ratings."""
Standing = Mapping[str, Any]
"""A member's rating, the numbers of groups and episodes played against it, and the agent's returns
in them."""


def population_table(table: Mapping[str, Any], units: int) -> Table:
    """Return the table of the members (opponents or task variants) met in training, the best rated
    first.

    Args:
        table: Result of `League.table`. Versions of the policy that the league keeps are in bold.
        units: Number of units of an episode, by which returns are divided.
    """
    standings: Mapping[str, Standing] = table["standings"]
    ordered = sorted(standings.items(), key=lambda item: -item[1]["rating"])
    rows = [TableRow("the agent, at the end", [_number(f"{table['rating']:.0f}")])]
    for name, standing in ordered:
        if standing["groups"]:
            numbers = (
                f"{standing['rating']:.0f}",
                f"{standing['groups']:,}",
                f"{standing['episodes']:,}",
                signed(standing["total"] / max(1, standing["episodes"]) / units),
                signed(standing["recent"] / units),
            )
            is_kept = version_of(name) in table["rivals"]
            rows.append(TableRow(name, [_number(text) for text in numbers], is_bold=is_kept))
    return Table(MEMBER_HEADS, rows)


def _number(text: str) -> TableCell:
    """Return a number as a cell, with the sign `MINUS` in place of a hyphen."""
    return TableCell(text.replace("-", MINUS))
