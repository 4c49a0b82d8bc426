"""Return by set, by family and by member, as tables whose cells are coloured by their value."""

from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.report.charts.learning_curves import SETS
from mage_async.report.charts.number_format import percent, signed, words
from mage_async.report.page_table import PageTable, TableCell, TableRow

Rows = Mapping[str, Sequence[float]]


def sets_tables(
    evaluation: Mapping[str, Any], summary: Mapping[str, Any], bound: float
) -> dict[str, PageTable | str | None]:
    """Every set with its intervals beside the references, and what there is to say of them: wins,
    seats, trials cut short, probes.
    """
    num_episodes = len(next(iter(evaluation.values()))["return_by_episode"])
    rows = [_set_row(SETS[name][0], evaluation[name], bound) for name in SETS if name in evaluation]
    return {
        "sets": _table(num_episodes, "set", [*rows, *_references(summary, bound)]),
        "wins": _wins(evaluation, num_episodes),
        "seats": _seats(evaluation["heldout"], num_episodes, bound),
        "cut": _cut(evaluation),
        "probes": _probes(evaluation, num_episodes),
    }


def environment_tables(
    sets: Mapping[str, Any], environments: Mapping[str, Any]
) -> list[dict[str, PageTable | str]]:
    """Of a mix, a table for each environment: every set beside the environment's references."""
    return [
        {"label": _titled(name, known), "table": _environment_table(name, sets, known)}
        for name, known in environments.items()
    ]


def _environment_table(name: str, sets: Mapping[str, Any], known: Mapping[str, Any]) -> PageTable:
    facts = known["environment"]
    played = {each: sets[each]["parts"]["environment"][name] for each in SETS if each in sets}
    largest = max(abs(facts["min_return"] or 0.0), abs(facts["max_return"] or 0.0))
    bound = largest / facts["units"] or 1.0
    rows = [_set_row(SETS[each][0], part, bound) for each, part in played.items()]
    num_episodes = len(next(iter(played.values()))["return_by_episode"])
    return _table(num_episodes, "set", [*rows, *_references(known, bound)])


def _references(known: Mapping[str, Any], bound: float) -> list[TableRow]:
    """Known values; those that were sampled stand with their intervals."""
    errors = known.get("reference_ci95", {}).get("heldout", {})
    return [
        _between(words(name), values, errors[name], bound, "quiet")
        if name in errors
        else _row(words(name), values, bound, "quiet")
        for name, values in known.get("references", {}).get("heldout", {}).items()
    ]


def _titled(name: str, known: Mapping[str, Any]) -> str:
    return name if known["is_trained_on"] else f"{name}, never trained on"


def family_tables(sets: Mapping[str, Any], bound: float) -> list[dict[str, PageTable | str]]:
    """Held-out and train, by family and by member."""
    return [
        {
            "label": SETS[name][0],
            "families": _values(sets[name]["by_family"], "family", bound),
            "members": _values(sets[name]["by_member"], "member", bound),
        }
        for name in ("heldout", "train")
        if name in sets
    ]


def _values(rows: Rows, head: str, bound: float) -> PageTable:
    num_episodes = len(next(iter(rows.values())))
    return _table(num_episodes, head, [_row(name, values, bound) for name, values in rows.items()])


def _table(num_episodes: int, head: str, rows: Sequence[TableRow]) -> PageTable:
    return PageTable([head, *(f"episode {k}" for k in range(1, num_episodes + 1))], rows)


def _set_row(label: str, score: Mapping[str, Any], bound: float) -> TableRow:
    return _between(label, score["return_by_episode"], score["ci95_by_episode"], bound)


def _between(
    label: str, means: Sequence[float], halves: Sequence[float], bound: float, css: str = ""
) -> TableRow:
    pairs = zip(means, halves, strict=True)
    return TableRow(label, [_cell(mean, bound, f"± {half:.3f}", 3) for mean, half in pairs], css)


def _row(label: str, values: Sequence[float], bound: float, css: str = "") -> TableRow:
    return TableRow(label, [_cell(value, bound) for value in values], css)


def _cell(value: float, bound: float, beside: str = "", digits: int = 2) -> TableCell:
    """Green for gains and red for losses, the deeper the nearer to the bound of the possible."""
    return TableCell(signed(value, digits), beside, max(-1.0, min(1.0, value / bound)))


def _wins(evaluation: Mapping[str, Any], num_episodes: int) -> PageTable:
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
    return _table(num_episodes, "share", rows)


def _seats(heldout: Mapping[str, Any], num_episodes: int, bound: float) -> PageTable | None:
    """Return by seat, where there are several."""
    seats = heldout.get("parts", {}).get("seat", {})
    if len(seats) < 2:
        return None
    rows = [_set_row(f"seat {name}", part, bound) for name, part in seats.items()]
    return _table(num_episodes, "seat", rows)


def _cut(evaluation: Mapping[str, Any]) -> str:
    """Trials that did not fit into the engine's context, which count as lost."""
    cut = {name: score["cut_short"] for name, score in evaluation.items() if score.get("cut_short")}
    return ", ".join(f"{percent(share)} of {SETS[name][0]}" for name, share in cut.items())


def _shares(label: str, values: Sequence[float]) -> TableRow:
    return TableRow(label, [TableCell(percent(value)) for value in values])


def _probes(evaluation: Mapping[str, Any], num_episodes: int) -> PageTable | None:
    """Where the environment knows actions that only gather information."""
    probing = {name: score["probes_by_episode"] for name, score in evaluation.items()}
    if not any(map(any, probing.values())):
        return None
    rows = [
        _shares(SETS[name][0], shares)
        for name, shares in sorted(probing.items(), key=lambda item: list(SETS).index(item[0]))
    ]
    return _table(num_episodes, "set", rows)
