"""Returns, comparison within keys, expansion to tokens: by hand, and against fp64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mage_kernels import TurnLayout, dense_keys, expansion, group_advantage, reference
from mage_kernels.advantage import returns_to_go

PLAY, REFLECT = False, True


def layout_of(
    turns: Sequence[tuple[int, int, bool, int]], lengths: Sequence[tuple[int, int]] | None = None
) -> TurnLayout:
    """From (trial, episode, is reflection, key) and (gap before, tokens) of each turn."""
    trials, episodes, is_reflection, _ = zip(*turns, strict=True)
    keys = torch.tensor(turns, dtype=torch.int64)[:, 3]  # strided, as columns of a table are
    edges = torch.tensor(lengths or [(0, 1)] * len(turns)).flatten().cumsum(0)
    return TurnLayout.of(
        trials=torch.tensor(trials),
        episodes=torch.tensor(episodes),
        is_reflection=torch.tensor(is_reflection),
        keys=keys,
        starts=edges[::2],
        stops=edges[1::2],
        num_tokens=int(edges[-1]) + 3,
    )


def alone(
    count: int, *, device: str, turns: list[tuple[int, int, bool, int]], rewards: list[float]
):
    """Advantages where every turn has a key of its own and keeps its return."""
    layout = layout_of([(*turn[:3], at) for at, turn in enumerate(turns)]).to(device)
    advantages = group_advantage(
        torch.tensor(rewards, device=device),
        layout,
        turn_discount=0.95,
        episode_discount=0.6,
        keep_singletons=True,
    )
    return advantages[:count].tolist()


# Lost, lost, won: two turns an episode, a reflection between; MAGE's and LaMer's own numbers.
LOST_LOST_WON = [
    (0, 0, PLAY, 0),
    (0, 0, PLAY, 0),
    (0, 1, REFLECT, 0),
    (0, 1, PLAY, 0),
    (0, 1, PLAY, 0),
    (0, 2, REFLECT, 0),
    (0, 2, PLAY, 0),
    (0, 2, PLAY, 0),
]


def test_returns_of_differential_rewards_are_those_of_mage(device: str) -> None:
    rewards = [0.0, -10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 20.0]
    returns = alone(8, device=device, turns=LOST_LOST_WON, rewards=rewards)
    assert returns == pytest.approx(
        [-3.3269, -3.502, 10.83, 10.83, 11.4, 19.0, 19.0, 20.0], abs=1e-4
    )


def test_returns_of_plain_rewards_are_those_of_lamer(device: str) -> None:
    rewards = [0.0, -10.0, 0.0, 0.0, -10.0, 0.0, 0.0, 10.0]
    returns = alone(8, device=device, turns=LOST_LOST_WON, rewards=rewards)
    assert returns == pytest.approx(
        [-11.82845, -12.451, -4.085, -4.085, -4.3, 9.5, 9.5, 10.0], abs=1e-4
    )


def test_what_a_reflection_is_said_to_earn_is_not_read(device: str) -> None:
    rewards = [0.0, 0.0, 99.0, 0.0, 0.0, 99.0, 0.0, 1.0]
    quiet = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    loud = alone(8, device=device, turns=LOST_LOST_WON, rewards=rewards)
    assert loud == alone(8, device=device, turns=LOST_LOST_WON, rewards=quiet)


def compared(rewards: list[float], keys: list[int], *, device: str, **options: bool) -> list[float]:
    """One turn a trial, so that returns are rewards."""
    layout = layout_of([(at, 0, PLAY, key) for at, key in enumerate(keys)]).to(device)
    values = torch.tensor(rewards, device=device)
    found = group_advantage(values, layout, turn_discount=1.0, episode_discount=1.0, **options)
    return found[: len(rewards)].tolist()


def test_a_turn_is_compared_with_the_turns_of_its_key(device: str) -> None:
    found = compared([1.0, 10.0, 3.0, 20.0], [0, 1, 0, 1], device=device)
    assert found == [-1.0, -5.0, 1.0, 5.0]


def test_the_deviation_is_the_unbiased_one(device: str) -> None:
    found = compared([1.0, 2.0, 3.0], [0, 0, 0], device=device, divide_by_std=True)
    assert found == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("divide_by_std", [False, True])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3e5])
def test_equal_rewards_give_exactly_zero(device: str, reward: float, divide_by_std: bool) -> None:
    found = compared([reward] * 7, [0] * 7, device=device, divide_by_std=divide_by_std)
    assert found == [0.0] * 7


def test_a_turn_without_company_gets_zero_or_by_rule_its_return(device: str) -> None:
    assert compared([5.0], [0], device=device) == [0.0]
    assert compared([5.0], [0], device=device, keep_singletons=True) == [5.0]
    both = {"keep_singletons": True, "divide_by_std": True}
    assert compared([5.0], [0], device=device, **both) == pytest.approx([5.0])


def test_tokens_between_turns_get_zero(device: str) -> None:
    layout = layout_of([(0, 0, PLAY, 0), (1, 0, PLAY, 0)], lengths=[(2, 3), (1, 2)]).to(device)
    rewards = torch.tensor([1.0, 3.0], device=device)
    found = group_advantage(rewards, layout, turn_discount=1.0, episode_discount=1.0)
    assert found.tolist() == [0, 0, -1, -1, -1, 0, 1, 1, 0, 0, 0]


# Blocks of 8 members and 16 tokens. 19 members: two blocks and a ragged third. 40 tokens: the same.
def test_long_groups_and_long_turns_cross_the_blocks(
    triton_kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mage_kernels.fused import group_advantage as fused

    monkeypatch.setattr(fused, "BLOCKS", {"BLOCK_N": 8, "BLOCK_T": 16})
    turns = [(0, 0, PLAY, 0)] + [(1 + n // 6, n % 6 // 3, PLAY, 0) for n in range(18)]
    lengths = [(0, 40), *[(n % 2, n % 3) for n in range(18)]]
    check_against_reference(turns, lengths, triton_kernels, divide_by_std=True)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int, bool, int]], list[tuple[int, int]]]:
    """Trials of one to five turns, episodes that only go up, keys without gaps."""
    turns = []
    for trial, num_turns in enumerate(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))):
        episode = 0
        for _ in range(num_turns):
            episode += draw(st.integers(0, 1))
            turns.append((trial, episode, draw(st.booleans()), draw(st.integers(0, 2))))
    keys = dense_keys(turn[3] for turn in turns).tolist()
    turns = [(*turn[:3], key) for turn, key in zip(turns, keys, strict=True)]
    return turns, [(draw(st.integers(0, 2)), draw(st.integers(0, 3))) for _ in turns]


@given(batch=batches(), divide_by_std=st.booleans(), keep_singletons=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_ragged_batch_agrees_with_the_reference(batch: Any, **options: bool) -> None:
    check_against_reference(*batch, "cpu", **options)


@given(batch=batches(), divide_by_std=st.booleans(), keep_singletons=st.booleans())
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_kernel_agrees_with_the_reference_too(
    triton_kernels: str, batch: Any, **options: bool
) -> None:
    check_against_reference(*batch, triton_kernels, **options)


def check_against_reference(
    turns: list[tuple[int, int, bool, int]],
    lengths: list[tuple[int, int]],
    device: str,
    **options: bool,
) -> None:
    layout = layout_of(turns, lengths)
    rewards = torch.randn(len(turns), generator=torch.Generator().manual_seed(4)).round(decimals=1)
    discounts = {"turn_discount": 0.9, "episode_discount": 0.5}
    found = group_advantage(rewards.to(device), layout.to(device), **discounts, **options)
    true = by_reference(turns, rewards.double(), layout, discounts, options)
    assert found.cpu().tolist() == pytest.approx(true.tolist(), rel=1e-4, abs=1e-5)


def by_reference(
    turns: list[tuple[int, int, bool, int]],
    rewards: Tensor,
    layout: TurnLayout,
    discounts: dict[str, float],
    options: dict[str, bool],
) -> Tensor:
    """Through the loops of the reference."""
    trials, episodes, is_reflection, _ = (
        torch.tensor(column) for column in zip(*turns, strict=True)
    )
    options = {"divide_by_std": False, "keep_singletons": False} | options
    returns = reference.returns_to_go(rewards, trials, episodes, is_reflection, **discounts)
    advantages = reference.compared_within_keys(returns, layout.keys, **options)
    return reference.expanded_to_tokens(advantages, layout.starts, layout.stops, layout.num_tokens)


def test_fp64_rewards_stay_fp64() -> None:
    layout = layout_of([(0, 0, PLAY, 0), (0, 0, PLAY, 0)])
    returns = returns_to_go(torch.tensor([1.0, 1.0]).double(), layout, 0.1, 0.5)
    assert returns.tolist() == [1.1, 1.0]
    assert returns.dtype == torch.float64


def test_a_batch_without_turns_gives_zeros(device: str) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    layout = TurnLayout.of(
        trials=nothing,
        episodes=nothing,
        is_reflection=nothing.bool(),
        keys=nothing,
        starts=nothing,
        stops=nothing,
        num_tokens=2,
    ).to(device)
    rewards = torch.zeros(0, device=device)
    found = group_advantage(rewards, layout, turn_discount=1.0, episode_discount=1.0)
    assert found.tolist() == [0.0, 0.0]


def test_keys_are_numbered_in_order_of_appearance() -> None:
    assert dense_keys([("rps", 1), ("kuhn", 0), ("rps", 1)]).tolist() == [0, 1, 0]


def test_turns_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending, disjoint stretches of 4 tokens"):
        layout_of([(0, 0, PLAY, 0), (0, 0, PLAY, 0)], lengths=[(0, 2), (-1, 0)])


def test_advantages_can_be_written_into_a_buffer_that_is_there(device: str) -> None:
    layout = layout_of([(0, 0, PLAY, 0), (1, 0, PLAY, 0)]).to(device)
    rewards, out = torch.tensor([1.0, 3.0], device=device), torch.full((5,), 9.0, device=device)
    found = group_advantage(rewards, layout, turn_discount=1.0, episode_discount=1.0, out=out)
    assert found is out
    assert out.tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_buffer_of_another_size_is_refused() -> None:
    layout = layout_of([(0, 0, PLAY, 0)])
    with pytest.raises(ValueError, match=r"out must be contiguous \[4\], got \[3\]"):
        group_advantage(
            torch.zeros(1), layout, turn_discount=1.0, episode_discount=1.0, out=torch.zeros(3)
        )


# Chunks of 4 tokens, turns of 0 to 9: shorter than a chunk, as long, and longer. Filled in where a
# stretch is at least so long on average: 0 takes the one way, 100 the other.
@pytest.mark.parametrize("long_stretch", [0, 100])
def test_tokens_are_filled_in_or_looked_up(
    monkeypatch: pytest.MonkeyPatch, long_stretch: int
) -> None:
    monkeypatch.setattr(expansion, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(expansion, "LONG_STRETCH", long_stretch)
    turns = [(n // 3, 0, PLAY, n % 2) for n in range(30)]
    check_against_reference(turns, [(n % 3, n * 7 % 10) for n in range(30)], "cpu")


def test_large_results_lie_in_memory_of_their_own() -> None:
    layout = layout_of([(0, 0, PLAY, 0), (1, 0, PLAY, 0)], lengths=[(0, 2**20), (5, 2**20)])
    rule = {"turn_discount": 1.0, "episode_discount": 1.0}
    first = group_advantage(torch.tensor([1.0, 3.0]), layout, **rule)
    second = group_advantage(torch.tensor([4.0, 2.0]), layout, **rule)
    assert first.unique_consecutive().tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert torch.equal(second, -first)


def test_turns_can_be_compared_by_other_keys() -> None:
    turns = [(trial, 0, PLAY, trial % 2) for trial in range(6)]
    others = [(trial, 0, PLAY, trial % 3) for trial in range(6)]
    keys = torch.tensor([key for *_, key in others])
    again, direct = layout_of(turns).with_keys(keys), layout_of(others)
    assert torch.equal(again.members, direct.members)
    assert torch.equal(again.key_starts, direct.key_starts)


def test_keys_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="keys must count from 0, got -1: see dense_keys"):
        layout_of([(0, 0, PLAY, -1)])


def test_a_reward_for_no_turn_is_refused() -> None:
    layout = layout_of([(0, 0, PLAY, 0)])
    with pytest.raises(ValueError, match="there are 1 turns, got 2 rewards"):
        group_advantage(torch.zeros(2), layout, turn_discount=1.0, episode_discount=1.0)
