"""Two corrections of our own that depend on the age of a token.

`decoupled_aged` trusts an old token's large weight less: the bound shrinks from `max_weight` for
fresh tokens towards 1. `age_mask` leaves over-age tokens out. The mask takes most from the
first episode of a trial, which is the oldest and, in meta-RL, the exploration: that is why it is
not the default, and why staleness is reported by episode.
"""

from mage_async.learning.corrections.surrogate import (
    Surrogate,
    Tokens,
    importance,
    nowhere,
    weighted,
)


def decoupled_aged(
    tokens: Tokens, *, clip_low: float, clip_high: float, max_weight: float, age_decay: float
) -> Surrogate:
    """`decoupled` with `w` truncated at `1 + (max_weight - 1) age_decay ** staleness`."""
    bound = 1 + (max_weight - 1) * age_decay ** tokens.staleness.to(tokens.advantages.dtype)
    weights = importance(tokens).minimum(bound)
    return weighted(tokens, weights, nowhere(tokens), clip_low=clip_low, clip_high=clip_high)


def age_mask(
    tokens: Tokens, *, clip_low: float, clip_high: float, max_weight: float, max_age: int
) -> Surrogate:
    """`decoupled`, without tokens of more than `max_age` steps."""
    weights = importance(tokens).clamp(max=max_weight)
    is_masked = tokens.staleness > max_age
    return weighted(tokens, weights, is_masked, clip_low=clip_low, clip_high=clip_high)
