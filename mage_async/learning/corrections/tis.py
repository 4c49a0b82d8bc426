"""Truncated importance sampling (Ionides 2008; Espeholt et al. 2018, IMPALA, eq. 1).

The policy gradient under one truncated weight and no clip: `min(current / behaviour, C)` multiplies
the gradient of the log-prob and has none itself, so a token keeps a gradient however far it has
moved. (Under this name other systems run the truncated weight *and* PPO's clip around the proximal
policy: that is `decoupled`.)
"""

from mage_async.learning.corrections.surrogate import Surrogate, Tokens, nowhere


def tis(tokens: Tokens, *, max_weight: float) -> Surrogate:
    """`-sg(min(current / behaviour, max_weight)) A log current`, sg stopping the gradient."""
    ratio = (tokens.logprobs.detach() - tokens.behaviour).exp()
    weights = ratio.clamp(max=max_weight)
    losses = -weights * tokens.advantages * tokens.logprobs
    return Surrogate(losses, weights, ratio > max_weight, nowhere(tokens))
