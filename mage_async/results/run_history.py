"""What happened to the processes of a run, by its `events.jsonl`: states, restarts, and notes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
"""A line of the run's `events.jsonl`."""
MAX_NOTES = 100
"""Notes that a history keeps, the latest ones."""
STATES = {
    "started": "starting",
    "ready": "ready",
    "policy": "training",
    "evaluating": "plays the final sets",
    "done": "done",
    "failed": "failed",
}
"""States of a process by the event that begins them."""


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
        kind, process, at = event["event"], event["process"], event["at"]
        if kind in STATES:
            # The supervisor records the start of another process, and names it in the text.
            name = event["text"] if kind == "started" else process
            life = history.processes.setdefault(name, ProcessLife(name))
            life.state, life.at = STATES[kind], at
        if kind == "started":
            life.num_starts, life.node = life.num_starts + 1, event.get("node", "")
        elif kind == "failed":
            history.notes.append((at, f"{process}: {event['reason']}"))
        elif kind == "note":
            prefix = "" if process == "supervisor" else f"{process}: "
            history.notes.append((at, prefix + event["text"]))
        elif kind == "restarting":
            history.restarts.append(event["text"])
            history.notes.append((at, event["text"]))
    history.notes.reverse()
    history.restarts.reverse()
    del history.notes[MAX_NOTES:]
    return history


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
