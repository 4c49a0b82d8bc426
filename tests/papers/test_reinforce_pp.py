"""REINFORCE++ with a baseline (arXiv 2501.03262), as its authors' code (OpenRLHF,
`compute_advantages_and_returns`) computes it, worked in plain Python over all tokens of a batch.
"""

import math
from dataclasses import replace
from statistics import mean, pstdev

from mage_async.config.schema import Transcript
from mage_async.learning.advantages import turn_advantages
from mage_async.learning.packing import credited, trained_advantages
from mage_async.trajectory import Group, Kind
from tests.helpers.paper_trials import close, configured, drawn_rewards, trial_of

GROUPS = [drawn_rewards(3, 1, 4), drawn_rewards(2, 2, 1, seed=11)]
LENGTHS = [[(2, 1, 3), (9,), (1, 1, 2, 2)], [(5, 1), (4, 4), (7,)]]


def without_first_token(trial):
    """The trial, the first token of which had no alternative and was not sampled."""
    (segment,) = trial.segments
    is_sampled = segment.is_sampled.copy()
    is_sampled[0] = False
    return replace(trial, segments=(replace(segment, is_sampled=is_sampled),))


def test_the_score_minus_the_groups_mean_is_normalised_over_the_tokens_of_the_batch():
    config = configured("reinforce_pp_baseline")
    groups = [
        Group(g, 0, tuple(trial_of(n, each, lengths=LENGTHS[g][n]) for n, each in enumerate(group)))
        for g, group in enumerate(GROUPS)
    ]
    first, *others = groups[0].trials
    groups[0] = replace(groups[0], trials=(without_first_token(first), *others))
    made = turn_advantages(credited(groups, config), config.advantage, Transcript(), "cpu").tolist()

    scores = [[math.fsum(rewards) for rewards in group] for group in GROUPS]
    gaps = [score - mean(group) for group in scores for score in group]
    sizes = [[list(own) for own in group] for group in LENGTHS]
    sizes[0][0][0] -= 1
    turns = [own for group in sizes for own in group]
    tokens = [gap for gap, own in zip(gaps, turns, strict=True) for _ in range(sum(own))]
    assert abs(mean(tokens)) > 0.03  # the second mean matters
    expected = [
        (gap - mean(tokens)) / (pstdev(tokens) + 1e-8)
        for gap, own in zip(gaps, turns, strict=True)
        for _ in own
    ]
    assert made == close(expected)


def test_tokens_that_are_not_trained_have_no_part_in_the_normalisation():
    config = configured("reinforce_pp_baseline")
    advantages = [
        trained_advantages(trials, credited([Group(0, 0, trials)], config), config, "cpu", kinds)
        for num_notes, kinds in ((1, {Kind.ACT}), (100, {Kind.ACT}), (100, {*Kind}))
        for trials in [
            tuple(
                trial_of(n, rewards, lengths=(2 + n, num_notes), kinds=(Kind.ACT, Kind.NOTES))
                for n, rewards in enumerate(([1.0, 0.0], [0.0, 0.0]))
            )
        ]
    ]
    few, many, trained = (each.tolist() for each in advantages)
    assert many == few
    assert abs(2 * few[0] + 3 * few[2]) < 1e-6
    assert trained != many
