"""Merge published adapters (LoRA, arXiv 2106.09685) into the frozen weights of a model directory.

For the embedded engine, the learner of a policy with adapters publishes only the adapters. Every
engine has the frozen weights, its *base*: the model directory that the run began from. The base
stays mapped from its files, so that the processes of one machine share its pages. Learner and
engine both call `with_adapter`, so their merged weights are equal bit for bit on the same kind of
processor. A GPU rounds differently, for which `MERGED_ROW_TOLERANCES` allows.

Shapes: a layer's weight has `O` outputs and `I` inputs; `R` is the rank of its adapter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from mage_async.completion import SECOND_ROLE
from mage_async.errors import UnreadableWeights
from mage_async.inference.weight_fingerprint import AdapterBase, combined, tensor_digest
from mage_async.inference.weights import DOWN, UP, read_tensors

LAYERS = "model.layers."
"""Beginning of the names of weights that may have an adapter."""


def with_adapter(
    weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return `weight + scale * up @ down`, computed in float32 and cast once: [O, I].

    Args:
        weight: [O, I]
        down: [R, I]
        up: [O, R]
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (up.to(wide) @ down.to(wide)).mul_(scale).add_(weight).to(weight.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """Hold published adapters, and a description of the base that they are added to."""

    tensors: dict[str, torch.Tensor]
    """Both matrices of each adapter, by their published names."""
    base: AdapterBase
    """Digest and type of the frozen weights, and the factor of the adapters."""


class BaseWeights:
    """Hold the frozen weights of a model directory, mapped from its files.

    Args:
        is_tied: Whether the LM head is the embedding, so that a copy of it in the files is ignored.
    """

    def __init__(self, directory: Path, *, is_tied: bool) -> None:
        self._directory, self._is_tied = directory, is_tied
        self._digests: dict[str, str] = {}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name; the files are read when the first adapters arrive."""
        return {
            name: tensor
            for name, tensor in read_tensors(self._directory)
            # Some old files hold the frequencies of the rotation, which engines compute themselves.
            if not name.endswith("rotary_emb.inv_freq")
            and not (self._is_tied and name == "lm_head.weight")
        }

    def digest(self, dtype: str) -> str:
        """Return the digest of all weights, cast to a type. The first call computes the digest."""
        if dtype not in self._digests:
            self._digests[dtype] = digest_of(self._tensors, getattr(torch, dtype))
        return self._digests[dtype]

    def tensors(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights by name, cast to a type, without adapters."""
        return ((name, one.to(getattr(torch, dtype))) for name, one in self._tensors.items())

    def merged(
        self, adapters: Mapping[str, torch.Tensor], published: AdapterBase
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights of a policy by name, with its adapters merged into them.

        If the policy has two roles, the weights that the second role's adapters change come once
        more at the end, merged with those adapters and named with the prefix `SECOND_ROLE`.

        Args:
            adapters: Published tensors, by name.
            published: Description of the learner's base: the digest and the type of its weights,
                and the factor of the adapters.

        Raises:
            UnreadableWeights: the tensors are not adapters of these weights.
        """
        dtype, changes = getattr(torch, published.dtype), self._changes(adapters)
        for name, weight in self._tensors.items():
            own = weight.to(dtype)
            pair = changes.pop(name, None)
            yield name, own if pair is None else with_adapter(own, *pair, published.scale)
        for name, pair in changes.items():
            weight = self._tensors[name.removeprefix(SECOND_ROLE)]
            yield name, with_adapter(weight.to(dtype), *pair, published.scale)

    def _changes(
        self, adapters: Mapping[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return both matrices of each adapter, by the published name of the weight they change."""
        changes = {}
        for layer in sorted({name.removesuffix(DOWN).removesuffix(UP) for name in adapters}):
            # A missing matrix is replaced by an empty one, whose shape does not fit.
            name, nothing = f"{layer}.weight", torch.empty(0)
            own = name.removeprefix(SECOND_ROLE)
            weight = self._tensors.get(own, nothing) if own.startswith(LAYERS) else nothing
            down, up = adapters.get(layer + DOWN, nothing), adapters.get(layer + UP, nothing)
            rank = len(down)
            if not rank or (*up.shape, *down.shape) != (len(weight), rank, rank, weight.shape[-1]):
                raise UnreadableWeights(
                    f"the adapter of {layer} does not fit {self._directory}: A is "
                    f"{list(down.shape)} and B {list(up.shape)}, the weight there "
                    f"{list(weight.shape)} ([0]: there is none)"
                )
            changes[name] = down, up
        return changes


def digest_of(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> str:
    """Return one digest of named weights, which are cast to a type first. They may be on any
    device.
    """
    return combined(
        {name: tensor_digest(name, weight.to("cpu", dtype)) for name, weight in weights.items()}
    )
