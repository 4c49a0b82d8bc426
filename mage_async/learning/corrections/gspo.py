"""GSPO: one ratio per completion (Zheng et al. 2025, arXiv 2507.18071, eq. 5-7 and, for advantages
per token, GSPO-token, eq. 13-14).

The ratio is the geometric mean of the token ratios of a turn, so its noise does not grow with the
turn's length; the clip takes whole turns. The paper clips at 3e-4 and 4e-4 on data a few
minibatches old; with stale data use PPO's.
"""

from mage_async.learning.corrections.surrogate import (
    Surrogate,
    Tokens,
    clipped_gain,
    nowhere,
    turn_means,
)


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Surrogate:
    """`-min(s A, clip(s) A)` with `s = sg(S) current / sg(current)`, sg stopping the gradient, and
    `S = exp(mean over the turn of log(current / behaviour))`.
    """
    gap = tokens.logprobs - tokens.behaviour
    of_turn = turn_means(gap.detach(), tokens.turns).exp()
    ratio = of_turn * (tokens.logprobs - tokens.logprobs.detach()).exp()
    gain, is_clipped = clipped_gain(ratio, tokens.advantages, clip_low, clip_high)
    return Surrogate(-gain, of_turn, is_clipped, nowhere(tokens))
