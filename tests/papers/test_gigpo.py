"""GiGPO (arXiv 2505.10978), eq. 3 to 8 without deviations, worked in plain Python."""

from dataclasses import replace
from statistics import mean

import pytest

from tests.helpers.paper_trials import advantages_of, close, drawn_rewards, trial_of


def to_go(rewards):
    """Returns from each turn on, with the discount 0.95."""
    return [
        sum(0.95 ** (u - t) * rewards[u] for u in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def test_the_score_is_compared_in_the_group_and_the_return_in_the_same_state():
    rewards = drawn_rewards(3, 3, 3, 3)
    trials = [trial_of(index, each) for index, each in enumerate(rewards)]
    scores, returns = [sum(each) for each in rewards], [to_go(each) for each in rewards]
    for number, own in enumerate(advantages_of(trials, "gigpo")):
        step = [returns[number][t] - mean(each[t] for each in returns) for t in range(3)]
        assert own == close([scores[number] - mean(scores) + step[t] for t in range(3)])


def test_a_state_that_recurs_in_a_trial_is_one_anchor_with_that_of_others():
    rewards = drawn_rewards(2, 2, seed=3)
    trials = [trial_of(index, each, states="one room") for index, each in enumerate(rewards)]
    scores = [sum(each) for each in rewards]
    returns = [to_go(each) for each in rewards]
    in_room = mean(value for each in returns for value in each)
    for number, own in enumerate(advantages_of(trials, "gigpo")):
        first = scores[number] - mean(scores)
        assert own == close([first + value - in_room for value in returns[number]])


@pytest.mark.parametrize("weight", ["trial", "sample"])
@pytest.mark.parametrize("method", ["gigpo", "retry", "lamer_paper"])
def test_a_state_that_trials_visit_unequally_often_counts_visits(method, weight):
    """Eq. 6 and 7: the mean over all visits of the state in the group. `weight` is that of eq. 3
    alone: over trajectories, or over turns as in the authors' code."""
    rewards = drawn_rewards(2, 4, 1, seed=3)
    trials = [trial_of(index, each, states="one room") for index, each in enumerate(rewards)]
    scores, returns = [sum(each) for each in rewards], [to_go(each) for each in rewards]
    in_room = mean(value for each in returns for value in each)
    of_turns = [score for score, each in zip(scores, rewards, strict=True) for _ in each]
    score = mean(scores if weight == "trial" else of_turns)
    for number, own in enumerate(advantages_of(trials, method, f"advantage.weight={weight}")):
        expected = [scores[number] - score + value - in_room for value in returns[number]]
        assert own == close(expected)


def test_an_invalid_action_costs_in_both_terms():
    """The authors' code (verl-agent) subtracts the penalty from the score of the turn's row and
    from its return."""
    rewards = drawn_rewards(2, 2, 2)
    trials = [trial_of(index, each) for index, each in enumerate(rewards)]
    first, *others = trials[0].turns
    trials[0] = replace(trials[0], turns=(replace(first, is_valid=False), *others))
    plain = advantages_of(trials, "gigpo", "advantage.format_penalty=0")
    made = advantages_of(trials, "gigpo")
    # The mean of three scores falls by a sixth of the penalty, as one of the trial's two turns has
    # it; the mean return in this state, which three trials met once, by a third.
    assert made[0][0] - plain[0][0] == close(-0.5 + 0.5 / 6 - 0.5 + 0.5 / 3)
    assert made[0][1] - plain[0][1] == close(0.5 / 6)
