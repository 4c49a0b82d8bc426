"""Sokoban: its steps, and rooms that can be solved."""

import random
from collections import deque
from dataclasses import replace

import pytest

from mage_async.environments.environment import Chance
from mage_async.environments.games.game import cells_of
from mage_async.environments.games.sokoban import (
    MOVES,
    Position,
    Room,
    Sokoban,
    SokobanPlay,
    SokobanScript,
    distances,
    push,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

# A corridor:  player, box, target; below it a row of floor.
#   ######
#   #PX_O#
#   #____#
#   ######
CORRIDOR = Room(6, 0b011110_011110_000000, 1 << 10, (7, 1 << 8), 2, 0)


def solve(room: Room) -> list[int] | None:
    """Return a shortest solution as step numbers (up, down, left, right), searched forwards; `None`
    if there is none.
    """
    came: dict[Position, tuple[Position, int]] = {}
    waiting, seen = deque([room.start]), {room.start}
    while waiting:
        position = waiting.popleft()
        if position[1] == room.targets:
            return _path(came, position)
        for number, step in enumerate(room.steps()):
            after = push(room, position, step)
            if after not in seen:
                seen.add(after)
                came[after] = (position, number)
                waiting.append(after)
    return None


def _path(came: dict[Position, tuple[Position, int]], position: Position) -> list[int]:
    """Follow the predecessors back from a position to the start."""
    numbers: list[int] = []
    while position in came:
        position, number = came[position]
        numbers.append(number)
    return numbers[::-1]


def play_in(room: Room, turns: int = 7) -> SokobanPlay:
    return SokobanPlay(room, turns, 3, Chance(0, 0))


def test_a_room_is_told_row_by_row() -> None:
    wall = "row wall wall wall wall wall wall"
    rows = play_in(CORRIDOR).observation.split(" row ")
    assert rows[0] == wall
    assert rows[1] == "wall player box floor target wall"
    assert rows[2] == "wall floor floor floor floor wall"


def test_pushing_the_last_box_home_solves_the_room_and_ends_the_turn() -> None:
    play = play_in(CORRIDOR)
    outcome = play.act("right right left")
    assert "wall floor floor player stored wall" in outcome.observation
    assert outcome.observation.endswith(" solved")
    assert outcome.is_done
    assert outcome.reward == pytest.approx(2 * -0.1 + 1 + 10)


def test_walls_stop_the_player_and_cost_a_step() -> None:
    play = play_in(CORRIDOR)
    before = play.observation
    outcome = play.act("up left")
    assert (outcome.observation, outcome.is_valid) == (before, True)
    assert outcome.reward == pytest.approx(-0.2)


def test_a_box_that_leaves_its_target_costs_what_it_earned() -> None:
    two = replace(CORRIDOR, targets=1 << 9 | 1 << 10)
    play = play_in(replace(two, start=(7, 1 << 8 | 1 << 15)))
    assert play.act("right").reward == pytest.approx(-0.1 + 1)
    play = play_in(replace(two, start=(8, 1 << 9 | 1 << 15)))
    assert play.act("right").reward == pytest.approx(-0.1)  # from one target to another
    other = replace(CORRIDOR, targets=1 << 9 | 1 << 14, start=(8, 1 << 9 | 1 << 15))
    assert play_in(other).act("right").reward == pytest.approx(-0.1 - 1)


def test_two_boxes_in_a_row_do_not_move() -> None:
    row = replace(CORRIDOR, start=(7, 1 << 8 | 1 << 9))
    play = play_in(row)
    play.act("right")
    assert play.position == row.start


@pytest.mark.parametrize("action", ["", "right, up", "RIGHT", "right right right right", "push"])
def test_any_other_answer_costs_a_step_and_moves_nothing(action: str) -> None:
    play = play_in(CORRIDOR)
    outcome = play.act(action)
    assert outcome.observation == f"invalid {play.observation}"
    assert (outcome.reward, outcome.is_valid, outcome.is_done) == (-0.1, False, False)


def test_an_episode_is_over_after_its_turns_or_where_nothing_helps_any_more() -> None:
    play = play_in(CORRIDOR, turns=2)
    assert not play.act("left").is_done
    assert play.act("left").observation.endswith(" over")
    lost = replace(CORRIDOR, dead=1 << 9)
    assert play_in(lost).act("right").observation.endswith(" stuck")


@pytest.mark.parametrize(
    "options", [{}, {"boxes": 1}, {"boxes": 3}, {"size": 8, "boxes": 3, "turns": 9}], ids=str
)
def test_every_room_is_solved_in_the_steps_it_says_and_in_no_fewer(options: dict) -> None:
    environment = Sokoban(**options)
    members = environment.members("train")[:25] + environment.members("heldout")[:25]
    for room in map(environment.room, members):
        solution = solve(room)
        assert solution is not None
        assert len(solution) == room.length
        assert 5 <= room.length <= 21
        assert not room.start[1] & room.targets
        assert not room.start[1] & room.dead
        position = room.start
        for number in solution:
            position = push(room, position, room.steps()[number])
        assert position[1] == room.targets


def test_a_box_on_a_dead_cell_can_indeed_not_be_brought_home() -> None:
    environment, num_dead = Sokoban(), 0
    for member in environment.members("train")[:40]:
        room = environment.room(member)
        solvable = distances(room.size, room.floor, room.targets, 10**9)
        assert all(not boxes & room.dead for _, boxes in solvable)
        num_dead += room.dead.bit_count()
    assert num_dead > 40


def test_steps_left_are_the_same_forwards_and_backwards() -> None:
    environment = Sokoban(boxes=1)
    for member in environment.members("heldout")[:10]:
        room = environment.room(member)
        left = distances(room.size, room.floor, room.targets, 10**9)
        for player in cells_of(room.floor):
            for box in cells_of(room.floor & ~(1 << player)):
                solution = solve(replace(room, start=(player, 1 << box)))
                expected = None if solution is None else len(solution)
                assert left.get((player, 1 << box)) == expected


def test_no_room_is_in_both_splits() -> None:
    environment = Sokoban(rooms=400)
    train, heldout = (
        {repr(environment.room(member)) for member in environment.members(split)}
        for split in ("train", "heldout")
    )
    assert not train & heldout
    assert len(train) > 250


def test_a_room_depends_on_its_name_alone() -> None:
    one, other = Sokoban(), Sokoban()
    assert one.room("room-9") == other.room("room-9")
    task = Task("sokoban", "room-9", 1)
    assert one.begin(task, 0).observation == one.begin(task, 4).observation


def test_careful_players_solve_and_players_with_memory_solve_again() -> None:
    environment = Sokoban()
    for number, member in enumerate(environment.members("heldout")[:30]):
        care = 1.0 if number % 2 else 0.7
        script = SokobanScript(random.Random(number), 3, care=care, memory=1.0)
        ends = []
        for episode in range(3):
            play = environment.begin(Task("sokoban", member, number), episode)
            while play.legal_actions():
                play.act(script.choose(play))
            ends.append(play.is_solved)
        assert ends == sorted(ends)
        assert ends[0] or care < 1


def test_actions_are_all_short_ways() -> None:
    legal = play_in(CORRIDOR).legal_actions()
    assert len(legal) == len(set(legal)) == 4 + 16 + 64
    assert legal[: len(MOVES)] == MOVES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 4}, "sokoban: `size` must be a whole number from 5 to 20, got 4"),
        ({"longest": 30}, "sokoban: `longest` must be a whole number from 5 to 21, got 30"),
        ({"boxes": True}, "sokoban: `boxes` must be a whole number from 1 to 6, got True"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sokoban(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"boxes": 6}, "6 by 6 with 6 boxes that takes 5 to 21 steps"),
        ({"size": 5, "boxes": 2, "shortest": 20}, "5 by 5 with 2 boxes that takes 20 to 21 steps"),
        # There are rooms to train in, and none that is held out.
        ({"size": 5, "boxes": 3}, "5 by 5 with 3 boxes that takes 5 to 21 steps"),
    ],
)
def test_options_that_no_room_satisfies_are_refused(options: dict, room: str) -> None:
    with pytest.raises(ConfigError, match=f"^sokoban: found no room of {room}; change `size`, "):
        Sokoban(**options)
