"""M2PO: hold the batch's second moment of the log-ratio under a bound (Zheng et al. 2025, arXiv
2510.01161; its constant is 0.04).

Instead of bounding every token, leave out the few largest squared log-ratios, until the mean over
the rest is at most the bound; a second moment has no signs that cancel and, unlike a variance of
ratios, no heavy tail of its own. As in the authors' code, and not in the paper's formula, only
tokens are looked at that would be pushed further away: made likelier and rewarded, or less likely
and punished (those that PPO would clip); what pulls a token back is never left out. "The batch" is
a minibatch here.
"""

from collections.abc import Callable

import torch

from mage_async.learning.corrections.surrogate import Surrogate, Tokens, nowhere

Selection = Callable[[torch.Tensor, float], torch.Tensor]
"""As `largest_set_under`."""


def largest_set_under(values: torch.Tensor, bound: float) -> torch.Tensor:
    """The largest set of values with a mean of at most `bound`: bool [N].

    It is made of the smallest values: the mean of the k smallest grows with k.
    """
    ordered, places = values.double().sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)
    kept = torch.zeros_like(values, dtype=torch.bool)
    kept[places[: int((means <= bound).sum())]] = True
    return kept


def m2po(
    tokens: Tokens, *, max_second_moment: float, largest: Selection = largest_set_under
) -> Surrogate:
    """`-keep r A` with `r = current / behaviour`; `keep` is as large as the bound admits.

    Args:
        largest: selects the tokens to keep; where ranks share a minibatch, from all of their parts.
    """
    gap = tokens.logprobs - tokens.behaviour
    is_pushed = gap.detach() * tokens.advantages > 0
    is_masked = is_pushed.clone()
    kept = largest(gap.detach()[is_pushed] ** 2, max_second_moment)
    is_masked[is_pushed] = ~kept
    ratio = gap.exp()
    losses = (-ratio * tokens.advantages).masked_fill(is_masked, 0.0)
    weights = ratio.detach().masked_fill(is_masked, 0.0)
    return Surrogate(losses, weights, nowhere(tokens), is_masked)
