"""Kernel: the element at each row's own token, written over what the tiles left there."""

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = {"BLOCK_T": 256}
OPTIONS = {"num_warps": 4}


@triton.jit
def own_gradient_kernel(
    gradient_ptr,
    tokens_ptr,
    own_ptr,
    T,
    first_column,
    num_columns,
    gradient_stride,
    BLOCK_T: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = rows < T
    column = tl.load(tokens_ptr + rows, mask=is_row, other=-1) - first_column
    own = tl.load(own_ptr + rows, mask=is_row, other=0.0)
    here = is_row & (column >= 0) & (column < num_columns)
    at = gradient_ptr + rows * gradient_stride + column
    tl.store(at, own.to(gradient_ptr.dtype.element_ty), mask=here)


def own_gradient(gradient: Tensor, tokens: Tensor, own: Tensor, first_column: int) -> None:
    """Write `own` `[R]` into `gradient` `[R, C]` where a row's token lies in these columns."""
    num_rows, num_columns = gradient.shape
    own_gradient_kernel[(triton.cdiv(num_rows, BLOCKS["BLOCK_T"]),)](
        gradient,
        tokens,
        own,
        num_rows,
        first_column,
        num_columns,
        gradient.stride(0),
        **BLOCKS,
        **OPTIONS,
    )
