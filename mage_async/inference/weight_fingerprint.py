"""Compare weight fingerprints, by which an engine checks that it has loaded the weights that the
learner published.

The learner writes a fingerprint with the weights of a version, and an engine computes another from
the weights that it has loaded. A fingerprint has three parts. Sums of the bytes (`tensor_digest`,
or `sample_digest` for most versions) reveal bytes that changed between learner and engine. Row
checksums, one number for one row of each tensor, also reveal faults before the bytes were written,
such as adapters that were not merged. Probe log-probs, of fixed probe tokens, also reveal faults
after the bytes were read, such as a matrix in another's place. A version is *scored* if its
fingerprint has probe log-probs.

If only the adapters of a policy are published, the fingerprint names their base, the frozen
weights, by its digest. All bytes of adapters are summed, in every version, and row checksums are of
adapters and of merged weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from mage_async.completion import with_roles
from mage_async.errors import UnreadableWeights
from mage_async.inference.architecture import Architecture
from mage_async.inference.arithmetic import Arithmetic
from mage_async.inference.model import Model
from mage_async.inference.weights import DOWN, UP, Weights, reading

DIGEST_BYTES = 8
"""Number of bytes of a digest."""
UNSEEN = "unseen"
"""Digest of weights that were never in host memory, so that no sum of their bytes was taken."""
NUM_PROBE_TOKENS = 32
"""Number of tokens whose log-probs are compared."""
_STRIDE = 2_654_435_761
"""A prime larger than every vocabulary. Its multiples, modulo the number of tokens or rows, reach
every token or row once, and successive ones lie far apart.
"""
Precision = Literal["float32", "reduced"]
"""Precision with which log-probs were computed: all in float32 or better, or partly with fewer bits
(bfloat16, float16, TF32).
"""
TOLERANCES: dict[Precision, float] = {"float32": 2e-4, "reduced": 0.25}
"""Largest mean difference of both sides' probe log-probs, in nats, by the less precise side."""
MERGED_ROW_TOLERANCES: dict[Precision, float] = {"float32": 1e-6, "reduced": 2e-3}
"""Largest difference of two row checksums if adapters were merged, which rounds the weights."""
COPIED_ROW_TOLERANCE = 1e-12
"""Largest difference of two row checksums of equal weights. It is not 0, because the order in which
NumPy adds up a row depends on the processor.
"""
RowChecksums = dict[str, float | None]
"""Row checksums by the names of tensors; None for one that is not finite."""


class AdapterBase(msgspec.Struct, frozen=True):
    """Describe the base that published adapters are added to
    (`mage_async/inference/merged_adapters.py`).
    """

    digest: str
    """Digest of the frozen weights, in the type in which the learner holds them."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    """Type in which the learner holds the frozen weights, by its name in torch."""
    scale: float
    """Factor of the product of an adapter's two matrices."""


class WeightFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the fingerprint of a version's weights, as the learner or an engine computes it."""

    version: int
    precision: Precision
    base: AdapterBase | None = None
    """The frozen weights, if the published tensors are adapters; None if they are all weights."""
    tensors: dict[str, str]
    """Sum (`tensor_digest`) of each published tensor, by its name; empty for whole weights that are
    not scored, and for weights that were never in host memory.
    """
    sample: str = ""
    """Sum of a sample of all bytes (`sample_digest`); "" if tensors have sums of their own."""
    row_checksums: RowChecksums = {}
    """Row checksums; empty for a model on several ranks, and for weights that an engine never
    holds.
    """
    row_tolerance: float = 0.0
    """Largest allowed difference of row checksums of an engine's weights."""
    logprobs: tuple[float | None, ...]
    """Log-probs of the probe tokens after the first, in nats; None for one that is not finite.
    Empty for weights that were not scored."""

    @property
    def digest(self) -> str:
        """One digest of all tensors, whatever their order, or of the sample; `UNSEEN` if there are
        no sums.
        """
        return combined(self.tensors) if self.tensors else self.sample or UNSEEN

    def text(self) -> str:
        """Return the fingerprint as JSON."""
        return msgspec.json.encode(self).decode()


class AcceptedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Report that the fingerprint of loaded weights agrees with the learner's."""

    digest: str
    """Digest of all loaded tensors."""
    difference: float
    """Mean difference of both sides' probe log-probs, in nats."""
    num_retries: int
    """Number of times that the weights were read again because they were wrong at first."""


def read_fingerprint(text: str, where: str) -> WeightFingerprint:
    """Decode a fingerprint from JSON.

    Raises:
        UnreadableWeights: the text is no fingerprint; the message begins with `where`.
    """
    try:
        return msgspec.json.decode(text, type=WeightFingerprint)
    except msgspec.MsgspecError as error:
        raise UnreadableWeights(f"{where}: its fingerprint cannot be read: {error}") from error


def probe_tokens(vocabulary: int) -> np.ndarray:
    """Return the probe tokens: int64 [NUM_PROBE_TOKENS], spread over the vocabulary."""
    return (np.arange(1, NUM_PROBE_TOKENS + 1) * _STRIDE) % vocabulary


def with_both_roles(tokens: np.ndarray) -> np.ndarray:
    """Mark the second half of the probe tokens as those of the second role."""
    return with_roles(tokens, (len(tokens) // 2,))


def precision_of(dtype: torch.dtype) -> Precision:
    """Return the precision of this process's matrix products in a type."""
    is_full = dtype.itemsize >= 4 and torch.get_float32_matmul_precision() == "highest"
    return "float32" if is_full else "reduced"


def difference(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    """Return the mean absolute difference of both sides' log-probs, in nats.

    It is 0 if a side has none, and infinite if only one of two values is finite. (Weights that have
    become NaN in training arrive as NaN, on both sides.)
    """
    if not one or not other:
        return 0.0
    first, second = (np.array(side, np.float64) for side in (one, other))
    if len(first) != len(second) or (np.isfinite(first) != np.isfinite(second)).any():
        return np.inf
    # Where neither value is finite, they count as equal.
    return float(np.nan_to_num(np.abs(first - second), posinf=0.0).mean())


def mismatch(published: WeightFingerprint, loaded: WeightFingerprint) -> str:
    """Return why an engine's fingerprint differs from the learner's; "" if it agrees."""
    if published.version != loaded.version:
        return f"they are weights of version {published.version}"
    if published.base != loaded.base:
        learners, engines = (
            each.base.digest if each.base else "none" for each in (published, loaded)
        )
        return (
            f"they are adapters of a base with the digest {learners}, and that of the engine's "
            f"model directory is {engines}: give the engine the folder `policy` of the run"
        )
    if name := _first_difference(
        published.tensors, loaded.tensors, lambda _, one, other: one != other
    ):
        return f"the digest of {name} is not the learner's"
    if published.sample and loaded.sample and published.sample != loaded.sample:
        return "the digest of a sample of their bytes is not the learner's"
    are_apart = partial(_are_apart, published.row_tolerance)
    if name := _first_difference(published.row_checksums, loaded.row_checksums, are_apart):
        return f"a row of {name} is not the learner's"
    is_full = published.precision == loaded.precision == "float32"
    bound = TOLERANCES["float32" if is_full else "reduced"]
    if (apart := difference(published.logprobs, loaded.logprobs)) > bound:
        return f"log-probs are {apart:.3g} nats from the learner's on average, over {bound:g}"
    return ""


def _first_difference(
    published: Mapping[str, Any],
    loaded: Mapping[str, Any],
    differ: Callable[[str, Any, Any], bool],
) -> str:
    """Return the first tensor whose values differ; empty if none do, or a side has no values."""
    if not published or not loaded:
        return ""
    names = sorted(published.keys() | loaded.keys())
    pairs = ((name, published.get(name), loaded.get(name)) for name in names)
    return next((name for name, *pair in pairs if differ(name, *pair)), "")


def _are_apart(tolerance: float, name: str, one: float | None, other: float | None) -> bool:
    """Return whether two row checksums differ by more than is allowed, or only one is None."""
    if one is None or other is None:
        return one is not other
    # Adapters are published and loaded as they are; merging rounds only the weights.
    bound = COPIED_ROW_TOLERANCE if name.endswith((DOWN, UP)) else tolerance
    return abs(one - other) > bound


# Row checksums: each version has one number for each tensor, computed from one row of the tensor,
# and successive versions take different rows. The learner takes the row from the model that it
# trains, with adapters added to that row alone, and not from the copy that it publishes. An engine
# takes it from the tensor that it has loaded. So row checksums reveal, in every version, faults
# that sums of the copy cannot reveal: a tensor that was not copied, two tensors that changed
# places, adapters that were not merged. A row checksum is the sum of the row's elements, each times
# the factor of its place, divided by the sum of the elements' absolute values.
NUM_FACTORS = 1024
"""Number of different factors."""


def checked_row(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Return the row that a version checksums; for a vector, all of it."""
    if tensor.dim() < 2:
        return tensor.reshape(-1)
    rows = tensor.flatten(0, -2)
    return rows[version * _STRIDE % len(rows)]


def joined(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows of several tensors: float64 [elements]."""
    return torch.cat(list(rows)).double()


def row_checksums_of(lengths: Mapping[str, int], elements: torch.Tensor) -> RowChecksums:
    """Compute row checksums by the names of the tensors.

    Args:
        lengths: Number of elements of each tensor's row, by the tensor's name.
        elements: Rows, in this order, concatenated by `joined`, in host memory.
    """
    starts, values = np.cumsum([0, *lengths.values()])[:-1], elements.numpy()
    factors = np.concatenate([_factors(length) for length in lengths.values()])
    sums, sizes = (np.add.reduceat(each, starts) for each in (values * factors, np.abs(values)))
    with np.errstate(invalid="ignore"):
        ratios = sums / np.where(sizes == 0.0, 1.0, sizes)
    pairs = zip(lengths, ratios.tolist(), np.isfinite(ratios).tolist(), strict=True)
    return {name: ratio if is_finite else None for name, ratio, is_finite in pairs}


@lru_cache(maxsize=64)
def _factors(length: int) -> np.ndarray:
    """Return odd multiples of 1 / NUM_FACTORS between -1 and 1: float64 [length]."""
    # An integer k of 0..NUM_FACTORS - 1 becomes (2 k + 1) / NUM_FACTORS - 1.
    return 2 * (np.arange(length) * _STRIDE % NUM_FACTORS) / NUM_FACTORS - 1 + 1 / NUM_FACTORS


# Sums of published tensors, computed at the speed of memory, once by the learner and once by each
# engine. Each 4 KiB of a tensor's bytes is summed as 64-bit words, modulo 2^64, and the sums are
# hashed with the tensor's name, type and shape. One changed word always changes the digest; words
# that change places change it unless they stay within the same 4 KiB. Reading all bytes costs a
# tenth of a publication. So a version that is not scored has one digest for all tensors together
# instead, of a sample: of every 61st block, beginning at another block in each version. The digests
# of a commit (`mage_async/policy/weight_digest.py`) can be computed on any device; they multiply
# every word by a key of its place, which takes far longer on a CPU.

ROW_WORDS = 512
"""Number of 64-bit words that are summed to one number."""
ROW_BYTES = 8 * ROW_WORDS
BLOCK_ROWS = 8
"""Number of such rows in a block, which is sampled as a whole."""
BLOCK_BYTES = BLOCK_ROWS * ROW_BYTES
SAMPLED = 61
"""Number of blocks of which one is sampled. It is a prime, so that an engine that loads every
second or every tenth version still samples all blocks in time.
"""


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """Return a digest of a tensor in host memory: of its name, type, shape and bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(data) - len(data) % ROW_BYTES
    rows = data[:whole].view(np.int64).reshape(-1, ROW_WORDS)
    head = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    state = blake2b(head, digest_size=DIGEST_BYTES)
    state.update(rows.sum(1).data)
    state.update(data[whole:].data)
    return state.hexdigest()


def combined(digests: Mapping[str, str]) -> str:
    """Combine the digests of tensors, by name, into one that does not depend on their order."""
    listed = "".join(f"{name} {digests[name]} " for name in sorted(digests))
    return blake2b(listed.encode(), digest_size=DIGEST_BYTES).hexdigest()


def sample_digest(body: np.ndarray, version: int) -> str:
    """Return a digest of one in `SAMPLED` blocks of 32 KiB, and of the bytes after the last block;
    of all blocks if they are fewer than `SAMPLED`.

    Args:
        body: All tensors of a version, one after the other: uint8 [bytes].
        version: Version whose blocks are sampled.
    """
    whole = len(body) - len(body) % BLOCK_BYTES
    blocks = body[:whole].view(np.int64).reshape(-1, BLOCK_ROWS, ROW_WORDS)
    step = SAMPLED if len(blocks) >= SAMPLED else 1
    state = blake2b(f"{len(body)} bytes".encode(), digest_size=DIGEST_BYTES)
    state.update(blocks[version % step :: step].sum(2).data)
    state.update(body[whole:].data)
    return state.hexdigest()


LENGTH_BYTES = 8
"""Number of bytes of the integer before a safetensors header, which is the header's length."""


class FingerprintBuilder:
    """Compute an engine's fingerprint while tensors pass by, with the same parts as the learner's.

    Args:
        published: Fingerprint of the learner; None if there is none: then nothing is computed.
        file: File of the tensors; None for tensors that are sent.
    """

    def __init__(self, published: WeightFingerprint | None, file: Path | None) -> None:
        self._published, self._file = published, file
        self._digests: dict[str, str] = {}
        self._rows: dict[str, torch.Tensor] = {}
        self.base: AdapterBase | None = None
        """The base that adapters were merged into; None for whole weights."""

    def passing(
        self, named: Iterable[tuple[str, torch.Tensor]], *, are_published: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors, taking the sum and the checked row of each.

        Args:
            are_published: Whether they are the tensors that were published; otherwise adapters have
                been merged into them, and only rows are taken.
        """
        published = self._published
        for name, tensor in named:
            if published and published.tensors and are_published:
                self._digests[name] = tensor_digest(name, tensor)
            if published and published.row_checksums:
                # A view would keep all of the tensor in memory until the fingerprint is computed.
                self._rows[name] = checked_row(tensor, published.version).clone()
            yield name, tensor

    def fingerprint(
        self, version: int, precision: Precision, logprobs: tuple[float, ...]
    ) -> WeightFingerprint:
        """Return the engine's fingerprint.

        Raises:
            UnreadableWeights: the file cannot be read.
        """
        lengths = {name: len(row) for name, row in self._rows.items()}
        is_sampled = self._published is not None and self._published.sample
        file = self._file if is_sampled else None
        return WeightFingerprint(
            version=version,
            precision=precision,
            base=self.base,
            tensors=self._digests,
            sample=sample_digest(_body(file), version) if file is not None else "",
            row_checksums=row_checksums_of(lengths, joined(self._rows.values())) if lengths else {},
            logprobs=logprobs,
        )


def _body(file: Path) -> np.ndarray:
    """Map the bytes after the header of a safetensors file: uint8 [bytes]."""
    with reading(file):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        return np.asarray(np.memmap(file, np.uint8, "r", LENGTH_BYTES + length))


def probe_logprobs(
    weights: Weights, architecture: Architecture, arithmetic: Arithmetic
) -> tuple[float, ...]:
    """Compute an embedded engine's log-probs of the probe tokens after the first, in nats."""
    model = Model(
        architecture, weights, slots=1, max_tokens=NUM_PROBE_TOKENS, arithmetic=arithmetic
    )
    tokens = probe_tokens(architecture.vocabulary)
    return tuple(model.score(with_both_roles(tokens) if weights.second_role else tokens).tolist())
