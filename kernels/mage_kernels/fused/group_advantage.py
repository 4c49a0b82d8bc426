"""Compute group-normalised advantages by Triton kernels, in fp64, as specified in
`mage_kernels.group_advantage`.

A cell is a set of turns that are compared with each other; a part is all turns of one trial in one
cell. Turns are sorted by cell, and one program computes one cell. It reads the cell's turns several
times in a fixed order, so two runs give the same bits; repeated reads come from the L2 cache.

Shapes: `N` turns, `K` cells. The arguments of the kernels, pointers to arrays, are

    values, magnitudes         fp64 [N], in sorted order
    weights                    fp64 [N]: the weight of each sorted turn in a mean; None: all equal
    order                      int64 [N]: the turn at each place of the sorted order
    cell_starts                int64 [K + 1]: the place where each cell starts, and N
    part_starts, part_stops    int64 [N]: the places where the part of each sorted turn starts and
                               stops; None without parts
    out                        fp64 [N], in the order of the turns

and `at` are the places of `BLOCK_N` sorted turns, int64 [BLOCK_N].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.group_advantage import EPSILON, ROUNDING, Cells

BLOCKS = {"BLOCK_N": 256}
"""Number of turns that a program loads at a time."""
OPTIONS = {"num_warps": 4}
"""Options of the kernels' launches."""


@triton.jit
def weight_of(weights_ptr, at, is_turn, IS_WEIGHTED: tl.constexpr):
    """Return the weight of each turn in a mean over its cell; 0 where `is_turn` is false."""
    weight = tl.where(is_turn, 1.0, 0.0).to(tl.float64)
    if IS_WEIGHTED:
        weight = tl.load(weights_ptr + at, mask=is_turn, other=0.0)
    return weight


@triton.jit
def part_sums(
    values_ptr,
    weights_ptr,
    part_starts_ptr,
    part_stops_ptr,
    at,
    is_turn,
    first,
    IS_WEIGHTED: tl.constexpr,
):
    """Return for each turn's part its size, its sum of weights, and its weighted sum of values
    minus `first`.

    `first` is the first value of the cell. It is subtracted so that equal values give exactly 0.
    """
    start = tl.load(part_starts_ptr + at, mask=is_turn, other=0)
    stop = tl.load(part_stops_ptr + at, mask=is_turn, other=0)
    size = stop - start
    total = tl.zeros_like(size).to(tl.float64)
    weights = tl.zeros_like(size).to(tl.float64)
    for step in range(0, tl.max(size, 0)):
        is_there = step < size
        value = tl.load(values_ptr + start + step, mask=is_there, other=0.0)
        weight = weight_of(weights_ptr, start + step, is_there, IS_WEIGHTED)
        total += tl.where(is_there, weight * (value - first), 0.0)
        weights += weight
    return size, weights, total


@triton.jit
def minus_baseline_kernel(
    values_ptr,
    order_ptr,
    weights_ptr,
    cell_starts_ptr,
    part_starts_ptr,
    part_stops_ptr,
    out_ptr,
    IS_WEIGHTED: tl.constexpr,
    LEAVE_ONE_OUT: tl.constexpr,
    KEEP_LONE: tl.constexpr,
    DIVIDE_BY_STD: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Subtract the baseline of one cell from its turns; see `mage_kernels.group_advantage`."""
    cell = tl.program_id(0).to(tl.int64)
    start = tl.load(cell_starts_ptr + cell)
    stop = tl.load(cell_starts_ptr + cell + 1)
    # Sums are of values minus the cell's first one, so that equal values give exactly 0.
    first = tl.load(values_ptr + start)
    total = tl.zeros((), tl.float64)  # weighted sum
    weights = tl.zeros((), tl.float64)
    plain = tl.zeros((), tl.float64)  # sum without weights, for the standard deviation
    for block in range(start, stop, BLOCK_N):
        at = block + tl.arange(0, BLOCK_N)
        is_turn = at < stop
        weight = weight_of(weights_ptr, at, is_turn, IS_WEIGHTED)
        relative = tl.load(values_ptr + at, mask=is_turn, other=0.0) - first
        relative = tl.where(is_turn, relative, 0.0)
        total += tl.sum(weight * relative, 0)
        weights += tl.sum(weight, 0)
        plain += tl.sum(relative, 0)
    count = stop - start
    scale = tl.full((), 1.0, tl.float64)
    if DIVIDE_BY_STD:
        mean = plain / count.to(tl.float64)
        squares = tl.zeros((), tl.float64)
        for block in range(start, stop, BLOCK_N):
            at = block + tl.arange(0, BLOCK_N)
            spread = tl.load(values_ptr + at, mask=at < stop, other=0.0) - first - mean
            squares += tl.sum(tl.where(at < stop, spread * spread, 0.0), 0)
        deviation = tl.sqrt(squares / tl.maximum(count - 1, 1).to(tl.float64))
        scale = tl.where(count == 1, scale, deviation) + EPSILON
    for block in range(start, stop, BLOCK_N):
        at = block + tl.arange(0, BLOCK_N)
        is_turn = at < stop
        value = tl.load(values_ptr + at, mask=is_turn, other=0.0)
        if LEAVE_ONE_OUT:
            size, part_weights, part_sum = part_sums(
                values_ptr,
                weights_ptr,
                part_starts_ptr,
                part_stops_ptr,
                at,
                is_turn,
                first,
                IS_WEIGHTED,
            )
            others = count - size
            # Sum of the weights outside of the turn's part; 1 avoids a division by 0.
            rest = tl.where(others > 0, weights - part_weights, 1.0)
            difference = value - first - (total - part_sum) / rest
            difference = tl.where(others > 0, difference, 0.0)
        else:
            difference = value - first - total / weights
        if KEEP_LONE:
            difference = tl.where(count == 1, value, difference)
        if DIVIDE_BY_STD:
            difference = difference / scale
        turn = tl.load(order_ptr + at, mask=is_turn, other=0)
        tl.store(out_ptr + turn, difference, mask=is_turn)


@triton.jit
def over_rms_kernel(
    values_ptr,
    magnitudes_ptr,
    order_ptr,
    weights_ptr,
    cell_starts_ptr,
    out_ptr,
    IS_WEIGHTED: tl.constexpr,
    ROUNDING: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Divide turns of one cell by their root mean square; see `mage_kernels.group_advantage`."""
    cell = tl.program_id(0).to(tl.int64)
    start = tl.load(cell_starts_ptr + cell)
    stop = tl.load(cell_starts_ptr + cell + 1)
    squares = tl.zeros((), tl.float64)
    weights = tl.zeros((), tl.float64)
    largest = tl.zeros((), tl.float64)
    for block in range(start, stop, BLOCK_N):
        at = block + tl.arange(0, BLOCK_N)
        is_turn = at < stop
        weight = weight_of(weights_ptr, at, is_turn, IS_WEIGHTED)
        value = tl.load(values_ptr + at, mask=is_turn, other=0.0)
        magnitude = tl.load(magnitudes_ptr + at, mask=is_turn, other=0.0)
        squares += tl.sum(weight * value * value, 0)
        weights += tl.sum(weight, 0)
        largest = tl.maximum(largest, tl.max(tl.abs(magnitude), 0))
    rms = tl.sqrt(squares / weights)
    varies = rms > largest * ROUNDING  # if not, the values are rounding errors
    scale = tl.where(varies, rms + EPSILON, 1.0)
    for block in range(start, stop, BLOCK_N):
        at = block + tl.arange(0, BLOCK_N)
        is_turn = at < stop
        value = tl.load(values_ptr + at, mask=is_turn, other=0.0)
        turn = tl.load(order_ptr + at, mask=is_turn, other=0)
        tl.store(out_ptr + turn, tl.where(varies, value / scale, 0.0), mask=is_turn)


def fused_minus_baseline(
    values: Tensor, cells: Cells, leave_one_out: bool, keep_lone: bool, divide_by_std: bool
) -> Tensor:
    """Compute `mage_kernels.group_advantage.minus_baseline`."""
    return _by_cell(
        minus_baseline_kernel,
        cells,
        values,
        LEAVE_ONE_OUT=leave_one_out,
        KEEP_LONE=keep_lone,
        DIVIDE_BY_STD=divide_by_std,
        EPSILON=EPSILON,
    )


def fused_over_rms(values: Tensor, cells: Cells, magnitudes: Tensor, epsilon: float) -> Tensor:
    """Compute `mage_kernels.group_advantage.over_rms`."""
    return _by_cell(over_rms_kernel, cells, values, magnitudes, ROUNDING=ROUNDING, EPSILON=epsilon)


def _by_cell(kernel: Any, cells: Cells, *arrays: Tensor, **constants: float) -> Tensor:
    """Run one program of a kernel for each cell, on arrays `[N]`; return its result, `[N]`."""
    order, cell_starts, *part_bounds = sorted_bounds(cells)
    out = torch.empty_like(arrays[0])
    if cells.num_cells:
        kernel[(cells.num_cells,)](
            *(each[order] for each in arrays),
            order,
            cells.weights if cells.weights is None else cells.weights[order],
            cell_starts,
            *(part_bounds if kernel is minus_baseline_kernel else ()),
            out,
            IS_WEIGHTED=cells.weights is not None,
            **constants,
            **BLOCKS,
            **OPTIONS,
        )
    return out


def sorted_bounds(cells: Cells) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sort turns by cell, and within a cell by part, without waiting for the device.

    Returns:
        The turns in that order, `[N]`; the index where each cell starts, and the end, `[K + 1]`;
        the indices where the part of each sorted turn starts and stops, `[N]` each, or None without
        parts. All int64.
    """
    # The numbers of parts ascend with those of their cells, so sorting by part sorts by cell too.
    order = (cells.ids if cells.parts is None else cells.parts).argsort(stable=True)
    edges = torch.arange(cells.num_cells + 1, device=order.device)
    cell_starts = torch.searchsorted(cells.ids[order], edges)
    if cells.parts is None:
        return order, cell_starts, None, None
    parts = cells.parts[order]
    starts, stops = (torch.searchsorted(parts, parts, right=is_stop) for is_stop in (False, True))
    return order, cell_starts, starts, stops
