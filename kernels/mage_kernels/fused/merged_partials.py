"""Kernel: the parts of the vocabulary merged, with the token's own logit, to log-prob and entropy.

The own logit is an fp32 dot of two gathered rows: 2 T D reads, where comparing every column with
the token in the GEMM's epilogue would cost three of its eight instructions per logit.
"""

import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.fused.launching import row_vectors

BLOCKS = {"BLOCK_D": 1024}
OPTIONS = {"num_warps": 4}
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merged_partials_kernel(
    partials_ptr,
    hidden_ptr,
    head_ptr,
    tokens_ptr,
    inverse_temperature_ptr,
    logprob_ptr,
    entropy_ptr,
    normaliser_ptr,
    T,
    D,
    num_parts,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    is_part = part < num_parts
    at = partials_ptr + row
    m = tl.load(at + part.to(tl.int64) * T, mask=is_part, other=-1.0e30)
    s = tl.load(at + (num_parts + part).to(tl.int64) * T, mask=is_part, other=0.0)
    w = tl.load(at + (2 * num_parts + part).to(tl.int64) * T, mask=is_part, other=0.0)
    top = tl.max(m, 0)
    decay = tl.exp2(m - top)
    total = tl.sum(s * decay, 0)
    mean = tl.sum(w * decay, 0) / total
    log_normaliser = top + tl.log2(total)

    token = tl.load(tokens_ptr + row)
    products = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(hidden_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        e = tl.load(head_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        products += x * e
    own = tl.sum(products, 0) * tl.load(inverse_temperature_ptr + row)
    tl.store(logprob_ptr + row, tl.minimum(own - log_normaliser * LN2, 0.0))
    tl.store(entropy_ptr + row, tl.maximum((log_normaliser - mean) * LN2, 0.0))
    tl.store(normaliser_ptr + row, log_normaliser)


def merged_partials(
    partials: Tensor, hidden: Tensor, head: Tensor, tokens: Tensor, inverse_temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy (nats) and log2 of the normaliser, fp32 `[T]` each, from `[3, parts, T]`.

    With a vocabulary in shards, partials of all ranks concatenated along the parts give the same.
    """
    num_rows, num_parts = len(hidden), partials.shape[1]
    logprob, entropy, normaliser = row_vectors(3, num_rows, hidden.device)
    merged_partials_kernel[(num_rows,)](
        partials,
        hidden,
        head,
        tokens,
        inverse_temperature,
        logprob,
        entropy,
        normaliser,
        num_rows,
        hidden.shape[1],
        num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        **BLOCKS,
        **OPTIONS,
    )
    return logprob, entropy, normaliser
