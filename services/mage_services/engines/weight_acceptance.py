"""Accept weights by their fingerprint: read wrong ones once more, then refuse them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from mage_async.errors import UnreadableWeights, WeightsRefused
from mage_async.inference.weight_fingerprint import (
    AcceptedWeights,
    FingerprintBuilder,
    WeightFingerprint,
    difference,
    mismatch,
    read_fingerprint,
)
from mage_async.inference.weights import read_tensors
from mage_async.policy.snapshot import published_fingerprint
from mage_async.protocol.messages import Loaded
from mage_services.weights.weight_group import Manifest, is_manifest, on_disk

T = TypeVar("T")
ADVICE = "look at the disk, the memory and the shared memory of its machine"


def is_published(path: Path) -> bool:
    """Return whether weights are those of a learner; a model directory has no fingerprint."""
    return path.suffix == ".safetensors" or is_manifest(path)


def fingerprint_at(path: Path) -> WeightFingerprint | None:
    """Read the learner's fingerprint of weights; None for a model directory.

    Raises:
        UnreadableWeights: the weights or their fingerprint cannot be read.
    """
    if is_manifest(path):
        manifest = Manifest.read(path)
        return read_fingerprint(manifest.receipt, str(path)) if manifest.receipt else None
    return published_fingerprint(path) if is_published(path) else None


def observe_published(path: Path) -> tuple[WeightFingerprint | None, FingerprintBuilder]:
    """Return the learner's fingerprint, and a builder that has seen the file's tensors.

    The builder has seen nothing of a model directory, and nothing of weights that are sent.

    Raises:
        UnreadableWeights: the weights cannot be read.
    """
    published = fingerprint_at(path)
    if published is None or is_manifest(path):
        return published, FingerprintBuilder(published, None)
    observed = FingerprintBuilder(published, path)
    for _ in observed.passing(read_tensors(path)):
        continue  # the builder alone looks at the tensors
    return published, observed


def read_again(
    name: str,
    version: int,
    path: Path,
    read: Callable[[Path, WeightFingerprint | None], tuple[T, WeightFingerprint]],
) -> tuple[T, AcceptedWeights | None]:
    """Read weights; if they are not what the learner published, read them once more.

    The second read is from a file, if the learner wrote one.

    Args:
        name: process of the engine.
        read: reads the weights and computes the engine's fingerprint, given the path and the
            learner's fingerprint.

    Returns:
        The result of `read`, and the receipt; None for a model directory.

    Raises:
        WeightsRefused: both reads failed or gave other weights.
        PolicyError: the weights are another model's, or a model directory cannot be read.
    """
    reason = ""
    for num_retries, source in enumerate((path, on_disk(path))):
        try:
            published = fingerprint_at(source)
            found, loaded = read(source, published)
        except UnreadableWeights as error:
            if not is_published(source):
                raise
            reason = str(error)
            continue
        if published is None:
            return found, None
        reason = mismatch(published, loaded)
        if not reason:
            return found, accepted(published, loaded, num_retries)
    raise refusal(name, version, path, reason)


def accepted(
    published: WeightFingerprint, loaded: WeightFingerprint, num_retries: int
) -> AcceptedWeights:
    """Return the receipt of weights whose fingerprint agrees with the learner's."""
    return AcceptedWeights(
        digest=loaded.digest,
        difference=difference(published.logprobs, loaded.logprobs),
        num_retries=num_retries,
    )


def loaded(version: int, receipt: AcceptedWeights | None) -> Loaded:
    """Return a peer's message to the learner once its engine samples with a version."""
    if receipt is None:
        return Loaded(version=version)
    return Loaded(version=version, **msgspec.structs.asdict(receipt))


def refusal(name: str, version: int, path: Path, reason: str) -> WeightsRefused:
    """Return the error that names an engine and the fault of its weights."""
    return WeightsRefused(
        f"{name}: its engine is refused: weights of version {version} at {path}, read twice, are "
        f"not what the learner published: {reason}; {ADVICE}"
    )
