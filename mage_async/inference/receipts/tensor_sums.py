"""Digests of published tensors, made at the speed of memory: once where they are written, once by
each engine that reads them.

Each 4 KiB of a tensor's bytes is added up as 64-bit words, modulo 2^64, and the sums are hashed
with the tensor's name, type and shape. One changed word always changes the digest; words that
change their places change the digest unless they stay within the same 4 KiB. A commit's digests
(`mage_async/policy/weight_digest.py`) take any device and multiply every word by a key of its
place, which takes a processor far longer.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
import torch

DIGEST_BYTES = 8
ROW_WORDS = 512
ROW_BYTES = 8 * ROW_WORDS


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """A digest of a tensor in the host's memory: of its name, type, shape and bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(data) - len(data) % ROW_BYTES
    rows = data[:whole].view(np.int64).reshape(-1, ROW_WORDS)
    head = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    state = blake2b(head, digest_size=DIGEST_BYTES)
    state.update(rows.sum(1))
    state.update(data[whole:])
    return state.hexdigest()


def digested(
    named: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, each entered in `digests` as it passes."""
    for name, tensor in named:
        digests[name] = tensor_digest(name, tensor)
        yield name, tensor
