"""No correction: stale tokens are taken for fresh ones.

GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 3) as most systems run it, where the "old" policy of
the clip is the trainer's own at the beginning of the step: how far the token's drawer was from it
is ignored.
"""

import torch

from mage_async.learning.corrections.surrogate import Surrogate, Tokens, nowhere, weighted


def none(tokens: Tokens, *, clip_low: float, clip_high: float) -> Surrogate:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = current / proximal`."""
    ones = torch.ones_like(tokens.advantages)
    return weighted(tokens, ones, nowhere(tokens), clip_low=clip_low, clip_high=clip_high)
