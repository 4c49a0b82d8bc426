"""Count the seconds that a process spends in each of its states."""

import time
from collections import defaultdict


class TimeAccounting:
    """Measure how much wall time a process spends in each of its states, such as "training". The
    process is in one state at a time, so the shares sum to 100 %.
    """

    def __init__(self, state: str) -> None:
        self._state, self._since = state, time.monotonic()
        self._booked: dict[str, float] = defaultdict(float)

    def enter(self, state: str) -> None:
        """End the current state and begin another."""
        now = time.monotonic()
        self._booked[self._state] += now - self._since
        self._state, self._since = state, now

    def current(self) -> tuple[str, float]:
        """Return the current state, and the seconds since it was entered."""
        return self._state, time.monotonic() - self._since

    def seconds(self) -> dict[str, float]:
        """Return seconds by state until now; they sum to the age of the process."""
        booked = dict(self._booked)
        booked[self._state] = booked.get(self._state, 0.0) + time.monotonic() - self._since
        return booked
