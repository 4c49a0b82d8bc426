"""Equal trials change nothing: every advantage is exactly 0, under every preset and
estimator, with rewards at the end and at each turn, with and without remarks.

A state is met once in a trial here, unless said: GiGPO's second term and MAGE's global anchor
compare turns of one trial in the same state, of which the later ones have other returns.
"""

from dataclasses import replace

import numpy as np
import pytest

from mage_async.config import config_file, presets
from mage_async.config.components import ESTIMATORS
from mage_async.learning.packing import batch_advantages, credited, has_advantage
from mage_async.trajectory import Alternative, Group, Kind, Task, Trial, Turn

AS_CODED = ("mage_code", "lamer_code")
REMARKS = {"none": (), "reflections": (Kind.REFLECT,), "strategies": (Kind.STRATEGY,)}
REWARDS = {
    "at the end": lambda number, is_last: 10.0 * number * is_last / 3,
    "at each turn": lambda number, is_last: number / 3,
}


def equal_groups(remarks="none", paid="at the end", episodes=3, *, recur=False):
    """Two groups of four equal trials, whose episodes are ever shorter and pay ever more."""
    kinds, reward = REMARKS[remarks], REWARDS[paid]
    groups = []
    for number in range(2):
        turns = tuple(turns_of(kinds, reward, episodes, number, recur))
        acts = [place for place, turn in enumerate(turns) if turn.kind is Kind.ACT]
        experts = tuple(Alternative(place, "paper") for place in acts)
        task = Task("rps", "fixed-rock", number)
        trials = [Trial(task, index, episodes, (), turns, alternatives=experts) for index in (0, 1)]
        groups.append(Group(number, 0, tuple(trials)))
    return groups


def turns_of(kinds, reward, episodes, group, recur):
    for episode in range(episodes):
        for index in range(4 - episode):
            if Kind.STRATEGY in kinds:
                yield Turn(Kind.STRATEGY, episode, index, 0, 0, 3, 0.0, True, "plan")
            paid = reward(episode + 1 + group, index == 3 - episode)
            state = f"{index}" if recur else f"{episode}.{index}"
            yield Turn(Kind.ACT, episode, index, 0, 0, 1, paid, True, "rock", anchor=state)
        if Kind.REFLECT in kinds and episode + 1 < episodes:
            yield Turn(Kind.REFLECT, episode, 0, 0, 0, 5, 0.0, True, "said")


def advantages(groups, config):
    return batch_advantages(credited(groups, config), config, "cpu").numpy()


def configured(method=None, *settings):
    return config_file.load(config_file.find(None), list(settings), method)


@pytest.mark.parametrize("remarks", list(REMARKS))
@pytest.mark.parametrize("paid", list(REWARDS))
@pytest.mark.parametrize("method", [each for each in presets.presets() if each not in AS_CODED])
def test_equal_trials_get_nothing_under_any_preset(method, paid, remarks):
    config = configured(method)
    groups = equal_groups(remarks, paid, config.trial.episodes)
    assert not advantages(groups, config).any()


@pytest.mark.parametrize("method", AS_CODED)
def test_the_codes_compare_an_episode_with_the_others_of_its_own_trial(method):
    """What `mage_paper` and `lamer_paper` repair; with one episode there is nothing to repair."""
    config = configured(method)
    assert advantages(equal_groups(), config).any()
    for paid in REWARDS:
        assert not advantages(equal_groups(paid=paid, episodes=1), config).any()


@pytest.mark.parametrize("remarks", list(REMARKS))
@pytest.mark.parametrize("paid", list(REWARDS))
@pytest.mark.parametrize("value", ["return", "trial_score"])
@pytest.mark.parametrize("estimator", [each for each in ESTIMATORS if each != "gigpo"])
def test_equal_trials_get_nothing_under_any_estimator(estimator, value, paid, remarks):
    """GiGPO stands above: its presets are its only uses."""
    config = configured(None, f"advantage.estimator={estimator}", f"advantage.value={value}")
    assert not advantages(equal_groups(remarks, paid, recur=True), config).any()


@pytest.mark.parametrize("method", ["grpo", "rloo", "rema"])
def test_an_invalid_action_costs_a_trial_its_score_and_no_turn_alone(method):
    (group, _), config = equal_groups(episodes=1), configured(method)
    first, second = group.trials
    faulty = tuple(replace(turn, is_valid=turn.index != 2) for turn in first.turns)
    wrong = replace(first, turns=faulty)
    both = replace(group, trials=(wrong, replace(second, turns=faulty)))
    assert not advantages([both], config).any()
    found = advantages([replace(group, trials=(wrong, second))], config).reshape(2, 4)
    assert np.ptp(found, axis=1).tolist() == [0.0, 0.0]
    assert found[0, 0] < 0 < found[1, 0]


def test_a_group_of_equal_rewards_has_an_advantage_by_an_invalid_action_or_a_rewards_time():
    """Such a group is not replaced (`admission.replaced_groups`)."""
    equal, config = equal_groups()[0], configured()
    assert not has_advantage(equal, config)
    first, second = equal.trials
    invalid = replace(first, turns=(replace(first.turns[0], is_valid=False), *first.turns[1:]))
    group = replace(equal, trials=(invalid, second))
    assert has_advantage(group, config)
    assert not has_advantage(group, configured(None, "advantage.format_penalty=0"))
    *_, before, last = first.turns
    early = (*first.turns[:-2], replace(before, reward=last.reward), replace(last, reward=0.0))
    group = replace(equal, trials=(replace(first, turns=early), second))
    assert {tuple(trial.episode_rewards()) for trial in group.trials} == {
        tuple(first.episode_rewards())
    }
    assert has_advantage(group, config)
