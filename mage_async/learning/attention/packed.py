"""Attention over packed sequences for any transformers model, registered under a name of its own.

A batch is one row of `T` tokens, sequence after sequence, without padding; only attention has to
know where sequences begin. Attention folds them into rows of equal length (right-padding is
invisible under a causal mask), calls torch's scaled-dot-product attention, and unfolds. Trials of
one environment have nearly equal lengths, so this costs little more than its tokens; a
block-diagonal mask over `T` would cost `T / L` times as much. On CUDA in 16 bits nothing is folded:
`varlen.py` hands the row to a kernel that knows of lengths.

What all sequences begin with may stand once at the beginning of the row, as their opening; each
sequence's own tokens then attend to the opening's keys as to earlier ones of their own.

Shapes: `T` packed tokens, of which the first `P` are the opening; `S` sequences, `L` own tokens of
the longest of them, `N` heads, `K` key-value heads, `D` head size.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional
from transformers import AttentionInterface

from mage_async.errors import PolicyError
from mage_async.learning.attention import varlen
from mage_async.learning.attention.fold import Fold, Unfold

NAME = "mage_packed"
WITHOUT_EFFECT = {"position_ids", "use_cache"}
"""Keywords that layers pass to every attention: positions are in the keys already."""


@dataclass(frozen=True, slots=True, eq=False)
class Boundaries:
    """Where the sequences of a packed row lie."""

    fold: torch.Tensor
    """int64 [S, L]: the packed position of each place, counted from the opening's end; places past
    a sequence's end repeat position 0.
    """
    unfold: torch.Tensor
    """int64 [T - P]: the place of each packed position past the opening, counted over S * L."""
    opening: int = 0
    """P: tokens at the row's beginning that every sequence begins with."""
    visible: torch.Tensor | None = None
    """bool [L, P + L]: the keys that each own token sees; None without an opening."""
    extents: varlen.Extents | None = None
    """Where sequences lie, on a device that has a kernel for it."""

    @staticmethod
    def of(lengths: torch.Tensor, opening: int = 0) -> "Boundaries":
        """Boundaries of sequences with the given lengths past their opening, int64 [S]."""
        starts = torch.cumsum(lengths, 0) - lengths
        longest, device = int(lengths.max()), lengths.device
        places = torch.arange(longest, device=device)
        exists = places < lengths[:, None]
        fold = torch.where(exists, starts[:, None] + places, 0)
        visible = None
        if opening:
            visible = torch.ones(longest, opening + longest, dtype=torch.bool, device=device)
            visible = visible.tril(opening)
        extents = varlen.Extents.of(lengths, opening) if device.type == "cuda" else None
        return Boundaries(fold, exists.flatten().nonzero()[:, 0], opening, visible, extents)


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
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if boundaries.extents is not None and varlen.fits(query, dropout):
        return varlen.attend(*rows, boundaries.extents, scaling)[None], None
    attend = partial(_attend, scale=scaling, dropout_p=dropout)
    if not boundaries.opening:
        folded = [_fold(each, boundaries) for each in rows]
        return _unfold(attend(*folded), boundaries)[None], None
    split = [each.tensor_split((boundaries.opening,)) for each in rows]
    first = [opening.transpose(0, 1)[None] for opening, _ in split]
    folded = [_fold(own, boundaries) for _, own in split]
    seen = [
        torch.cat((shared.expand(len(own), -1, -1, -1), own), dim=2)
        for shared, own in zip(first[1:], folded[1:], strict=True)
    ]
    later = _unfold(attend(folded[0], *seen, visible=boundaries.visible), boundaries)
    return torch.cat((attend(*first)[0].transpose(0, 1), later))[None], None


def lacks_grouped_kernel(
    device: torch.device, dtype: torch.dtype, *, is_masked: bool = False
) -> bool:
    """Whether torch, for fewer key heads than heads, would keep all weights, [S, N, L, L] a layer.

    On CUDA only its flash kernel shares key heads, which takes 16 bits and no mask; keys and values
    that are repeated instead go to a kernel that keeps none.
    """
    return device.type == "cuda" and (is_masked or dtype not in (torch.bfloat16, torch.float16))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None = None,
    **options: float,
) -> torch.Tensor:
    """torch's attention, causal where nothing says which keys are `visible`: [S, N, L, D]."""
    is_grouped = query.shape[1] != key.shape[1]
    is_masked = visible is not None
    if is_grouped and lacks_grouped_kernel(query.device, query.dtype, is_masked=is_masked):
        each = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(each, dim=1) for tensor in (key, value))
        is_grouped = False
    return functional.scaled_dot_product_attention(
        query, key, value, visible, is_causal=not is_masked, enable_gqa=is_grouped, **options
    )


def _fold(rows: torch.Tensor, boundaries: Boundaries) -> torch.Tensor:
    """[T - P, N, D] -> [S, N, L, D]"""
    return Fold.apply(rows, boundaries.fold, boundaries.unfold).transpose(1, 2)


def _unfold(folded: torch.Tensor, boundaries: Boundaries) -> torch.Tensor:
    """[S, N, L, D] -> [T - P, N, D]"""
    return Unfold.apply(folded.transpose(1, 2), boundaries.unfold)


AttentionInterface.register(NAME, packed_attention)
