"""The grid: where an episode begins, how far its goals are, and the script that goes there."""

import random

import pytest

from mage_async.environments.games.grid import Grid
from mage_async.errors import ConfigError
from mage_async.trajectory import Task


@pytest.mark.parametrize(
    ("start", "first", "farthest"),
    [("corner", "alpha one", 16), ("middle", "omega five", 8)],
)
def test_an_expert_takes_as_many_steps_as_the_goal_is_far(start, first, farthest):
    grid = Grid(size=9, turns=16, nearest=5, start=start)
    far = set[int]()
    for split in ("train", "heldout"):
        for member in grid.members(split):
            play, script = (
                grid.begin(Task("grid", member, 1, 0), 0),
                grid.best_script(random.Random(1)),
            )
            assert play.observation.endswith(first)
            steps, reward = 0, 0.0
            while play.legal_actions():
                reward, steps = play.act(script.choose(play)).reward, steps + 1
            assert (reward, grid.family(member)) == (1.0, f"steps-{steps}")
            assert grid.reached(play) == member
            far.add(steps)
    assert far == set(range(5, farthest + 1))


def test_from_the_middle_goals_lie_on_all_sides():
    grid = Grid(size=9, turns=10, nearest=5, start="middle")
    assert (len(grid.members("train")), len(grid.members("heldout"))) == (32, 8)
    rows = {member.split("-")[0] for member in grid.members("train")}
    assert {"alpha", "kappa"} < rows
    assert grid.reached(grid.begin(Task("grid", "alpha-one", 1, 0), 0)) is None


@pytest.mark.parametrize(
    "options",
    [
        {"start": "edge"},
        {"size": 10},
        {"size": 9, "turns": 15},
        {"size": 9, "turns": 7, "start": "middle"},
        {"size": 9, "turns": 10, "nearest": 7, "start": "middle"},
    ],
)
def test_options_that_leave_no_task_are_refused(options):
    with pytest.raises(ConfigError, match="grid"):
        Grid(**options)
