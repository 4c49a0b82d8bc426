"""Time accounting of a process: one state at a time, so that the shares sum to 100 %."""

import time
from collections import defaultdict


class TimeAccounting:
    """Counts wall time by named state; entering one ends the last.

    States are few and named in `STATES`; a process shows them as what it does or what it waits for.
    """

    def __init__(self, state: str) -> None:
        self._state, self._since = state, time.monotonic()
        self._booked: dict[str, float] = defaultdict(float)

    def enter(self, state: str) -> None:
        """Book the time so far on the current state, and go on in another."""
        now = time.monotonic()
        self._booked[self._state] += now - self._since
        self._state, self._since = state, now

    def seconds(self) -> dict[str, float]:
        """Seconds per state until now; their sum is the process's age."""
        booked = dict(self._booked)
        booked[self._state] = booked.get(self._state, 0.0) + time.monotonic() - self._since
        return booked
