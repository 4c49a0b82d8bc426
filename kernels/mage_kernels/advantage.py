"""From the rewards of turns to the advantages of tokens: returns, compared within groups.

Shapes: `N` turns, `K` keys, `T` tokens.
"""

import torch
from torch import Tensor

from mage_kernels.dispatch import is_fused
from mage_kernels.expansion import expanded_to_tokens, fresh_tokens
from mage_kernels.reference import computing_dtype
from mage_kernels.turns import COPIES, NEXT_EPISODE, SAME_EPISODE, TurnLayout


def group_advantage(
    rewards: Tensor,
    turns: TurnLayout,
    *,
    turn_discount: float,
    episode_discount: float,
    divide_by_std: bool = False,
    keep_singletons: bool = False,
    epsilon: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Advantage of every token: each turn's return-to-go against those of its key.

    Returns are those of `reference.returns_to_go`, compared by `reference.compared_within_keys`:
    equal returns give exactly 0; a key with one turn gives 0 or, with `keep_singletons`, its
    return.

    Args:
        rewards: `[N]`, one per turn.
        turns: how they lie in the batch, on the same device.
        out: `[T]`, fp32, to write into. On a CPU most of the time goes into fresh memory.

    Returns:
        `[T]`: 0 at tokens of no turn; fp32, or fp64 for fp64 rewards.
    """
    if len(rewards) != len(turns.step):
        raise ValueError(f"there are {len(turns.step)} turns, got {len(rewards)} rewards")
    if out is None:
        out = fresh_tokens(turns.num_tokens, rewards, computing_dtype(rewards.dtype))
    if out.shape != (turns.num_tokens,) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{turns.num_tokens}], got {list(out.shape)}")
    if is_fused(rewards):
        from mage_kernels.fused.group_advantage import fused_group_advantage

        return fused_group_advantage(
            rewards,
            turns,
            turn_discount,
            episode_discount,
            divide_by_std,
            keep_singletons,
            epsilon,
            out,
        )
    returns = returns_to_go(rewards, turns, turn_discount, episode_discount)
    advantages = compared_within_keys(
        returns,
        turns,
        divide_by_std=divide_by_std,
        keep_singletons=keep_singletons,
        epsilon=epsilon,
    )
    return expanded_to_tokens(advantages, turns, out)


def returns_to_go(
    rewards: Tensor, turns: TurnLayout, turn_discount: float, episode_discount: float
) -> Tensor:
    """`reference.returns_to_go`, a round per turn of the longest trial, all trials at once."""
    returns = rewards.to(computing_dtype(rewards.dtype), copy=True)
    turn = torch.arange(len(rewards), device=rewards.device)
    from_end = turns.trial_stops - 1 - turn
    by_round = from_end.argsort(stable=True)
    sizes = torch.bincount(from_end).tolist()
    discounts = {COPIES: 1.0, SAME_EPISODE: turn_discount, NEXT_EPISODE: episode_discount}
    by_step = returns.new_tensor([discounts[step] for step in sorted(discounts)])
    discount = by_step[turns.step.long()]
    returns[turns.step == COPIES] = 0.0
    done = 0
    for size in sizes:
        here = by_round[done : done + size]
        if done:
            returns[here] += discount[here] * returns[here + 1]
        done += size
    return returns


def compared_within_keys(
    returns: Tensor,
    turns: TurnLayout,
    *,
    divide_by_std: bool,
    keep_singletons: bool,
    epsilon: float,
) -> Tensor:
    """`reference.compared_within_keys`, by sums over keys in two passes."""
    keys, count = turns.keys, turns.key_starts.diff().to(returns.dtype)
    zeros = torch.zeros_like(count)
    mean = zeros.index_add(0, keys, returns) / count
    deviations = returns - mean[keys]
    low = zeros.scatter_reduce(0, keys, returns, "amin", include_self=False)
    high = zeros.scatter_reduce(0, keys, returns, "amax", include_self=False)
    advantages = torch.where((low < high)[keys], deviations, 0.0)
    if divide_by_std:
        variance = zeros.index_add(0, keys, deviations.square()) / (count - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + epsilon)[keys]
    if keep_singletons:
        alone = returns / (1 + epsilon) if divide_by_std else returns
        advantages = torch.where((count == 1)[keys], alone, advantages)
    return advantages
