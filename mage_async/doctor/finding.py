"""What a signature is, and what the doctor says where a run shows one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mage_async.config.schema import Config

Record = dict[str, Any]
"""The metrics of a step, or an evaluation, as a run records them."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A signature is there, at the step just looked at."""

    onset: int
    """The first step of those that show the signature."""
    evidence: str
    """The figures, as a clause without a full stop."""
    subject: str = ""
    """The member or the actor that the signature is about; "" where it is about the run."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of a run before its first step."""

    config: Config
    bounds: tuple[float, float] | None
    """Least and most return per unit that an episode can have; None where they are unknown."""

    def span(self) -> float:
        """Between the least and the most return; 1 where they are unknown."""
        return 1.0 if self.bounds is None else self.bounds[1] - self.bounds[0]


class Watch(Protocol):
    """Looks for one signature, a step at a time, in constant time and memory."""

    def step(self, record: Record) -> Iterable[Sighting]:
        """Take the metrics of the next step; the signature as this step shows it, if it does.

        A metric that an older run does not have is not judged.
        """
        ...


Look = Callable[[Case, Record], Iterable[Sighting]]
"""Looks for one signature in an evaluation, which has its `version` and its `sets`."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A way in which runs fail, how it shows, and the key to change."""

    looks: str
    """What the metrics show, as a sentence."""
    remedy: str
    """What to do, as a sentence that names a key."""
    watch: Callable[[Case], Watch] | None = None
    """Makes what looks at the steps; None: only evaluations show it."""
    look: Look | None = None
    """What looks at evaluations; None: only steps show it."""


class Finding(msgspec.Struct, frozen=True):
    """A signature found in a run. It holds names from environments and peers: text to escape."""

    name: str
    """Of the signature, as `doctor.halt` and `SIGNATURES` have it."""
    onset: int
    """The first step that showed it; of an evaluation, the version that was evaluated."""
    found: int
    """The step after which it was certain."""
    evidence: str
    remedy: str
    subject: str = ""
    """The member or the actor that it is about."""

    def sentence(self) -> str:
        """All of it in one line, control characters made visible."""
        about = f" of {self.subject}" if self.subject else ""
        text = f"{self.name}{about} since step {self.onset}: {self.evidence}. {self.remedy}"
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
