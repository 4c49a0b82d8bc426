"""Digests of weights, which a commit record holds for the policy that a step made.

`sum64` is computed where the weights lie, and only sums leave the device: each word of a tensor's
bytes, as a signed integer, times the key of its place, added modulo 2^64. Integer sums have no
order, so devices, blocks and shards of a tensor agree to the bit. One changed word always changes
the sum, for keys are odd; several by accident keep it in one of about 2^32 cases. It is no defence
against somebody who chooses weights. `blake2b` is what runs committed before; they are compared by
it when they are replayed.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from torch import nn

from mage_async.learning.adapters import trained_tensors

Method = Literal["blake2b", "sum64"]
NEWEST: Method = "sum64"
"""What commits are made with."""
DIGEST_BYTES = 8
ROW = 2**16
"""Words of a row; the key of a place is that of its column times that of its row."""
ROWS_AT_ONCE = {"cpu": 4, "cuda": 64}
"""Blocks of 2 MiB of products stay in a processor's cache; a GPU wants fewer launches."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_digests(model: nn.Module, method: Method = NEWEST) -> dict[str, str]:
    """A digest of each trained tensor's name, shape, type and bytes, in the order of the model; of
    a model with adapters, of these alone.
    """
    tensors = {name: tensor.detach() for name, tensor in trained_tensors(model).items()}
    if method == "blake2b":
        return {name: bytes_digest(name, one) for name, one in tensors.items()}
    return sum_digests(tensors, torch.stack([word_sum(tensor) for tensor in tensors.values()]))


def bytes_digest(name: str, tensor: torch.Tensor) -> str:
    """One tensor's `blake2b`."""
    return _digest(name, tensor, tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def sum_digests(tensors: dict[str, torch.Tensor], sums: torch.Tensor) -> dict[str, str]:
    """Each tensor's `sum64`, from its `word_sum`: int64 [tensors]."""
    pairs = zip(tensors.items(), sums.cpu().numpy(), strict=True)
    return {name: _digest(name, one, own.tobytes()) for (name, one), own in pairs}


def overall(tensors: dict[str, str]) -> str:
    """One digest of all tensors."""
    return blake2b("".join(tensors.values()).encode(), digest_size=DIGEST_BYTES).hexdigest()


def word_sum(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The sum of a tensor's words times their keys: int64 [], on the tensor's device.

    Args:
        first: of a part of a tensor, how many elements lie before it; the sums of parts add up.
    """
    words = tensor.contiguous().reshape(-1).view(WORDS[tensor.element_size()])
    rows_before, before = divmod(first, ROW)
    if before:
        words = torch.cat([words.new_zeros(before), words])
    rows, rest = divmod(len(words), ROW)
    columns = _keys(0, ROW, words.device)
    keys = _keys(1, rows_before + rows + 1, words.device)[rows_before:]
    total = (words[rows * ROW :] * columns[:rest]).sum() * keys[rows]
    whole, step = words[: rows * ROW].view(rows, ROW), ROWS_AT_ONCE[words.device.type]
    for block, own in zip(whole.split(step), keys[:rows].split(step), strict=True):
        total += ((block * columns).sum(1) * own).sum()
    return total


@lru_cache(maxsize=8)
def _keys(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, int64 [count]: a shorter list is the beginning of a longer one."""
    drawn = np.random.PCG64(seed).random_raw(count)
    return torch.from_numpy(drawn.view(np.int64) | 1).to(device)


def _digest(name: str, tensor: torch.Tensor, content: bytes | np.ndarray) -> str:
    head = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    state = blake2b(head, digest_size=DIGEST_BYTES)
    state.update(content)
    return state.hexdigest()
