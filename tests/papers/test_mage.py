"""MAGE (arXiv 2603.03680), worked in plain Python; `tests/credit/test_reference_code.py` holds
a thousand trials against its code.
"""

from itertools import pairwise
from statistics import mean

import pytest

from mage_async.credit.turn_table import build_table
from mage_async.trajectory import Group
from tests.helpers.paper_trials import advantages_of, close, configured, drawn_rewards, trial_of

EPISODES = drawn_rewards(3, 2, 4)


def returns_of(rewards):
    """An episode is paid its gain on the one before, at its last turn; returns chain backwards over
    all turns, 0.95 a turn and 0.6 an episode.
    """
    totals = [sum(each) for each in rewards]
    values, ahead = [], 0.0
    for number in reversed(range(len(rewards))):
        own = []
        for turn in reversed(range(len(rewards[number]))):
            ahead *= 0.95 if own else 0.6
            if turn + 1 == len(rewards[number]):
                ahead += totals[number] - (totals[number - 1] if number else 0.0)
            own.insert(0, ahead)
        values = own + values
    return values


def test_an_episode_is_paid_its_gain_on_the_one_before():
    group = Group(0, 0, (trial_of(0, *EPISODES),))
    table = build_table([group], configured("mage_paper").credit)
    assert table.returns.tolist() == close(returns_of(EPISODES))


@pytest.mark.parametrize("anchor", ["global", "local"])
def test_the_anchor_compares_a_state_over_episodes_or_its_ablation_in_one(anchor):
    """The step term: the return minus the mean return of turns in the same state of the group.
    One trial ends with its first episode, and meets the state less often than the others."""
    plays = [drawn_rewards(*[1] * episodes, seed=episodes) for episodes in (3, 2, 1)]
    trials = [trial_of(n, *each, states="one room") for n, each in enumerate(plays)]
    gains = [
        [own[0] - (before[0] if before else 0.0) for before, own in pairwise([None, *each])]
        for each in plays
    ]
    returns = [returns_of(each) for each in plays]
    everywhere = mean(value for each in returns for value in each)
    made = advantages_of(trials, "mage_paper", f"advantage.anchor={anchor}")
    for number, own in enumerate(made):
        for k, value in enumerate(own):
            in_episode = mean(each[k] for each in returns if k < len(each))
            same = in_episode if anchor == "local" else everywhere
            score = gains[number][k] - mean(each[k] for each in gains if k < len(each))
            assert value == close(score + returns[number][k] - same)
