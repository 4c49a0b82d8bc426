"""Episodes as paths, and what two of them differ in."""

import random

from mage_async.methods.graph_memory import (
    MOST_TRANSITIONS,
    Step,
    contrasted,
    episodes_of,
    path_of,
    with_shuffled_rewards,
)

BETTER = (Step("red", "left", 1.0), Step("green", "left", 0.0), Step("blue", "right", 1.0))
WORSE = (Step("red", "right", 0.0), Step("green", "right", 0.0), Step("blue", "right", 1.0))


def test_episodes_are_the_actions_of_a_trial_in_order(group_of):
    trial = group_of([[[("a", "x", 1.0), ("b", "", 0.0)], [("a", "y", 0.0)]]]).trials[0]
    assert episodes_of(trial) == [
        (Step("a", "x", 1.0), Step("b", "", 0.0)),
        (Step("a", "y", 0.0),),
    ]


def test_a_path_has_each_transition_once_and_an_end():
    again = path_of((*BETTER, *BETTER))
    assert again == (("red", "left", "+"), ("green", "left", "0"), ("blue", "right", "+"))
    long = tuple(Step(str(number), "x", -1.0) for number in range(100))
    assert len(path_of(long)) == MOST_TRANSITIONS
    assert path_of(long)[0] == ("0", "x", "-")


def test_long_texts_name_a_node_briefly_and_stay_apart():
    one, other = (path_of((Step("é" * 500 + end, "x", 0.0),))[0][0] for end in "ab")
    assert one != other
    assert len(one.encode()) <= 80


def test_a_strategy_is_what_the_better_episode_earned_by_deciding_otherwise():
    assert contrasted(BETTER, WORSE) == [("red", "left")]


def test_where_rewards_come_at_the_end_it_is_the_first_decision_that_differs():
    def late(episode, reward):
        steps = [step._replace(reward=0.0) for step in episode]
        return (*steps, Step("end", "stop", reward))

    assert contrasted(late(BETTER, 1.0), late(WORSE, 0.0)) == [("red", "left")]


def test_refused_actions_and_equal_episodes_teach_nothing():
    assert contrasted((Step("a", "", 1.0),), (Step("a", "x", 0.0),)) == []
    assert contrasted(BETTER, BETTER) == []


def test_shuffled_rewards_are_the_same_rewards_elsewhere():
    batch = [[[BETTER], [WORSE]], [[WORSE, BETTER]]]
    shuffled = with_shuffled_rewards(batch, random.Random(1))

    def flat(steps):
        return [s for group in steps for trial in group for episode in trial for s in episode]

    assert [s[:2] for s in flat(shuffled)] == [s[:2] for s in flat(batch)]
    assert sorted(s.reward for s in flat(shuffled)) == sorted(s.reward for s in flat(batch))
    assert shuffled != batch
