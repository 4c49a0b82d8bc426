"""Games that pay for progress count an episode as won only where its goal is reached."""

import random
from typing import Any

import pytest

from mage_async.environments.environment import Chance
from mage_async.environments.games.game import Game, cells_of, set_of
from mage_async.environments.games.minesweeper import (
    WON,
    MineSweeper,
    MineSweeperPlay,
    board_of,
    cell_names,
)
from mage_async.environments.games.sokoban import SOLVED, Sokoban
from mage_async.trajectory import Task


@pytest.mark.parametrize(
    ("game", "goal"),
    [
        (MineSweeper(size=6, mines=3, turns=7), WON),
        (MineSweeper(size=4, mines=4, turns=7), WON),
        (MineSweeper(size=5, mines=5, wins_only=True), WON),
        (Sokoban(boxes=2, turns=7, steps_per_turn=3), SOLVED),
    ],
)
def test_won_are_the_episodes_that_reach_the_goal(game: Game[Any], goal: str) -> None:
    found = set()
    for number in range(150):
        source = random.Random(number)
        members = game.members("train")
        script = game.script(source)
        task = Task(game.facts.name, members[number % len(members)], number)
        for episode in range(2):
            play, rewards, shown = game.begin(task, episode), [0.0], ""
            while play.legal_actions():
                outcome = play.act(script.choose(play))
                rewards.append(outcome.reward)
                shown = outcome.observation
            is_solved = goal in shown.split()
            assert game.facts.is_won(rewards) == is_solved
            assert game.facts.is_lost(rewards) == (not is_solved)
            found.add((is_solved, sum(rewards) > 0))
    # All kinds occur: without its goal an episode may earn nothing, and more than nothing.
    assert {(True, True), (False, False)} <= found


def test_a_minesweeper_board_cleared_after_an_invalid_action_is_won() -> None:
    game = MineSweeper(size=4, mines=3, turns=16)
    low = 0
    for number, member in enumerate(game.members("train")[:100]):
        play, board = game.begin(Task("minesweeper", member, number), 0), game.board(member)
        rewards = [play.act("no cell").reward]
        while play.closed():
            # The largest cascade first, so that few turns pay.
            safe = [cell for cell in play.closed() if board.safe >> cell & 1]
            cell = max(safe, key=lambda each: (board.opens[each] & ~play.opened).bit_count())
            rewards.append(play.act(cell_names(4)[cell]).reward)
        assert game.facts.is_won(rewards)
        assert not game.facts.is_lost(rewards)
        low += sum(rewards) < 10.0
    assert low > 0


def test_many_opened_cells_are_no_win_of_minesweeper() -> None:
    # One mine in the middle of each block of 3x3 cells: no cell is clear, so each opens by itself.
    board = board_of(6, set_of([7, 10, 25, 28]))
    play = MineSweeperPlay(6, lambda _: board, 0, 32, "board", Chance(0, 0))
    names = [cell_names(6)[cell] for cell in cells_of(board.safe)]
    rewards = [play.act(name).reward for name in names[1:-1]]
    assert sum(rewards) == 15.0
    facts = MineSweeper(size=6, mines=4, turns=32).facts
    assert not facts.is_won(rewards)
    assert facts.is_lost(rewards)


def test_a_room_solved_after_a_hundred_steps_is_won() -> None:
    game = Sokoban(boxes=1, turns=200, steps_per_turn=1)
    member = game.members("train")[0]
    play, script = game.begin(Task("sokoban", member, 0), 0), game.best_script(random.Random(0))
    rewards = [play.act("no step").reward for _ in range(120)]
    while play.legal_actions():
        rewards.append(play.act(script.choose(play)).reward)
    assert sum(rewards) < 0
    assert game.facts.is_won(rewards)
    assert not game.facts.is_lost(rewards)
