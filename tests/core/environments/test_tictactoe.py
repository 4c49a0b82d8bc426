"""Tic-tac-toe: its turns, its opponents and its values."""

import random

import pyspiel
import pytest

from mage_async.environments.environment import Play
from mage_async.environments.tictactoe import CELLS, MAX_TURNS, TicTacToe
from mage_async.environments.tictactoe_opponents import weights
from mage_async.environments.tictactoe_values import best_response, random_value, references
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
    assert play.legal_actions() == ["two", "three", "four", "six", "seven", "eight", "nine"]


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
    assert best_response("minimax") == 0.0
    assert best_response("preferred-edges") == 1.0
    assert random_value("random") == pytest.approx(0.0)
    assert random_value("minimax") < -0.8
    assert 0.95 < best_response("random") < 1.0
    assert set(references(("random", "mcts-100"))) == {"minimax"}
    assert references(("random", "minimax"))["best_response"] == best_response("random") / 2


def test_uniform_play_earns_what_the_values_say() -> None:
    source, total, num_episodes = random.Random(1), 0.0, 2000
    for seed in range(num_episodes):
        play = begin("preferred-corners", seed, seed % 2)
        while legal := play.legal_actions():
            total += play.act(source.choice(legal)).reward
    expected = random_value("preferred-corners")
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
