"""What a watch remembers of the steps before: streaks, recent values, levels."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Streak:
    """Steps in a row in which something held; one of them alone may be chance."""

    needed: int
    onset: int = 0
    """The first step of the streak."""
    _length: int = 0

    def add(self, step: int, holds: bool) -> bool:
        """Take a step; whether there are as many as needed."""
        if not holds:
            self._length = 0
            return False
        if not self._length:
            self.onset = step
        self._length += 1
        return self._length >= self.needed


@dataclass(slots=True)
class Recent:
    """The last values of a metric."""

    size: int
    values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.size)

    def add(self, value: float) -> None:
        """Take the next value, and forget the oldest."""
        self.values.append(value)

    @property
    def is_full(self) -> bool:
        """Whether there were as many values as are kept."""
        return len(self.values) == self.size

    def mean(self, start: int = 0, stop: int | None = None) -> float:
        """Mean of the kept values from place `start` to `stop`; the oldest has place 0."""
        values = list(self.values)[start:stop]
        return sum(values) / max(1, len(values))


@dataclass(slots=True)
class Level:
    """Where a metric began: the mean of its first values."""

    size: int
    _sum: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Take the next value; those behind the first ones change nothing."""
        if self._count < self.size:
            self._sum, self._count = self._sum + value, self._count + 1

    @property
    def value(self) -> float | None:
        """The level; None while it is not known."""
        return self._sum / self.size if self._count == self.size else None


@dataclass(slots=True)
class Lowest:
    """The lowest mean of some values in a row so far."""

    recent: Recent
    value: float | None = None

    def add(self, value: float) -> float | None:
        """Take the next value; the mean of the last ones, None where there are too few."""
        self.recent.add(value)
        if not self.recent.is_full:
            return None
        mean = self.recent.mean()
        self.value = mean if self.value is None else min(self.value, mean)
        return mean
