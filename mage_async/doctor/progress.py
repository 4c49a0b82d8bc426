"""Whether a run is still getting somewhere: a policy that has learned all there is looks like one
that has stopped to learn, but for what it earns.
"""

from dataclasses import dataclass, field

from mage_async.doctor.finding import Case
from mage_async.doctor.windows import Recent

SOLVED = 0.05
"""Of the span of returns, below the most that an episode can earn. Scout ends within 0.02."""
RISING = 0.05
"""Of the span of returns, in six steps. Means of three batches of the quickstart vary by 0.02."""


@dataclass(slots=True)
class Progress:
    """The last episode's return over the last steps."""

    case: Case
    _returns: Recent = field(default_factory=lambda: Recent(9))

    def add(self, last_return: float) -> None:
        """Take the return of the next step's last episode."""
        self._returns.add(last_return)

    def latest(self) -> float:
        """Mean over the last three steps."""
        return self._returns.mean(-3)

    def is_solved(self) -> bool:
        """Whether there is hardly more to earn; never where that is not known."""
        bounds = self.case.bounds
        return bounds is not None and self.latest() > bounds[1] - SOLVED * self.case.span()

    def is_rising(self) -> bool:
        """Whether more is earned than six steps ago."""
        rise = self.latest() - self._returns.mean(0, 3)
        return self._returns.is_full and rise > RISING * self.case.span()
