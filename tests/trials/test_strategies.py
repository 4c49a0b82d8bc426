"""SGE: a strategy before an action, drawn at a temperature of its own; ReMA: roles kept apart."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Completion
from mage_async.config import config_file
from mage_async.config.schema import Transcript
from mage_async.credit.turn_table import build_table
from mage_async.learning.advantages import turn_advantages
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Group, Kind, Task, Trial, Turn
from mage_async.trials.scripted_play import scripted_trial
from mage_async.trials.trial_run import TrialRun, TrialStart
from tests.helpers.credits import CREDITS, credit_of

RPS = environment_of(config_file.load(config_file.find(None), []))
TASK = Task("rps", "fixed-rock", 3)


def rules(chat, *settings, episodes=2):
    given = ["transcript.max_reflection_tokens=6", "sampling.strategy_temperature=1.5", *settings]
    config = config_file.load(config_file.find(None), given)
    return trial_config_of(config, RPS, chat, episodes)


@pytest.mark.parametrize("memory", ["none", "history", "reflection", "history_and_reflection"])
@pytest.mark.parametrize(("strategy", "per_episode"), [("none", 0), ("episode", 1), ("turn", 4)])
def test_a_strategy_stands_before_the_first_action_or_before_each(
    chat, memory, strategy, per_episode
):
    settings = (f"trial.strategy={strategy}", f"trial.memory={memory}", "engine.max_tokens=256")
    trial = scripted_trial(RPS, TASK, 0, rules(chat, *settings), chat)
    plans = [turn for turn in trial.turns if turn.kind is Kind.STRATEGY]
    assert [(turn.episode, turn.index) for turn in plans] == [
        (episode, index) for episode in range(2) for index in range(per_episode)
    ]
    followed = zip(trial.turns, trial.turns[1:], strict=False)
    assert all(
        (after.kind, after.episode, after.index) == (Kind.ACT, turn.episode, turn.index)
        for turn, after in followed
        if turn.kind is Kind.STRATEGY
    )
    assert sum(turn.kind is Kind.REFLECT for turn in trial.turns) == ("reflection" in memory)


def test_the_action_is_conditioned_on_its_strategy(chat):
    trial = scripted_trial(RPS, TASK, 0, rules(chat, "trial.strategy=turn"), chat)
    plans = [n for n, turn in enumerate(trial.turns) if turn.kind is Kind.STRATEGY]
    for number in plans:
        plan, act = trial.turns[number], trial.turns[number + 1]
        assert plan.segment == act.segment
        assert plan.stop <= act.start
    said = chat.decode(trial.segments[0].tokens.tolist())
    assert said.count("<remark>") == len(plans)


def test_only_strategies_are_drawn_at_their_own_temperature(chat):
    settings = ("trial.strategy=turn", "trial.memory=reflection")
    run = TrialRun(TrialStart(RPS, TASK, 0, rules(chat, *settings), chat, name="t"))
    found = {}
    while (prompt := run.next_prompt()) is not None:
        found.setdefault(run.kind, set()).add(
            (prompt.sampling.temperature, prompt.sampling.max_tokens)
        )
        word = " rock" if run.kind is Kind.ACT else " rock</remark>"
        ids = np.array(chat.encode(word), np.int32)
        logprobs, versions = np.zeros(len(ids), np.float32), (VersionRun(0, 0, 0),)
        run.receive(Completion(ids, logprobs, versions, "stop", 0))
    assert found == {Kind.ACT: {(1.0, 1)}, Kind.STRATEGY: {(1.5, 6)}, Kind.REFLECT: {(1.0, 6)}}


def test_a_strategy_is_worth_what_the_action_it_led_to_is_worth():
    def turn(kind, episode, index, reward=0.0):
        return Turn(kind, episode, index, 0, 0, 1, reward, True, "x")

    turns = (
        turn(Kind.STRATEGY, 0, 0),
        turn(Kind.ACT, 0, 0, 1.0),
        turn(Kind.STRATEGY, 0, 1),
        turn(Kind.ACT, 0, 1, 2.0),
        turn(Kind.REFLECT, 0, 0),
        turn(Kind.STRATEGY, 1, 0),
        turn(Kind.ACT, 1, 0, 8.0),
    )
    group = Group(0, 0, (Trial(TASK, 0, 2, (), turns),))
    table = build_table(
        [group], credit_of(CREDITS["cumulative_paper"], turn_discount=0.5, episode_discount=0.5)
    )
    assert table.returns.tolist() == [6.0, 6.0, 6.0, 6.0, 8.0, 8.0, 8.0]
    assert table.episode_score.tolist() == [0.0, 3.0, 0.0, 3.0, 0.0, 0.0, 8.0]


def test_each_role_of_rema_has_its_own_mean_and_deviation_in_each_group():
    config = config_file.load(config_file.find(None), method="rema")
    source = np.random.default_rng(0)
    groups = [Group(n, 0, tuple(_trial(n, i, source) for i in range(8))) for n in range(3)]
    table = build_table(groups, credit_of(CREDITS["cumulative_paper"], episode_discount=0.5))
    limits = Transcript(max_action_tokens=1, max_reflection_tokens=5)
    found = turn_advantages(table, config.advantage, limits, "cpu").numpy()
    for group in range(3):
        for kind in (Kind.ACT, Kind.REFLECT):
            own = found[(table.group == group) & (table.kind == kind)]
            assert np.isclose(own.mean(), 0.0, atol=1e-9)
            assert np.isclose(np.sqrt((own**2).mean()), 1.0, atol=0.05)


def test_what_actions_earn_elsewhere_does_not_move_the_advantage_of_reflections():
    """One key fewer, and it does: that is what the role is for."""
    source = np.random.default_rng(1)
    trials = [_trial(0, i, source) for i in range(8)]
    other = [_with_first_reward(trial, 50.0) for trial in trials]
    by_role, pooled = (
        [_reflections(each, baseline) for each in (trials, other)]
        for baseline in (["group", "kind"], ["group"])
    )
    assert np.allclose(by_role[0], by_role[1])
    assert not np.allclose(pooled[0], pooled[1])


def _trial(task, index, source):
    turns = []
    for episode in range(2):
        rewards = source.normal(size=2) * (1 + 10 * episode)
        turns += [
            Turn(Kind.ACT, episode, number, 0, 0, 1, float(reward), True, "a")
            for number, reward in enumerate(rewards)
        ]
        if episode == 0:
            turns.append(Turn(Kind.REFLECT, 0, 0, 0, 0, 1, 0.0, True, "so"))
    return Trial(Task("rps", "fixed-rock", task), index, 2, (), tuple(turns))


def _with_first_reward(trial, reward):
    first, *rest = trial.turns
    return replace(trial, turns=(replace(first, reward=reward), *rest))


def _reflections(trials, key):
    names = json.dumps(key)
    changes = [f"advantage.{each}={names}" for each in ("baseline", "scale")]
    rules = config_file.load(config_file.find(None), changes).advantage
    group = Group(0, 0, tuple(trials))
    table = build_table([group], credit_of(CREDITS["single_episode"]))
    limits = Transcript(max_action_tokens=1, max_reflection_tokens=5)
    found = turn_advantages(table, rules, limits, "cpu").numpy()
    return found[table.kind == Kind.REFLECT]
