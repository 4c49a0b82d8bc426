"""Kernel: logits tile by tile, reduced at once to what a softmax needs; kept where asked.

One program takes BLOCK_T rows and one of SPLITS parts of the vocabulary, and carries along, per row
and in units of log2, the running maximum `m`, `s = sum 2^(z - m)` and `w = sum 2^(z - m) z`. The
number of parts does not depend on T, so a row's result does not depend on the rows beside it.

Programs run in groups of GROUP row tiles times SPLITS parts: a wave of them holds GROUP tiles of
hidden states and SPLITS panels of the head, about 20 MB at D = 2560, so both operands come from L2.

What is kept is `2^(z - m)` in the inputs' 16 bits, with the `m` of its tile beside it: its relative
error is 2^-9 whatever the logit, where a bf16 logit would put up to 6 % on a probability.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.fused.kept_logits import TILE, KeptLogits
from mage_kernels.fused.launching import LOG2E, UPCAST, descriptor

SPLITS = 8
BLOCKS = {**TILE, "BLOCK_D": 64, "GROUP": 16}
OPTIONS = {"num_warps": 8, "num_stages": 3}
LOWEST = tl.constexpr(-1.0e30)  # finite: rows of -inf would give inf - inf


@triton.jit
def logit_partials_kernel(
    hidden_desc,
    head_desc,
    kept_desc,
    tile_max_ptr,
    partials_ptr,
    scale_ptr,
    T,
    V,
    D,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(T, BLOCK_T)
    group = program // (GROUP * SPLITS)
    in_group = program % (GROUP * SPLITS)
    rows_in_group = tl.minimum(num_row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + in_group % rows_in_group
    split = in_group // rows_in_group

    rows = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = rows < T
    scale = tl.load(scale_ptr + rows, mask=is_row, other=1.0)
    num_tiles = tl.cdiv(V, BLOCK_V)
    tiles_per_split = tl.cdiv(num_tiles, SPLITS)
    m = tl.full((BLOCK_T,), LOWEST, tl.float32)
    s = tl.zeros((BLOCK_T,), tl.float32)
    w = tl.zeros((BLOCK_T,), tl.float32)
    first = split * tiles_per_split
    for tile in range(first, tl.minimum(first + tiles_per_split, num_tiles)):
        z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for d in range(0, D, BLOCK_D):
            x = hidden_desc.load([row_tile * BLOCK_T, d])
            e = head_desc.load([tile * BLOCK_V, d])
            if UPCAST:
                x, e = x.to(tl.float32), e.to(tl.float32)
            z = tl.dot(x, e.T, z)
        if (tile + 1) * BLOCK_V > V:  # columns past the vocabulary must not enter the sums
            columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            z = tl.where(columns[None, :] < V, z, LOWEST)
        new_m = tl.maximum(m, tl.max(z, 1) * scale)
        p = tl.exp2(z * scale[:, None] - new_m[:, None])
        decay = tl.exp2(m - new_m)
        s = s * decay + tl.sum(p, 1)
        w = w * decay + tl.sum(p * z, 1) * scale  # past the vocabulary p is 0 and z finite
        m = new_m
        if KEEP:
            kept_desc.store([row_tile * BLOCK_T, tile * BLOCK_V], p.to(kept_desc.dtype))
            tl.store(tile_max_ptr + tile * T + rows, m, mask=is_row)
    at = partials_ptr + split * T + rows
    tl.store(at, m, mask=is_row)
    tl.store(at + SPLITS * T, s, mask=is_row)
    tl.store(at + 2 * SPLITS * T, w, mask=is_row)


def logit_partials(
    hidden: Tensor, head: Tensor, inverse_temperature: Tensor, kept: KeptLogits | None = None
) -> Tensor:
    """`(m, s, w)` of every part of the vocabulary: fp32 `[3, SPLITS, T]`; fills `kept` if given."""
    (num_rows, width), vocabulary = hidden.shape, len(head)
    partials = torch.empty((3, SPLITS, num_rows), dtype=torch.float32, device=hidden.device)
    tile_t, tile_v, tile_d = BLOCKS["BLOCK_T"], BLOCKS["BLOCK_V"], BLOCKS["BLOCK_D"]
    logit_partials_kernel[(triton.cdiv(num_rows, tile_t) * SPLITS,)](
        descriptor(hidden, tile_t, tile_d),
        descriptor(head, tile_v, tile_d),
        None if kept is None else descriptor(kept.values, tile_t, tile_v),
        None if kept is None else kept.tile_max,
        partials,
        inverse_temperature * LOG2E,
        num_rows,
        vocabulary,
        width,
        SPLITS=SPLITS,
        KEEP=kept is not None,
        UPCAST=UPCAST,
        **BLOCKS,
        **OPTIONS,
    )
    return partials
