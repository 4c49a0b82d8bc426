"""What is said of a set of trials cannot flatter."""

import random
from dataclasses import replace

import pytest

from mage_async.environments import catalogue
from mage_async.errors import ConfigError
from mage_async.results.intervals import wilson
from mage_async.results.score import MOST_MEMBERS, score
from mage_async.trajectory import Kind, Task, Trial, Turn

TICTACTOE = catalogue.load("tictactoe")
MEMBERS = TICTACTOE.members("heldout")


def trial(*rewards, seat=0, member=MEMBERS[0], cut_at=None, num_episodes=None):
    turns = tuple(
        Turn(Kind.ACT, episode, 0, 0, 0, 1, reward, True, "x")
        for episode, reward in enumerate(rewards)
    )
    task = Task("tictactoe", member, 1, seat)
    return Trial(task, 0, num_episodes or len(rewards), (), turns, cut_at=cut_at)


def test_each_episode_is_won_drawn_or_lost_by_itself_and_the_best_so_far_only_grows():
    found = score([trial(1.0, 0.0, -1.0), trial(-1.0, 0.0, 1.0)], TICTACTOE)
    assert found.won_by_episode == [0.5, 0.0, 0.5]
    assert found.lost_by_episode == [0.5, 0.0, 0.5]
    assert found.won_within == [0.5, 0.5, 1.0]
    assert found.return_by_episode == [0.0, 0.0, 0.0]
    assert found.best_within == [0.0, 0.5, 1.0]


def test_seats_opponents_and_families_are_told_apart_with_intervals_of_their_own():
    trials = [trial(1.0, seat=0), trial(1.0, seat=0), trial(-1.0, seat=1, member=MEMBERS[-1])]
    found = score(trials, TICTACTOE)
    seats = found.parts["seat"]
    assert {name: part.won_by_episode for name, part in seats.items()} == {"0": [1.0], "1": [0.0]}
    assert {name: part.num_trials for name, part in seats.items()} == {"0": 2, "1": 1}
    assert found.parts["member"][MEMBERS[-1]].lost_by_episode == [1.0]
    ends = MEMBERS[0], MEMBERS[-1]
    assert found.parts["family"].keys() == {TICTACTOE.family(each) for each in ends}
    assert found.ci95_by_episode[0] > 0


@pytest.mark.parametrize(("win", "num_trials"), [(0.95, 4), (0.95, 12), (0.99, 32)])
def test_the_interval_of_few_trials_holds_the_true_return(win, num_trials):
    draw, truth, held = random.Random(0), 2 * win - 1, []
    for _ in range(500):
        rewards = [1.0 if draw.random() < win else -1.0 for _ in range(num_trials)]
        found = score([trial(each) for each in rewards], TICTACTOE)
        distance = abs(found.return_by_episode[0] - truth)
        held.append(distance <= found.ci95_by_episode[0])
    assert sum(held) / len(held) > 0.94


def test_an_exception_of_is_probe_names_the_action_and_the_environment(monkeypatch):
    monkeypatch.setattr(TICTACTOE, "is_probe", lambda action: {}[action], raising=False)
    with pytest.raises(ConfigError, match=r"^environment 'tictactoe': is_probe\('x'\): .* KeyErr"):
        score([trial(1.0)], TICTACTOE)


def test_parts_of_a_mix_with_one_name_have_bounds_of_their_own():
    """Three hands can lose 3 and two hands 2: per hand, an episode not finished counts -1."""
    parts = [{"name": "blackjack", "label": f"b{n}", "options": {"hands": n}} for n in (2, 3)]
    mix = catalogue.load("mix", parts=parts)
    tasks = [Task("mix", f"{label}/deck-0", 1) for label in ("b2", "b3")]
    cut = [replace(trial(cut_at=0, num_episodes=1), task=task) for task in tasks]
    found = score(cut, mix).parts["environment"]
    assert [found[label].return_by_episode for label in ("b2", "b3")] == [[-1.0], [-1.0]]


def test_boards_are_no_opponents_and_are_told_apart_by_how_hard_they_are():
    sweeper = catalogue.load("minesweeper")
    members = sweeper.members("train")[: MOST_MEMBERS + 1]
    trials = [replace(trial(1.0), task=Task("minesweeper", each, 1)) for each in members]
    found = score(trials, sweeper)
    assert found.parts.keys() == {"family", "seat"}
    assert sum(part.num_trials for part in found.parts["family"].values()) == len(trials)


def test_what_did_not_fit_into_the_context_counts_the_least_there_is():
    cut = trial(1.0, 1.0, cut_at=1, num_episodes=3)
    found = score([cut, trial(1.0, 1.0, 1.0)], TICTACTOE)
    least = TICTACTOE.facts.min_return
    assert found.return_by_episode == [1.0, (1 + least) / 2, (1 + least) / 2]
    assert found.lost_by_episode == [0.0, 0.5, 0.5]
    assert found.cut_short == 0.5


def test_a_trial_cut_before_its_first_turn_counts_too():
    found = score([trial(cut_at=0, num_episodes=2)], TICTACTOE)
    assert found.return_by_episode == [TICTACTOE.facts.min_return] * 2


@pytest.mark.parametrize(
    ("successes", "count", "bounds"),
    [(86, 128, (0.587, 0.747)), (77, 128, (0.515, 0.682)), (0, 10, (0.0, 0.278))],
)
def test_intervals_of_shares_are_wilsons(successes, count, bounds):
    """The first two are MAGE's and LaMer's tic-tac-toe, at the sample size they were measured."""
    assert wilson(successes, count) == pytest.approx(bounds, abs=1e-3)
