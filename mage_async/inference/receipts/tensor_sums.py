"""Digests of published tensors, made at the speed of memory: once where they are written, once by
each engine that reads them.

Each 4 KiB of a tensor's bytes is added up as 64-bit words, modulo 2^64, and the sums are hashed
with the tensor's name, type and shape. One changed word always changes the digest; words that
change their places change the digest unless they stay within the same 4 KiB. To read all bytes
costs a tenth of a publication, so a version that is not scored has the digest of a sample instead:
of one block in 61, of others in each version, of all tensors together. A commit's digests
(`mage_async/policy/weight_digest.py`) take any device and multiply every word by a key of its
place, which takes a processor far longer.
"""

from hashlib import blake2b

import numpy as np
import torch

from mage_async.inference.receipts.receipt import DIGEST_BYTES

ROW_WORDS = 512
ROW_BYTES = 8 * ROW_WORDS
BLOCK_ROWS = 8
BLOCK_BYTES = BLOCK_ROWS * ROW_BYTES
SAMPLED = 61
"""Of so many blocks a sample has one: a prime, so that an engine that loads every second or every
tenth version comes past all blocks."""


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


def sample_digest(body: np.ndarray, version: int) -> str:
    """A digest of one in `SAMPLED` blocks of 32 KiB, and of what lies behind the last whole block.

    Args:
        body: uint8 [bytes]: all tensors of a version, one after the other.
        version: chooses the blocks.
    """
    whole = len(body) - len(body) % BLOCK_BYTES
    blocks = body[:whole].view(np.int64).reshape(-1, BLOCK_ROWS, ROW_WORDS)
    step = max(1, min(SAMPLED, len(blocks)))
    state = blake2b(f"{len(body)} bytes".encode(), digest_size=DIGEST_BYTES)
    state.update(blocks[version % step :: step].sum(2))
    state.update(body[whole:])
    return state.hexdigest()
