"""Masked importance sampling at three levels (Liu, Li et al. 2025, "When Speed Kills Stability").

Where the weight is too large to be trusted, the token or its whole turn is left out instead of
truncated: truncation keeps the direction of a gradient whose size it does not believe.

    token        a token's own weight w, kept while w <= max_weight
    sequence     the product of its turn's weights: unbiased for the turn, and of large variance
    geometric    their geometric mean decides for the whole turn, so that long turns are not
                 punished for being long; survivors weigh min(w, max_weight) each
"""

from mage_async.learning.corrections.surrogate import (
    Surrogate,
    Tokens,
    importance,
    turn_means,
    turn_sums,
    weighted,
)


def mis_token(tokens: Tokens, *, clip_low: float, clip_high: float, max_weight: float) -> Surrogate:
    """`-w 1[w <= max_weight] min(r A, clip(r) A)` with `w = proximal / behaviour`."""
    weights = importance(tokens)
    is_masked = weights > max_weight
    return weighted(tokens, weights, is_masked, clip_low=clip_low, clip_high=clip_high)


def mis_sequence(
    tokens: Tokens, *, clip_low: float, clip_high: float, max_weight: float
) -> Surrogate:
    """As `mis_token`, with the product of a turn's weights for each of its tokens."""
    weights = turn_sums(tokens.proximal - tokens.behaviour, tokens.turns).exp()
    is_masked = weights > max_weight
    return weighted(tokens, weights, is_masked, clip_low=clip_low, clip_high=clip_high)


def mis_geometric(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    max_weight: float,
    keep_low: float,
    keep_high: float,
) -> Surrogate:
    """As `decoupled`, on turns whose weights' geometric mean lies in `keep_low .. keep_high`."""
    mean = turn_means(tokens.proximal - tokens.behaviour, tokens.turns).exp()
    is_masked = ~((mean >= keep_low) & (mean <= keep_high))
    weights = importance(tokens).clamp(max=max_weight)
    return weighted(tokens, weights, is_masked, clip_low=clip_low, clip_high=clip_high)
