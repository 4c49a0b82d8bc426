"""What the scripted trials of a warm start are told, and what their scripts make of it."""

import random

import pytest

from mage_async.assembly import environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.inference.chat_files import load_chat
from mage_async.methods.method import Methods
from mage_async.policy.initial_policy import prepare_policy
from mage_async.trials.scripted_play import random_task, scripted_trial

BOXES = ("environment.name=boxes", "methods.graph_memory.strategies=4", "warm_start=none")


@pytest.fixture
def trials(tmp_path):
    """200 demonstrations in order, each with what it was told."""
    config = config_file.load(config_file.find("quickstart"), BOXES)
    prepare_policy(config, tmp_path / "policy", lambda progress: None)
    environment, chat = environment_of(config), load_chat(tmp_path / "policy")
    rules = trial_config_of(config, environment, chat, 3)
    earlier, source, found = Methods(config, environment), random.Random(1), []
    for index in range(200):
        task = random_task(environment, "train", source)
        told = earlier.guide_demonstration(task)
        trial = scripted_trial(environment, task, index, rules, chat, told)
        earlier.learn_demonstration(trial)
        found.append((told, trial, chat.decode(trial.segments[0].tokens.tolist())))
    return found


def actions(trial, episode):
    return {turn.anchor: turn.action for turn in trial.turns if turn.episode == episode}


def code_of(trial):
    return dict(zip(("red", "green", "blue", "gold"), trial.task.member.split("-"), strict=True))


def test_half_of_the_trials_begin_with_strategies_of_earlier_ones(trials):
    guided = [(told, trial, text) for told, trial, text in trials if told is not None]
    assert 80 <= len(guided) <= 120
    for told, trial, text in guided:
        assert told.text in text.split("episode")[0]
        assert trial.memory == 0
    assert all(trial.memory is None for told, trial, _ in trials if told is None)


def test_strategies_are_decisions_that_paid_in_the_latest_trials(trials):
    latest = {}
    for told, trial, _ in trials:
        if told is not None:
            assert dict(told.decisions).items() <= latest.items()
            assert len(dict(told.decisions)) == len(told.decisions) <= 4
        code = code_of(trial)
        episodes = [actions(trial, number) for number in range(3)]
        right = [sum(each[box] == code[box] for box in code) for each in episodes]
        best, worst = (episodes[right.index(most)] for most in (max(right), min(right)))
        latest |= {b: best[b] for b in code if best[b] != worst[b] and best[b] == code[b]}


def test_the_first_episode_follows_and_the_third_knows_better(trials):
    wrong = followed = kept = 0
    for told, trial, _ in trials:
        code = code_of(trial)
        for box, action in told.decisions if told is not None else ():
            assert actions(trial, 0)[box] == action
            followed += 1
            if action != code[box]:
                wrong += 1
                kept += actions(trial, 2)[box] == action
    assert followed > 150
    assert wrong > 50
    assert kept < 0.3 * wrong


def test_without_a_memory_nobody_is_told(tmp_path):
    config = config_file.load(config_file.find("quickstart"), ("environment.name=boxes",))
    environment = environment_of(config)
    earlier = Methods(config, environment)
    assert earlier.guide_demonstration(random_task(environment, "train", random.Random(1))) is None
