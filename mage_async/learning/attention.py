"""Compute attention over packed sequences for any transformers model; registered as `mage_packed`.

A forward gets one row of `T` tokens, sequence after sequence without padding; only attention needs
to know where sequences begin. On CUDA in 16 bits, torch's variable-length flash kernel computes it.
Otherwise the row is folded to padded rows `[S, L]` for scaled-dot-product attention, and unfolded
again. Under a causal mask the padding on the right has no effect, and trials of one environment
have nearly equal lengths, so this costs little; a block-diagonal mask over `T` would cost `T / L`
times as much.

Sequences may share a prefix of `P` tokens, the *opening*. It then stands once, at the beginning of
the row, and the own tokens of every sequence attend to its keys.

Shapes: `T` packed tokens, of which the first `P` are the opening; `S` sequences, `L` own tokens of
the longest, `N` heads, `K` key-value heads, `D` head size, `M` keys of all sequences with their
openings.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from mage_async.errors import PolicyError

PACKED_ATTENTION = "mage_packed"
"""Name of this attention in transformers' registry (`attn_implementation`)."""
WITHOUT_EFFECT = {"position_ids", "use_cache"}
"""Keywords that every layer passes and that have no effect here: the rotary embedding has put the
positions into queries and keys already, and there is no cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Boundaries:
    """Describe where the sequences of a row lie."""

    shape: tuple[int, int]
    """S and L."""
    places: torch.Tensor
    """int64 [T - P]: place of each token after the opening among the S * L padded positions."""
    opening: int = 0
    """P: tokens at the beginning of the row that belong to every sequence."""
    visible: torch.Tensor | None = None
    """bool [L, P + L]: which keys, the opening's and then its sequence's own, each own token sees;
    None without an opening.
    """
    extents: "Extents | None" = None
    """Inputs of the variable-length kernel; None where the row does not lie on CUDA."""

    @property
    def has_padding(self) -> bool:
        """Whether sequences differ in length."""
        return len(self.places) < self.shape[0] * self.shape[1]

    @staticmethod
    def of(lengths: torch.Tensor, opening: int = 0) -> "Boundaries":
        """Compute boundaries from the number of own tokens of each sequence, int64 [S]."""
        longest, device = int(lengths.max()), lengths.device
        exists = torch.arange(longest, device=device) < lengths[:, None]
        visible = visible_keys(longest, opening + longest, device) if opening else None
        extents = Extents.of(lengths, opening) if device.type == "cuda" else None
        places = exists.flatten().nonzero()[:, 0]
        return Boundaries((len(lengths), longest), places, opening, visible, extents)


def visible_keys(
    num_queries: int, num_keys: int, device: torch.device, window: int = 0
) -> torch.Tensor:
    """Return which keys each query sees: bool [queries, keys]. The queries belong to the last
    tokens.

    Args:
        window: Number of tokens that a token sees, itself and those before it; 0: all.
    """
    first = num_keys - num_queries
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(first)
    return visible.triu(first - window + 1) if window else visible


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
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend causally inside each packed sequence.

    Args:
        query: [1, N, T, D]
        key: [1, K, T, D]
        value: [1, K, T, D]
        attention_mask: not used; `boundaries` decide what a token sees.
        sliding_window: number of tokens that a token sees, itself and those before it; None: all.
        others: further keywords of the layer; none may change its attention.

    Returns:
        Outputs [1, T, N, D], and None for the attention weights.

    Raises:
        PolicyError: the layer passes a keyword that this attention does not implement.
    """
    if unknown := [name for name in others.keys() - WITHOUT_EFFECT if others[name] is not None]:
        raise PolicyError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))}, which attention over "
            "packed sequences does not implement: choose another model"
        )
    rows = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    (_, longest), opening = boundaries.shape, boundaries.opening
    # A window that is as wide as the longest sequence hides nothing.
    window = sliding_window or 0
    window = 0 if window >= opening + longest else window
    if boundaries.extents is not None and kernel_takes(query, dropout):
        return attend_by_kernel(*rows, boundaries.extents, scaling, window)[None], None
    attend = partial(_attend, scale=scaling, dropout_p=dropout)

    def visible(num_queries: int, num_keys: int) -> torch.Tensor | None:
        """Return the mask of the window; None without a window."""
        return visible_keys(num_queries, num_keys, query.device, window) if window else None

    if not opening:
        folded = [_fold(each, boundaries) for each in rows]
        attended = attend(*folded, visible=visible(longest, longest))
        return _unfold(attended, boundaries)[None], None
    # The opening attends to itself once; every sequence sees its keys and values before its own.
    split = [each.tensor_split((opening,)) for each in rows]
    of_opening = [shared.transpose(0, 1)[None] for shared, _ in split]
    folded = [_fold(own, boundaries) for _, own in split]
    with_opening = [
        torch.cat((shared.expand(len(own), -1, -1, -1), own), dim=2)
        for shared, own in zip(of_opening[1:], folded[1:], strict=True)
    ]
    own_visible = visible(longest, opening + longest) if window else boundaries.visible
    own_attended = _unfold(attend(folded[0], *with_opening, visible=own_visible), boundaries)
    opening_attended = attend(*of_opening, visible=visible(opening, opening))
    return torch.cat((opening_attended[0].transpose(0, 1), own_attended))[None], None


# Attention over padded rows: fold the row to [S, L], attend, unfold.


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    visible: torch.Tensor | None = None,
    **options: float,
) -> torch.Tensor:
    """Attend by torch: [S, N, L, D]; causal unless a mask of `visible` keys is given."""
    is_grouped = query.shape[1] != key.shape[1]
    is_masked = visible is not None
    if is_grouped and lacks_grouped_kernel(query.device, query.dtype, is_masked=is_masked):
        num_shared = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(num_shared, dim=1) for tensor in (key, value))
        is_grouped = False
    return functional.scaled_dot_product_attention(
        query, key, value, visible, is_causal=not is_masked, enable_gqa=is_grouped, **options
    )


def _fold(rows: torch.Tensor, boundaries: Boundaries) -> torch.Tensor:
    """Pad the sequences of a row with 0: [T - P, N, D] -> [S, N, L, D]. If none needs padding, the
    result is a view of `rows`.
    """
    if boundaries.has_padding:
        return placed(rows, boundaries.places, boundaries.shape).transpose(1, 2)
    by_token: torch.Tensor = rows.unflatten(0, boundaries.shape)
    return by_token.transpose(1, 2)


def _unfold(folded: torch.Tensor, boundaries: Boundaries) -> torch.Tensor:
    """Drop the padding, the reverse of `_fold`: [S, N, L, D] -> [T - P, N, D]."""
    by_token = folded.transpose(1, 2)
    if not boundaries.has_padding:
        return by_token.flatten(0, 1)
    rows: torch.Tensor = Unfold.apply(by_token, boundaries.places)
    return rows


def placed(rows: torch.Tensor, places: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Copy each token's row to its place, and the gradient back: [T - P, ...] -> [S, L, ...].

    Args:
        places: `Boundaries.places`.
        shape: S and L.
    """
    folded = rows.new_zeros((shape[0] * shape[1], *rows.shape[1:]))
    padded: torch.Tensor = folded.index_copy_(0, places, rows).unflatten(0, shape)
    return padded


class Unfold(torch.autograd.Function):
    """Drop the padding: [S, L, ...] -> [T - P, ...].

    Every token has one place of its own, so the backward pass copies. The backward pass that torch
    has for `index_select` would add row by row.
    """

    @staticmethod
    def forward(ctx: Any, folded: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Drop the padding; `places` is `Boundaries.places`."""
        ctx.save_for_backward(places)
        ctx.shape = folded.shape[:2]
        return folded.flatten(0, 1).index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Put each row's gradient in its place, and 0 into the padding."""
        (places,) = ctx.saved_tensors
        return placed(gradient, places, ctx.shape), None


def lacks_grouped_kernel(
    device: torch.device, dtype: torch.dtype, *, is_masked: bool = False
) -> bool:
    """Return whether torch would store all attention weights, [S, N, L, L], if K < N.

    On CUDA only the flash kernel shares key-value heads, and it takes 16 bits and no mask. Repeated
    keys and values go to another kernel, which does not store the weights.
    """
    return device.type == "cuda" and (is_masked or dtype not in (torch.bfloat16, torch.float16))


# Attention by torch's variable-length flash kernel, on CUDA in 16 bits. It has never run on a GPU.
#
# The opening is a sequence of queries of its own. Its keys are copied before the own keys of every
# other sequence: the kernel's causal mask is aligned at the last query and the last key of a
# sequence (`torch/nn/attention/bias.py`), so an own token sees the whole opening.

MIN_CAPABILITY = (8, 0)
"""Least compute capability for the kernel."""
MAX_HEAD_SIZE = 256
"""Largest head size of the kernel."""


@cache
def kernel() -> Callable[..., Any] | None:
    """Return torch's `varlen_attn`; None if this version lacks it or one of its arguments."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= takes.keys() else None


def kernel_takes(query: torch.Tensor, dropout: float) -> bool:
    """Return whether the kernel takes queries of this device, dtype and shape, [1, N, T, D]. The
    kernel has no dropout.
    """
    is_gpu = query.device.type == "cuda"
    return is_gpu and not dropout and not why_padded(query.device, query.dtype, query.shape[-1])


@cache
def why_padded(device: torch.device, dtype: torch.dtype, size: int) -> str:
    """Return the reason why attention on a GPU cannot use the kernel, and computes padded rows
    instead; "" if the kernel is used.

    Args:
        size: Head size, D.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel takes 16 bits, not {dtype}"
    if size > MAX_HEAD_SIZE or size % 8:
        return f"the kernel takes head sizes up to {MAX_HEAD_SIZE}, multiples of 8, not {size}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the kernel needs compute capability 8.0"
    if kernel() is None:
        return f"torch {torch.__version__} has no `varlen_attn` that shares key heads"
    return ""


def attention_report(model: PreTrainedModel) -> str:
    """Describe the attention of a model on a GPU in a few words for people; "" on a CPU."""
    if model.device.type != "cuda":
        return ""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    reason = why_padded(model.device, model.dtype, size)
    return f"attention over padded rows, because {reason}" if reason else "attention by varlen_attn"


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Describe where queries and keys of each sequence lie; the opening is the first sequence."""

    queries: torch.Tensor
    """int32 [S + 1], [S + 2] with an opening: index where each sequence's queries begin, and the
    end.
    """
    keys: torch.Tensor
    """Like `queries`, for the keys: indices into the M keys."""
    most_queries: int
    """Number of queries of the longest sequence."""
    most_keys: int
    """Number of keys of the longest sequence."""
    copies: torch.Tensor | None = None
    """int64 [S + 1, P]: indices of the copies of the opening's keys; None without an opening."""
    own: torch.Tensor | None = None
    """int64 [T - P]: indices of the keys of all tokens after the opening; None if there is no
    opening."""

    @staticmethod
    def of(lengths: torch.Tensor, opening: int = 0) -> "Extents":
        """Compute extents from the number of own tokens of each sequence, int64 [S]."""
        longest = int(lengths.max())
        if not opening:
            ends = _ends(lengths)
            return Extents(ends, ends, longest, longest)
        first = lengths.new_tensor([opening])
        owned = torch.cat((first.new_zeros(1), lengths))
        queries, keys = _ends(torch.cat((first, lengths))), _ends(owned + opening)
        starts = keys[:-1].long()
        copies = starts[:, None] + torch.arange(opening, device=lengths.device)
        is_own = torch.ones(int(keys[-1]), dtype=torch.bool, device=lengths.device)
        is_own[copies] = False
        own = is_own.nonzero()[:, 0]
        return Extents(queries, keys, max(opening, longest), opening + longest, copies, own)


def attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    extents: Extents,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Attend inside each sequence by the kernel: [T, N, D], [T, K, D], [T, K, D] to [T, N, D].

    Args:
        window: Number of tokens that a token sees, itself and those before it; 0: all.
    """
    attention = kernel()
    assert attention is not None, "`kernel_takes` was true"
    if extents.copies is not None:
        key, value = (CopyOpening.apply(each, extents.copies, extents.own) for each in (key, value))
    attended: torch.Tensor = attention(
        query,
        key,
        value,
        extents.queries,
        extents.keys,
        extents.most_queries,
        extents.most_keys,
        scale=scale,
        # Number of keys before a token (-1: all), and after it.
        window_size=(window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended


class CopyOpening(torch.autograd.Function):
    """Copy the opening's rows before those of every sequence: [T, ...] -> [M, ...].

    The backward pass sums the gradients of the copies in a fixed order; the backward pass of
    indexing would not do that on CUDA.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, copies: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        """Copy the rows; `copies` and `own` are those of `Extents`."""
        ctx.save_for_backward(copies, own)
        first, others = rows.tensor_split((copies.shape[1],))
        spread = rows.new_empty((copies.numel() + len(own), *rows.shape[1:]))
        spread[copies] = first
        spread[own] = others
        return spread

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sum the gradients of each opening row's copies; pass the others through."""
        copies, own = ctx.saved_tensors
        shared = gradient.index_select(0, copies.flatten()).unflatten(0, copies.shape).sum(0)
        return torch.cat((shared, gradient.index_select(0, own))), None, None


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """Return 0 and the index where each sequence ends: int32 [S + 1]."""
    return functional.pad(lengths.cumsum(0), (1, 0)).int()


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
