"""What the backward kernels need of every row, computed once in fp32.

The gradient of raw logit j is `p_j (rest + slope log2 p_j)`, and `own` at the token's own column.

Shapes: `R` rows with a gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LN2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class Coefficients:
    """fp32 `[R]` each."""

    inverse_temperature: Tensor
    normaliser: Tensor
    """log2 of the sum of `2^z`"""
    rest: Tensor
    slope: Tensor | None
    """None where no gradient flows into the entropy."""
    own: Tensor

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
        """From the forward's results and the incoming gradients.

        `own` goes through expm1, because `1 - p` cancels where p is close to 1.
        """
        d_logprob = torch.zeros_like(logprob) if d_logprob is None else d_logprob
        rest, own, slope = -d_logprob, -d_logprob * logprob.expm1(), None
        if d_entropy is not None:
            rest = rest - d_entropy * entropy
            own = own - d_entropy * logprob.exp() * (logprob + entropy)
            slope = -d_entropy * LN2 * inverse_temperature
        return cls(
            inverse_temperature,
            normaliser,
            rest * inverse_temperature,
            slope,
            own * inverse_temperature,
        )

    def __getitem__(self, rows: slice) -> "Coefficients":
        """The same for some rows."""
        slope = None if self.slope is None else self.slope[rows]
        return Coefficients(
            self.inverse_temperature[rows],
            self.normaliser[rows],
            self.rest[rows],
            slope,
            self.own[rows],
        )
