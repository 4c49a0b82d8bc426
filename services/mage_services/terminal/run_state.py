"""Collect the state of a run that is going on from the status events of its processes."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from mage_async.config.schema import Config
from mage_async.errors import MAKE_ROOM
from mage_async.results.metrics import injections_by_source
from mage_async.results.progress import (
    PLAYED_AGAIN,
    Progress,
    seconds_left,
    sentence,
    time_in_words,
)

Event = dict[str, Any]
Phase = Literal["starting", "warm start", "training", "evaluating", "done"]
WINDOW_S = 10.0
"""Seconds of the window over which `RunState.shares` takes the times of processes."""
MAX_STEPS_KEPT = 2000
"""Largest number of steps whose metrics are kept, the newest ones."""
MAX_NOTES = 50
"""Largest number of notes that are kept, the newest ones."""


def permanent_line(process: str, event: Event) -> str | None:
    """Return the text of an event that stays in the terminal as a line of its own, or None.

    Findings of the doctor do, and facts such as the device of a process. All actors have the same
    facts, so only the first one prints them.
    """
    is_first = not process.startswith("actor-") or process == "actor-0"
    is_shown = event["event"] == "finding" or (event["event"] == "fact" and is_first)
    return event["text"] if is_shown else None


@dataclass(slots=True)
class RunState:
    """Hold all that a terminal shows of a run; `take` updates it.

    Times are in seconds of the clock from which `began` and every `now` are read.
    """

    config: Config
    began: float
    phase: Phase = "starting"
    phase_began: float = 0.0
    warm_start: Event = field(default_factory=dict)
    """Keys `step`, `steps`, `loss` and `gate` (`Progress` in `mage_async/policy/warm_start.py`);
    later `origin`, where the weights came from, and `prepared_s`."""
    steps: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_STEPS_KEPT))
    """Metrics of each step."""
    curve: list[Event] = field(default_factory=list)
    """Points of the curve: `version`, and `sets` with the return of each episode by name."""
    evaluating: int | None = None
    """The version whose final evaluation is being played."""
    evaluation_began: float = 0.0
    """When the final evaluation began. The phase "evaluating" may begin earlier, with points of the
    curve that are still to be played."""
    final_trials: tuple[int, int] | None = None
    """Number of trials of the final sets that are played, and of all; None before the first
    report."""
    trials: dict[str, int] = field(default_factory=dict)
    """Number of trials that were granted, trained, dropped, or are in flight, by these names."""
    processes: dict[str, str] = field(default_factory=dict)
    """What each process did last, in a few words, by the process's name."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Nodes of a cluster on which processes run, by the process's name."""
    progress: Progress | None = None
    """Progress towards the next step; None while the learner prepares the policy."""
    notes: list[str] = field(default_factory=list)
    """Restarts, faults and remarks, each once, oldest first."""
    full_disk: str = ""
    """The note that a disk is full, if no step was trained since it came."""
    _blocked: deque[tuple[float, dict[str, dict[str, float]]]] = field(default_factory=deque)
    """Times of the events within `WINDOW_S` that had `blocked_s`, each with that value: seconds so
    far by process and state.
    """

    def __post_init__(self) -> None:
        self.phase_began = self.began

    def take(self, process: str, event: Event, now: float) -> None:
        """Update the state by one event of a process."""
        match event["event"]:
            case "warm_start":
                self.warm_start |= {key: event[key] for key in ("step", "steps", "loss", "gate")}
                self._enter("warm start", now)
            case "policy":
                self.warm_start |= {key: event[key] for key in ("origin", "prepared_s")}
                self._enter("training", now)
            case "step":
                self._add_step(event["metrics"])
                self._record_view(event, now)
            case "view":
                self._record_view(event, now)
            case "curve":
                self.curve = [point for point in self.curve if point["version"] < event["version"]]
                self.curve.append(event)
                self.processes[process] = f"measured version {event['version']}"
            case "evaluating":
                self.evaluating, self.evaluation_began = event["version"], now
                self.final_trials = None  # those of an evaluator that was restarted
                self.processes[process] = "plays the final sets and their controls"
            case "final_trials":
                self.final_trials = played, of = event["played"], event["of"]
                what = f"has played {played} of {of} trials of the final sets and their controls"
                self.processes[process] = what
            case "started":
                # `text` is the name of the started process.
                self.processes[event["text"]] = "starting"
                if "node" in event:
                    self.nodes[event["text"]] = event["node"]
                if event["text"] == "learner":  # a restarted learner prepares the policy again
                    self._enter("starting", now)
                    self.evaluating, self.final_trials, self.progress = None, None, None
            case "ready" | "done":
                self.processes[process] = event["event"]
            case "failed":
                self.processes[process] = "failed"
                self._add_note(f"{process}: {event['reason']}")
            case "note" | "restarting":
                prefix = "" if process == "supervisor" else f"{process}: "
                self._add_note(prefix + event["text"])
        self._follow(now)

    @property
    def step(self) -> int:
        """Number of steps trained so far."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def last(self) -> Event:
        """Metrics of the last step; empty before the first."""
        return self.steps[-1] if self.steps else {}

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until this phase ends at its present pace; None if that is not
        known.
        """
        if self.phase == "warm start" and (done := self.warm_start["step"]):
            return float((now - self.phase_began) / done * max(0, self.warm_start["steps"] - done))
        if self.phase == "training":
            return seconds_left(list(self.steps), self.config.learner.steps)
        played, of = self.final_trials or (0, 0)
        if self.phase == "evaluating" and played:
            return (now - self.evaluation_began) / played * (of - played)
        return None

    def waiting(self, now: float) -> str:
        """Return one line that says what the run waits for, and how far it has come."""
        if self.phase == "training" and self.progress is not None:
            text = sentence(self.progress)
            if self.full_disk:  # "" again once a step was trained
                text += f"; {self.full_disk}"
            # The learner counts the trials that are played again; notes of actors have the faults.
            faults = [note for note in self.notes if PLAYED_AGAIN in note]
            if faults and self.progress.played_again:
                text += f"; a fault: {faults[-1]}"
            return text
        states = ", ".join(f"{name} {what}" for name, what in self.processes.items())
        doing = states or "no process is started yet"  # Ray places each on a node first
        done = ""
        if self.phase == "warm start":
            done = f" {self.warm_start['step']}/{self.warm_start['steps']}"
        return f"{self.phase}{done}, for {time_in_words(now - self.phase_began)}: {doing}"

    def returns(self, episode: int) -> list[float]:
        """Return the mean return of an episode in each step's batch; empty for an episode that only
        evaluations play.
        """
        rows = (metrics["return_by_episode"] for metrics in self.steps)
        return [row[episode] for row in rows if episode < len(row)]

    def injections(self) -> dict[str, int]:
        """Count the observations that contained the text of a special token, by their source."""
        return injections_by_source(self.steps, self.config.environment.name)

    def shares(self) -> dict[str, dict[str, float]]:
        """Return, for each process, the shares of the last `WINDOW_S` that it spent in each state,
        the largest first.
        """
        if not self._blocked:
            return {}
        (_, old), (_, new) = self._blocked[0], self._blocked[-1]
        return {name: _shares(old.get(name, {}), new[name]) for name in new}

    def _add_step(self, metrics: Event) -> None:
        """Add the metrics of a step."""
        self.full_disk = ""
        while self.steps and self.steps[-1]["step"] >= metrics["step"]:
            self.steps.pop()  # a restarted learner trains the steps since its checkpoint again
        self.steps.append(metrics)

    def _record_view(self, event: Event, now: float) -> None:
        """Record the counts, progress, times and faults that the learner sends with every step, and
        between steps.
        """
        self.trials = event["trials"]
        if "progress" in event:
            self.progress = Progress(**event["progress"])
        self._blocked.append((now, event["blocked_s"]))
        while self._blocked[0][0] < now - WINDOW_S:
            self._blocked.popleft()
        for fault in event["faults"]:
            self._add_note(fault)

    def _follow(self, now: float) -> None:
        """Enter the phases that no process announces."""
        doing = self.processes
        if doing and all(what == "done" for what in doing.values()):
            self._enter("done", now)
        elif doing.get("learner") == "done" or self.evaluating is not None:
            self._enter("evaluating", now)

    def _enter(self, phase: Phase, now: float) -> None:
        """Begin a phase, unless the run is in it already."""
        if phase != self.phase:
            self.phase, self.phase_began = phase, now

    def _add_note(self, note: str) -> None:
        """Keep a note, unless it was kept before."""
        if MAKE_ROOM in note:
            self.full_disk = note
        if note not in self.notes:
            self.notes = [*self.notes[1 - MAX_NOTES :], note]


def _shares(old: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """Return the shares of states in the seconds since `old`, the largest first.

    `old` and `new` are totals by state. If a total has become smaller (the process was restarted),
    or no total has grown (`old` and `new` are of the same event), all of `new` counts.
    """
    spent = {state: seconds - old.get(state, 0.0) for state, seconds in new.items()}
    if min(spent.values(), default=0.0) < 0 or sum(spent.values()) <= 0:
        spent = dict(new)
    total = sum(spent.values()) or 1.0
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return {state: seconds / total for state, seconds in ordered if seconds > 0}
