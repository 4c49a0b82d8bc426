"""The fixed sets of tasks that an evaluation plays."""

import random
from collections import Counter, defaultdict

import pytest

from mage_async.environments import catalogue
from mage_async.environments.environment import Split
from mage_async.tasks.task_stream import CURVE_SEED, FINAL_SEED, TaskStream, evaluation_tasks

# 252 members for training and 84 held-out ones.
TICTACTOE = catalogue.load("tictactoe", opponents="careless", view="news")


@pytest.mark.parametrize("seed", [CURVE_SEED, FINAL_SEED])
@pytest.mark.parametrize("num_trials", [1, 16, 83, 84, 85, 128, 240, 512])
def test_seats_are_balanced_in_a_set_smaller_than_its_members(seed: int, num_trials: int) -> None:
    for split in ("train", "heldout"):
        tasks = evaluation_tasks(TICTACTOE, split, num_trials, seed)
        counts = Counter(task.seat for task in tasks)
        assert abs(counts[0] - counts[1]) <= 1


def test_a_member_is_met_in_every_seat_before_it_is_met_in_one_twice() -> None:
    tasks = evaluation_tasks(TICTACTOE, "heldout", 4 * 84, FINAL_SEED)
    for half in (tasks[:168], tasks[168:]):
        met = Counter((task.member, task.seat) for task in half)
        assert len(met) == 168


def test_a_seat_is_not_tied_to_the_order_in_which_members_are_declared() -> None:
    # The four orders of preference alternate in the list of members.
    seats: dict[str, Counter[int]] = defaultdict(Counter)
    for task in evaluation_tasks(TICTACTOE, "heldout", 84, CURVE_SEED):
        seats[task.member.split("-")[1]][task.seat] += 1
    assert len(seats) == 4
    for counts in seats.values():
        assert min(counts[0], counts[1]) >= 4


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_final_set_shares_no_member_with_the_curve_if_there_are_enough(split: Split) -> None:
    size = len(TICTACTOE.members(split)) // 2
    sets = [
        {task.member for task in evaluation_tasks(TICTACTOE, split, size, seed)}
        for seed in (CURVE_SEED, FINAL_SEED)
    ]
    assert [len(each) for each in sets] == [size, size]
    assert not sets[0] & sets[1]
    every = evaluation_tasks(TICTACTOE, split, 2 * size, FINAL_SEED)
    assert {task.member for task in every} == set(TICTACTOE.members(split))


def test_tasks_of_a_deck_are_drawn_without_shuffling_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shuffled, shuffle = [], random.Random.shuffle
    monkeypatch.setattr(
        random.Random, "shuffle", lambda source, deck: (shuffled.append(1), shuffle(source, deck))
    )
    stream = TaskStream(TICTACTOE, 0)
    first = [stream.task(number) for number in range(252 * 2)]
    assert len(shuffled) == 2
    assert len({task.member for task in first[252:]}) == 252
    assert stream.task(3) == first[3]
