"""Where the time of each process went, and what became of the trials, as parts of the whole."""

from collections.abc import Mapping

from mage_async.report.markup import Markup, join, tag
from mage_async.report.numbers import duration, percent, words

STATES = {
    "training": "work1",
    "engine": "work1",
    "environment": "work2",
    "publishing": "work3",
    "checkpoint": "work4",
    "parity": "work5",
    "playing": "work1",
    "loading": "work4",
    "preparing": "work4",
    "journal sync": "work4",
    "view": "work3",
    "ending": "work5",
    "batch not full": "wait1",
    "no grant": "wait1",
    "no fresh weights": "wait2",
    "no version": "wait1",
    "peer gone": "wait2",
    "processes": "wait1",
    "process starting": "wait2",
    "back-off": "wait2",
}
"""Colours of known states: work is coloured, waiting is warm, what is new is grey."""
FATES = {"trained": "work1", "dropped": "bad", "in_flight": "wait2"}


def time_shares(blocked_s: Mapping[str, Mapping[str, float]]) -> Markup:
    """A bar a process; the states of each sum to 100 % of its life."""
    if not blocked_s:
        return tag("p", "known when a run has ended well", cls="note")
    rows = [_process(name, blocked_s[name]) for name in blocked_s]
    return tag("div", *rows, cls="bars")


def trial_fates(
    trials: Mapping[str, int], dropped_by_reason: Mapping[str, int], granted_again: int
) -> Markup:
    """Granted = trained + dropped + in flight, as a bar and as a sum."""
    if not trials:
        return tag("p", "known when a run has ended well", cls="note")
    parts = {name: float(trials[name]) for name in FATES}
    total = sum(trials[name] for name in FATES)
    said = (
        f"{trials['granted']:,} granted {'=' if total == trials['granted'] else '≠'} "
        + " + ".join(f"{trials[name]:,} {words(name)}" for name in FATES)
    )
    also = (
        f"{trials['acknowledged']:,} acknowledged, {trials['duplicate']:,} duplicate;"
        f" groups granted again: {granted_again}"
    )
    reasons = [
        tag("li", f"{count} × {reason}") for reason, count in sorted(dropped_by_reason.items())
    ]
    return join(
        tag("div", _bar(parts, FATES), cls="bars"),
        tag("p", tag("b", said)),
        tag("p", also, cls="note"),
        tag("ul", *reasons) if reasons else None,
    )


def _process(name: str, seconds: Mapping[str, float]) -> Markup:
    ordered = dict(sorted(seconds.items(), key=lambda item: (_place(item[0]), -item[1])))
    total = tag("span", duration(sum(seconds.values())), cls="note")
    return tag("div", tag("div", name, total, cls="who"), _bar(ordered, STATES), cls="row")


def _place(state: str) -> int:
    """The same order in every bar, so that bars can be compared."""
    return list(STATES).index(state) if state in STATES else len(STATES)


def _bar(parts: Mapping[str, float], colours: Mapping[str, str]) -> Markup:
    total = sum(parts.values()) or 1.0
    shown = {name: part / total for name, part in parts.items() if part > 0}
    return tag("div", *(_part(name, share, colours) for name, share in shown.items()), cls="bar")


def _part(name: str, share: float, colours: Mapping[str, str]) -> Markup:
    """Parts too narrow for their words say them on hovering."""
    said = f"{words(name)} {percent(share)}"
    text = said if share >= 0.14 else percent(share) if share >= 0.07 else ""
    css = f"part {colours.get(name, 'other')}"
    return tag("div", tag("span", text), cls=css, title=said, style=f"flex:{share:.4f}")
