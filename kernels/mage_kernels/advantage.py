"""From the rewards of turns to the advantages of tokens: returns, compared within groups.

Shapes: `N` turns, `T` tokens.
"""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from mage_kernels import vectorised
from mage_kernels.dispatch import is_fused


def dense_keys(keys: Iterable[Hashable]) -> Tensor:
    """Number any keys, as `("rps", opponent, seat, episode)`, from 0 in order of appearance: int64
    `[N]`.
    """
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


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
    """Advantage of every token: each turn's return-to-go against those of its key.

    Returns are those of `reference.returns_to_go`, compared by `reference.compared_within_keys`:
    equal returns give exactly 0, a key with one turn gives 0 or, with `keep_singletons`, its
    return.

    Args:
        rewards: fp32 `[N]`, one per turn; turns of a trial are contiguous and in order of play.
        trials: int64 `[N]`, ascending: the trial of each turn.
        episodes: int64 `[N]`: the episode of each turn.
        is_reflection: bool `[N]`.
        keys: int64 `[N]` from 0 (see `dense_keys`): which turns are compared with each other.
        starts, stops: int64 `[N]`: the tokens of each turn, ascending and disjoint.
        num_tokens: `T`.

    Returns:
        `[T]`: 0 at tokens of no turn.
    """
    arguments = (rewards, trials, episodes, is_reflection, keys, starts, stops, num_tokens)
    options = {
        "turn_discount": turn_discount,
        "episode_discount": episode_discount,
        "divide_by_std": divide_by_std,
        "keep_singletons": keep_singletons,
        "epsilon": epsilon,
    }
    if is_fused(rewards):
        from mage_kernels.fused.group_advantage import fused_group_advantage

        return fused_group_advantage(*arguments, **options)
    return vectorised.group_advantage(*arguments, **options)
