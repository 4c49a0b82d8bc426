"""The maze: its walls, its ways, and what a walk earns."""

import random

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games.maze import DIRECTIONS, MazeGame, maze_of, random_return, reward
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

SPLITS: tuple[Split, ...] = ("train", "heldout")


@pytest.mark.parametrize("size", [3, 4, 6])
def test_every_cell_is_reached_and_a_way_leads_back(size: int) -> None:
    for number in range(30):
        maze = maze_of(f"maze-{number}", size, 2)
        assert len(maze.distances(maze.start)) == size * size
        passages = sum(len(ways) for ways in maze.exits.values()) // 2
        assert passages == size * size - 1 + 2
        for cell, ways in maze.exits.items():
            for way, to in ways.items():
                assert (to[0] - cell[0], to[1] - cell[1]) == DIRECTIONS[way]
                assert cell in maze.exits[to].values()
        assert maze.goal != maze.start


def test_the_shortest_way_earns_one_and_a_longer_one_less() -> None:
    game = MazeGame()
    maze, play = game.maze("maze-3"), game.begin(Task("maze", "maze-3", 0), 0)
    far, outcome = maze.distances(maze.goal), None
    while legal := play.legal_actions():
        nearer = min(legal, key=lambda way: far[maze.exits[play.cell][way]])
        outcome = play.act(nearer)
    assert outcome is not None
    assert (outcome.observation, outcome.reward) == ("goal", 1.0)
    assert reward(4, 6, 20) == pytest.approx(14 / 16)
    assert reward(4, 20, 20) == 0.0


def test_a_wall_uses_up_a_turn_and_the_cell_stays() -> None:
    play = MazeGame().begin(Task("maze", "maze-3", 0), 0)
    assert play.observation == "beta one down right"
    outcome = play.act("left")
    assert (outcome.observation, outcome.is_valid) == ("invalid beta one down right", False)
    assert play.act("right").observation == "beta two up down left right"


def test_the_value_of_a_random_walk_is_exact() -> None:
    source, game, total = random.Random(0), MazeGame(), 0.0
    for number in range(2000):
        play = game.begin(Task("maze", "maze-3", number), 0)
        while legal := play.legal_actions():
            total += play.act(source.choice(legal)).reward
    assert random_return(game.maze("maze-3"), 20) == pytest.approx(total / 2000, abs=0.03)
    assert 0.5 < random_return(game.maze("maze-3"), 1000) < 1.0


@pytest.mark.parametrize("split", SPLITS)
def test_an_explorer_that_remembers_goes_nearly_straight(split: Split) -> None:
    known = MazeGame().references(split, 2)
    assert known["random"][0] < known["explorer_without_memory"][0] < known["explorer"][1]
    assert known["explorer"][0] == pytest.approx(known["explorer_without_memory"][0])
    assert known["explorer"][1] > 0.9


def test_the_goal_of_a_swapped_maze_is_elsewhere() -> None:
    game = MazeGame(mazes=40)
    for member in game.members("heldout"):
        goals = {game.maze(other).goal for other in game.swaps(member, "heldout")}
        assert goals
        assert game.maze(member).goal not in goals


def test_too_few_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match="maze: `turns` must be a whole number from 16 to 1000"):
        MazeGame(turns=15)
