"""Trials as transitions, and with goals that they reached."""

import random
from dataclasses import replace

import numpy as np
import pytest

from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Completion
from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.methods.sac_glam import replay_buffer
from mage_async.methods.sac_glam.replay_buffer import (
    action_tokens,
    experiences,
    goals_in_hindsight,
    play_again,
)
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Group, Guidance, Task
from mage_async.trials import allowed_tokens
from mage_async.trials.scripted_play import chat_in_words
from mage_async.trials.trial_run import TrialRun, TrialStart

CHAT = chat_in_words()


def configured(*changes):
    grid = ["environment.name=grid", "environment.options.size=4", "environment.options.turns=6"]
    return config_file.load(config_file.find(None), [*grid, *changes], "sac_glam")


def completion_of(tokens, legal, version):
    """Those tokens, drawn by a version from the legal actions."""
    drawn_from, node = [], 0
    for token in tokens:
        allowed = legal.allowed(node)
        drawn_from.append(allowed if len(allowed) > 1 else None)
        node = legal.after(node, token)
    logprobs = np.array([-1.5 if each is not None else 0.0 for each in drawn_from], np.float32)
    runs = (VersionRun(0, version, version),)
    drawn = np.array(tokens, np.int32)
    return Completion(drawn, logprobs, runs, "stop", 0, drawn_from=tuple(drawn_from))


def played(config, goal, actions, version=3, guidance=None):
    """A trial of the given words, drawn by a version."""
    environment = environment_of(config)
    rules = trial_config_of(config, environment, CHAT, config.trial.episodes)
    rules = rules.with_guidance(guidance)
    run = TrialRun(TrialStart(environment, Task("grid", goal, 5), 0, rules, CHAT, name="trial"))
    for word in actions:
        prompt = run.next_prompt()
        assert prompt is not None
        tokens = allowed_tokens.action_tokens(word, CHAT, rules.parser)
        run.receive(completion_of(tokens, prompt.restriction, version))
    assert run.next_prompt() is None
    return run.trial(), environment, rules


MISSED = ("right", "right", "down", "down", "left", "up")
"""From the corner by beta-three and gamma-three to beta-two."""


def test_a_trial_played_again_with_its_own_goal_is_the_same():
    trial, environment, rules = played(configured(), "delta-four", MISSED)
    again = play_again(environment, trial, rules, CHAT)
    for one, other in zip(trial.segments, again.trial.segments, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
        assert one.versions == other.versions
    assert [turn.reward for turn in again.trial.turns] == [0.0] * 6
    assert again.reached[1] == "alpha-three"


def test_with_a_goal_that_it_reached_a_trial_reads_as_if_it_had_been_played_for_it():
    trial, environment, rules = played(configured(), "delta-four", MISSED)
    again = play_again(environment, trial, rules, CHAT, "gamma-three")
    wanted, _, _ = played(configured(), "gamma-three", MISSED[:4])
    assert again.trial.segments[0].tokens.tolist() == wanted.segments[0].tokens.tolist()
    assert [turn.reward for turn in again.trial.turns] == [0.0, 0.0, 0.0, 1.0]
    assert again.trial.cut_at is None


def test_a_trial_whose_actions_run_out_is_cut_and_its_last_value_is_unknown():
    config = configured("methods.sac_glam.hindsight=0")
    trial, environment, rules = played(config, "alpha-three", ("right", "right"))
    again = play_again(environment, trial, rules, CHAT, "delta-four")
    assert again.trial.cut_at == 0
    assert [turn.reward for turn in again.trial.turns] == [0.0, 0.0]


def test_transitions_say_what_was_done_what_could_be_done_and_what_it_earned():
    config = configured("methods.sac_glam.hindsight=0")
    trial, environment, _ = played(config, "alpha-three", ("right", "left", "right", "right"))
    (only,) = experiences([Group(7, 3, (trial,))], config, environment, CHAT, 0)
    ((sequence,),) = only
    tokens = list(action_tokens(environment, CHAT))
    drawn = [tokens[place] for place in sequence.actions]
    assert [CHAT.decode([token]).strip() for token in drawn] == ["right", "left", "right", "right"]
    assert sequence.rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert sequence.discounts.tolist() == pytest.approx([0.95, 0.95, 0.95, 0.0])
    assert sequence.valid.sum(1).tolist() == [2, 3, 2, 3]  # the corner and the upper edge
    assert sequence.version == 3
    assert len(sequence.tokens) == sequence.places[-1] + 1


def test_every_copy_of_a_guided_trial_begins_with_its_guidance():
    guidance = Guidance(2, 1, (("corner", "right"),), "guided right", 0.0)
    trial, environment, _ = played(configured(), "delta-four", MISSED, guidance=guidance)
    group = Group(7, 3, (trial, replace(trial, index=1)), guidance)
    guided, other = experiences([group], configured(), environment, CHAT, 9)
    (word,) = CHAT.encode("guided")
    assert [[word in sequence.tokens for (sequence,) in each] for each in (guided, other)] == [
        [True] * 6,
        [False] * 6,
    ]


def test_copies_end_with_the_reward_of_a_goal_that_was_reached():
    config = configured()
    trial, environment, _ = played(config, "delta-four", MISSED)
    (found,) = experiences([Group(7, 3, (trial,))], config, environment, CHAT, 9)
    own, *others = found
    assert own[0].rewards.sum() == 0.0
    assert [copy[0].rewards.tolist()[-1] for copy in others] == [1.0] * len(others)
    assert len(others) == 5  # of six cells; beta-two is held out


def test_goals_are_drawn_by_seed_grant_and_trial_and_are_never_held_out():
    config = configured()
    trial, environment, rules = played(config, "delta-four", MISSED)
    again = play_again(environment, trial, rules, CHAT)
    drawn = {
        goal
        for seed in range(60)
        for goal in goals_in_hindsight(environment, again, 1, random.Random(seed))
    }
    assert drawn == {"alpha-two", "alpha-three", "beta-three", "gamma-three", "gamma-two"}
    assert not drawn & set(environment.members("heldout"))
    once, twice = (
        experiences([Group(7, 3, (trial,))], config, environment, CHAT, 1)[0][1][0].tokens
        for _ in range(2)
    )
    assert once.tolist() == twice.tolist()


def test_an_episode_ends_where_credit_does_not_cross_it():
    chained = ("credit.kind=cumulative_code", "credit.episode_discount=0.5")
    config = configured("trial.episodes=2", *chained)
    trial, environment, _ = played(config, "alpha-two", ("right", "right"))
    ((sequence,),) = experiences([Group(1, 0, (trial,))], config, environment, CHAT, 0)[0]
    assert sequence.discounts.tolist() == [0.5, 0.0]
    alone = configured("trial.episodes=2")
    ((sequence,),) = experiences([Group(1, 0, (trial,))], alone, environment, CHAT, 0)[0]
    assert sequence.discounts.tolist() == [0.0, 0.0]


def test_each_token_of_an_action_that_has_alternatives_is_a_step():
    room = "{size=5,boxes=1,turns=3,steps_per_turn=2,shortest=2,longest=5,rooms=64}"
    changes = ["environment.name=sokoban", f"environment.options={room}"]
    config = config_file.load(config_file.find(None), changes, "sac_glam")
    environment = environment_of(config)
    rules = trial_config_of(config, environment, CHAT, config.trial.episodes)
    task = Task("sokoban", environment.members("train")[0], 5)
    run = TrialRun(TrialStart(environment, task, 0, rules, CHAT, name="trial"))
    while (prompt := run.next_prompt()) is not None:
        action = next(each for each in run.play.legal_actions() if " " in each)
        tokens = allowed_tokens.action_tokens(action, CHAT, rules.parser)
        run.receive(completion_of(tokens, prompt.restriction, 0))
    trial = run.trial()
    ((sequence,),) = experiences([Group(7, 3, (trial,))], config, environment, CHAT, 0)[0]
    assert len(sequence.actions) == int(trial.segments[0].is_sampled.sum()) > len(trial.turns)
    rewards = iter(turn.reward for turn in trial.turns)
    for paid, discount in zip(sequence.rewards, sequence.discounts, strict=True):
        assert paid == (0.0 if discount == 1.0 else np.float32(next(rewards)))
    assert not list(rewards)


def test_a_token_that_no_known_action_has_is_refused():
    config = configured()
    trial, environment, _ = played(config, "alpha-two", ("right",))
    environment.facts = replace(environment.facts, words=("up", "left"))
    environment.begin, begin = lambda *_: PlayOfNothing(), environment.begin
    numbers = action_tokens(environment, CHAT)
    environment.begin = begin
    assert CHAT.encode(" down")[0] not in numbers
    maker = replay_buffer._CopyMaker(config, environment, CHAT)
    maker._numbers = numbers
    with pytest.raises(RunError, match="is in no word of the environment"):
        maker.copy_of(replay_buffer.ReplayedTrial(trial, ()))


class PlayOfNothing:
    def legal_actions(self):
        return ()
