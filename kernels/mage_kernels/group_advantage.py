"""Compute group-normalised advantages: baselines and scales of values within cells of turns.

A *cell* is a set of turns that are compared with each other, such as the first turns of all trials
of a group. A *part* is all turns of one trial in one cell.

The plain PyTorch here is the specification and runs on CPUs; `fused/group_advantage.py` is the same
in Triton. Both compute in fp64: it costs nothing for the thousands of turns of a batch, and its
rounding of equal values is far smaller than a difference between values.

Equal values give exactly 0: one value of the cell is subtracted from all before any mean is
computed, so the rounding of a mean cannot become a gradient. The backward pass skips tokens whose
advantage is exactly 0.

Shapes: `N` turns, `K` cells, `P` parts.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mage_kernels.dispatch import is_fused_on

ROUNDING = 1e-12
"""Largest ratio of a spread to the largest magnitude at which the spread counts as rounding of
equal values.
"""
EPSILON = 1e-6
"""Number that is added to a cell's standard deviation, in units of the values, as in GRPO's
reference code.
"""


@dataclass(frozen=True, slots=True)
class Cells:
    """Describe which turns are compared with each other, and their weights."""

    ids: Tensor
    """int64 `[N]`: the cell of each turn, from 0 without gaps."""
    num_cells: int
    parts: Tensor | None = None
    """int64 `[N]`: the part of each turn. Parts are numbered from 0 without gaps, those of a lower
    cell first. None if no baseline needs them.
    """
    num_parts: int = 0
    weights: Tensor | None = None
    """fp64 `[N]`: the weight of each turn in a mean, at least 0, and above 0 for one turn of each
    cell; None if all are equal."""

    def to(self, device: torch.device | str) -> "Cells":
        """Copy to a device."""
        ids, parts, weights = (
            None if each is None else each.to(device, non_blocking=True)
            for each in (self.ids, self.parts, self.weights)
        )
        assert ids is not None
        return replace(self, ids=ids, parts=parts, weights=weights)


def minus_baseline(
    values: Tensor,
    cells: Cells,
    *,
    leave_one_out: bool = False,
    keep_lone: bool = False,
    divide_by_std: bool = False,
) -> Tensor:
    """Subtract the mean of its cell from each value: fp64 `[N]`.

    Args:
        values: fp64 `[N]`.
        cells: Cells of the values; they need parts for `leave_one_out`.
        leave_one_out: Whether to take the mean over the other parts of the cell (RLOO, Ahmadian et
            al. 2024, arXiv 2402.14740); a part without others gives 0.
        keep_lone: Whether a turn alone in its cell keeps its value; otherwise it gives 0.
        divide_by_std: Whether to divide by the unbiased standard deviation of the cell's turns,
            plus `EPSILON` (GRPO, arXiv 2402.03300); a turn alone in its cell is divided by 1 +
            `EPSILON`.

    Raises:
        ValueError: values or weights are not one fp64 number per turn, or the cells lack parts that
            are needed.
    """
    _check(values, cells)
    if leave_one_out and cells.parts is None:
        raise ValueError("leave_one_out leaves out parts, got cells without parts")
    rule = (leave_one_out, keep_lone, divide_by_std)
    if is_fused_on(values.device.type):
        from mage_kernels.fused.group_advantage import fused_minus_baseline

        return fused_minus_baseline(values, cells, *rule)
    return _minus_baseline(values, cells, *rule)


def over_rms(values: Tensor, cells: Cells, magnitudes: Tensor, epsilon: float) -> Tensor:
    """Divide each value by the root mean square of its cell plus `epsilon`: fp64 `[N]`.

    A cell whose root mean square is at most `ROUNDING` times its largest magnitude gives 0.

    Args:
        values: fp64 `[N]`.
        magnitudes: fp64 `[N]`: the numbers, such as returns, from which the values were computed as
            differences. A root mean square that is tiny beside them counts as rounding.
        epsilon: Added to the root mean square, in units of the values.

    Raises:
        ValueError: values or weights are not one fp64 number per turn.
    """
    _check(values, cells)
    if is_fused_on(values.device.type):
        from mage_kernels.fused.group_advantage import fused_over_rms

        return fused_over_rms(values, cells, magnitudes, epsilon)
    return _over_rms(values, cells, magnitudes, epsilon)


def at_tokens(advantages: Tensor, lengths: Tensor) -> Tensor:
    """Repeat each turn's advantage for all of its tokens: `[sum of lengths]`.

    Args:
        advantages: `[N]`.
        lengths: int64 `[N]`, on the host, so that nothing waits for a device.
    """
    if not advantages.is_cuda:  # numpy fills ranges, torch would look up every token
        return torch.from_numpy(advantages.numpy().repeat(lengths.numpy()))
    total = int(lengths.sum())
    lengths = lengths.to(advantages.device, non_blocking=True)
    return advantages.repeat_interleave(lengths, output_size=total)


def _minus_baseline(
    values: Tensor, cells: Cells, leave_one_out: bool, keep_lone: bool, divide_by_std: bool
) -> Tensor:
    """Compute `minus_baseline` in plain PyTorch: fp64 `[N]`."""
    ids, weights = cells.ids, _weights(values, cells)
    # Subtract one value of the cell first, so that equal values give exactly 0.
    relative = values - values[_first_turns(cells)][ids]
    if leave_one_out:
        difference = _minus_mean_of_others(relative, weights, cells)
    else:
        sums, totals = _sums(weights * relative, cells), _sums(weights, cells)
        difference = relative - (sums / totals)[ids]
    if keep_lone:
        difference = torch.where(_sizes(cells)[ids] == 1, values, difference)
    return difference / (_deviation(values, cells) + EPSILON)[ids] if divide_by_std else difference


def _minus_mean_of_others(relative: Tensor, weights: Tensor, cells: Cells) -> Tensor:
    """Subtract from each value the mean over the other parts of its cell: `[N]`."""
    ids, parts = cells.ids, cells.parts
    assert parts is not None
    count = cells.num_parts
    sums = _sums(weights * relative, cells)[ids] - _sums_by(weights * relative, parts, count)[parts]
    totals = _sums(weights, cells)[ids] - _sums_by(weights, parts, count)[parts]
    others = _sizes(cells)[ids] - torch.bincount(parts, minlength=count)[parts]
    return torch.where(others > 0, relative - sums / totals, 0.0)


def _deviation(values: Tensor, cells: Cells) -> Tensor:
    """Compute the unbiased standard deviation of each cell, 1 for a single turn: `[K]`."""
    sizes = _sizes(cells)
    spread = values - (_sums(values, cells) / sizes)[cells.ids]
    variance = _sums(spread.square(), cells) / (sizes - 1).clamp(min=1)
    return torch.where(sizes == 1, 1.0, _roots(variance))


def _over_rms(values: Tensor, cells: Cells, magnitudes: Tensor, epsilon: float) -> Tensor:
    """Compute `over_rms` in plain PyTorch: fp64 `[N]`."""
    weights = _weights(values, cells)
    rms = _roots(_sums(weights * values.square(), cells) / _sums(weights, cells))
    largest = torch.zeros_like(rms).scatter_reduce_(0, cells.ids, magnitudes.abs(), "amax")
    factors = torch.where(rms > ROUNDING * largest, 1.0 / (rms + epsilon), 0.0)
    return values * factors[cells.ids]


def _roots(squares: Tensor) -> Tensor:
    """Compute square roots, correctly rounded on a CPU, so that all machines give the same bits.

    On a CPU torch computes square roots by MKL, which rounds about one in a hundred incorrectly.
    """
    if squares.is_cuda:
        return squares.sqrt()
    return squares.new_tensor([math.sqrt(square) for square in squares.tolist()])


def _weights(values: Tensor, cells: Cells) -> Tensor:
    """Return the weight of each turn in the mean of its cell: `[N]`."""
    return torch.ones_like(values) if cells.weights is None else cells.weights


def _first_turns(cells: Cells) -> Tensor:
    """Return the first turn of each cell: int64 `[K]`."""
    turns = torch.arange(len(cells.ids), device=cells.ids.device)
    past_end = turns.new_full((cells.num_cells,), len(turns))
    return past_end.scatter_reduce_(0, cells.ids, turns, "amin")


def _sizes(cells: Cells) -> Tensor:
    """Count the turns of each cell: int64 `[K]`."""
    return torch.bincount(cells.ids, minlength=cells.num_cells)


def _sums(values: Tensor, cells: Cells) -> Tensor:
    """Sum over each cell, in the order of its turns: `[K]`."""
    return _sums_by(values, cells.ids, cells.num_cells)


def _sums_by(values: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Sum values by their numbers, 0 to `count` - 1: `[count]`."""
    return values.new_zeros(count).index_add_(0, numbers, values)


def _check(values: Tensor, cells: Cells) -> None:
    """Raise a ValueError if values and cells do not fit together."""
    for what, each in (("values", values), ("weights", cells.weights)):
        if each is not None and (each.dtype != torch.float64 or each.shape != cells.ids.shape):
            raise ValueError(
                f"{what} must be float64 {list(cells.ids.shape)}, one per turn, "
                f"got {each.dtype} {list(each.shape)}"
            )
