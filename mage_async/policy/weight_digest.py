"""Digests of weights, which a commit record holds for the policy that a step made."""

from hashlib import blake2b

import torch
from torch import nn

from mage_async.learning.adapters import trained_tensors

DIGEST_BYTES = 8


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """A digest of each trained tensor's name, shape, type and bytes, in the order of the model; of
    a model with adapters, of these alone.
    """
    return {name: _digest(name, tensor) for name, tensor in trained_tensors(model).items()}


def overall(tensors: dict[str, str]) -> str:
    """One digest of all tensors."""
    return blake2b("".join(tensors.values()).encode(), digest_size=DIGEST_BYTES).hexdigest()


def _digest(name: str, tensor: torch.Tensor) -> str:
    whole = tensor.detach().cpu().contiguous()
    state = blake2b(f"{name} {whole.dtype} {list(whole.shape)}".encode(), digest_size=DIGEST_BYTES)
    state.update(whole.reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()
