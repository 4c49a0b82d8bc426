"""Attention over packed sequences for any transformers model, registered under a name of its own.

A batch is one row of `T` tokens, sequence after sequence, without padding; only attention has to
know where sequences begin. Attention folds them into rows of equal length (right-padding is
invisible under a causal mask), calls torch's scaled-dot-product attention, and unfolds. Trials of
one environment have nearly equal lengths, so this costs little more than its tokens; a
block-diagonal mask over `T` would cost `T / L` times as much.

Shapes: `T` packed tokens, `S` sequences, `L` the longest of them, `N` heads, `K` key-value heads,
`D` head size.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import AttentionInterface

from mage_async.errors import PolicyError

NAME = "mage_packed"
WITHOUT_EFFECT = {"position_ids", "use_cache"}
"""Keywords that layers pass to every attention: positions are in the keys already."""


@dataclass(frozen=True, slots=True, eq=False)
class Boundaries:
    """Where the sequences of a packed row lie."""

    fold: torch.Tensor
    """int64 [S, L]: the packed position of each place; places past a sequence's end repeat position
    0.
    """
    unfold: torch.Tensor
    """int64 [T]: the place of each packed position, counted over S * L."""

    @staticmethod
    def of(lengths: torch.Tensor) -> "Boundaries":
        """Boundaries of sequences with the given lengths, int64 [S]."""
        starts = torch.cumsum(lengths, 0) - lengths
        places = torch.arange(int(lengths.max()), device=lengths.device)
        exists = places < lengths[:, None]
        fold = torch.where(exists, starts[:, None] + places, 0)
        return Boundaries(fold, exists.flatten().nonzero()[:, 0])


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    boundaries: Boundaries,
    dropout: float = 0.0,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence.

    Args:
        query: [1, N, T, D]
        key: [1, K, T, D]
        value: [1, K, T, D]
        others: what a layer says beside these; nothing that changes its attention.

    Returns:
        [1, T, N, D], and no weights.

    Raises:
        PolicyError: the layer asks for more than this attention knows.
    """
    if asked := [name for name in others.keys() - WITHOUT_EFFECT if others[name] is not None]:
        raise PolicyError(
            f"{type(module).__name__} asks for {', '.join(sorted(asked))}, which attention over "
            "packed sequences does not know: take a model without"
        )
    folded = [_fold(tensor, boundaries) for tensor in (query, key, value)]
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and lacks_grouped_kernel(query.device, query.dtype):
        each = query.shape[1] // key.shape[1]
        folded[1:] = (tensor.repeat_interleave(each, dim=1) for tensor in folded[1:])
        is_grouped = False
    out = functional.scaled_dot_product_attention(
        *folded, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=is_grouped
    )
    places = out.transpose(1, 2).flatten(0, 1)
    return places[boundaries.unfold][None], None


def lacks_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch, for fewer key heads than heads, would keep all weights, [S, N, L, L] a layer.

    On CUDA only its flash kernel shares key heads, which takes 16 bits; keys and values that are
    repeated instead go to a kernel that keeps none.
    """
    return device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16)


def _fold(tensor: torch.Tensor, boundaries: Boundaries) -> torch.Tensor:
    """[1, N, T, D] -> [S, N, L, D]"""
    return tensor[0].transpose(0, 1)[boundaries.fold].transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
