"""What torchao's 8-bit AdamW holds, for plans: the library is needed to train, not to plan."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

BLOCK, FEWEST = 256, 4096
"""Weights that share a scale, and of a tensor whose moments are in 8 bits."""


class PlannedEightBit(torch.optim.Optimizer):
    """The state, without the arithmetic; what an update needs for a moment is not counted."""

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        super().__init__(trained, {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Make the state, where there is none."""
        for weight in self.param_groups[0]["params"]:
            if not self.state[weight]:
                moments = {name: _moment(weight) for name in ("exp_avg", "exp_avg_sq")}
                self.state[weight].update(moments)


def _moment(weight: torch.Tensor) -> list[torch.Tensor]:
    """Codes, scales and the table of 256 values; or the moment as it is."""
    if weight.numel() < FEWEST or weight.numel() % BLOCK:
        return [torch.zeros_like(weight)]
    codes = torch.zeros_like(weight, dtype=torch.uint8)
    numbers = (weight.numel() // BLOCK, 2**8)
    return [codes, *(weight.new_zeros(count, dtype=torch.float32) for count in numbers)]
