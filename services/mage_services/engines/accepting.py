"""Weights are accepted by their receipt: others are read again, once, and then refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from mage_async.errors import UnreadableWeights, WeightsRefused
from mage_async.inference.receipts.observed import Observed
from mage_async.inference.receipts.receipt import Accepted, Receipt, difference, mismatch
from mage_async.inference.weights import read_tensors
from mage_async.policy.snapshot import published_receipt
from mage_async.protocol.messages import Loaded
from mage_services.weights.weight_group import Manifest, is_manifest, on_disk

T = TypeVar("T")
ADVICE = "look at the disk, the memory and the shared memory of its machine"


def is_published(path: Path) -> bool:
    """Whether weights are those of a learner; a model directory has no receipt."""
    return path.suffix == ".safetensors" or is_manifest(path)


def receipt_at(path: Path) -> Receipt | None:
    """The learner's receipt of weights; None of a model directory, and of weights of a run that is
    older than receipts.

    Raises:
        UnreadableWeights: the weights, or their receipt, cannot be read.
    """
    if is_manifest(path):
        return Manifest.read(path).published_receipt(path)
    return published_receipt(path) if is_published(path) else None


def promised(path: Path) -> tuple[Receipt | None, Observed]:
    """The learner's receipt, and what is seen of the tensors of the file: nothing of a model
    directory, and of weights that are sent, which no host sees.

    Raises:
        UnreadableWeights: it cannot be read.
    """
    receipt = receipt_at(path)
    if receipt is None or is_manifest(path):
        return receipt, Observed(receipt, None)
    observed = Observed(receipt, path)
    for _ in observed.passing(read_tensors(path)):
        continue
    return receipt, observed


def read_again(
    name: str, version: int, path: Path, read: Callable[[Path, Receipt | None], tuple[T, Receipt]]
) -> tuple[T, Accepted | None]:
    """Read weights, and once more, from the whole file where the learner wrote one, if they are not
    what the learner published.

    Args:
        name: of the process whose engine reads.
        read: what is read, with the engine's own receipt of that; the second argument is the
            learner's receipt, after which the engine's is made.

    Returns:
        What was read, and the receipt; None for a model directory.

    Raises:
        WeightsRefused: both were others, or could not be read.
        PolicyError: they are another model's, or a model directory cannot be read.
    """
    reason = ""
    for num_retries, source in enumerate((path, on_disk(path))):
        try:
            published = receipt_at(source)
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


def accepted(published: Receipt, loaded: Receipt, num_retries: int) -> Accepted:
    """What is said of weights that agree with the learner's receipt."""
    return Accepted(
        digest=loaded.digest,
        difference=difference(published.logprobs, loaded.logprobs),
        num_retries=num_retries,
    )


def loaded(version: int, receipt: Accepted | None) -> Loaded:
    """What a peer tells the learner once its engine draws with a version."""
    if receipt is None:
        return Loaded(version=version)
    return Loaded(version=version, **msgspec.structs.asdict(receipt))


def refusal(name: str, version: int, path: Path, reason: str) -> WeightsRefused:
    """The sentence that names an engine and what is wrong with its weights."""
    return WeightsRefused(
        f"{name}: its engine is refused: weights of version {version} at {path}, read twice, are "
        f"not what the learner published: {reason}; {ADVICE}"
    )
