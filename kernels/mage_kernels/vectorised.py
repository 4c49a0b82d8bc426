"""`group_advantage` in plain PyTorch without a loop over turns or trials.

Shapes: `N` turns, `M` trials, `K` keys, `S` turns of the longest trial, `T` tokens.
"""

import torch
from torch import Tensor

from mage_kernels.reference import computing_dtype


def returns_to_go(
    rewards: Tensor,
    trials: Tensor,
    episodes: Tensor,
    is_reflection: Tensor,
    *,
    turn_discount: float,
    episode_discount: float,
) -> Tensor:
    """`reference.returns_to_go`, one step per turn of the longest trial."""
    dtype = computing_dtype(rewards.dtype)
    if not len(rewards):
        return rewards.to(dtype)
    num_turns = torch.unique_consecutive(trials, return_counts=True)[1]  # [M]
    ends = num_turns.cumsum(0)
    running = torch.zeros(len(num_turns), dtype=dtype, device=rewards.device)
    episode = torch.full_like(ends, -1)
    returns = torch.empty(len(rewards), dtype=dtype, device=rewards.device)
    order = num_turns.argsort(descending=True, stable=True)
    still = torch.arange(1, int(num_turns.max()) + 1, device=rewards.device)
    alive = (num_turns[order][None, :] >= still[:, None]).sum(1).tolist()
    for back, count in enumerate(alive, start=1):
        which = order[:count]
        turn = ends[which] - back
        acts = ~is_reflection[turn]
        discount = torch.where(episodes[turn] == episode[which], turn_discount, episode_discount)
        now = torch.where(acts, rewards[turn].to(dtype) + discount * running[which], running[which])
        running[which], returns[turn] = now, now
        episode[which] = torch.where(acts, episodes[turn], episode[which])
    return returns


def compared_within_keys(
    returns: Tensor,
    keys: Tensor,
    *,
    divide_by_std: bool,
    keep_singletons: bool,
    epsilon: float = 1e-6,
) -> Tensor:
    """`reference.compared_within_keys`, by sums over keys."""
    if not len(returns):
        return returns
    num_keys = int(keys.max()) + 1
    count = torch.bincount(keys, minlength=num_keys).to(returns.dtype)  # [K]
    zeros = returns.new_zeros(num_keys)
    mean = zeros.index_add(0, keys, returns) / count
    deviations = returns - mean[keys]
    low = zeros.scatter_reduce(0, keys, returns, "amin", include_self=False)
    high = zeros.scatter_reduce(0, keys, returns, "amax", include_self=False)
    advantages = torch.where((low < high)[keys], deviations, 0.0)
    if divide_by_std:
        squares = zeros.index_add(0, keys, deviations.square())
        advantages = advantages / ((squares / (count - 1).clamp(min=1)).sqrt() + epsilon)[keys]
    if keep_singletons:
        alone = returns / (1 + epsilon) if divide_by_std else returns
        advantages = torch.where((count == 1)[keys], alone, advantages)
    return advantages


def expanded_to_tokens(
    advantages: Tensor, starts: Tensor, stops: Tensor, num_tokens: int
) -> Tensor:
    """`reference.expanded_to_tokens`: gaps and turns alternate, each repeated for its length."""
    edges = torch.stack([starts, stops], 1).flatten()
    ends = torch.tensor([num_tokens], device=edges.device)
    lengths = torch.diff(edges, prepend=torch.zeros_like(ends), append=ends)  # [2 N + 1]
    values = torch.stack([torch.zeros_like(advantages), advantages], 1).flatten()
    return torch.cat([values, values.new_zeros(1)]).repeat_interleave(
        lengths, output_size=num_tokens
    )


def group_advantage(
    rewards: Tensor,
    trials: Tensor,
    episodes: Tensor,
    is_reflection: Tensor,
    keys: Tensor,
    starts: Tensor,
    stops: Tensor,
    num_tokens: int,
    *,
    turn_discount: float,
    episode_discount: float,
    divide_by_std: bool = False,
    keep_singletons: bool = False,
    epsilon: float = 1e-6,
) -> Tensor:
    """See `mage_kernels.advantage.group_advantage`."""
    returns = returns_to_go(
        rewards,
        trials,
        episodes,
        is_reflection,
        turn_discount=turn_discount,
        episode_discount=episode_discount,
    )
    advantages = compared_within_keys(
        returns, keys, divide_by_std=divide_by_std, keep_singletons=keep_singletons, epsilon=epsilon
    )
    return expanded_to_tokens(advantages, starts, stops, num_tokens)
