"""How published weights reach the engines: files on a disk or in shared memory, or sent by NCCL."""

from pathlib import Path
from typing import Protocol

from mage_async.config.schema import Config
from mage_async.results.run_directory import RunDirectory
from mage_services.weights.weight_files import AnySnapshot, WeightFiles
from mage_services.weights.weight_sender import WeightSender
from mage_services.weights.weight_store import is_measured


class WeightTransport(Protocol):
    """Where published versions lie until no lease is left."""

    def write(self, snapshot: AnySnapshot) -> Path:
        """Put a version there; returns the path that is announced."""
        ...

    def file(self, version: int) -> Path:
        """The path under which a version is announced."""
        ...

    def versions(self) -> list[int]:
        """The versions that are there, oldest first."""
        ...

    def remove(self, versions: list[int]) -> None:
        """Remove versions without a lease."""
        ...

    def describe(self) -> str:
        """Where weights go, in a few words."""
        ...


def weight_transport_of(run: RunDirectory, config: Config) -> WeightTransport:
    """What `transport.weights` asks for."""
    match config.transport.weights:
        case "disk" | "tensor":
            return WeightFiles(weights_folder(run, config))
        case "nccl":
            backend = "nccl" if config.learner.device.startswith("cuda") else "gloo"
            every, last = config.evaluation.every, config.learner.steps
            return WeightSender(
                run.weights,
                backend,
                lambda version: is_measured(version, every=every, last=last),
                config.learner.device,
                weights_folder(run, config) if config.learner.ranks > 1 else None,
            )


def weights_folder(run: RunDirectory, config: Config) -> Path:
    """Where weights are written: on a disk, or in shared memory. Of weights that are sent, where
    several ranks bring their parts together.
    """
    return run.weights if config.transport.weights == "disk" else run.shared_weights
