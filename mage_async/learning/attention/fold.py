"""Packed rows to places of equal length and back, with gradients that copy and never add.

Every packed row has one place, and what stands in a place past its sequence's end has no gradient:
indexing would add the gradients of all those places into one row, one after the other
(pytorch#41162 on CUDA).

Shapes: `T` rows, `S` sequences, `L` the longest of them.
"""

import torch
from torch.autograd.function import FunctionCtx


class Fold(torch.autograd.Function):
    """[T, ...] -> [S, L, ...]; a place past a sequence's end gets any row."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, fold: torch.Tensor, unfold: torch.Tensor
    ) -> torch.Tensor:
        """`fold` is the row of each place, int64 [S, L]; `unfold` the place of each row, [T]."""
        ctx.save_for_backward(unfold)
        return rows.index_select(0, fold.flatten()).unflatten(0, fold.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of each row's own place."""
        (unfold,) = ctx.saved_tensors
        return gradient.flatten(0, 1).index_select(0, unfold), None, None


class Unfold(torch.autograd.Function):
    """[S, L, ...] -> [T, ...]"""

    @staticmethod
    def forward(ctx: FunctionCtx, places: torch.Tensor, unfold: torch.Tensor) -> torch.Tensor:
        """`unfold` is int64 [T], the place of each row."""
        ctx.save_for_backward(unfold)
        ctx.shape = places.shape
        return places.flatten(0, 1).index_select(0, unfold)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of each row in its place, and 0 in places past a sequence's end."""
        (unfold,) = ctx.saved_tensors
        places = gradient.new_zeros(ctx.shape).flatten(0, 1)
        return places.index_copy_(0, unfold, gradient).view(ctx.shape), None
