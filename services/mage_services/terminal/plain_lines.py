"""A run as plain lines: one per phase, curve point, note and, now and then, step.

Values are written `key=value`, to be grepped.
"""

import math
from collections.abc import Callable
from typing import Any

from rich.console import Console

from mage_async.results.metrics import INJECTIONS, returns_by_environment
from mage_async.results.run_directory import RunDirectory
from mage_services.terminal.final_table import print_final
from mage_services.terminal.run_state import Event, RunState, fact

EVERY_STEPS = 10
EVERY_S = 5.0


class PlainView:
    """Lines for logs, pipes and CI. Nothing is ever overwritten."""

    def __init__(
        self, state: RunState, run: RunDirectory, console: Console, clock: Callable[[], float]
    ) -> None:
        self._state, self._run, self._console, self._clock = state, run, console, clock
        self._said_step, self._said_at = 0, state.began
        self._num_points, self._notes = 0, list[str]()
        config = state.config
        self.line(f"environment={config.environment.name} seed={config.seed} run_dir={run.root}")

    def event(self, process: str, event: Event) -> None:
        """Take a status line of a process, and say what is worth a line."""
        now, phase = self._clock(), self._state.phase
        self._state.take(process, event, now)
        if self._state.phase != phase:
            self.line(f"phase={self._state.phase.replace(' ', '_')}{self._origin()}")
            self._said_step, self._said_at = 0, now
        if (text := fact(process, event)) is not None:
            self.line(f"{process}: {text}")
        if "node" in event:
            self.line(f"{event['text']} is started on {event['node']}")
        self._say_news()
        if event["event"] in ("warm_start", "step"):
            self._progress(event, now)

    def line(self, text: str) -> None:
        """Say something, with the time."""
        seconds = self._clock() - self._state.began
        self._console.out(f"[{seconds:7.1f}s] {text}", highlight=False)

    def close(self, summary: dict[str, Any] | None) -> None:
        """End with the table of what was reached, where that is known."""
        if summary is not None:
            print_final(self._console, summary, self._run.report)

    def _origin(self) -> str:
        warm = self._state.warm_start
        if self._state.phase != "training" or "origin" not in warm:
            return ""
        return f" policy={warm['origin'].replace(' ', '_')} warm_start_s={warm['warm_start_s']:.1f}"

    def _say_news(self) -> None:
        """Each point of the curve and each note once."""
        for note in self._state.notes:
            if note not in self._notes:
                self.line(f"note: {note}")
        self._notes = list(self._state.notes)
        for point in self._state.curve[self._num_points :]:
            returns = " ".join(f"{name}={_numbers(row)}" for name, row in point["sets"].items())
            self.line(f"curve version={point['version']} {returns}{_by_name(point)}")
        self._num_points = len(self._state.curve)

    def _progress(self, event: Event, now: float) -> None:
        metrics = event.get("metrics", event)
        step, steps = metrics["step"], event.get("steps", self._state.config.learner.steps)
        is_due = (
            step // EVERY_STEPS != self._said_step // EVERY_STEPS or now - self._said_at >= EVERY_S
        )
        if is_due or step == steps:
            self._said_step, self._said_at = step, now
            self.line(self._warm(event) if event["event"] == "warm_start" else self._step(metrics))

    def _warm(self, event: Event) -> str:
        at = f"{event['step']}/{event['steps']}"
        gate = f" gate={event['gate']:.2f}" if math.isfinite(event["gate"]) else ""
        return f"warm_start step={at} loss={event['loss']:.3f}{gate}"

    def _step(self, metrics: Event) -> str:
        left = self._state.seconds_left(self._clock())
        return (
            f"step={metrics['step']}/{self._state.config.learner.steps}"
            f" return={_numbers(metrics['return_by_episode'])}"
            f"{_by_name({'environments': returns_by_environment(metrics)})}"
            f" trials_per_s={metrics['trials_per_s']:.1f}"
            f" tokens_per_s={metrics['generated_tokens_per_s']:.0f}"
            f" staleness_mean={metrics['staleness_mean']:.2f}"
            f" staleness_max={metrics['staleness_max']:.0f}"
            f" prefix_hit_rate={metrics['prefix_hit_rate']:.3f}"
            f" entropy={metrics['entropy']:.3f}"
            f" valid={metrics['valid_action_share']:.1%}"
            f" invalid={metrics['invalid_actions_per_trial']:.2f}"
            + "".join(f" {name}={metrics[name]}" for name in INJECTIONS.values() if name in metrics)
            + ("" if left is None else f" left_s={left:.0f}")
        )


def _by_name(point: Event) -> str:
    """Returns of each environment of a mix, held-out ones in a point of the curve."""
    returns = point.get("environments", {})
    return "".join(f" {name}={_numbers(row)}" for name, row in returns.items())


def _numbers(values: list[float]) -> str:
    return ",".join(f"{value:+.3f}" for value in values)
