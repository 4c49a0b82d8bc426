"""A receipt: digests and *spots* of a version's tensors, and the log-probs of fixed *check tokens*.

The learner writes its receipt beside the weights that it publishes, and an engine makes another of
what it has loaded. Digests see what happened to the bytes on their way; spots, one number for a row
of each tensor, see too what went wrong before the bytes were written (adapters that were not
merged); log-probs, which the learner computes with the model that it trains, see what went wrong
behind their reading as well (a matrix in another's place).
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np
import torch

from mage_async.completion import with_roles
from mage_async.errors import UnreadableWeights

DIGEST_BYTES = 8
UNSEEN = "unseen"
CHECK_TOKENS = 32
_STRIDE = 2_654_435_761
"""A prime beyond every vocabulary: its multiples visit all tokens, far apart."""
Precision = Literal["float32", "reduced"]
"""How log-probs were computed: all in float32 or better, or partly with fewer bits (bfloat16,
float16, TF32)."""
TOLERANCES: dict[Precision, float] = {"float32": 2e-4, "reduced": 0.25}
"""Nats that two log-probs of check tokens may differ by, on average over the tokens, where the less
precise side computes so."""
MERGED_SPOTS: dict[Precision, float] = {"float32": 1e-6, "reduced": 2e-3}
"""What two spots may differ by where adapters were merged, which rounds."""
COPIED_SPOTS = 1e-12
"""And where they were not: sums are of the same numbers, in an order that is a processor's."""
Spots = dict[str, float | None]
"""Spots by the names of tensors; None where one is not finite."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What one side says of a version's weights."""

    version: int
    precision: Precision
    tensors: dict[str, str]
    """Digests by name; empty of a version that is not scored, and of weights that never were in
    the host's memory."""
    sample: str = ""
    """The digest of a sample of all tensors (`tensor_sums.py`), where these have none of their
    own; empty otherwise."""
    spots: Spots = {}
    """Empty of a model that lies on several ranks, and of weights that an engine never holds."""
    spots_apart: float = 0.0
    """What an engine's spots may differ by."""
    logprobs: tuple[float | None, ...]
    """Of each check token after the first, in nats; None where one is not finite; empty of
    weights that were not scored."""

    @property
    def digest(self) -> str:
        """One digest of all tensors, whatever their order, or of the sample of them; `UNSEEN` where
        no host saw them.
        """
        if not self.tensors:
            return self.sample or UNSEEN
        listed = "".join(f"{name} {self.tensors[name]} " for name in sorted(self.tensors))
        return blake2b(listed.encode(), digest_size=DIGEST_BYTES).hexdigest()

    def text(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt that agrees with the learner's."""

    digest: str
    """Of all tensors that were loaded."""
    difference: float
    """Mean over the check tokens of how far both sides' log-probs are apart, in nats."""
    num_retries: int
    """Times that the weights were read again, because they were others at first."""


def read_receipt(text: str, where: str) -> Receipt:
    """A receipt from its JSON.

    Raises:
        UnreadableWeights: it is none; `where` it was found begins the sentence.
    """
    try:
        return _DECODER.decode(text)
    except msgspec.MsgspecError as error:
        raise UnreadableWeights(f"{where}: its receipt cannot be read: {error}") from error


def check_tokens(vocabulary: int) -> np.ndarray:
    """The check tokens: int64 [CHECK_TOKENS], spread over the vocabulary."""
    return (np.arange(1, CHECK_TOKENS + 1) * _STRIDE) % vocabulary


def of_both_roles(tokens: np.ndarray) -> np.ndarray:
    """Check tokens of a policy with two roles: the second half is the exploiter's."""
    return with_roles(tokens, len(tokens) // 2)


def precision_of(dtype: torch.dtype) -> Precision:
    """The precision of this process's products of matrices of a type."""
    is_full = dtype.itemsize >= 4 and torch.get_float32_matmul_precision() == "highest"
    return "float32" if is_full else "reduced"


def difference(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    """Mean distance of both sides' log-probs; 0 where a side has none, infinite where one is finite
    and the other is not: weights that have become NaN arrive as NaN.
    """
    if not one or not other:
        return 0.0
    first, second = (np.array(side, np.float64) for side in (one, other))
    if len(first) != len(second) or (np.isfinite(first) != np.isfinite(second)).any():
        return np.inf
    return float(np.nan_to_num(np.abs(first - second), posinf=0.0).mean())


def mismatch(published: Receipt, loaded: Receipt) -> str:
    """Why an engine's receipt is not of what the learner published; empty where it is."""
    if published.version != loaded.version:
        return f"they are weights of version {published.version}"
    if name := _first_difference(published.tensors, loaded.tensors):
        return f"the digest of {name} is not the learner's"
    if published.sample and loaded.sample and published.sample != loaded.sample:
        return "the digest of a sample of their bytes is not the learner's"
    if name := _first_apart(published, loaded):
        return f"a row of {name} is not the learner's"
    is_full = published.precision == loaded.precision == "float32"
    bound = TOLERANCES["float32" if is_full else "reduced"]
    if (apart := difference(published.logprobs, loaded.logprobs)) > bound:
        return f"log-probs are {apart:.3g} nats from the learner's on average, over {bound:g}"
    return ""


def _first_difference(published: dict[str, str], loaded: dict[str, str]) -> str:
    """The name of a tensor that is not the same on both sides; empty where a side has none."""
    if not published or not loaded:
        return ""
    names = sorted(published.keys() | loaded.keys())
    return next((name for name in names if published.get(name) != loaded.get(name)), "")


def _first_apart(published: Receipt, loaded: Receipt) -> str:
    """The name of a tensor whose spot is not the learner's; empty where a side has none."""
    if not published.spots or not loaded.spots:
        return ""
    names = sorted(published.spots.keys() | loaded.spots.keys())
    pairs = ((name, published.spots.get(name), loaded.spots.get(name)) for name in names)
    bound = published.spots_apart
    return next((name for name, one, other in pairs if _is_apart(one, other, bound)), "")


def _is_apart(one: float | None, other: float | None, bound: float) -> bool:
    return one is not other if one is None or other is None else abs(one - other) > bound


_DECODER = msgspec.json.Decoder(Receipt)
