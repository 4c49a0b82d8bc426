"""A horizon that grows with the version of the grant, and stays the group's own."""

import math

import pytest

from mage_async.admission.ledger import Ledger
from mage_async.admission.replay import replay
from mage_async.assembly import check, environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import ConfigError
from mage_async.methods.method import Horizon, Methods
from mage_async.methods.scaling_inter import ScalingInter, Settings
from mage_async.protocol.journal_records import Granted
from mage_async.tasks.league import League
from mage_async.trajectory import Kind, Task
from mage_async.trials.scripted_play import scripted_trial

CONFIG = config_file.load(
    config_file.find(None), ["transcript.rules=true", "engine.max_tokens=4096"]
)
RPS = environment_of(CONFIG)
TASK = Task("rps", "fixed-rock", 3)


def of(**stages):
    return ScalingInter(Settings(**stages), Config())


def test_the_stages_of_sciworld_begin_after_100_and_200_steps_and_the_last_one_stays():
    method = of(steps=100, turns=[10, 20, 30], episodes=[])
    found = [
        method.horizon(version, Horizon(3)).max_turns for version in (0, 99, 100, 199, 200, 5000)
    ]
    assert found == [10, 10, 20, 20, 30, 30]


def test_turns_and_episodes_grow_apart():
    method = of(steps=2, turns=[2, 4], episodes=[1, 2, 3])
    found = [method.horizon(version, Horizon(3)) for version in (0, 2, 4, 6)]
    assert found == [Horizon(1, 2), Horizon(2, 4), Horizon(3, 4), Horizon(3, 4)]


def test_without_stages_nothing_is_limited():
    assert Methods().horizon(50, 3) == Horizon(3, 0)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "methods.scaling_inter.turns=[4, 2]",
            r"methods.scaling_inter.turns must not shrink .*\[4, 2\]",
        ),
        (
            "methods.scaling_inter.episodes=[1, 2]",
            r"must end with trial.episodes = 3, got \[1, 2\]",
        ),
        (
            "methods.scaling_inter.turns=[4, 8]",
            r"turns = \[4, 8\] limits nothing: episodes of 'rps' have at most 4 turns",
        ),
        (
            "methods.scaling_inter.turns=[0]",
            r"`methods.scaling_inter.turns\[0\]` must be at least 1, got 0",
        ),
        (
            "methods.scaling_inter.steps=5",
            "methods.scaling_inter has neither turns nor episodes",
        ),
    ],
)
def test_a_curriculum_that_leads_elsewhere_is_refused(setting, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check(config_file.load(config_file.find(None), [setting]))


def test_an_episode_that_is_cut_off_keeps_what_it_earned_and_the_next_one_begins(chat):
    whole = trial_config_of(CONFIG, RPS, chat, 3)
    long = scripted_trial(RPS, TASK, 0, whole, chat)
    short = scripted_trial(RPS, TASK, 0, whole.with_horizon(RPS, 2, 3), chat)
    acts = [(turn.episode, turn.index) for turn in short.turns if turn.kind is Kind.ACT]
    assert acts == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert short.num_episodes == 2
    assert short.turns[:3] == long.turns[:3]


def test_the_agent_is_told_how_many_episodes_its_own_trial_has(chat):
    whole = trial_config_of(CONFIG, RPS, chat, 3)
    assert "3 episodes" in whole.prompts.rules
    assert "2 episodes" in whole.with_horizon(RPS, 2, 0).prompts.rules
    assert whole.with_horizon(RPS, 3, 0) is whole


def test_a_group_granted_again_or_read_from_the_journal_keeps_its_horizon():
    ledger = Ledger(groups_per_step=1, max_staleness=1, trials_per_group=2)
    grant = ledger.grant(TASK, num_episodes=2, peer="a", now=0.0, deadline_s=1.0, max_turns=3)
    ledger.peer_gone("a")
    again = ledger.grant_again(grant.grant, peer="b", now=0.0, deadline_s=1.0)
    assert (again.num_episodes, again.max_turns, again.epoch) == (2, 3, 1)
    later = Ledger(groups_per_step=1, max_staleness=1, trials_per_group=2)
    written = [ledger.segment_header("", math.inf), Granted(peer="b", version=0, grant=again)]
    assert list(replay(written, later, League())) == []
    later.peer_gone("b")
    found = later.grant_again(grant.grant, peer="c", now=0.0, deadline_s=1.0)
    assert (found.num_episodes, found.max_turns) == (2, 3)
