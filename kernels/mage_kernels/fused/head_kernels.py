"""Implement the Triton kernels of the LM head: forward partials, their merge, gradients of the
logits, and the policy loss.

    logit_partials            softmax sums of each part of the vocabulary; may keep the logits
    merged_partials           log-prob and entropy from the partials of all parts of the vocabulary
    recomputed_gradient       gradient of the logits, for which it computes the logits again
    kept_gradient             gradient of the logits from kept logits
    sampled_token_gradient    gradient of each row's sampled token, which the two above leave wrong
    surrogate_gradient        the policy loss of each token, and its derivatives

Softmax sums are in base 2. In comments and docstrings `z` is a scaled logit: the raw logit times
the inverse temperature times log2(e). In the kernels `logits` are raw and `scale` is that factor.

Shapes: `T` tokens, `V` vocabulary, `D` hidden, `R` rows with a gradient, `K` rows with kept logits,
`C` columns of a chunk. The argument `T` of a kernel is the number of rows of its own launch.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mage_kernels.surrogate import MAX_LOG_RATIO, Surrogate, TokenData

UPCAST = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels. It stores bf16 as 16-bit integers, which its
`tl.dot` would multiply as integers. With UPCAST, kernels convert the operands of `tl.dot` to fp32.
"""
LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)

# Forward: partials of the softmax over parts of the vocabulary.
#
# A program takes BLOCK_T rows and one of SPLITS parts of the vocabulary. For each row it updates
# the running maximum `m`, `s = sum 2^(z - m)` and `w = sum 2^(z - m) z`. The number of parts does
# not depend on T, so the result of a row does not depend on the other rows.
#
# Programs are numbered in groups of GROUP row tiles times SPLITS parts. Programs that run at the
# same time then read GROUP tiles of hidden states and SPLITS panels of the LM head, about 20 MB at
# D = 2560, which fit into the L2 cache.
#
# `2^(z - m)` may be kept in 16 bits, with the `m` of its tile. Its relative error is 2^-9 for any
# logit. A logit kept in bf16 would change a probability by up to 6 %.

TILE = {"BLOCK_T": 128, "BLOCK_V": 256}
"""Tile of the forward, in rows and columns; kept logits have one maximum per row and BLOCK_V
columns.
"""


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """Hold `2^(z - m)` of the first K rows of a forward, with the `m` of each of their tiles.

    A call of `logit_partials` for these rows alone fills it.
    """

    values: Tensor
    """`[K, V]`: bf16 for 16-bit inputs, because its eight exponent bits hold all but vanishing
    values of `2^(z - m)`; otherwise of the inputs' type."""
    tile_max: Tensor
    """fp32 `[tiles, K]`: the running maximum `m` after each tile of BLOCK_V columns."""

    @classmethod
    def empty(cls, num_rows: int, vocabulary: int, like: Tensor) -> "KeptLogits":
        """Allocate memory for the logits of `num_rows` rows, on the device of `like`."""
        tiles = -(-vocabulary // TILE["BLOCK_V"])
        tile_max = torch.empty((tiles, num_rows), dtype=torch.float32, device=like.device)
        dtype = torch.bfloat16 if like.itemsize == 2 else like.dtype
        return cls(padded_buffer(num_rows, vocabulary, dtype, like.device), tile_max)


def num_kept_rows(keep_bytes: int, num_rows: int, vocabulary: int, itemsize: int) -> int:
    """Return the number of rows whose logits fit into `keep_bytes`: all, or whole row tiles."""
    fitting = keep_bytes // (vocabulary * itemsize)
    return num_rows if fitting >= num_rows else fitting - fitting % TILE["BLOCK_T"]


SPLITS = 8
"""Number of parts of the vocabulary, each of which is reduced by programs of its own."""
PARTIALS_BLOCKS = {**TILE, "BLOCK_D": 64, "GROUP": 16}
"""Tile sizes of `logit_partials_kernel`, and GROUP as explained above."""
PARTIALS_OPTIONS = {"num_warps": 8, "num_stages": 3}
"""Options of the kernel's launches, as of each kernel below."""
LOWEST = tl.constexpr(-1.0e30)  # finite, because -inf - -inf is NaN


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
    """Reduce the logits of one row tile over one part of the vocabulary; see `logit_partials`.

    Shapes: hidden `[T, D]`, head `[V, D]`, kept `[T, V]`, tile_max fp32 `[tiles, T]`, partials fp32
    `[3, SPLITS, T]`, scale fp32 `[T]`. Without KEEP, kept and tile_max are None.
    """
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
        logits = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for d in range(0, D, BLOCK_D):
            x = hidden_desc.load([row_tile * BLOCK_T, d])
            e = head_desc.load([tile * BLOCK_V, d])
            if UPCAST:
                x, e = x.to(tl.float32), e.to(tl.float32)
            logits = tl.dot(x, e.T, logits)
        if (tile + 1) * BLOCK_V > V:  # columns past the vocabulary must not enter the sums
            columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            logits = tl.where(columns[None, :] < V, logits, LOWEST)
        new_m = tl.maximum(m, tl.max(logits, 1) * scale)
        p = tl.exp2(logits * scale[:, None] - new_m[:, None])
        decay = tl.exp2(m - new_m)
        s = s * decay + tl.sum(p, 1)
        # LOWEST is finite: past the vocabulary p is 0, and 0 times -inf would be NaN.
        w = w * decay + tl.sum(p * logits, 1) * scale
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
    """Compute `(m, s, w)` of every part of the vocabulary, fp32 `[3, SPLITS, T]`; fill `kept`,
    which has as many rows as `hidden`.
    """
    (num_rows, width), vocabulary = hidden.shape, len(head)
    partials = torch.empty((3, SPLITS, num_rows), dtype=torch.float32, device=hidden.device)
    logit_partials_kernel[(triton.cdiv(num_rows, PARTIALS_BLOCKS["BLOCK_T"]) * SPLITS,)](
        descriptor(hidden, PARTIALS_BLOCKS, "TD"),
        descriptor(head, PARTIALS_BLOCKS, "VD"),
        None if kept is None else descriptor(kept.values, PARTIALS_BLOCKS, "TV"),
        None if kept is None else kept.tile_max,
        partials,
        inverse_temperature * LOG2E,
        num_rows,
        vocabulary,
        width,
        SPLITS=SPLITS,
        KEEP=kept is not None,
        UPCAST=UPCAST,
        **PARTIALS_BLOCKS,
        **PARTIALS_OPTIONS,
    )
    return partials


# Merge of the parts, with the logit of the sampled token.
#
# The sampled token's logit is an fp32 dot product of its hidden state and its row of the LM head,
# which reads 2 T D elements. It could also be picked out of the tiles above, by comparing every
# column with the token; but with that the kernel above would execute eight instructions for each
# logit after the product, instead of five.

MERGE_BLOCKS = {"BLOCK_D": 1024}
MERGE_OPTIONS = {"num_warps": 4}


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
    """Merge the partials of one row; see `merged_partials`.

    Shapes: partials fp32 `[3, num_parts, T]`, hidden `[T, D]`, head `[V, D]`, tokens int64 `[T]`;
    the others fp32 `[T]`.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    is_part = part < num_parts
    at = partials_ptr + row
    m = tl.load(at + part.to(tl.int64) * T, mask=is_part, other=LOWEST)
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
    logit = tl.sum(products, 0) * tl.load(inverse_temperature_ptr + row)
    # Rounding must not give a log-prob above 0 or an entropy below 0.
    tl.store(logprob_ptr + row, tl.minimum(logit - log_normaliser * LN2, 0.0))
    tl.store(entropy_ptr + row, tl.maximum((log_normaliser - mean) * LN2, 0.0))
    tl.store(normaliser_ptr + row, log_normaliser)


def merged_partials(
    partials: Tensor, hidden: Tensor, head: Tensor, tokens: Tensor, inverse_temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-prob, entropy (nats) and log2 of the normaliser, fp32 `[T]`, from `[3, parts,
    T]`.
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
        **MERGE_BLOCKS,
        **MERGE_OPTIONS,
    )
    return logprob, entropy, normaliser


# Gradients of the logits.
#
# The gradient of raw logit j is `p_j (rest + slope log2 p_j)`, with another value, `sampled`, in
# the column of the sampled token.


class Coefficients(NamedTuple):
    """Hold the terms of the gradient of each row's logits, in the formula above: fp32 `[R]`
    each.
    """

    inverse_temperature: Tensor
    normaliser: Tensor
    """log2 of the sum of `2^z`."""
    rest: Tensor
    """Factor of `p_j`."""
    slope: Tensor | None
    """Factor of `p_j log2 p_j`; None if no gradient flows into the entropy."""
    sampled: Tensor
    """Gradient of the sampled token's logit."""

    @classmethod
    def of(
        cls,
        logprob: Tensor,
        entropy: Tensor,
        normaliser: Tensor,
        inverse_temperature: Tensor,
        d_logprob: Tensor | None,
        d_entropy: Tensor | None,
    ) -> "Coefficients":
        """Compute the terms from the forward's results and the incoming gradients, `[R]` each."""
        d_logprob = torch.zeros_like(logprob) if d_logprob is None else d_logprob
        # 1 - p through expm1, because the difference cancels if p is close to 1
        rest, sampled, slope = -d_logprob, -d_logprob * logprob.expm1(), None
        if d_entropy is not None:
            rest = rest - d_entropy * entropy
            sampled = sampled - d_entropy * logprob.exp() * (logprob + entropy)
            slope = -d_entropy * LN2.value * inverse_temperature
        return cls(
            inverse_temperature,
            normaliser,
            rest * inverse_temperature,
            slope,
            sampled * inverse_temperature,
        )

    def rows(self, index: slice | Tensor) -> "Coefficients":
        """Select rows."""
        return Coefficients._make(None if field is None else field[index] for field in self)


# `recomputed_gradient` computes the logits of a chunk of the vocabulary again, and from them
# `inverse_temperature p (-d_logprob - d_entropy (log p + entropy))`, stored in the inputs'
# type. In the sampled token's column the term `+ d_logprob` is missing, so `sampled_token_gradient`
# overwrites that column.

# Here GROUP counts column tiles: programs are numbered in groups of GROUP column tiles times all
# row tiles, so programs that run at the same time share GROUP panels of the LM head.
RECOMPUTED_BLOCKS = {"BLOCK_T": 128, "BLOCK_V": 256, "BLOCK_D": 64, "GROUP": 8}
RECOMPUTED_OPTIONS = {"num_warps": 8, "num_stages": 3}


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
    """Compute the gradient of one tile of logits; see `recomputed_gradient`.

    Shapes: hidden `[T, D]`, head `[V, D]`, gradient `[T, num_columns]`; the others fp32 `[T]`.
    """
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(T, BLOCK_T)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_V)
    first_tile = program // (GROUP * num_row_tiles) * GROUP
    columns_in_group = tl.minimum(num_column_tiles - first_tile, GROUP)
    in_group = program % (GROUP * num_row_tiles)
    column_tile = first_tile + in_group % columns_in_group
    row_tile = in_group // columns_in_group

    logits = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for d in range(0, D, BLOCK_D):
        x = hidden_desc.load([row_tile * BLOCK_T, d])
        e = head_desc.load([first_column + column_tile * BLOCK_V, d])
        if UPCAST:
            x, e = x.to(tl.float32), e.to(tl.float32)
        logits = tl.dot(x, e.T, logits)
    rows = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = rows < T
    scale = tl.load(scale_ptr + rows, mask=is_row, other=0.0)
    normaliser = tl.load(normaliser_ptr + rows, mask=is_row, other=0.0)
    rest = tl.load(rest_ptr + rows, mask=is_row, other=0.0)
    log2_p = logits * scale[:, None] - normaliser[:, None]
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
    """Fill `gradient` `[R, C]` with the gradient of C logits of each row: those of the C tokens of
    the vocabulary from `first_column` on.
    """
    num_rows, num_columns = gradient.shape
    num_row_tiles, num_column_tiles = tiles(gradient, RECOMPUTED_BLOCKS)
    recomputed_gradient_kernel[(num_row_tiles * num_column_tiles,)](
        descriptor(hidden, RECOMPUTED_BLOCKS, "TD"),
        descriptor(head, RECOMPUTED_BLOCKS, "VD"),
        descriptor(gradient, RECOMPUTED_BLOCKS, "TV"),
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
        **RECOMPUTED_BLOCKS,
        **RECOMPUTED_OPTIONS,
    )


# `kept_gradient` computes the same gradient without a GEMM, from `p = kept 2^(m - normaliser)`. The
# gradient may overwrite the kept logits if every row stays in its place. The kernel's speed is
# limited by its memory traffic of 4 bytes per logit.

KEPT_BLOCKS = {"BLOCK_T": 16, "BLOCK_V": TILE["BLOCK_V"]}
KEPT_OPTIONS = {"num_warps": 4}


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
    """Compute the gradient of one tile from kept logits; see `kept_gradient`.

    Shapes: kept `[num_kept, V]`, tile_max fp32 `[tiles, num_kept]`, gradient `[T, num_columns]`,
    source_rows int64 `[T]`; the others fp32 `[T]`.
    """
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
    """Fill `gradient` `[R, C]` like `recomputed_gradient`, from rows `source_rows` `[R]` of kept
    logits.

    `first_column` must be a multiple of the forward's BLOCK_V, because maxima are stored by tile.
    """
    assert first_column % KEPT_BLOCKS["BLOCK_V"] == 0
    num_rows, num_columns = gradient.shape
    kept_gradient_kernel[tiles(gradient, KEPT_BLOCKS)](
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
        **KEPT_BLOCKS,
        **KEPT_OPTIONS,
    )


# The gradient of each row's sampled token.

SAMPLED_BLOCKS = {"BLOCK_T": 256}
SAMPLED_OPTIONS = {"num_warps": 4}


@triton.jit
def sampled_token_gradient_kernel(
    gradient_ptr,
    tokens_ptr,
    sampled_ptr,
    T,
    first_column,
    num_columns,
    gradient_stride,
    BLOCK_T: tl.constexpr,
):
    """Overwrite one column in each of BLOCK_T rows; see `sampled_token_gradient`.

    Shapes: gradient `[T, num_columns]`, tokens int64 `[T]`, sampled fp32 `[T]`.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = rows < T
    column = tl.load(tokens_ptr + rows, mask=is_row, other=-1) - first_column
    sampled = tl.load(sampled_ptr + rows, mask=is_row, other=0.0)
    here = is_row & (column >= 0) & (column < num_columns)
    at = gradient_ptr + rows * gradient_stride + column
    tl.store(at, sampled.to(gradient_ptr.dtype.element_ty), mask=here)


def sampled_token_gradient(
    gradient: Tensor, tokens: Tensor, sampled: Tensor, first_column: int
) -> None:
    """Write `sampled` `[R]` into `gradient` `[R, C]` in rows whose token is among these columns."""
    num_rows, num_columns = gradient.shape
    sampled_token_gradient_kernel[(triton.cdiv(num_rows, SAMPLED_BLOCKS["BLOCK_T"]),)](
        gradient,
        tokens,
        sampled,
        num_rows,
        first_column,
        num_columns,
        gradient.stride(0),
        **SAMPLED_BLOCKS,
        **SAMPLED_OPTIONS,
    )


# The policy loss of each token and its derivatives.
#
# The loss is `mage_kernels.surrogate.token_losses`, with derivatives derived by hand; a test
# compares them with autograd. The parameters of the loss are compile-time constants, because Python
# floats as run-time arguments would promote the arithmetic to fp64.

SURROGATE_BLOCKS = {"BLOCK_T": 256}
"""Number of tokens of a program."""
SURROGATE_OPTIONS = {"num_warps": 4}


@triton.jit
def triton_k3(d):
    """Compute `e^d - d - 1`, near 0 by its series, where the formula cancels."""
    series = d * d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120))))
    return tl.where(tl.abs(d) < 0.125, series, tl.exp(d) - d - 1.0)


@triton.jit
def surrogate_gradient_kernel(
    logprob_ptr,
    entropy_ptr,
    advantage_ptr,
    anchor_ptr,
    reference_ptr,
    entropy_rate_ptr,
    inverse_normaliser_ptr,
    d_logprob_ptr,
    d_entropy_ptr,
    losses_ptr,
    T,
    CLIP_LOW: tl.constexpr,
    CLIP_HIGH: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    KL_COEFFICIENT: tl.constexpr,
    MAX_LOG_RATIO: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute the losses and derivatives of BLOCK_T tokens; see `surrogate_gradient`.

    The pointers from `advantage_ptr` to `entropy_rate_ptr` are the fields of `TokenData`; the
    anchor is the log-prob that the ratio is relative to.

    Shapes: inverse_normaliser fp32 `[1]`, losses fp32 `[blocks]`; the others `[T]`.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < T
    logprob = tl.load(logprob_ptr + token, mask=is_token, other=0.0)
    advantage = tl.load(advantage_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    anchor = tl.load(anchor_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    inverse_normaliser = tl.load(inverse_normaliser_ptr)

    log_ratio = logprob - anchor
    ratio = tl.exp(tl.minimum(tl.maximum(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    plain = -advantage * ratio
    clipped = -advantage * tl.minimum(tl.maximum(ratio, 1.0 - CLIP_LOW), 1.0 + CLIP_HIGH)
    loss = tl.where(clipped > plain, clipped, plain)
    # Where the loss is constant in the log-prob, its derivative is 0.
    is_flat = (clipped > plain) | (tl.abs(log_ratio) > MAX_LOG_RATIO)
    if DUAL_CLIP is not None:
        bound = -advantage * DUAL_CLIP
        is_dual = (advantage < 0) & (loss > bound)
        loss = tl.where(is_dual, bound, loss)
        is_flat = is_flat | is_dual
    d_logprob = tl.where(is_flat, 0.0, -advantage * ratio)
    if reference_ptr is not None:
        reference = tl.load(reference_ptr + token, mask=is_token, other=0.0).to(tl.float32)
        distance = reference - logprob
        cut = tl.minimum(tl.maximum(distance, -MAX_LOG_RATIO), MAX_LOG_RATIO)
        slope = tl.where(tl.abs(distance) > MAX_LOG_RATIO, 0.0, 1.0 - tl.exp(cut))
        loss += KL_COEFFICIENT * triton_k3(cut)
        d_logprob += KL_COEFFICIENT * slope
    if entropy_rate_ptr is not None:
        rate = tl.load(entropy_rate_ptr + token, mask=is_token, other=0.0).to(tl.float32)
        loss -= rate * tl.load(entropy_ptr + token, mask=is_token, other=0.0)
        tl.store(d_entropy_ptr + token, -rate * inverse_normaliser, mask=is_token)
    tl.store(d_logprob_ptr + token, d_logprob * inverse_normaliser, mask=is_token)
    tl.store(losses_ptr + tl.program_id(0), tl.sum(tl.where(is_token, loss, 0.0), 0))


def surrogate_gradient(
    logprob: Tensor, entropy: Tensor, data: TokenData, loss: Surrogate, inverse_normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the sum of losses of each block, `[blocks]`, and the derivatives of the loss by
    log-prob and by entropy, `[T]` each. Only the derivatives are multiplied by
    `inverse_normaliser`. The last one is None without an entropy bonus.

    Args:
        inverse_normaliser: Factor of the derivatives: fp32 `[1]`.
    """
    num_rows = len(logprob)
    num_blocks = triton.cdiv(num_rows, SURROGATE_BLOCKS["BLOCK_T"])
    (losses,) = row_vectors(1, num_blocks, logprob.device)
    d_logprob, d_entropy = row_vectors(2, num_rows, logprob.device)
    surrogate_gradient_kernel[(num_blocks,)](
        logprob,
        entropy,
        *data,
        inverse_normaliser,
        d_logprob,
        d_entropy,
        losses,
        num_rows,
        CLIP_LOW=loss.clip_low,
        CLIP_HIGH=loss.clip_high,
        DUAL_CLIP=loss.dual_clip,
        KL_COEFFICIENT=loss.kl_coefficient,
        MAX_LOG_RATIO=MAX_LOG_RATIO,
        **SURROGATE_BLOCKS,
        **SURROGATE_OPTIONS,
    )
    return losses, d_logprob, None if data.entropy_rates is None else d_entropy


# Launch helpers.


def descriptor(matrix: Tensor, blocks: dict[str, int], axes: str) -> TensorDescriptor:
    """Describe a matrix to the tensor memory accelerator; reads past its edges give 0.

    Args:
        blocks: Sizes of a kernel's tiles: `BLOCK_T` rows, `BLOCK_V` columns, `BLOCK_D` hidden.
        axes: Letters of the matrix's two axes.
    """
    return TensorDescriptor.from_tensor(matrix, [blocks[f"BLOCK_{axis}"] for axis in axes])


def tiles(gradient: Tensor, blocks: dict[str, int]) -> tuple[int, int]:
    """Count the row tiles and the column tiles that cover a gradient `[R, C]`."""
    num_rows, num_columns = gradient.shape
    return triton.cdiv(num_rows, blocks["BLOCK_T"]), triton.cdiv(num_columns, blocks["BLOCK_V"])


def row_vectors(count: int, num_rows: int, device: torch.device) -> list[Tensor]:
    """Allocate `count` fp32 vectors `[T]`, without initial values."""
    return [torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(count)]


def padded_buffer(
    num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate a matrix whose rows start at multiples of 16 bytes, as a descriptor needs.

    The padding is set to 0: a GEMM may read it and multiply it by 0 (oneDNN's for AMX does), and
    NaN times 0 is NaN.
    """
    columns = -(-num_columns // 16) * 16
    buffer = torch.empty((num_rows, columns), dtype=dtype, device=device)
    if columns > num_columns:
        buffer[:, num_columns:] = 0
    return buffer[:, :num_columns]


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right`, accumulated in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute `total += left @ right` in place, accumulated in fp32."""
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(product(left, right))
