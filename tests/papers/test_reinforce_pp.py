"""REINFORCE++ with a baseline (arXiv 2501.03262), worked in plain Python."""

import math
from statistics import mean

from mage_async.config.schema import Transcript
from mage_async.learning.advantages import turn_advantages
from mage_async.learning.packing import credited
from mage_async.trajectory import Group
from tests.helpers.paper_trials import close, configured, drawn_rewards, trial_of

GROUPS = [drawn_rewards(3, 1, 4), drawn_rewards(2, 2, 1, seed=11)]


def test_the_score_minus_the_groups_mean_is_divided_by_the_deviation_of_the_batch():
    """Over trials, whatever their length; the mean of these differences over trials is 0."""
    config = configured("reinforce_pp_baseline")
    trials = [[trial_of(index, each) for index, each in enumerate(group)] for group in GROUPS]
    groups = [Group(number, 0, tuple(each)) for number, each in enumerate(trials)]
    made = turn_advantages(credited(groups, config), config.advantage, Transcript(), "cpu").tolist()
    scores = [[math.fsum(each) for each in group] for group in GROUPS]
    gaps = [[score - mean(group) for score in group] for group in scores]
    deviation = math.sqrt(mean(gap**2 for group in gaps for gap in group))
    expected = [
        gap / (deviation + 1e-8)
        for group, rewards in zip(gaps, GROUPS, strict=True)
        for gap, turns in zip(group, rewards, strict=True)
        for _ in turns
    ]
    assert made == close(expected)
