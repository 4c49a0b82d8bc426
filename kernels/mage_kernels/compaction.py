"""Leaving out rows that cannot matter.

Masked ones before the forward, those without a gradient before the backward. An index that comes
from a device tensor costs one host synchronisation; a mask that lies on the host costs none.
"""

import torch
from torch import Tensor


def masked_rows(mask: Tensor, device: torch.device) -> Tensor | None:
    """Indices of the rows to keep, ascending, on `device`; None where that is all of them."""
    index = mask.nonzero().squeeze(1)
    return None if len(index) == len(mask) else index.to(device, non_blocking=True)


def rows_with_gradient(*gradients: Tensor | None) -> Tensor | None:
    """Indices of the rows where any gradient `[T]` is not exactly 0; None where that is all."""
    present = [gradient for gradient in gradients if gradient is not None]
    active = present[0] != 0
    for gradient in present[1:]:
        active = active | (gradient != 0)
    index = active.nonzero().squeeze(1)
    return None if len(index) == len(active) else index


def scattered(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """`values[i]` at row `index[i]` of `num_rows` rows, 0 elsewhere; differentiable."""
    return values.new_zeros(num_rows).index_copy(0, index, values)
