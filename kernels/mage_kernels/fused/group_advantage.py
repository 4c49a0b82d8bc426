"""Kernel: returns, group statistics and expansion to tokens, in one launch.

One program takes one turn. It computes the returns of every turn of its key again (some dozens,
from L2), their mean and deviation in two passes in a fixed order, and writes its own tokens and the
gap before them. Programs share nothing, so nothing waits and two runs give the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from mage_kernels.turns import TurnLayout

BLOCKS = {"BLOCK_N": 128, "BLOCK_T": 1024}
OPTIONS = {"num_warps": 4}


@triton.jit
def member_returns(
    rewards_ptr, step_ptr, trial_stops_ptr, member, is_member, TURN_DISCOUNT, EPISODE_DISCOUNT
):
    """Each lane walks from the end of its member's trial back to that member."""
    stop = tl.load(trial_stops_ptr + member, mask=is_member, other=0)
    length = tl.where(is_member, stop - member, 0)
    running = tl.zeros_like(length).to(tl.float32)
    for back in range(0, tl.max(length, 0)):
        is_there = back < length
        turn = stop - 1 - back
        step = tl.load(step_ptr + turn, mask=is_there, other=0)
        reward = tl.load(rewards_ptr + turn, mask=is_there, other=0.0)
        discount = tl.where(step == 1, TURN_DISCOUNT, EPISODE_DISCOUNT)
        running = tl.where(step == 0, running, reward + discount * running)
    return running


@triton.jit
def group_advantage_kernel(
    rewards_ptr,
    step_ptr,
    trial_stops_ptr,
    keys_ptr,
    members_ptr,
    key_starts_ptr,
    starts_ptr,
    stops_ptr,
    advantages_ptr,
    N,
    num_tokens,
    TURN_DISCOUNT: tl.constexpr,
    EPISODE_DISCOUNT: tl.constexpr,
    DIVIDE_BY_STD: tl.constexpr,
    KEEP_SINGLETONS: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    turn = tl.program_id(0).to(tl.int64)
    key = tl.load(keys_ptr + turn)
    first = tl.load(key_starts_ptr + key)
    stop = tl.load(key_starts_ptr + key + 1)
    total = 0.0
    low = float("inf")
    high = float("-inf")
    own = 0.0
    for block in range(first, stop, BLOCK_N):
        at = block + tl.arange(0, BLOCK_N)
        is_member = at < stop
        member = tl.load(members_ptr + at, mask=is_member, other=0)
        value = member_returns(
            rewards_ptr,
            step_ptr,
            trial_stops_ptr,
            member,
            is_member,
            TURN_DISCOUNT,
            EPISODE_DISCOUNT,
        )
        total += tl.sum(tl.where(is_member, value, 0.0), 0)
        low = tl.minimum(low, tl.min(tl.where(is_member, value, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(is_member, value, float("-inf")), 0))
        own += tl.sum(tl.where(is_member & (member == turn), value, 0.0), 0)
    count = stop - first
    mean = total / count.to(tl.float32)
    scale = 1.0
    if DIVIDE_BY_STD:
        squares = 0.0
        for block in range(first, stop, BLOCK_N):
            at = block + tl.arange(0, BLOCK_N)
            is_member = at < stop
            member = tl.load(members_ptr + at, mask=is_member, other=0)
            value = member_returns(
                rewards_ptr,
                step_ptr,
                trial_stops_ptr,
                member,
                is_member,
                TURN_DISCOUNT,
                EPISODE_DISCOUNT,
            )
            deviation = tl.where(is_member, value - mean, 0.0)
            squares += tl.sum(deviation * deviation, 0)
        scale = tl.sqrt(squares / tl.maximum(count - 1, 1).to(tl.float32)) + EPSILON
    advantage = tl.where(low < high, (own - mean) / scale, 0.0)  # equal returns: exactly 0
    if KEEP_SINGLETONS:
        alone = own / (1.0 + EPSILON) if DIVIDE_BY_STD else own
        advantage = tl.where(count == 1, alone, advantage)

    start = tl.load(starts_ptr + turn)
    gap = tl.load(stops_ptr + turn - 1, mask=turn > 0, other=0)
    end = tl.load(stops_ptr + turn)
    until = tl.where(turn == N - 1, num_tokens, end)
    for block in range(gap, until, BLOCK_T):
        token = block + tl.arange(0, BLOCK_T)
        value = tl.where((token >= start) & (token < end), advantage, 0.0)
        tl.store(advantages_ptr + token, value, mask=token < until)


def fused_group_advantage(
    rewards: Tensor,
    turns: TurnLayout,
    turn_discount: float,
    episode_discount: float,
    divide_by_std: bool,
    keep_singletons: bool,
    epsilon: float,
    out: Tensor,
) -> Tensor:
    """Fill `out` `[T]`: see `mage_kernels.advantage.group_advantage`."""
    num_turns = len(rewards)
    if not num_turns:
        return out.zero_()
    group_advantage_kernel[(num_turns,)](
        rewards.float().contiguous(),
        turns.step,
        turns.trial_stops,
        turns.keys,
        turns.members,
        turns.key_starts,
        turns.starts,
        turns.stops,
        out,
        num_turns,
        turns.num_tokens,
        TURN_DISCOUNT=turn_discount,
        EPISODE_DISCOUNT=episode_discount,
        DIVIDE_BY_STD=divide_by_std,
        KEEP_SINGLETONS=keep_singletons,
        EPSILON=epsilon,
        **BLOCKS,
        **OPTIONS,
    )
    return out
