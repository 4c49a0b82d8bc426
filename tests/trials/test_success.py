"""Episodes won, drawn and lost: where a trial stops, and what a set of trials says."""

from dataclasses import replace

from mage_async.assembly import environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.results.score import score
from mage_async.trajectory import Kind, Task, Trial, Turn
from mage_async.trials.scripted import scripted_trial

CONFIG = config_file.load(config_file.find(None), [])
ENVIRONMENT = environment_of(CONFIG)


def played(chat, seed, *, stops):
    rules = trial_config_of(CONFIG, ENVIRONMENT, chat, 3, stops_on_success=stops)
    members = ENVIRONMENT.members("train")
    task = Task("rps", members[seed % len(members)], seed)
    return scripted_trial(ENVIRONMENT, task, seed, rules, chat)


def test_a_trial_that_may_stop_ends_with_the_first_episode_that_was_won(chat):
    for seed in range(20):
        whole, stopped = played(chat, seed, stops=False), played(chat, seed, stops=True)
        won = [reward > 0 for reward in whole.episode_rewards()]
        assert stopped.num_played() == (won.index(True) + 1 if any(won) else 3)
        assert stopped.turns == whole.turns[: len(stopped.turns)]
        assert whole.num_played() == 3


def test_an_episode_that_was_not_played_has_the_reward_of_the_last_that_was(chat):
    stopped = next(
        trial for seed in range(50) if (trial := played(chat, seed, stops=True)).num_played() == 1
    )
    first = sum(turn.reward for turn in stopped.turns)
    assert stopped.num_episodes == 3
    assert stopped.episode_rewards() == [first] * 3


def test_nobody_stops_before_anything_was_played():
    assert Trial(Task("rps", "a", 1), 0, 3, (), ()).episode_rewards() == []


def trial(*rewards):
    turns = [Turn(Kind.ACT, k, 0, 0, 0, 1, r, True, "rock") for k, r in enumerate(rewards)]
    return Trial(Task("rps", ENVIRONMENT.members("train")[0], 1), 0, len(rewards), (), tuple(turns))


def test_wins_are_counted_by_episode_and_as_any_win_so_far():
    said = score([trial(1.0, -1.0, 0.0), trial(-1.0, 0.0, 2.0)], ENVIRONMENT)
    assert said.won_by_episode == [0.5, 0.0, 0.5]
    assert said.won_within == [0.5, 0.5, 1.0]
    assert said.lost_by_episode == [0.5, 0.5, 0.0]


def test_an_environment_may_ask_more_of_a_win_than_a_positive_return():
    facts = replace(ENVIRONMENT.facts, wins_above=5.0, loses_below=-1.0)
    assert (facts.is_won(5.0), facts.is_won(5.5)) == (False, True)
    assert (facts.is_lost(-1.0), facts.is_lost(-1.5)) == (False, True)
