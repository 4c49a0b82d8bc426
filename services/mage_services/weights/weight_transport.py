"""How published weights reach the engines: files on a disk or in shared memory, or sent by NCCL."""

from pathlib import Path
from typing import Protocol

from mage_async.config.schema import Config
from mage_async.policy.checkpoint import writing
from mage_async.policy.snapshot import Snapshot
from mage_async.results.run_directory import RunDirectory
from mage_services.weights.weight_sender import WeightSender
from mage_services.weights.weight_store import is_measured


class WeightTransport(Protocol):
    """Where published versions lie until no lease is left."""

    def write(self, snapshot: Snapshot) -> Path:
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
                run.weights, backend, lambda version: is_measured(version, every=every, last=last)
            )


def weights_folder(run: RunDirectory, config: Config) -> Path:
    """Where weights are published: on a disk, or in shared memory."""
    return run.shared_weights if config.transport.weights == "tensor" else run.weights


def weights_file(folder: Path, version: int) -> Path:
    """Where a version lies."""
    return folder / f"v{version:06d}.safetensors"


class WeightFiles:
    """A safetensors file a version, in a folder of the disk or of shared memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, snapshot: Snapshot) -> Path:
        """Write a version under a temporary name, and rename it when it is whole."""
        file = self.file(snapshot.version)
        with writing(f"weights of version {snapshot.version} to {self._folder}"):
            snapshot.write(file)
        return file

    def versions(self) -> list[int]:
        """The versions that are there, oldest first."""
        return sorted(int(file.stem[1:]) for file in self._folder.glob("v*.safetensors"))

    def remove(self, versions: list[int]) -> None:
        """Delete versions without a lease."""
        for version in versions:
            self.file(version).unlink()

    def describe(self) -> str:
        """Where weights go, in a few words."""
        return f"weights are published in {self._folder}"

    def file(self, version: int) -> Path:
        """Where a version lies."""
        return weights_file(self._folder, version)
