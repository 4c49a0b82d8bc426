"""The page of a run's processes: state, restarts, where the time went, and the ends of the logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
"""A line of the run's `events.jsonl`."""
MAX_NOTES = 100
_STATES = {"policy": "training", "evaluating": "plays the final sets"}
"""States of a process by the event that begins them; others have the name of the event."""


@dataclass(slots=True)
class ProcessLife:
    """The last state of one process."""

    name: str
    state: str = ""
    at: float = 0.0
    """When the state began, seconds since 1970."""
    num_starts: int = 0
    node: str = ""
    """The node of its last start, in a run on a cluster."""


@dataclass(slots=True)
class RunHistory:
    """What happened to the processes of a run."""

    processes: dict[str, ProcessLife] = field(default_factory=dict)
    restarts: list[str] = field(default_factory=list)
    """Sentences on processes that failed and were started again, the latest first."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Times and sentences of restarts, faults and remarks, the latest first."""

    @property
    def has_nodes(self) -> bool:
        """Whether the run is on a cluster."""
        return any(life.node for life in self.processes.values())


def run_history(events: Sequence[Event]) -> RunHistory:
    """Collect the events of a run, over all its resumptions."""
    history = RunHistory()
    for event in events:
        _add_event(history, event["process"], event)
    history.notes.reverse()
    history.restarts.reverse()
    del history.notes[MAX_NOTES:]
    return history


def _add_event(history: RunHistory, process: str, event: Event) -> None:
    at = event["at"]
    match event["event"]:
        case "started":
            life = history.processes.setdefault(event["text"], ProcessLife(event["text"]))
            life.state, life.at, life.num_starts = "starting", at, life.num_starts + 1
            life.node = event.get("node", "")
        case "ready" | "done" | "failed" | "policy" | "evaluating" as name:
            life = history.processes.setdefault(process, ProcessLife(process))
            life.state, life.at = _STATES.get(name, name), at
    match event["event"]:
        case "failed":
            history.notes.append((at, f"{process}: {event['reason']}"))
        case "note":
            prefix = "" if process == "supervisor" else f"{process}: "
            history.notes.append((at, prefix + event["text"]))
        case "restarting":
            history.restarts.append(event["text"])
            history.notes.append((at, event["text"]))


def run_state(is_alive: bool | None, is_complete: bool, history: RunHistory) -> str:
    """Return the state of a run in a word or two.

    Args:
        is_alive: whether a process runs it; `None` if that cannot be known on this machine.
        is_complete: whether its summary says that it came to its end.
    """
    if is_alive:
        states = {life.state for life in history.processes.values()}
        return "starting" if states == {"starting"} else "running"
    if is_complete:
        return "finished"
    return "stopped" if is_alive is False else "not finished"
