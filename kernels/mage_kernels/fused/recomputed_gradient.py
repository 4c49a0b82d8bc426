"""Kernel: gradient of the logits for a chunk of the vocabulary, from logits computed again.

`inverse_temperature p (-d_logprob - d_entropy (log p + H))`, in the inputs' 16 bits. The token's
own element is left without its `+ d_logprob`: `own_gradient` writes it.
"""

import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.fused.coefficients import Coefficients
from mage_kernels.fused.launching import LOG2E, UPCAST, descriptor

BLOCKS = {"BLOCK_T": 128, "BLOCK_V": 256, "BLOCK_D": 64, "GROUP": 8}
OPTIONS = {"num_warps": 8, "num_stages": 3}


@triton.jit
def recomputed_gradient_kernel(
    hidden_desc,
    head_desc,
    gradient_desc,
    scale_ptr,
    normaliser_ptr,
    rest_ptr,
    slope_ptr,
    T,
    D,
    first_column,
    num_columns,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(T, BLOCK_T)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_V)
    first_tile = program // (GROUP * num_row_tiles) * GROUP
    columns_in_group = tl.minimum(num_column_tiles - first_tile, GROUP)
    in_group = program % (GROUP * num_row_tiles)
    column_tile = first_tile + in_group % columns_in_group
    row_tile = in_group // columns_in_group

    z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for d in range(0, D, BLOCK_D):
        x = hidden_desc.load([row_tile * BLOCK_T, d])
        e = head_desc.load([first_column + column_tile * BLOCK_V, d])
        if UPCAST:
            x, e = x.to(tl.float32), e.to(tl.float32)
        z = tl.dot(x, e.T, z)
    rows = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = rows < T
    scale = tl.load(scale_ptr + rows, mask=is_row, other=0.0)
    normaliser = tl.load(normaliser_ptr + rows, mask=is_row, other=0.0)
    rest = tl.load(rest_ptr + rows, mask=is_row, other=0.0)
    log2_p = z * scale[:, None] - normaliser[:, None]
    factor = rest[:, None]
    if HAS_SLOPE:
        slope = tl.load(slope_ptr + rows, mask=is_row, other=0.0)
        factor += slope[:, None] * log2_p
    gradient = tl.exp2(log2_p) * factor
    gradient_desc.store(
        [row_tile * BLOCK_T, column_tile * BLOCK_V], gradient.to(gradient_desc.dtype)
    )


def recomputed_gradient(
    gradient: Tensor, hidden: Tensor, head: Tensor, coefficients: Coefficients, first_column: int
) -> None:
    """Fill `gradient` `[R, C]` for the columns from `first_column` on."""
    num_rows, num_columns = gradient.shape
    tile_t, tile_v, tile_d = BLOCKS["BLOCK_T"], BLOCKS["BLOCK_V"], BLOCKS["BLOCK_D"]
    grid = triton.cdiv(num_rows, tile_t) * triton.cdiv(num_columns, tile_v)
    recomputed_gradient_kernel[(grid,)](
        descriptor(hidden, tile_t, tile_d),
        descriptor(head, tile_v, tile_d),
        descriptor(gradient, tile_t, tile_v),
        coefficients.inverse_temperature * LOG2E,
        coefficients.normaliser,
        coefficients.rest,
        coefficients.slope,
        num_rows,
        hidden.shape[1],
        first_column,
        num_columns,
        HAS_SLOPE=coefficients.slope is not None,
        UPCAST=UPCAST,
        **BLOCKS,
        **OPTIONS,
    )
