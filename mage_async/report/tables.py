"""Return by set, by family and by member, as tables whose cells are coloured by their value."""

from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.report.charts.learning_curves import SETS
from mage_async.report.markup import Markup, join, tag
from mage_async.report.numbers import percent, signed, words

Rows = Mapping[str, Sequence[float]]


def sets_table(
    evaluation: Mapping[str, Any], references: Mapping[str, Rows], bound: float
) -> Markup:
    """Every set with its intervals, its probes where there are any, and the references."""
    num_episodes = len(next(iter(evaluation.values()))["return_by_episode"])
    rows = [_set_row(SETS[name][0], evaluation[name], bound) for name in SETS if name in evaluation]
    known = [
        _row(words(name), values, bound, css="quiet")
        for name, values in references.get("heldout", {}).items()
    ]
    return join(
        _table(num_episodes, "set", [*rows, *known]),
        _wins(evaluation, num_episodes),
        _seats(evaluation["heldout"], num_episodes, bound),
        _cut(evaluation),
        _probes(evaluation, num_episodes),
    )


def family_tables(sets: Mapping[str, Any], bound: float) -> Markup:
    """Held-out and train by family, and folded by member."""
    parts: list[Markup] = []
    for name in ("heldout", "train"):
        if name in sets:
            label = SETS[name][0]
            families = _values(sets[name]["by_family"], "family", bound)
            members = _values(sets[name]["by_member"], "member", bound)
            count = len(sets[name]["by_member"])
            folded = tag("details", tag("summary", f"{count} {label} members"), members)
            parts.append(tag("div", tag("h3", label), families, folded))
    return tag("div", *parts, cls="pair")


def _values(rows: Rows, head: str, bound: float) -> Markup:
    num_episodes = len(next(iter(rows.values())))
    return _table(num_episodes, head, [_row(name, values, bound) for name, values in rows.items()])


def _table(num_episodes: int, head: str, rows: Sequence[Markup]) -> Markup:
    names = [tag("th", f"episode {k}") for k in range(1, num_episodes + 1)]
    top = tag("tr", tag("th", head), *names)
    table = tag("table", tag("thead", top), tag("tbody", *rows))
    return tag("div", table, cls="scroll")


def _set_row(label: str, score: Mapping[str, Any], bound: float) -> Markup:
    pairs = zip(score["return_by_episode"], score["ci95_by_episode"], strict=True)
    cells = [_cell(value, bound, f"± {half:.3f}", 3) for value, half in pairs]
    return tag("tr", tag("th", label), *cells)


def _row(label: str, values: Sequence[float], bound: float, css: str | None = None) -> Markup:
    return tag("tr", tag("th", label), *(_cell(value, bound) for value in values), cls=css)


def _cell(value: float, bound: float, beside: str = "", digits: int = 2) -> Markup:
    """Green for gains and red for losses, the deeper the nearer to the bound of the possible."""
    strength = min(1.0, abs(value) / bound)
    css = "number gain" if value >= 0 else "number loss"
    half = tag("small", f" {beside}") if beside else None
    return tag("td", signed(value, digits), half, cls=css, style=f"--depth:{strength:.2f}")


def _wins(evaluation: Mapping[str, Any], num_episodes: int) -> Markup:
    """Held-out tasks won: in the episode itself, and in any so far, which can only grow; beside it
    what the same policy reaches without its earlier episodes, by independent retries.
    """
    heldout, blind = evaluation["heldout"], evaluation.get("heldout_blind")
    won, lost = heldout["won_by_episode"], heldout["lost_by_episode"]
    shares = {
        "won": won,
        "drawn": [1.0 - one - other for one, other in zip(won, lost, strict=True)],
        "lost": lost,
        "won at least once so far": heldout["won_within"],
        **({"the same by independent retries": blind["won_within"]} if blind else {}),
    }
    rows = [_shares(label, values) for label, values in shares.items()]
    return join(tag("h3", "held-out tasks won and lost"), _table(num_episodes, "share", rows))


def _seats(heldout: Mapping[str, Any], num_episodes: int, bound: float) -> Markup | None:
    """Return by seat, where there are several."""
    seats = heldout.get("parts", {}).get("seat", {})
    if len(seats) < 2:
        return None
    rows = [_set_row(f"seat {name}", part, bound) for name, part in seats.items()]
    return join(tag("h3", "held-out, by seat"), _table(num_episodes, "seat", rows))


def _cut(evaluation: Mapping[str, Any]) -> Markup | None:
    """Trials that did not fit into the engine's context, which count as lost."""
    cut = {name: score["cut_short"] for name, score in evaluation.items() if score.get("cut_short")}
    if not cut:
        return None
    said = ", ".join(f"{percent(share)} of {SETS[name][0]}" for name, share in cut.items())
    text = f"Outgrew the engine's context, and count the least a task can pay from there: {said}."
    return tag("p", text, cls="note")


def _shares(label: str, values: Sequence[float]) -> Markup:
    cells = [tag("td", percent(value), cls="number") for value in values]
    return tag("tr", tag("th", label), *cells)


def _probes(evaluation: Mapping[str, Any], num_episodes: int) -> Markup | None:
    """Where the environment knows actions that only gather information."""
    probing = {name: score["probes_by_episode"] for name, score in evaluation.items()}
    if not any(map(any, probing.values())):
        return None
    rows = [
        _shares(SETS[name][0], shares)
        for name, shares in sorted(probing.items(), key=lambda item: list(SETS).index(item[0]))
    ]
    title = tag("h3", "probes: share of actions that only gather information")
    return join(title, _table(num_episodes, "set", rows))
