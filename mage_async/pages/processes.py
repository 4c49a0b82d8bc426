"""The processes of a run: which live, how each ended, and what each said last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from mage_async.pages.frame import Frame
from mage_async.pages.templating import fill
from mage_async.report.charts.stacked_bars import time_bars

Event = Mapping[str, Any]
MOST_NOTES = 100
_SAID = {"policy": "training", "evaluating": "plays the final sets"}
"""What some events say of the life of the process."""


@dataclass(slots=True)
class ProcessLife:
    """What the events say of one process."""

    name: str
    said: str = ""
    """The last it said of its life."""
    at: float = 0.0
    """When, in seconds since 1970."""
    num_starts: int = 0
    node: str = ""
    """Where it was last started, in a run on a cluster."""


@dataclass(slots=True)
class Lives:
    """All processes, and what happened to them, the latest first."""

    processes: dict[str, ProcessLife] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    """Epitaphs: processes that failed or were started again."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Time and sentence: epitaphs, faults and remarks."""

    @property
    def have_nodes(self) -> bool:
        """Whether the run is on a cluster."""
        return any(life.node for life in self.processes.values())


def lives_of(events: Sequence[Event]) -> Lives:
    """Put the events of a run together; of a resumed one all its lives."""
    lives = Lives()
    for event in events:
        _take(lives, event["process"], event)
    lives.notes.reverse()
    lives.ends.reverse()
    del lives.notes[MOST_NOTES:]
    return lives


def _take(lives: Lives, process: str, event: Event) -> None:
    at = event["at"]
    match event["event"]:
        case "started":
            life = lives.processes.setdefault(event["text"], ProcessLife(event["text"]))
            life.said, life.at, life.num_starts = "starting", at, life.num_starts + 1
            life.node = event.get("node", "")
        case "ready" | "done" | "failed" | "policy" | "evaluating" as said:
            life = lives.processes.setdefault(process, ProcessLife(process))
            life.said, life.at = _SAID.get(said, said), at
    match event["event"]:
        case "failed":
            lives.notes.append((at, f"{process}: {event['reason']}"))
        case "note":
            prefix = "" if process == "supervisor" else f"{process}: "
            lives.notes.append((at, prefix + event["text"]))
        case "restarting":
            lives.ends.append(event["text"])
            lives.notes.append((at, event["text"]))


def state_of(is_alive: bool | None, is_whole: bool, lives: Lives) -> str:
    """What a run does, in a word or two; `is_alive` is None where that cannot be known here."""
    if is_alive:
        said = {life.said for life in lives.processes.values()}
        return "starting" if said == {"starting"} else "running"
    if is_whole:
        return "finished"
    return "stopped" if is_alive is False else "not finished"


def processes_page(
    frame: Frame,
    state: str,
    lives: Lives,
    blocked_s: Mapping[str, Mapping[str, float]],
    logs: Mapping[str, str],
    now: float,
) -> Markup:
    """Lives, waits, epitaphs, and the last lines of each log. `now` in seconds since 1970."""
    return fill(
        "processes.html",
        frame=frame,
        state=state,
        lives=lives,
        bars=time_bars(blocked_s),
        logs=logs,
        ago=lambda at: ago(now - at),
    )


def ago(seconds: float) -> str:
    """How long ago, roughly."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"
