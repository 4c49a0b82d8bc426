"""Returns worked by hand; two turns an episode and the published discounts unless said."""

from functools import partial
from itertools import chain

import pytest

from mage_async.credit.returns import (
    CumulativeCode,
    CumulativePaper,
    Differential,
    DifferentialDense,
    FinalOnly,
    SingleEpisode,
)
from tests.helpers.credits import CREDITS, credited

LOSE, DRAW, WIN = [0.0, -10.0], [0.0, 0.0], [0.0, 10.0]

published = {"turn_discount": 0.95, "episode_discount": 0.6}
approx = partial(pytest.approx, rel=1e-12, abs=1e-12)


def flat(returns):
    """Returns in the order of play."""
    return list(chain.from_iterable(returns.acts))


def test_differential_pays_two_losses_and_a_win_as_mage_does():
    returns = credited(Differential, [LOSE, LOSE, WIN], **published)
    expected = [-3.3269, -3.502, 10.83, 11.4, 19.0, 20.0]
    assert flat(returns) == approx(expected)
    assert returns.scores == [-10.0, 0.0, 20.0]


def test_cumulative_code_pays_two_losses_and_a_win_as_lamer_does():
    returns = credited(CumulativeCode, [LOSE, LOSE, WIN], **published)
    expected = [-11.82845, -12.451, -4.085, -4.3, 9.5, 10.0]
    assert flat(returns) == approx(expected)
    assert returns.scores == [-10.0, -10.0, 10.0]


def test_differential_pays_nothing_after_the_first_of_three_losses():
    returns = credited(Differential, [LOSE, LOSE, LOSE], **published)
    assert flat(returns) == approx([-9.5, -10.0, 0.0, 0.0, 0.0, 0.0])


def test_the_code_of_lamer_discounts_the_next_episodes_by_the_rest_of_this_one():
    returns = credited(CumulativeCode, [DRAW, DRAW, WIN], **published)
    assert returns.acts[0][0] == approx(3.0865500)  # 0.95 * 0.6 * 0.95 * 0.6 * 0.95 * 10
    assert returns.acts[0][1] == approx(3.249)


def test_the_paper_of_lamer_discounts_the_next_episodes_by_their_distance_alone():
    returns = credited(CumulativePaper, [DRAW, DRAW, WIN], **published)
    assert returns.acts == [approx([3.42, 3.42]), approx([5.7, 5.7]), approx([9.5, 10.0])]


def test_a_single_episode_is_credited_with_nothing_of_the_others():
    returns = credited(SingleEpisode, [LOSE, DRAW, WIN], **published)
    assert flat(returns) == approx([-9.5, -10.0, 0.0, 0.0, 9.5, 10.0])
    assert returns.scores == [-10.0, 0.0, 10.0]


def test_final_only_credits_earlier_episodes_with_the_last_one():
    returns = credited(FinalOnly, [LOSE, DRAW, [4.0, 10.0]], **published)
    assert returns.acts == [approx([4.86, 4.86]), approx([8.1, 8.1]), approx([13.5, 10.0])]
    assert returns.scores == [0.0, 0.0, 14.0]


def test_differential_dense_pays_a_share_of_each_reward_where_it_came():
    rewards = [[1.0, 2.0], [3.0], [4.0, 5.0]]
    returns = credited(DifferentialDense, rewards, turn_discount=0.5, episode_discount=0.6)
    assert returns.acts[2] == [6.5, 5.0]
    assert returns.acts[1] == approx([0.4 * 3.0 + 0.6 * 6.5])  # 5.1
    assert returns.acts[0] == approx([0.4 + 0.5 * 3.86, 0.4 * 2.0 + 0.6 * 5.1])
    assert returns.scores == approx([1.2, 1.2, 9.0])


def test_at_discount_one_dense_credits_the_last_turns_with_their_own_reward_to_go():
    rewards = [[1.0, 2.0], [3.0, 0.0], [4.0, 5.0]]
    returns = credited(DifferentialDense, rewards, turn_discount=1.0, episode_discount=1.0)
    assert returns.acts == [[9.0, 9.0], [9.0, 9.0], [9.0, 5.0]]


def test_a_trial_won_at_once_has_one_episode():
    for credit in CREDITS.values():
        returns = credited(credit, [WIN], **published)
        assert returns.acts == [[9.5, 10.0]]
        assert returns.scores == [10.0]


def test_an_episode_of_one_turn_is_discounted_between_episodes_only():
    for credit in (Differential, CumulativeCode, CumulativePaper, FinalOnly):
        returns = credited(credit, [[0.0], [1.0]], **published)
        assert returns.acts == [[0.6], [1.0]]


def test_a_reward_inside_an_episode_keeps_its_time_for_lamer_and_moves_to_the_end_for_mage():
    early = [[10.0, 0.0, 0.0]]
    assert credited(CumulativeCode, early, **published).acts == [[10.0, 0.0, 0.0]]
    assert credited(DifferentialDense, early, **published).acts == [[10.0, 0.0, 0.0]]
    assert credited(Differential, early, **published).acts == [approx([9.025, 9.5, 10.0])]


def test_running_out_of_turns_after_a_loss_is_an_improvement():
    returns = credited(Differential, [LOSE, DRAW], **published)
    assert returns.scores == [-10.0, 10.0]
    assert returns.acts[1] == [9.5, 10.0]
