"""The decoupled clipped loss with truncated importance weights: the default.

Two ratios are kept apart (Hilton et al. 2021, "Batch size-invariance for policy optimization";
AReaL, arXiv 2505.24298): the clip is anchored at the *proximal* policy, the weights at the
beginning of this step, and the gap between the proximal and the behaviour policy is corrected by a
weight that is truncated from above.
"""

from mage_async.learning.corrections.surrogate import (
    Surrogate,
    Tokens,
    importance,
    nowhere,
    weighted,
)


def decoupled(tokens: Tokens, *, clip_low: float, clip_high: float, max_weight: float) -> Surrogate:
    """`-min(w, max_weight) min(r A, clip(r) A)`, `w = proximal / behaviour`,
    `r = current / proximal`.
    """
    weights = importance(tokens).clamp(max=max_weight)
    return weighted(tokens, weights, nowhere(tokens), clip_low=clip_low, clip_high=clip_high)
