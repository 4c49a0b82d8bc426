"""The equations of soft actor-critic over a few discrete actions, as pure functions.

For a policy `pi`, an entropy coefficient `alpha` and a discount `d` (Haarnoja et al. 2018, with
expectations over actions taken exactly: Christodoulou 2019, arXiv 1910.07207):

    V(s)   = sum_a pi(a|s) (Q(s, a) - alpha log pi(a|s))
    y      = r + d V'(s'),   with V' by the target heads
    critic = 1/2 sum_i (Q_i(s, a) - y)^2
    actor  = sum_a pi(a|s) (alpha log pi(a|s) - min_i Q_i(s, a))

Sums run over the valid actions of a state; of two heads the smaller value counts.

Shapes: `N` states, `A` actions; logits and log-probs in nats.
"""

import torch
from torch import Tensor


def log_policy(logits: Tensor, valid: Tensor) -> Tensor:
    """Log-probs over valid actions, float [N, A]; 0 where an action is not valid.

    Args:
        logits: float [N, A], after temperature.
        valid: bool [N, A], at least one in a row.
    """
    logprobs = logits.masked_fill(~valid, -torch.inf).log_softmax(-1)
    return logprobs.masked_fill(~valid, 0.0)


def soft_values(q: Tensor, logprobs: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """V of every state under a policy: float [N].

    Args:
        q: float [N, A].
        logprobs: float [N, A], as `log_policy` gives them.
    """
    return (_probs(logprobs, valid) * (q - alpha * logprobs)).sum(-1)


def targets(rewards: Tensor, discounts: Tensor, next_values: Tensor) -> Tensor:
    """What the critic is trained towards: float [N].

    Args:
        discounts: float [N]: 0 where nothing follows.
        next_values: float [N]: V of the state that follows.
    """
    return rewards + discounts * next_values


def critic_losses(q: Tensor, actions: Tensor, wanted: Tensor) -> Tensor:
    """Half the squared errors of all heads, summed over heads: float [N].

    Args:
        q: float [heads, N, A].
        actions: int64 [N]: which action was taken.
        wanted: float [N], as `targets` gives them.
    """
    taken = q.gather(-1, actions.expand(q.shape[0], -1)[..., None])[..., 0]
    return 0.5 * (taken - wanted).square().sum(0)


def actor_losses(q: Tensor, logprobs: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """What the policy lowers, `-V` with Q held fixed: float [N]."""
    return -soft_values(q.detach(), logprobs, valid, alpha)


def entropies(logprobs: Tensor, valid: Tensor) -> Tensor:
    """Entropy over valid actions in nats: float [N]."""
    return -(_probs(logprobs, valid) * logprobs).sum(-1)


def _probs(logprobs: Tensor, valid: Tensor) -> Tensor:
    return logprobs.exp() * valid
