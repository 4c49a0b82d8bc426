"""Show a run as plain lines, or as a live panel (`panel.py`) if there is a terminal.

The supervisor passes on the events of its children. Nothing here waits, and no thread is started.
"""

import math
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console

from mage_async.config.schema import Config
from mage_async.results.metrics import INJECTIONS, returns_by_environment
from mage_async.results.run_directory import RunDirectory
from mage_async.trajectory import num_decimals
from mage_services.terminal.final_table import print_final
from mage_services.terminal.panel import LiveView
from mage_services.terminal.run_state import Event, RunState, permanent_line

EVERY_STEPS = 10
"""Plain lines show at least one step of each block of so many steps."""
EVERY_S = 5.0
"""Seconds after which plain lines show a step, even if fewer steps were trained."""
MOST_NUMBERS = 6
"""Largest number of episodes for which a plain line shows each return. For more episodes it shows
the first return, the last one and the mean."""
QUIET_S = 20.0
"""Seconds without a line about a step or a phase after which a line says what the run waits for."""


class View(Protocol):
    """Show a run to a person."""

    def event(self, process: str, event: Event) -> None:
        """Handle an event of a process; events of "supervisor" are about the other processes."""

    def line(self, text: str) -> None:
        """Print a line that stays."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the view, with the final table if there is a summary. Closing twice is allowed."""


def make_view(
    config: Config,
    run: RunDirectory,
    *,
    is_terminal: bool,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> View:
    """Return a panel for a terminal, and plain lines for anything else."""
    kind = LiveView if is_terminal else PlainView
    return kind(
        RunState(config, clock()), run, console or Console(highlight=False, emoji=False), clock
    )


class PlainView:
    """Print lines for logs, pipes and CI: one for each phase, each note and each evaluation during
    training (a point of the curve), and for some steps. Nothing is ever overwritten.

    Values are written `key=value`, so that they can be searched by grep.
    """

    def __init__(
        self, state: RunState, run: RunDirectory, console: Console, clock: Callable[[], float]
    ) -> None:
        self._state, self._run, self._console, self._clock = state, run, console, clock
        self._printed_step, self._printed_at = 0, state.began
        self._progress_at = state.began
        """Time at which a line last showed how far the run is."""
        self._num_points, self._notes = 0, list[str]()
        self._is_gate_explained = False
        config = state.config
        self.line(f"environment={config.environment.name} seed={config.seed} run_dir={run.root}")

    def event(self, process: str, event: Event) -> None:
        """Handle an event of a process, and print the lines that are due."""
        now, phase = self._clock(), self._state.phase
        self._state.take(process, event, now)
        if self._state.phase != phase:
            warm, origin = self._state.warm_start, ""
            if self._state.phase == "training" and "origin" in warm:
                origin = f" prepared_s={warm['prepared_s']:.1f} policy: {warm['origin']}"
            self.line(f"phase={self._state.phase.replace(' ', '_')}{origin}")
            if self._state.phase == "training":
                self.line(
                    f"a line follows every {EVERY_STEPS} steps, and for a step that ends "
                    f"{EVERY_S:g} s or more after the last line; metrics.jsonl has every step"
                )
            self._printed_step, self._printed_at, self._progress_at = 0, now, now
        if (text := permanent_line(process, event)) is not None:
            self.line(f"{process}: {text}")
        if "node" in event:
            self.line(f"{event['text']} is started on {event['node']}")
        self._print_news()
        if event["event"] in ("warm_start", "step"):
            self._print_progress(event, now)
        if now - self._progress_at >= QUIET_S and self._state.phase != "done":
            self._progress_at = now
            self.line(f"waiting: {self._state.waiting(now)}")

    def line(self, text: str) -> None:
        """Print a line with the time since the start."""
        seconds = self._clock() - self._state.began
        self._console.out(f"[{seconds:7.1f}s] {text}", highlight=False)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Print the final table, if there is a summary."""
        if summary is not None:
            print_final(self._console, summary, self._run.report)

    def _print_news(self) -> None:
        """Print each new note and each new point of the curve."""
        for note in self._state.notes:
            if note not in self._notes:
                self.line(f"note: {note}")
        self._notes = list(self._state.notes)
        for point in self._state.curve[self._num_points :]:
            returns = " ".join(f"{name}={_numbers(row)}" for name, row in point["sets"].items())
            self.line(f"curve version={point['version']} {returns}{_by_name(point)}")
        self._num_points = len(self._state.curve)

    def _print_progress(self, event: Event, now: float) -> None:
        """Print a line for a step of training or of the warm start, if it is time for one."""
        metrics = event.get("metrics", event)
        step, steps = metrics["step"], event.get("steps", self._state.config.learner.steps)
        is_due = (
            step // EVERY_STEPS != self._printed_step // EVERY_STEPS
            or now - self._printed_at >= EVERY_S
        )
        if is_due or step == steps:
            self._printed_step, self._printed_at, self._progress_at = step, now, now
            if event["event"] == "warm_start":
                # A ratio of losses (`Progress.gate`): a warm start with a gate continues until the
                # ratio has fallen to a bound. NaN until the ratio has been computed once.
                gate = f" gate={event['gate']:.2f}" if math.isfinite(event["gate"]) else ""
                if gate and not self._is_gate_explained:
                    self._is_gate_explained = True
                    self.line(
                        "gate: a ratio of losses: last episode over first episode or, with "
                        "win_stay, repeated actions over tried actions; if warm_start.gate "
                        "(win_stay: repeat_gate) is below 1.0, the warm start continues until the "
                        "ratio has fallen to it, at most to warm_start.max_steps (win_stay: "
                        "max_stable_steps), so the number of steps may change"
                    )
                left = self._state.seconds_left(now)
                # Fewer if the gate opens earlier.
                ends = "" if left is None else f" left_s={left:.0f}"
                self.line(f"warm_start step={step}/{steps} loss={event['loss']:.3f}{gate}{ends}")
            else:
                self.line(self._step_line(metrics))

    def _step_line(self, metrics: Event) -> str:
        """Return the line of a step of training."""
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
    """Return the returns in each environment of a mix, as `name=values`."""
    returns = point.get("environments", {})
    return "".join(f" {name}={_numbers(row)}" for name, row in returns.items())


def _numbers(values: list[float]) -> str:
    """Return values with a sign and their decimals, separated by commas. If there are more than
    `MOST_NUMBERS`, return the first, the last and the mean.
    """
    digits = num_decimals(values)
    if len(values) > MOST_NUMBERS:
        shown = values[0], values[-1], fmean(values)
        first, last, mean = (f"{value:+.{digits}f}" for value in shown)
        return f"{first}..{last},mean={mean}"
    return ",".join(f"{value:+.{digits}f}" for value in values)
