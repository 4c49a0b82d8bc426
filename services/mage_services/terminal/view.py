"""What the terminal shows of a run: a live panel, or plain lines where there is no terminal.

Fed by the supervisor with the status lines of its children. Nothing here waits, and no thread is
started: the panel is drawn anew when an event comes, at most `MAX_FRAMES_PER_S` times a second.
"""

import atexit
import time
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from mage_async.config.schema import Config
from mage_async.results.run_directory import RunDirectory
from mage_services.terminal.final_table import print_final
from mage_services.terminal.panel import panel, panel_width
from mage_services.terminal.plain_lines import PlainView
from mage_services.terminal.run_state import Event, RunState, fact

MAX_FRAMES_PER_S = 5.0


class View(Protocol):
    """Shows a run to a person."""

    def event(self, process: str, event: Event) -> None:
        """Take one status line of a process; "supervisor" speaks of the processes themselves."""
        ...

    def line(self, text: str) -> None:
        """Say a sentence that stays."""
        ...

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the view, with the final table where there is a summary. Twice is no error."""
        ...


def make_view(
    config: Config,
    run: RunDirectory,
    *,
    is_terminal: bool,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> View:
    """The view that suits where it is shown."""
    console = console or Console(highlight=False)
    state = RunState(config, clock())
    if is_terminal:
        return LiveView(state, run, console, clock)
    return PlainView(state, run, console, clock)


class LiveView:
    """A panel that is drawn over itself; the cursor it hides comes back, whatever happens."""

    def __init__(
        self, state: RunState, run: RunDirectory, console: Console, clock: Callable[[], float]
    ) -> None:
        self._state, self._run, self._console, self._clock = state, run, console, clock
        self._drawn_at = -1.0
        self._is_closed = False
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._panel)
        atexit.register(self._live.stop)  # in case nobody closes the view

    def event(self, process: str, event: Event) -> None:
        """Take a status line of a process, and draw if it is time to."""
        now = self._clock()
        self._state.take(process, event, now)
        if (text := fact(process, event)) is not None:
            self.line(f"{process}: {text}")
        if not self._is_closed and now - self._drawn_at >= 1 / MAX_FRAMES_PER_S:
            self._drawn_at = now
            self._live.start()
            self._live.refresh()

    def line(self, text: str) -> None:
        """Say a sentence above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Leave the panel as it was last, or the final table in its place."""
        was_closed, self._is_closed = self._is_closed, True
        self._live.transient = summary is not None
        self._live.stop()
        atexit.unregister(self._live.stop)
        if summary is not None and not was_closed:
            print_final(self._console, summary, self._run.report)

    def _panel(self) -> Any:
        return panel(self._state, self._run, self._clock(), panel_width(self._console.width))
