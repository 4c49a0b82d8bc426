"""Games are worth what is known of them: Kuhn poker's and tic-tac-toe's calibration values.

The members are MAGE's (arXiv 2603.03680), whose win rates at Kuhn poker say nothing of adaptation:
a single fixed policy reaches the most that can be won. Chips do.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pyspiel
import pytest

from mage_async.environments.environment import Chance
from mage_async.environments.games.kuhn import CFR_GREEDY, MAGE_TRAIN, Strategy, best_response
from mage_async.environments.games.openspiel_policies import Table, best_value, equilibrium
from mage_async.environments.games.tictactoe import mover, weights

KUHN, TICTACTOE = pyspiel.load_game("kuhn_poker"), pyspiel.load_game("tic_tac_toe")
PREFERRED = [
    f"preferred-{each}"
    for each in ("centre", "corners", "edges", "diagonal", "antidiagonal", "reverse")
]


CONSERVATIVE, AGGRESSIVE, INTERMEDIATE = MAGE_TRAIN
MIXTURE = (CONSERVATIVE,) * 3 + (AGGRESSIVE,) * 3 + (INTERMEDIATE,) * 4


def table(who: Strategy) -> Table:
    """What a player does, as OpenSpiel names the places: card, then passes and bets."""
    places = {
        "": who.first.bets,
        "pb": who.first.calls,
        "p": who.second.bets,
        "b": who.second.calls,
    }
    return {
        f"{card}{place}": [(0, 1 - chances[card]), (1, chances[card])]
        for place, chances in places.items()
        for card in range(3)
    }


@pytest.mark.parametrize(
    ("who", "first", "second"),
    [
        (CONSERVATIVE, 1 / 6, 1 / 3),
        (AGGRESSIVE, 1 / 3, 1 / 3),
        (INTERMEDIATE, 1 / 3, 1 / 6),
        (CFR_GREEDY, 1 / 6, 1 / 6),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_who_knows_the_opponent_earns_so_many_chips(
    who: Strategy, first: float, second: float
) -> None:
    values = [best_value(KUHN, seat, table(who)) for seat in range(2)]
    assert values == pytest.approx([first, second])
    assert best_response((who,)) == pytest.approx((first + second) / 2)


def test_the_greedy_equilibrium_plays_as_it_is_written_here() -> None:
    solved = equilibrium(KUHN, 1000)
    for known, chances in table(CFR_GREEDY).items():
        likeliest = max(solved[known], key=lambda each: each[1])[0]
        assert likeliest == max(chances, key=lambda each: each[1])[0]


def test_who_does_not_know_which_of_the_mixture_it_is_earns_less() -> None:
    known = sum(best_response((who,)) for who in MIXTURE) / len(MIXTURE)
    assert known == pytest.approx((0.283 + 0.267) / 2, abs=1e-3)
    assert best_response(MIXTURE) == pytest.approx((0.083 + 0.167) / 2, abs=1e-3)


@pytest.mark.parametrize(
    ("who", "first", "second"),
    [(CONSERVATIVE, 4, 4), (AGGRESSIVE, 3, 3), (INTERMEDIATE, 4, 3), (CFR_GREEDY, 4, 3)],
    ids=lambda each: getattr(each, "name", None),
)
def test_so_many_of_the_six_deals_can_be_won_at_all(who: Strategy, first: int, second: int) -> None:
    assert [_num_winnable(who, seat) for seat in range(2)] == [first, second]


def _num_winnable(who: Strategy, seat: int) -> int:
    decided, winnable = table(who), 0
    for cards in itertools.permutations(range(3), 2):
        state = KUHN.new_initial_state()
        for card in cards:
            state.apply_action(card)
        winnable += _can_win(state, seat, decided)
    return winnable


def _can_win(state: Any, seat: int, decided: Table) -> bool:
    if state.is_terminal():
        return state.returns()[seat] > 0
    actions = state.legal_actions()
    if state.current_player() != seat:
        chances = dict(decided[state.information_state_string()])
        actions = [action for action in actions if chances[action]]
    return any(_can_win(state.child(action), seat, decided) for action in actions)


def _win_chance(member: str, state: Any, seat: int, choose: Callable, moves: int = 9) -> float:
    """Chance of a win within so many of the agent's moves."""
    if state.is_terminal():
        return float(state.returns()[seat] > 0)
    if state.current_player() == seat:
        if not moves:
            return 0.0
        children = [state.child(each) for each in state.legal_actions()]
        return choose([_win_chance(member, each, seat, choose, moves - 1) for each in children])
    cells = weights(member, state)
    return sum(
        weight * _win_chance(member, state.child(cell), seat, choose, moves)
        for cell, weight in cells.items()
    ) / sum(cells.values())


@pytest.mark.parametrize("seat", [0, 1])
def test_every_preferred_list_is_beaten_in_three_moves_and_often_by_luck(seat: int) -> None:
    start = TICTACTOE.new_initial_state()
    assert [_win_chance(member, start, seat, max, 3) for member in PREFERRED] == [1.0] * 6
    by_luck = [
        _win_chance(member, start, seat, lambda each: sum(each) / len(each)) for member in PREFERRED
    ]
    least, most = ((0.35, 0.78), (0.10, 0.49))[seat]
    assert least - 0.005 <= min(by_luck)
    assert max(by_luck) <= most + 0.005


def test_minimax_never_loses_whatever_is_played_against_it() -> None:
    start = TICTACTOE.new_initial_state()
    assert [_win_chance("minimax", start, seat, max) for seat in range(2)] == [0.0, 0.0]


def test_perfect_play_beats_a_search_of_100_in_46_games_of_100_and_never_loses() -> None:
    results = [_against_search(100, seed, 0, None) for seed in range(800)]
    assert min(results) >= 0.0
    assert sum(each > 0 for each in results) / 800 == pytest.approx(0.461, abs=0.035)


def test_against_a_search_of_100_the_corner_is_the_better_opening() -> None:
    """Shares of wins in 3,000 games each: 0.59 and 0.28."""
    corner, centre = (
        sum(_against_search(100, seed, 0, opening) > 0 for seed in range(200)) for opening in (0, 4)
    )
    assert corner > centre + 20


def test_a_search_is_not_beaten_from_the_second_seat_nor_a_long_one_often() -> None:
    assert max(_against_search(100, seed, 1, None) for seed in range(150)) == 0.0
    assert sum(_against_search(1000, seed, 0, None) > 0 for seed in range(40)) <= 6


def _against_search(num_simulations: int, seed: int, seat: int, opening: int | None) -> float:
    """Result of minimax with random ties, which may begin with a given cell."""
    source, state = random.Random(seed), TICTACTOE.new_initial_state()
    theirs = mover(f"mcts-{num_simulations}", Chance(seed, 0))
    while not state.is_terminal():
        if state.current_player() != seat:
            state.apply_action(theirs(state))
        elif opening is not None and state.move_number() == 0:
            state.apply_action(opening)
        else:
            state.apply_action(source.choice(list(weights("minimax", state))))
    return state.returns()[seat]
