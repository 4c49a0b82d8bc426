"""How much a peer may send: token buckets, with the time as an argument.

A bucket holds at most `burst` tokens and gains `per_s` a second; a peer that spends more than its
bucket holds is over its rate. So a peer may send `burst` at once, and `per_s` in the long run.

A message that brought a trial which the learner takes is given back. So the rate of messages does
not bound the work that a peer was granted, however fast it is done, and can be a small one: it is
for what comes besides, a few messages a second from a peer of this build.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second, and at once."""

    per_s: float
    burst: float


class Level(NamedTuple):
    """What a bucket held at a moment; below 0: more was spent than it held."""

    tokens: float
    at_s: float


def spend(level: Level, amount: float, rate: Rate, *, now: float) -> Level:
    """The bucket after `amount` tokens were taken at `now`; a clock that went back adds none."""
    elapsed_s = max(0.0, now - level.at_s)
    held = min(rate.burst, level.tokens + elapsed_s * rate.per_s)
    return Level(held - amount, max(now, level.at_s))


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one peer may send."""

    messages: Rate = Rate(500, 2_000)
    """At once: several times what an actor of many trials may have to send again. In the long run:
    far above what heartbeats, given-up groups and duplicates come to."""
    bytes: Rate = Rate(512 * 2**20, 1024 * 2**20)
    malformed: Rate = Rate(0.2, 32)
    """Messages that cannot be decoded: a peer of this build sends none, a bad line few."""


DEFAULT_ALLOWANCE = Allowance()


class Meter:
    """What one peer has sent, against its allowance."""

    __slots__ = ("_allowance", "_bytes", "_malformed", "_messages")

    def __init__(self, allowance: Allowance, *, now: float) -> None:
        self._allowance = allowance
        self._messages = Level(allowance.messages.burst, now)
        self._bytes = Level(allowance.bytes.burst, now)
        self._malformed = Level(allowance.malformed.burst, now)

    def arrived(self, num_bytes: int, *, now: float) -> str:
        """Count a message; why its sender is over its rate, or nothing."""
        rates = self._allowance
        self._messages = spend(self._messages, 1, rates.messages, now=now)
        self._bytes = spend(self._bytes, num_bytes, rates.bytes, now=now)
        if self._messages.tokens < 0:
            return f"over {rates.messages.per_s:g} messages a second"
        if self._bytes.tokens < 0:
            return f"over {rates.bytes.per_s / 2**20:g} MiB a second"
        return ""

    def was_wanted(self) -> None:
        """A message brought a trial that was taken: it does not count."""
        self._messages = self._messages._replace(tokens=self._messages.tokens + 1)

    def was_malformed(self, *, now: float) -> str:
        """Count a message that was none; why its sender is over its rate, or nothing."""
        rate = self._allowance.malformed
        self._malformed = spend(self._malformed, 1, rate, now=now)
        return f"over {rate.burst:g} malformed messages" if self._malformed.tokens < 0 else ""
