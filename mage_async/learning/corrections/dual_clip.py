"""Dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5), around any correction with a weight.

Where the advantage is negative, PPO's loss has no bound: a token that has become much likelier
costs as much as it likes. Dual clip bounds it by `dual_clip` times the advantage; LaMer and MAGE
run with 3.
"""

import dataclasses

import torch

from mage_async.learning.corrections.surrogate import Correction, Surrogate, Tokens


@dataclasses.dataclass(frozen=True, slots=True)
class DualClip:
    """A correction whose loss is `-weight * min(r A, clip(r) A)`, bounded where A is negative."""

    correct: Correction
    anchor: str
    """Around which of `Tokens`' policies `r` is taken."""
    dual_clip: float

    def __call__(self, tokens: Tokens) -> Surrogate:
        """The same, at most `-weight * dual_clip * A` where `A < 0`."""
        made = self.correct(tokens)
        weights = self.correct(tokens.at(getattr(tokens, self.anchor))).weights
        bound = -weights * self.dual_clip * tokens.advantages
        is_bound = (tokens.advantages < 0) & (made.losses > bound)
        return Surrogate(
            torch.where(is_bound, bound, made.losses),
            made.weights,
            made.is_clipped | is_bound,
            made.is_masked,
        )
