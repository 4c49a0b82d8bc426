"""What happens to the processes of a run, written down for those who look at the run from outside.

`events.jsonl` grows by a line whenever a process starts, ends, fails or remarks something; where
the time goes is in `times.json`, written anew at most once in `TIMES_S`.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from mage_async.results.run_directory import RunDirectory
from mage_services.processes.json_lines import append_lines
from mage_services.terminal.view import View

TIMES_S = 1.0
KEPT = {"started", "ready", "done", "failed", "restarting", "note", "policy", "evaluating"}
_CONTENT = ("event", "text", "reason", "version", "node")
Event = dict[str, Any]


class RecordedView:
    """A view of a run that is also written down; a disk that takes no more is said once."""

    def __init__(
        self, view: View, run: RunDirectory, clock: Callable[[], float] = time.time
    ) -> None:
        self._view, self._run, self._clock = view, run, clock
        self._told: set[str] = set()
        """Faults that a learner has named; it repeats the latest."""
        self._times_at = 0.0
        self._can_write = True

    def event(self, process: str, event: Event) -> None:
        """Take one status line of a process."""
        if self._can_write:
            try:
                self._record(process, event)
            except OSError as error:
                self._can_write = False
                self.line(f"{self._run.events} cannot be written: {error.strerror}")
        self._view.event(process, event)

    def line(self, text: str) -> None:
        """Say a sentence that stays."""
        self._view.line(text)

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the view."""
        self._view.close(summary)

    def _record(self, process: str, event: Event) -> None:
        whose = {"at": self._clock(), "process": process}
        if event["event"] in KEPT:
            said = {key: event[key] for key in _CONTENT if key in event}
            append_lines(self._run.events, [whose | said])
        elif "blocked_s" in event:
            faults = [fault for fault in event["faults"] if fault not in self._told]
            self._told.update(faults)
            notes = [whose | {"event": "note", "text": fault} for fault in faults]
            if notes:
                append_lines(self._run.events, notes)
            if whose["at"] - self._times_at >= TIMES_S:
                self._write_times(whose["at"], event)

    def _write_times(self, now: float, event: Event) -> None:
        """Replace the file by a new one, so that a reader finds a whole one. What a crash takes is
        of no use to anybody, so nothing is synced.
        """
        self._times_at = now
        times = {"at": now, "trials": event["trials"], "blocked_s": event["blocked_s"]}
        working = self._run.times.with_suffix(".part")
        working.write_text(json.dumps(times))
        os.replace(working, self._run.times)
