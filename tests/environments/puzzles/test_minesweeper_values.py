"""What MineSweeper is worth: computed on sets of cells, and by playing every game there is."""

from collections import defaultdict

import pytest

from mage_async.environments.environment import Chance
from mage_async.environments.games.minesweeper import Board, MineSweeperPlay, board_of, layouts
from tests.helpers.game_values import forgetful_value, knowing_value

SIZE = 3
BOARDS = [board_of(SIZE, mines) for mines in layouts(SIZE, 2, 100)]


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_the_best_who_forgets_is_the_best_over_all_games_that_can_be_played(turns: int) -> None:
    boards = BOARDS[:4]
    begun = [
        (board, opening, 1 / len(board.openings()) / len(boards))
        for board in boards
        for opening in board.openings()
    ]
    assert forgetful_value(boards, turns) == pytest.approx(_by_playing(begun, (), turns))


def _by_playing(begun: list[tuple[Board, int, float]], actions: tuple[str, ...], turns: int):
    """Best sum of weighted returns of these openings, which one sees after some actions."""
    seen = defaultdict(list)
    for board, opening, weight in begun:
        known = {opening: board}.__getitem__
        play = MineSweeperPlay(SIZE, known, opening, turns, "board", Chance(0, 0))
        earned = sum(play.act(action).reward for action in actions)
        seen[play.observation, play.anchor].append((board, opening, weight, earned, play))
    total = 0.0
    for alike in seen.values():
        legal = alike[0][-1].legal_actions()
        if not legal:
            total += sum(weight * earned for _, _, weight, earned, _ in alike)
            continue
        same = [each[:3] for each in alike]
        total += max(_by_playing(same, (*actions, action), turns) for action in legal)
    return total


def test_who_knows_the_mines_is_who_knows_that_there_is_one_board() -> None:
    for board in BOARDS[:10]:
        assert forgetful_value([board], 4) == pytest.approx(knowing_value(board, 4))


def test_who_knows_earns_more_than_who_forgets() -> None:
    knows = sum(knowing_value(board, 4) for board in BOARDS) / len(BOARDS)
    assert forgetful_value(BOARDS, 4) < knows - 0.5


def test_single_cells_are_opened_before_the_cascade_that_wins() -> None:
    """Mine at `aa`; any of the five clear cells opens all, three others can be collected first."""
    board = board_of(3, 1)
    assert [knowing_value(board, turns) for turns in (1, 2, 3, 4)] == [10.0, 10.5, 11.0, 11.0]
