"""PPO's clip around the behaviour policy (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

One ratio does both jobs, correcting and bounding. With stale tokens the clip is anchored at a
policy of some steps ago: what has moved since then may move no further, and what moved the wrong
way has no bound.
"""

from mage_async.learning.corrections.surrogate import Surrogate, Tokens, clipped_gain, nowhere


def ppo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Surrogate:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = current / behaviour`."""
    ratio = (tokens.logprobs - tokens.behaviour).exp()
    gain, is_clipped = clipped_gain(ratio, tokens.advantages, clip_low, clip_high)
    return Surrogate(-gain, ratio.detach(), is_clipped, nowhere(tokens))
