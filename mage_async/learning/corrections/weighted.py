"""The clip around the proximal policy under any weights: what most corrections end in.

With `r = current / proximal`, the loss of a token is `-weight * min(r A, clip(r) A)`; a correction
that ends here says only what the weights are and which tokens are left out.
"""

import torch

from mage_async.learning.corrections.surrogate import Surrogate, Tokens, clipped_gain


def weighted(
    tokens: Tokens,
    weights: torch.Tensor,
    is_masked: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """The clipped surrogate of each token, times its weight; nothing where masked.

    Args:
        weights: [N], without a gradient.
        is_masked: [N], bool.
    """
    ratio = (tokens.logprobs - tokens.proximal).exp()
    gain, is_clipped = clipped_gain(ratio, tokens.advantages, clip_low, clip_high)
    weights = weights.masked_fill(is_masked, 0.0)
    losses = (-weights * gain).masked_fill(is_masked, 0.0)  # also where a ratio overflowed
    return Surrogate(losses, weights, is_clipped & ~is_masked, is_masked)


def importance(tokens: Tokens) -> torch.Tensor:
    """Proximal over behaviour probability of each token: [N]."""
    return (tokens.proximal - tokens.behaviour).exp()
