"""The maze: its walls, its ways, and what a walk earns."""

import random
from operator import sub
from statistics import fmean
from typing import Any

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games import maze as maze_module
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
    assert play.observation == "beta three up left"
    outcome = play.act("right")
    assert (outcome.observation, outcome.is_valid) == ("invalid beta three up left", False)
    assert play.act("left").observation.startswith("beta two")


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


ORBIT = {"shapes": [[6, 6], [7, 6], [7, 7], [6, 7]], "shortest": [7, 8], "turns": 9}


@pytest.mark.parametrize("options", [{"size": 3}, {"loops": 100}, ORBIT | {"mazes": 1024}])
def test_no_held_out_maze_is_a_training_maze_of_another_name(options: dict[str, Any]) -> None:
    game = MazeGame(**options)
    trained = [game.maze(member) for member in game.members("train")]
    assert not [member for member in game.members("heldout") if game.maze(member) in trained]


def test_a_split_without_any_maze_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maze_module, "is_heldout_text", lambda looks: False)
    with pytest.raises(ConfigError, match="200 draws gave no held-out one; allow more `shapes`"):
        MazeGame()


def test_corridors_keep_to_their_shape_and_to_the_bounds_on_the_shortest_way() -> None:
    game = MazeGame(**ORBIT)
    sizes = set()
    for member in game.members("heldout"):
        maze = game.maze(member)
        far = maze.distances(maze.start)
        assert far.keys() == maze.exits.keys()
        assert max(far.values()) == far[maze.goal] == maze.shortest()
        assert maze.shortest() in (7, 8)
        sizes.add(tuple(max(cell[side] for cell in maze.exits) + 1 for side in (0, 1)))
    assert max(sizes) == (5, 5)
    assert len(sizes) > 1


def test_corridors_are_as_many_and_as_looped_as_orbits() -> None:
    """3,000 mazes of ORBIT's code, commit 9b5d0e7, with the same bounds: 16.79 cells and 1.52 loops
    on average, in 32 % of them eight steps.
    """
    game = MazeGame(**ORBIT, mazes=2000)
    mazes = [game.maze(member) for member in game.members("train")]
    cells = [len(maze.exits) for maze in mazes]
    passages = [sum(map(len, maze.exits.values())) // 2 for maze in mazes]
    assert fmean(cells) == pytest.approx(16.79, abs=0.15)
    assert fmean(map(sub, passages, cells)) + 1 == pytest.approx(1.52, abs=0.08)
    assert fmean(maze.shortest() == 8 for maze in mazes) == pytest.approx(0.32, abs=0.04)


def test_who_remembers_corridors_reaches_most_goals_in_the_third_episode() -> None:
    known = MazeGame(**ORBIT, wins_only=True, mazes=1024).references("heldout", 3)
    assert known["explorer_without_memory"] == pytest.approx((0.34, 0.34, 0.34), abs=0.03)
    assert known["explorer"][2] == pytest.approx(0.89, abs=0.03)


def test_the_goal_of_corridors_is_seen_from_beside_it_and_pays_one_on_the_last_turn() -> None:
    game = MazeGame(**ORBIT, wins_only=True)
    member = game.members("heldout")[0]
    maze, play = game.maze(member), game.begin(Task("maze", member, 0), 0)
    far = maze.distances(maze.goal)
    for _ in range(9 - maze.shortest()):
        assert play.act("nonsense").reward == 0.0
    while far[play.cell] > 1:
        assert "goal" not in play.observation
        play.act(min(play.actions(), key=lambda way: far[maze.exits[play.cell][way]]))
    way = play.observation.split()[play.observation.split().index("goal") + 1]
    outcome = play.act(way)
    assert (outcome.observation, outcome.reward, outcome.is_done) == ("goal", 1.0, True)


def test_the_share_of_random_walks_that_reach_the_goal_is_exact() -> None:
    game, source, won = MazeGame(**ORBIT, wins_only=True), random.Random(0), 0.0
    member = game.members("heldout")[0]
    for number in range(4000):
        play = game.begin(Task("maze", member, number), 0)
        while legal := play.legal_actions():
            won += play.act(source.choice(legal)).reward
    exact = random_return(game.maze(member), 9, wins_only=True)
    assert exact == pytest.approx(won / 4000, abs=0.01)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shapes": [[6]], "shortest": [7, 8]}, r"`shapes` holds pairs .*, got \[6\]"),
        ({"shapes": [[6, 99]], "shortest": [7, 8]}, "`shapes` must be a whole number from 5 to 11"),
        ({"shapes": [[6, 6]]}, r"`shortest` must be \[least, most\] steps, got \(\)"),
        ({"shapes": 5, "shortest": [7, 8]}, "`shapes` must be a list, got 5"),
        ({"shapes": [5], "shortest": [7, 8]}, "`shapes` holds pairs of rows and columns, got 5"),
        ({"shapes": [[6, 6]], "shortest": 3}, "`shortest` must be a list, got 3"),
        ({"shapes": [[6, 6]], "shortest": [1, "b"]}, "`shortest` must be a whole number .*'b'"),
        (ORBIT | {"turns": 7}, "`turns` must be a whole number from 8 to 1000, got 7"),
    ],
)
def test_corridors_that_cannot_be_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        MazeGame(**options)


def test_a_shortest_way_that_no_maze_has_is_said_before_any_task() -> None:
    with pytest.raises(ConfigError, match=r"no maze of `shapes` = .* shortest way of 30 to 40"):
        MazeGame(shapes=[[5, 5]], shortest=[30, 40], turns=40)
