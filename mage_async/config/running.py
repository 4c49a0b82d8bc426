"""Define the keys of evaluation, transport, journal, supervision, doctor and trackers."""

from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import field

from mage_async.config.components import TRACKERS, WEIGHT_TRANSPORTS, AnyTracker, AnyWeightTransport
from mage_async.config.section import Count, Natural, NonNegative, Positive, Section

SignatureName = Literal[
    "not_finite",
    "no_variance",
    "truncation",
    "invalid_actions",
    "entropy_collapse",
    "entropy_runaway",
    "off_policy",
    "engine_mismatch",
    "over_bound",
    "format_gaming",
    "member_failing",
    "selection",
    "disk_soon_full",
    "learner_starving",
    "actors_starving",
]
"""Faults that show while a run trains; `mage_async/doctor/signatures.py` explains each."""

GPU = Literal[
    "", "t4", "v100", "l4", "rtx4090", "l40s", "a100_40", "a100_80", "h100", "h200", "b200"
]
"""GPU models of `mage_async/plan/plan.py`."""


class Hardware(Section):
    """The machine that the run is meant for."""

    gpu: GPU = ""
    """Model of every GPU that the configuration names, for `mage plan` and the memory check
    before a launch; "" is the model of this machine's GPU."""


class Evaluation(Section):
    """Evaluation while training (the curve), and after it with controls."""

    every: Natural = 20
    """Steps between points of the curve; 0 is no curve."""
    trials: Count = 128
    """Trials of a point, from each split."""
    final_trials: Count = 512
    """Trials of each final set."""
    episodes: Count = 3
    """Episodes of an evaluated trial; unless it is given, as many as `trial.episodes`, where those
    are at least 2."""


class Transport(Section):
    """Communication between the learner and its peers."""

    address: str = "ipc"
    """Address of the learner: "ipc" (a private socket file), or tcp://HOST:PORT."""
    keys: str = ""
    """Directory of keys for CURVE, ZeroMQ's encryption, made by `mage keys new`; "" is none, which
    needs HOST 127.0.0.1."""
    weights: AnyWeightTransport = WEIGHT_TRANSPORTS.load("disk")()
    """How weights reach the engines."""


class Journal(Section):
    """The journal of grants, trials and steps on disk."""

    max_bytes: Count = 32_000_000_000
    """Size at which no trial is accepted until there is space again. From half of it on, and on a
    full disk, segments that a checkpoint has made unnecessary are deleted."""


class Supervision(Section):
    """Restarts of the run's processes."""

    max_restarts: Natural = 3
    """Restarts of one process before the run ends."""
    silence_s: Positive = 60.0
    """Seconds without a heartbeat after which a process counts as dead."""


class Doctor(Section):
    """The doctor examines every step for signs that a run goes wrong. The processes of one run may
    have different values in this table."""

    halt: list[SignatureName] = field(default_factory=list)
    """Signatures that end the run when they are found, so that it can be resumed with other keys.
    A signature found before a run was resumed does not end it again."""


# A section with one optional table per registered tracker, so that a new tracker needs no line
# here. A type checker cannot evaluate `defstruct`, and sees a section without keys.
if TYPE_CHECKING:
    _TrackerTables = Section
else:
    _TrackerTables = msgspec.defstruct(
        "_TrackerTables",
        [(name, TRACKERS.load(name) | None, None) for name in TRACKERS],
        bases=(Section,),
        frozen=True,
    )


class Tracking(_TrackerTables):
    """Trackers that are sent a run's metrics, each by a process of its own. None by default: then
    nothing is sent anywhere."""

    own: AnyTracker | None = None
    """A tracker of your own: `tracking.own.kind = "my_tracker:Mine"`."""
    wait_s: NonNegative = 0.0
    """Seconds that the end of a run waits for trackers at most. Without waiting they end within a
    minute of the run; a container, which ends with the command, wants 30."""
