"""CISPO: clip the importance weight, never the gradient (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

PPO's clip takes rare but decisive tokens out of every later update; here they keep a gradient,
under a bounded weight.
"""

from mage_async.learning.corrections.surrogate import Surrogate, Tokens, nowhere


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Surrogate:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log current` with `r = current / behaviour`, sg
    stopping the gradient.
    """
    ratio = (tokens.logprobs.detach() - tokens.behaviour).exp()
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -weights * tokens.advantages * tokens.logprobs
    return Surrogate(losses, weights, weights != ratio, nowhere(tokens))
