"""IcePop: leave out tokens on which two policies disagree too much, either way (Ring-1T, arXiv
2510.18855; its constants are 0.5 and 5).

Inside `keep_low .. keep_high` a token keeps its full weight; outside it counts nothing. A weight
below the band says that the behaviour policy drew what today's would hardly draw: truncation from
above keeps such tokens, a band does not.
"""

from mage_async.learning.corrections.surrogate import Surrogate, Tokens, importance, weighted


def icepop(
    tokens: Tokens, *, clip_low: float, clip_high: float, keep_low: float, keep_high: float
) -> Surrogate:
    """`-M(w) min(r A, clip(r) A)` with `M(w) = w` for `keep_low <= w <= keep_high`, else 0;
    `w = proximal / behaviour`, `r = current / proximal`.
    """
    weights = importance(tokens)
    is_masked = ~((weights >= keep_low) & (weights <= keep_high))
    return weighted(tokens, weights, is_masked, clip_low=clip_low, clip_high=clip_high)
