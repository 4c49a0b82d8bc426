"""Digests of weights: what a commit record says of the policy that a step made."""

import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import torch
from torch import nn

DIGEST_BYTES = 8
THREADS_FROM_BYTES = 64 << 20
"""A smaller model is read faster than threads are begun."""
MAX_THREADS = 8


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """A digest of each tensor's name, shape, type and bytes, in the order of the model."""
    tensors = model.state_dict()
    size = sum(tensor.nbytes for tensor in tensors.values())
    num_threads = min(MAX_THREADS, os.cpu_count() or 1) if size >= THREADS_FROM_BYTES else 1
    with ThreadPoolExecutor(num_threads) as pool:  # hashing lets other threads run
        digests = pool.map(_digest, tensors, tensors.values())
        return dict(zip(tensors, digests, strict=True))


def overall(tensors: dict[str, str]) -> str:
    """One digest of all tensors."""
    return blake2b("".join(tensors.values()).encode(), digest_size=DIGEST_BYTES).hexdigest()


def _digest(name: str, tensor: torch.Tensor) -> str:
    whole = tensor.detach().cpu().contiguous()
    state = blake2b(f"{name} {whole.dtype} {list(whole.shape)}".encode(), digest_size=DIGEST_BYTES)
    state.update(whole.reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()
