"""Tic-tac-toe: its turns, its opponents and its values."""

import random
from statistics import fmean

import pyspiel
import pytest

from mage_async.environments.environment import Play
from mage_async.environments.games.tictactoe import (
    CELLS,
    MAX_TURNS,
    GameTree,
    TicTacToe,
    TicTacToeExplorer,
    references,
    return_against,
    taken_lightly,
    weights,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

BOARD = " ".join(CELLS)


def begin(member: str, seed: int = 0, seat: int = 0) -> Play:
    return TicTacToe().begin(Task("tictactoe", member, seed, seat), 0)


def test_a_board_names_its_free_cells() -> None:
    play = begin("preferred-centre")
    assert play.observation == BOARD
    outcome = play.act("one")
    assert outcome.observation == "mine two three four theirs six seven eight nine"
    assert play.legal_actions() == ("two", "three", "four", "six", "seven", "eight", "nine")


def test_in_the_second_seat_the_opponent_has_moved() -> None:
    assert begin("preferred-corners", seat=1).observation == BOARD.replace("one", "theirs")


def test_a_line_wins() -> None:
    play = begin("preferred-edges")
    outcomes = [play.act(action) for action in ("one", "five", "nine")]
    assert outcomes[-1].observation == "mine theirs three theirs mine six seven eight mine win"
    assert (outcomes[-1].reward, outcomes[-1].is_done) == (1.0, True)


@pytest.mark.parametrize("action", ["five", "mine", "ten", ""])
def test_an_invalid_action_leaves_the_board_and_uses_up_the_turn(action: str) -> None:
    play = begin("preferred-centre")
    board = play.act("one").observation
    outcome = play.act(action)
    assert (outcome.observation, outcome.reward) == (f"invalid {board}", 0.0)
    assert (outcome.is_valid, outcome.is_done, play.anchor) == (False, False, board)


def test_a_game_that_is_not_finished_in_eight_turns_is_lost() -> None:
    play = begin("random")
    outcomes = [play.act("nonsense") for _ in range(MAX_TURNS)]
    assert [each.is_done for each in outcomes] == [False] * 7 + [True]
    assert (outcomes[-1].observation, outcomes[-1].reward) == (f"invalid {BOARD} lose", -1.0)


def test_preferred_opponents_take_the_first_free_cell_of_their_list() -> None:
    play = begin("preferred-diagonal")
    for action, taken in (("two", "one"), ("five", "nine"), ("three", "seven")):
        before = play.legal_actions()
        play.act(action)
        assert set(before) - set(play.legal_actions()) == {action, taken}


@pytest.mark.parametrize("member", ["minimax", "mcts-1000"])
def test_strong_opponents_never_lose(member: str) -> None:
    for seed in range(60):
        play, source = begin(member, seed, seed % 2), random.Random(seed)
        outcomes = []
        while legal := play.legal_actions():
            outcomes.append(play.act(source.choice(legal)))
        assert outcomes[-1].reward <= 0


def test_a_search_is_the_same_for_a_seed_and_not_for_all() -> None:
    openings = [begin("mcts-100", seed, seat=1).observation for seed in range(20)]
    assert openings == [begin("mcts-100", seed, seat=1).observation for seed in range(20)]
    assert len(set(openings)) > 1


def test_minimax_plays_every_move_that_keeps_the_value() -> None:
    state = pyspiel.load_game("tic_tac_toe").new_initial_state()
    assert set(weights("minimax", state)) == set(range(9))
    state.apply_action(0)
    assert set(weights("minimax", state)) == {4}


def test_values_are_known_where_the_opponents_moves_are() -> None:
    assert return_against("minimax", max) == 0.0
    assert return_against("preferred-edges", max) == 1.0
    assert return_against("random", fmean) == pytest.approx(0.0)
    assert return_against("minimax", fmean) < -0.8
    assert 0.95 < return_against("random", max) < 1.0
    assert set(references(("random", "mcts-100"))) == {"minimax"}
    assert references(("random", "minimax"))["best_response"] == return_against("random", max) / 2


def test_uniform_play_earns_what_the_values_say() -> None:
    source, total, num_episodes = random.Random(1), 0.0, 2000
    for seed in range(num_episodes):
        play = begin("preferred-corners", seed, seed % 2)
        while legal := play.legal_actions():
            total += play.act(source.choice(legal)).reward
    expected = return_against("preferred-corners", fmean)
    assert abs(total / num_episodes - expected) < 4 / num_episodes**0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simulations": -1}, "`simulations` must be a whole number from 0, got -1"),
        ({"heldout_simulations": 1.5}, "must be a whole number from 0, got 1.5"),
        ({"simulations": 9, "heldout_simulations": 9}, "'mcts-9' cannot be trained on and"),
    ],
)
def test_impossible_searches_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^tictactoe: ") as caught:
        TicTacToe(**options)
    assert message in str(caught.value)


CARELESS = TicTacToe(opponents="careless", view="news")
MEMBER = "careless-corners-one-two-four"


def game(actions: str, seat: int = 0) -> list[str]:
    """What is said in one game against it, from the beginning on."""
    play = CARELESS.begin(Task("tictactoe", MEMBER, 0, seat), 0)
    return [play.observation, *(play.act(action).observation for action in actions.split())]


def test_news_are_the_opponents_cells_and_the_end() -> None:
    assert game("one one five nine") == ["first", "three", "invalid", "seven", "win"]
    assert game("five", seat=1) == ["second one", "three"]


def test_careless_opponents_only_play_by_their_list_after_what_they_take_lightly() -> None:
    assert game("two five eight") == ["first", "one", "three", "win"]
    assert game("five two")[-1] == "eight"  # it blocks
    assert game("two five eight", seat=1) == ["second one", "three", "seven", "win"]
    assert game("nine five eight", seat=1) == ["second one", "three", "seven", "two lose"]


def test_held_out_careless_opponents_take_each_cell_lightly_equally_often() -> None:
    for split in ("train", "heldout"):
        lightly = [cell for each in CARELESS.members(split) for cell in taken_lightly(each)]
        assert len(set(map(lightly.count, range(9)))) == 1


def test_what_swaps_with_a_careless_opponent_takes_none_of_its_cells_lightly() -> None:
    lightly = taken_lightly(MEMBER)
    assert all(not lightly & taken_lightly(each) for each in CARELESS.swaps(MEMBER, "heldout"))


@pytest.mark.parametrize("seat", [0, 1])
def test_no_first_cell_earns_more_than_a_third_of_those_who_do_not_know(seat: int) -> None:
    """Each is taken lightly by a third; it wins against those and never against the others."""
    assert return_against(MEMBER, max) == 1.0
    free = [cell for cell in range(9) if seat == 0 or cell != 0]
    worth = {cell: _best_after(cell, seat) for cell in free}
    lightly = taken_lightly(MEMBER)
    assert all(worth[cell] == 1.0 if cell in lightly else worth[cell] <= 0.0 for cell in free)
    assert max(worth[cell] for cell in free if cell not in lightly) == 0.0


def _best_after(cell: int, seat: int) -> float:
    """What the agent can get when it begins with a cell."""
    state = pyspiel.load_game("tic_tac_toe").new_initial_state()
    if seat == 1:
        state.apply_action(0)  # as a member of this list opens
    state.apply_action(cell)
    return GameTree(MEMBER, seat, max).value(state)


def test_the_explorer_wins_more_from_episode_to_episode() -> None:
    returns = [0.0] * 3
    for seed in range(100):
        script = TicTacToeExplorer(random.Random(seed), care=1.0, memory=1.0)
        for episode in range(3):
            play = CARELESS.begin(Task("tictactoe", MEMBER, seed, seed % 2), episode)
            while play.legal_actions():
                returns[episode] += play.act(script.choose(play)).reward / 100
    assert returns[0] < returns[1] - 0.1 < returns[2] - 0.2


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="`opponents` must be 'mixed' or 'careless', got 'odd'"):
        TicTacToe(opponents="odd")
    with pytest.raises(ConfigError, match="`view` must be 'board' or 'news', got 'all'"):
        TicTacToe(view="all")
