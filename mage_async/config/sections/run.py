"""Around the learning: what is measured, sent, kept and watched."""

from typing import Literal

from msgspec import field

from mage_async.config.sections.section import Count, Natural, NonNegative, Positive, Section

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
    "disk_soon_full",
    "learner_starving",
    "actors_starving",
]
"""Signatures that show while a run trains; `mage_async/doctor/catalogue.py` explains each."""

GPU = Literal[
    "", "t4", "v100", "l4", "rtx4090", "l40s", "a100_40", "a100_80", "h100", "h200", "b200"
]
"""Models that `mage_async/plan/devices.py` knows."""


class Hardware(Section):
    """What the run is meant for."""

    gpu: GPU = ""
    """Model of every GPU that the configuration names, for `mage plan` and for the check before a
    launch where this machine's own is not asked for; "" is this machine's."""


class Evaluation(Section):
    """Curves while training, and the final measure with its controls."""

    every: Natural = 20
    """Steps between points of the curve; 0 is none."""
    trials: Count = 128
    """Trials of a point, from each split."""
    final_trials: Count = 512
    """Trials of each final set."""
    episodes: Count = 3
    """Episodes of an evaluated trial."""


class Transport(Section):
    """Between the learner and its peers."""

    address: str = "ipc"
    """Where the learner is reached: "ipc" (a private socket file), or tcp://HOST:PORT."""
    keys: str = ""
    """Directory of CURVE keys, made by `mage keys new`; "" is none, and then HOST is 127.0.0.1."""
    weights: Literal["disk", "tensor", "nccl"] = "disk"
    """How weights reach the engines: a file a version (any host that sees the run's directory),
    shared memory (one host), or sent from GPU to GPU (one host; by Gloo where there is no GPU)."""


class Journal(Section):
    """What is kept on disk of grants, trials and steps."""

    max_bytes: Count = 32_000_000_000
    """Above half of it, and on a full disk, segments that a checkpoint has made unnecessary are
    deleted; at it, no trial is taken in until there is space."""
    segment_bytes: Count = 67_108_864
    """A segment that has become so long is followed by a new one after the next step."""


class Supervision(Section):
    """How the processes are watched."""

    max_restarts: Natural = 3
    """Restarts of one process, after which the run ends."""
    silence_s: Positive = 60.0
    """Seconds of silence after which a process is taken for dead."""


class Doctor(Section):
    """The doctor looks, after every step, for signs that a run goes wrong. Peers of a run may
    differ in this table."""

    halt: list[SignatureName] = field(default_factory=list)
    """Signatures that end a run when they are found, so that it can be resumed with other keys; []
    is none. What is found before a run is resumed does not end it again."""


class Tracking(Section):
    """Trackers that are told a run's metrics, each by a process of its own. None by default: then
    nothing is sent anywhere."""

    wandb: str = ""
    """Project of Weights & Biases; "" is none. Extra `wandb`; WANDB_MODE=offline sends nothing."""
    tensorboard: bool = False
    """Write TensorBoard's events into `tracking/tensorboard` of the run. Extra `tensorboard`."""
    mlflow: str = ""
    """Experiment of MLflow, at MLFLOW_TRACKING_URI; "" is none. Extra `mlflow`."""
    trackio: str = ""
    """Project of trackio, on this machine unless trackio's own variables say where; "" is none.
    Extra `trackio`."""
    wait_s: NonNegative = 0.0
    """Most seconds that the end of a run waits for trackers. They end behind it within a minute; a
    container, which ends with the command, wants 30."""
