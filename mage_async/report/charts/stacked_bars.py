"""Bars of parts of a whole: where the time of each process went, what became of the trials, and how
old the trained tokens were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mage_async.report.charts.number_format import duration, percent, words

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


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar. Parts too narrow for their words say them on hovering."""

    text: str
    title: str
    share: float
    css: str
    age: float | None = None
    """From 0, fresh, to 1, old: the colour of parts that are ages."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar; the shares of its parts sum to 1."""

    label: str
    parts: Sequence[BarPart]
    beside: str = ""


def time_bars(seconds_by_process: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """A bar a process; the states of each sum to 100 % of its life."""
    return [_process(name, seconds) for name, seconds in seconds_by_process.items()]


def fate_bar(trials: Mapping[str, int]) -> Bar:
    """Granted = trained + dropped + in flight."""
    return Bar("", _parts({name: float(trials[name]) for name in FATES}, FATES))


def age_bar(label: str, shares: Mapping[int, float]) -> Bar:
    """The share of tokens of each age, in steps."""
    return Bar(label, [_age(age, share) for age, share in shares.items()])


def _age(age: int, share: float) -> BarPart:
    text = f"{age}: {percent(share)}" if share >= 0.14 else f"{age}" if share >= 0.04 else ""
    return BarPart(text, f"{age} steps: {percent(share)}", share, "age", min(age, 8) / 8)


def _process(name: str, seconds: Mapping[str, float]) -> Bar:
    ordered = dict(sorted(seconds.items(), key=lambda item: (_place(item[0]), -item[1])))
    return Bar(name, _parts(ordered, STATES), duration(sum(seconds.values())))


def _place(state: str) -> int:
    """The same order in every bar, so that bars can be compared."""
    return list(STATES).index(state) if state in STATES else len(STATES)


def _parts(sizes: Mapping[str, float], colours: Mapping[str, str]) -> list[BarPart]:
    total = sum(sizes.values()) or 1.0
    shares = {name: size / total for name, size in sizes.items() if size > 0}
    return [_part(name, share, colours.get(name, "other")) for name, share in shares.items()]


def _part(name: str, share: float, css: str) -> BarPart:
    said = f"{words(name)} {percent(share)}"
    text = said if share >= 0.14 else percent(share) if share >= 0.07 else ""
    return BarPart(text, said, share, css)
