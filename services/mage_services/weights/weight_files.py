"""Published weights as files, on a disk or in shared memory."""

from pathlib import Path
from typing import Protocol

import torch

from mage_async.inference.receipts.receipt import Receipt
from mage_async.policy.checkpoint import writing
from mage_async.policy.places import Place


class AnySnapshot(Protocol):
    """A copy of a version's weights: a `Snapshot`, or a `SharedSnapshot` of several ranks."""

    version: int
    places: tuple[Place, ...]

    @property
    def data(self) -> torch.Tensor:
        """All tensors, one after the other: uint8 [bytes]"""
        ...

    @property
    def made(self) -> torch.cuda.Event | None:
        """Happens when `data` holds the weights; None: it does."""
        ...

    def write(self, file: Path) -> None:
        """Write a safetensors file."""
        ...

    def receipt(self) -> Receipt:
        """The learner's receipt."""
        ...


def weights_file(folder: Path, version: int) -> Path:
    """Where a version lies."""
    return folder / f"v{version:06d}.safetensors"


class WeightFiles:
    """A safetensors file a version, in a folder of the disk or of shared memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, snapshot: AnySnapshot) -> Path:
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
