"""The entropy of distinct trajectories, by episode."""

import math

import numpy as np
import pytest

from mage_async.policy_version import VersionRun
from mage_async.results.score import diversity, trajectory
from mage_async.trajectory import Kind, Segment, Task, Trial, Turn

TASK = Task("rps", "m", 1)


def trial(*episodes: str) -> Trial:
    """A trial whose episodes are written as their actions; small letters are remarks."""
    turns = [
        Turn(Kind.ACT if action.isupper() else Kind.REFLECT, k, n, 0, 0, 1, 0.0, True, action, "s")
        for k, actions in enumerate(episodes)
        for n, action in enumerate(actions)
    ]
    segment = Segment(
        np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), (VersionRun(0, 0, 0),)
    )
    return Trial(TASK, 0, len(episodes), (segment,), tuple(turns))


def test_entropy_is_that_of_the_shares_of_distinct_trajectories() -> None:
    plays = [
        [trial("A", "AB"), trial("A", "AB"), trial("A", "B"), trial("A", "BA")],
        [trial("A", "A"), trial("A", "B"), trial("A", "C"), trial("A", "D")],
    ]
    found = diversity(plays)
    assert (found.num_tasks, found.repeats, found.most) == (2, 4, pytest.approx(math.log(4)))
    half = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert found.entropy_by_episode == pytest.approx([0.0, (half + math.log(4)) / 2])
    assert found.distinct_by_episode == [1.0, 3.5]
    assert found.ci95_by_episode == pytest.approx([0.0, 12.706 * (math.log(4) - half) / 2])


def test_a_trajectory_is_of_actions_in_states_and_not_of_remarks() -> None:
    assert trajectory(trial("AxB"), 0) == (("s", "A"), ("s", "B"))
    assert trajectory(trial("AB", "A"), 1) == trajectory(trial("B", "A"), 1)
