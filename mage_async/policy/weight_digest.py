"""Compute digests of weights for the journal, and score fixed tokens with the trained model.

A *digest* identifies the bytes of a version. It is computed on the weights' own device, and only
sums leave the device: each word of a tensor's bytes, as a signed integer, times the key of its
place, added modulo 2^64. Integer addition does not depend on the order, so devices, blocks and
shards of a tensor agree to the bit. A change of one word always changes the sum, because keys are
odd; accidental changes of several words leave it unchanged in about one of 2^32 cases. The digest
does not protect against somebody who chooses the weights.

The fixed tokens are the *probe tokens* (`mage_async/inference/weight_fingerprint.py`). A version is
*scored* if their log-probs are published with it: an engine then computes them too, and compares.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from mage_async.inference.weight_fingerprint import probe_tokens, with_both_roles
from mage_async.learning.forward import head_inputs
from mage_async.learning.lora import has_roles, trained_tensors
from mage_async.learning.packing import TokenRow

DIGEST_BYTES = 8
"""Number of bytes of a digest."""
ROW = 2**16
"""Number of words of a row. The key of a place is the key of its column times that of its row."""
ROWS_AT_ONCE = {"cpu": 4, "cuda": 64}
"""Number of rows that are summed at once: on a CPU 2 MiB of products, which stay in its cache; on a
GPU more, for fewer kernel launches.
"""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integer type of a word, by the size of an element in bytes."""
# An element of 8 bytes is two words, because a word has to be shorter than the sum: the sum of two
# odd keys is even, so two changed highest bits of 8-byte words would add 2^63 times an even number,
# which is 0 modulo 2^64.


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of each trained tensor's name, shape, type and bytes, in the model's order.

    For a model with adapters, these are the adapters' tensors alone.
    """
    tensors = {name: tensor.detach() for name, tensor in trained_tensors(model).items()}
    return sum_digests(tensors, torch.stack([word_sum(tensor) for tensor in tensors.values()]))


def sum_digests(tensors: dict[str, torch.Tensor], sums: torch.Tensor) -> dict[str, str]:
    """Return each tensor's digest from `sums`, their `word_sum`: int64 [tensors]."""
    digests = {}
    for (name, tensor), own in zip(tensors.items(), sums.cpu().numpy(), strict=True):
        head = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
        digests[name] = blake2b(head + own.tobytes(), digest_size=DIGEST_BYTES).hexdigest()
    return digests


def overall(tensors: dict[str, str]) -> str:
    """Combine the digests of all tensors into one."""
    return blake2b("".join(tensors.values()).encode(), digest_size=DIGEST_BYTES).hexdigest()


def word_sum(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Sum a tensor's words times their keys: int64 [], on the tensor's device.

    Args:
        first: If `tensor` is a part of a tensor, the number of elements before it. The sums of all
            parts add up to the sum of the whole.
    """
    word = WORDS[tensor.element_size()]
    words = tensor.contiguous().reshape(-1).view(word)
    rows_before, before = divmod(first * tensor.element_size() // word.itemsize, ROW)
    if before:
        words = torch.cat([words.new_zeros(before), words])
    rows, rest = divmod(len(words), ROW)
    # The keys of columns are drawn with seed 0, those of rows with seed 1.
    columns = _keys(0, ROW, words.device)
    keys = _keys(1, rows_before + rows + 1, words.device)[rows_before:]
    # The last row may be incomplete.
    total = (words[rows * ROW :] * columns[:rest]).sum() * keys[rows]
    whole, step = words[: rows * ROW].view(rows, ROW), ROWS_AT_ONCE[words.device.type]
    for block, own in zip(whole.split(step), keys[:rows].split(step), strict=True):
        total += ((block * columns).sum(1) * own).sum()
    return total


@lru_cache(maxsize=8)
def _keys(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudo-random numbers, int64 [count]; a shorter list is a longer one's prefix."""
    drawn = np.random.PCG64(seed).random_raw(count)
    return torch.from_numpy(drawn.view(np.int64) | 1).to(device)


# Few versions are scored: on a CPU, one forward on each side costs more than half of the rest of a
# publication. Log-probs reveal faults of the engine's code that digests do not, such as two
# matrices that change places. Such a fault affects every version, so it shows in the first versions
# of a run or of a learner process. Row checksums (`weight_fingerprint.py`), one number for one row
# of each tensor, are computed for every version where the engine can.
SCORED_EVERY = 16
"""Number of versions from one scored version to the next, if engines compute no row checksums."""
SCORED_EVERY_WITH_ROWS = 256
"""Number of versions from one scored version to the next, if engines compute row checksums."""


def is_scored(version: int, *, has_row_checksums: bool) -> bool:
    """Return whether the log-probs of the probe tokens are published with a version.

    They are published with versions 0, 1, 16 and every 256th, or every 16th if engines compute no
    row checksums.
    """
    every = SCORED_EVERY_WITH_ROWS if has_row_checksums else SCORED_EVERY
    return version % every == 0 or version in (1, SCORED_EVERY)


@torch.no_grad()
def probe_logprobs(model: PreTrainedModel) -> torch.Tensor:
    """Compute, with the model under training, the log-prob of each probe token but the first.

    Returns:
        float32 [tokens - 1], in nats, on the model's device. On a GPU the call does not wait until
        they are computed.
    """
    tokens = probe_tokens(model.config.vocab_size)
    # With two roles, the second half of the tokens belongs to the second role.
    with_roles = with_both_roles(tokens) if has_roles(model) else tokens
    row = TokenRow.of([with_roles], model.device, predicted=[np.arange(1, len(tokens))])
    logprobs, _ = head_inputs(model, row, 1.0).logprobs()
    return logprobs.float()
