"""DPPO with the binary total-variation bound: trust differences of probability, not ratios.

A ratio of 2 moves a token of probability 0.001 by nothing and one of 0.4 by everything. A token is
left out when its probability has already moved further than `max_probability_change` in the
direction its advantage asks for (Qi et al. 2026, "Rethinking the trust region in LLM RL", arXiv
2602.04879, binary-TV variant; prime-rl's default loss, without its penalty on the squared
log-ratio).
"""

import torch

from mage_async.learning.corrections.surrogate import Surrogate, Tokens, nowhere


def dppo(tokens: Tokens, *, max_probability_change: float) -> Surrogate:
    """`-keep r A` with `r = current / behaviour` and
    `keep = not (change * sign(A) > max_probability_change)`, `change = current - behaviour` in
    probability, and `sign(0) = -1`.
    """
    ratio = (tokens.logprobs - tokens.behaviour).exp()
    change = tokens.logprobs.detach().exp() - tokens.behaviour.exp()
    is_masked = torch.where(tokens.advantages > 0, change, -change) > max_probability_change
    losses = (-ratio * tokens.advantages).masked_fill(is_masked, 0.0)
    weights = ratio.detach().masked_fill(is_masked, 0.0)
    return Surrogate(losses, weights, nowhere(tokens), is_masked)
