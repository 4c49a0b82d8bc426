"""Kernel: gradient of logits that exist already, in place where destination and source are one.

The token's own element is left to `own_gradient`, which writes it from fp32 numbers: read back from
16 bits, `1 - p` would be lost where p is close to 1.
"""

import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.fused.coefficients import Coefficients
from mage_kernels.fused.launching import LOG2E

BLOCKS = {"BLOCK_V": 4096}
OPTIONS = {"num_warps": 8}


@triton.jit
def row_gradient_kernel(
    gradient_ptr,
    logits_ptr,
    scale_ptr,
    normaliser_ptr,
    rest_ptr,
    slope_ptr,
    V,
    gradient_stride,
    stride,
    BLOCK_V: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    normaliser = tl.load(normaliser_ptr + row)
    rest = tl.load(rest_ptr + row)
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        inside = column < V
        z = tl.load(logits_ptr + row * stride + column, mask=inside, other=float("-inf"))
        log2_p = z.to(tl.float32) * scale - normaliser
        p = tl.exp2(log2_p)
        factor = tl.zeros((BLOCK_V,), tl.float32) + rest
        if HAS_SLOPE:
            factor += tl.load(slope_ptr + row) * tl.where(p > 0, log2_p, 0.0)  # 0 log 0 is 0
        at = gradient_ptr + row * gradient_stride + column
        tl.store(at, (p * factor).to(gradient_ptr.dtype.element_ty), mask=inside)


def row_gradient(gradient: Tensor, logits: Tensor, coefficients: Coefficients) -> None:
    """Fill `gradient` `[T, V]`, which may be the logits themselves."""
    num_rows, vocabulary = logits.shape
    row_gradient_kernel[(num_rows,)](
        gradient,
        logits,
        coefficients.inverse_temperature * LOG2E,
        coefficients.normaliser,
        coefficients.rest,
        coefficients.slope,
        vocabulary,
        gradient.stride(0),
        logits.stride(0),
        HAS_SLOPE=coefficients.slope is not None,
        **BLOCKS,
        **OPTIONS,
    )
