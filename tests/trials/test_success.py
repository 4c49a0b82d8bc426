"""Episodes won, drawn and lost: where a trial stops, and what a set of trials says."""

from dataclasses import replace

import pytest

from mage_async.assembly import check_keys, environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.errors import ConfigError
from mage_async.results.score import score
from mage_async.trajectory import Kind, Task, Trial, Turn
from mage_async.trials.prompts import prompts_for
from mage_async.trials.scripted_play import scripted_trial

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


def budgeted(chat, seed, budget, name="hangman", episodes=12):
    changes = [
        f"environment.name={name}",
        f"trial.episode_budget={budget}",
        "engine.max_tokens=9999",
    ]
    config = config_file.load(config_file.find(None), changes)
    environment = environment_of(config)
    rules = trial_config_of(config, environment, chat, episodes)
    task = Task(name, environment.members("train")[seed], seed)
    return scripted_trial(environment, task, seed, rules, chat), environment.facts.max_turns


def test_a_trial_with_a_budget_of_turns_plays_as_many_episodes_as_these_hold(chat):
    played = set()
    for seed in range(12):
        trial, most_turns = budgeted(chat, seed, 2)
        whole, _ = budgeted(chat, seed, 0)
        acts = [turn for turn in trial.turns if turn.kind is Kind.ACT]
        assert len(acts) == 2 * most_turns or trial.num_played() == 12
        assert [turn.action for turn in acts] == [
            turn.action for turn in whole.turns if turn.kind is Kind.ACT
        ][: len(acts)]
        played.add(trial.num_played())
    assert min(played) >= 2
    assert len(played) > 1


def test_a_budget_that_holds_all_episodes_changes_nothing(chat):
    for seed in range(3):
        (some, _), (none, _) = (budgeted(chat, seed, n, episodes=3) for n in (3, 0))
        assert some.turns == none.turns


def test_the_rules_say_how_many_turns_there_are_in_all():
    environment = environment_of(CONFIG)
    said = prompts_for(environment, 12, rules=True, episode_budget=3).rules
    assert "You play episodes of the same game until 12 turns are used up, and what" in said
    assert (
        "You play 3 episodes of" in prompts_for(environment, 3, rules=True, episode_budget=3).rules
    )


def test_the_rules_of_a_single_episode_promise_no_other_one():
    said = prompts_for(environment_of(CONFIG), 1, rules=True).rules
    assert "\nYou play one episode. At each turn answer with exactly one action" in said
    assert "stays the same" not in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["trial.episode_budget=3"], "must be less than trial.episodes.*: got 3, with 3 and 3"),
        (
            ["trial.episode_budget=2", "trial.episodes=9", "evaluation.episodes=3"],
            "at least evaluation.episodes, all of which are played: got 2, with 9 and 3",
        ),
        (
            [
                *("trial.episode_budget=3", "trial.episodes=9", "evaluation.episodes=3"),
                "population.rivals=0.5",
            ],
            "trial.episode_budget is for one agent that plays turn by turn",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_keys(config_file.load(config_file.find(None), changes))


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
    assert (facts.is_won([2.0, 3.0]), facts.is_won([2.0, 3.5])) == (False, True)
    assert (facts.is_lost([0.0, -1.0]), facts.is_lost([-0.5, -1.0])) == (False, True)


def test_a_trial_stops_and_scores_by_the_reward_of_the_turn_that_wins(chat):
    """An invalid action takes more than a win's margin from the return of MineSweeper."""
    config = config_file.load(config_file.find("minesweeper"), [])
    environment = environment_of(config)
    rules = trial_config_of(config, environment, chat, 3, stops_on_success=True)
    won = 0
    for seed, member in enumerate(environment.members("train")[:40]):
        task = Task("minesweeper", member, seed)
        played = scripted_trial(environment, task, seed, rules, chat)
        rewards = [max(each) for each in played.turn_rewards()[: played.num_played()]]
        assert played.num_played() == next((k + 1 for k, r in enumerate(rewards) if r == 10), 3)
        invalid = Turn(Kind.ACT, 0, 0, 0, 0, 1, -1.0, False, "")
        worse = replace(played, turns=(invalid, invalid, *played.turns))
        shares = score([worse], environment)
        assert shares.won_by_episode[0] == (rewards[0] == 10)
        assert shares.lost_by_episode[0] == (rewards[0] != 10)
        won += rewards[0] == 10
    assert won
