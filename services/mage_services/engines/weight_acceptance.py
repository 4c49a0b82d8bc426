"""Accept or refuse the weights that an engine has read, by comparing fingerprints.

The learner publishes a fingerprint with each version: sums of the bytes, and for some versions
log-probs of fixed tokens (`weight_fingerprint.py`). If the engine's own fingerprint differs from
it, the weights are read once more; if it still differs, they are refused.
"""

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
from mage_services.weights.process_group import Manifest, is_manifest, on_disk

T = TypeVar("T")
ADVICE = "look at the disk, the memory and the shared memory of its machine"


def is_published(path: Path) -> bool:
    """Return whether `path` is a file of weights or a manifest, which a learner published.

    Otherwise it is a model directory. A manifest announces weights that the learner sends on
    request (`process_group.py`).
    """
    return path.suffix == ".safetensors" or is_manifest(path)


def fingerprint_at(path: Path) -> WeightFingerprint | None:
    """Read the learner's fingerprint of weights; None for a model directory.

    Raises:
        UnreadableWeights: the weights or their fingerprint cannot be read.
    """
    if is_manifest(path):
        manifest = Manifest.read(path)
        return read_fingerprint(manifest.fingerprint, str(path)) if manifest.fingerprint else None
    return published_fingerprint(path) if is_published(path) else None


def observe_published(path: Path) -> tuple[WeightFingerprint | None, FingerprintBuilder]:
    """Return the learner's fingerprint, and a builder that has summed the tensors of the file.

    This is for an engine that reads the file by itself, such as SGLang. The builder has no sums if
    `path` is a model directory, or a manifest, whose weights only the engine receives.

    Raises:
        UnreadableWeights: the weights cannot be read.
    """
    published = fingerprint_at(path)
    if published is None or is_manifest(path):
        return published, FingerprintBuilder(published, None)
    builder = FingerprintBuilder(published, path)
    for _ in builder.passing(read_tensors(path)):
        continue  # the builder sums each tensor that passes; nothing else is done with it
    return published, builder


def read_checked(
    name: str,
    version: int,
    path: Path,
    read: Callable[[Path, WeightFingerprint | None], tuple[T, WeightFingerprint]],
) -> tuple[T, AcceptedWeights | None]:
    """Read weights; if their fingerprint is not the learner's, read them once more.

    If `path` is a manifest and the learner has also written the weights to a file, the second read
    is from that file.

    Args:
        name: name of the engine's process, for errors.
        read: reads the weights and computes the engine's fingerprint, given the path and the
            learner's fingerprint.

    Returns:
        The weights as `read` returns them, and a report that the fingerprints agree; None instead
        of the report for a model directory.

    Raises:
        WeightsRefused: both reads failed or gave other weights.
        PolicyError: the weights are another model's, or a model directory cannot be read.
    """
    reason = ""
    for num_retries, source in enumerate((path, on_disk(path))):
        try:
            published = fingerprint_at(source)
            weights, own = read(source, published)
        except UnreadableWeights as error:
            if not is_published(source):
                raise
            reason = str(error)
            continue
        if published is None:
            return weights, None
        reason = mismatch(published, own)
        if not reason:
            return weights, accepted(published, own, num_retries)
    raise refusal(name, version, path, reason)


def accepted(
    published: WeightFingerprint, own: WeightFingerprint, num_retries: int
) -> AcceptedWeights:
    """Report that the engine's own fingerprint of weights agrees with the learner's."""
    return AcceptedWeights(
        digest=own.digest,
        difference=difference(published.logprobs, own.logprobs),
        num_retries=num_retries,
    )


def loaded(version: int, receipt: AcceptedWeights | None) -> Loaded:
    """Return the message by which a peer tells the learner that its engine samples with a version.

    Args:
        receipt: the engine's report that the fingerprints agree; None if there was none to compare.
    """
    if receipt is None:
        return Loaded(version=version)
    return Loaded(version=version, **msgspec.structs.asdict(receipt))


def refusal(name: str, version: int, path: Path, reason: str) -> WeightsRefused:
    """Return the error about weights that an engine refuses for a `reason`."""
    return WeightsRefused(
        f"{name}: weights of version {version} at {path} were read twice and are not those that "
        f"the learner published: {reason}; {ADVICE}"
    )
