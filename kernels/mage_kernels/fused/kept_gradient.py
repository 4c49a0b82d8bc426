"""Kernel: gradient of the logits from exp-scaled logits that were kept, no GEMM needed.

Like `recomputed_gradient`, with `p = kept 2^(m - normaliser)`. Source and destination may be the
same memory where every row stays in its place. 4 bytes are moved per logit; nothing else counts.
"""

import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.fused.coefficients import Coefficients
from mage_kernels.fused.kept_logits import TILE, KeptLogits

BLOCKS = {"BLOCK_T": 16, "BLOCK_V": TILE["BLOCK_V"]}
OPTIONS = {"num_warps": 4}


@triton.jit
def kept_gradient_kernel(
    kept_ptr,
    tile_max_ptr,
    gradient_ptr,
    source_rows_ptr,
    normaliser_ptr,
    rest_ptr,
    slope_ptr,
    T,
    num_kept,
    first_column,
    num_columns,
    kept_stride,
    gradient_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = first_column // BLOCK_V + tl.program_id(1)
    is_row = rows < T
    inside = is_row[:, None] & (columns < num_columns)[None, :]
    source = tl.load(source_rows_ptr + rows, mask=is_row, other=0)
    m = tl.load(tile_max_ptr + tile * num_kept + source, mask=is_row, other=0.0)
    shift = m - tl.load(normaliser_ptr + rows, mask=is_row, other=0.0)
    factor = tl.load(rest_ptr + rows, mask=is_row, other=0.0)[:, None]
    at = kept_ptr + source[:, None] * kept_stride + (first_column + columns)[None, :]
    kept = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if HAS_SLOPE:
        slope = tl.load(slope_ptr + rows, mask=is_row, other=0.0)
        log2_p = tl.log2(tl.where(kept > 0, kept, 1.0)) + shift[:, None]  # 0 log 0 is 0
        factor += slope[:, None] * log2_p
    gradient = kept * tl.exp2(shift)[:, None] * factor
    to = gradient_ptr + rows[:, None] * gradient_stride + columns[None, :]
    tl.store(to, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def kept_gradient(
    gradient: Tensor,
    kept: KeptLogits,
    source_rows: Tensor,
    coefficients: Coefficients,
    first_column: int,
) -> None:
    """Fill `gradient` `[R, C]` from rows `source_rows` `[R]` of what was kept.

    `first_column` must be a multiple of the forward's BLOCK_V: the tiles' maxima are stored by
    tile.
    """
    assert first_column % BLOCKS["BLOCK_V"] == 0
    num_rows, num_columns = gradient.shape
    grid = (triton.cdiv(num_rows, BLOCKS["BLOCK_T"]), triton.cdiv(num_columns, BLOCKS["BLOCK_V"]))
    kept_gradient_kernel[grid](
        kept.values,
        kept.tile_max,
        gradient,
        source_rows,
        coefficients.normaliser,
        coefficients.rest,
        coefficients.slope,
        num_rows,
        len(kept.values),
        first_column,
        num_columns,
        kept.values.stride(0),
        gradient.stride(0),
        HAS_SLOPE=coefficients.slope is not None,
        **BLOCKS,
        **OPTIONS,
    )
