"""Rock-paper-scissors: its opponents, its luck and its exact values."""

import itertools
from collections import Counter

import numpy as np
import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games.rps import (
    BEST_RESPONSE,
    HELDOUT,
    NOISE,
    NUM_ROUNDS,
    TRAIN,
    BiasedRps,
    Opponent,
    Rps,
    bayes_greedy,
    best_moves,
    one_episode,
    payoff,
    result,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

MOVES = ("rock", "paper", "scissors")


def opponents_moves(member: str, actions: list[str], seed: int = 0) -> list[str]:
    """What the opponent plays, where no move is noise."""
    seeds = (seed for seed in itertools.count(seed) if not _noisy(member, seed))
    play = Rps().begin(Task("rps", member, next(seeds)), 0)
    return [play.act(action).observation.split()[1] for action in actions]


def _noisy(member: str, seed: int) -> bool:
    play = Rps().begin(Task("rps", member, seed), 0)
    for _ in range(NUM_ROUNDS):
        play.act("rock")
    return "noise=1" in play.chance.draws


@pytest.mark.parametrize(
    ("member", "actions", "moves"),
    [
        ("fixed-paper", "rock rock rock rock", "paper paper paper paper"),
        ("seq-rock-paper-rock", "rock rock rock rock", "rock paper rock rock"),
        ("copy-rock", "paper scissors rock rock", "rock paper scissors rock"),
        ("beat-rock", "paper scissors rock rock", "rock scissors rock paper"),
        ("lose-rock", "paper scissors rock rock", "rock rock paper scissors"),
    ],
)
def test_opponents_play_as_their_names_say(member: str, actions: str, moves: str) -> None:
    assert opponents_moves(member, actions.split()) == moves.split()


def test_an_invalid_action_loses_the_round_and_is_no_move_to_react_to() -> None:
    play = Rps().begin(Task("rps", "copy-rock", 1), 0)
    outcomes = [play.act(action) for action in ("paper", "lizard", "rock", "rock")]
    assert "noise=1" not in play.chance.draws
    assert (outcomes[1].observation, outcomes[1].reward) == ("opp paper invalid", -1.0)
    assert outcomes[2].observation.startswith("opp paper")


def test_rewards_are_those_of_the_game() -> None:
    wins = {("rock", "scissors"), ("paper", "rock"), ("scissors", "paper")}
    for mine, theirs in itertools.product(range(3), repeat=2):
        pair = (MOVES[mine], MOVES[theirs])
        assert result(mine, theirs) == (pair in wins) - (pair[::-1] in wins)


def test_a_groups_trials_meet_the_same_luck_whatever_they_do() -> None:
    task = Task("rps", "beat-rock", 12)
    draws = set()
    for actions in (["rock"] * 4, ["paper", "nonsense", "rock", "scissors"]):
        play = Rps().begin(task, 2)
        for action in actions:
            play.act(action)
        draws.add(tuple(play.chance.draws))
    assert len(draws) == 1


def test_one_move_in_thirty_departs_from_the_rule() -> None:
    num_rounds, departures = 0, 0
    for seed in range(2000):
        play = Rps().begin(Task("rps", "fixed-rock", seed), 0)
        said = [play.act("rock").observation for _ in range(NUM_ROUNDS)]
        departures += sum("rock" not in each for each in said)
        num_rounds += NUM_ROUNDS
    expected = NOISE * 2 / 3 * num_rounds
    assert abs(departures - expected) < 4 * expected**0.5


def test_the_split_is_by_orbit_so_that_no_move_is_likelier_in_any_round() -> None:
    assert (len(TRAIN), len(HELDOUT)) == (24, 12)
    assert Counter(each.family for each in TRAIN) == {"fixed": 3, "seq": 15, "copy": 3, "beat": 3}
    assert Counter(each.family for each in HELDOUT) == {"seq": 9, "lose": 3}
    for split in (TRAIN, HELDOUT):
        sequences = [each for each in split if each.family in ("seq", "fixed")]
        for turn in range(NUM_ROUNDS):
            counts = Counter(each.move(turn, None) for each in sequences)
            assert len(set(counts.values())) == 1
        assert {shifted(each).pattern for each in sequences} == {e.pattern for e in sequences}


def shifted(opponent: Opponent) -> Opponent:
    return Opponent("", tuple((move + 1) % 3 for move in opponent.pattern))


@pytest.mark.parametrize("opponent", TRAIN + HELDOUT, ids=lambda each: each.name)
def test_knowing_the_opponent_wins_every_round_but_for_noise(opponent: Opponent) -> None:
    assert payoff(best_moves(opponent), opponent) == NUM_ROUNDS


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_what_was_learned_wins_nothing_against_a_swapped_opponent(split: Split) -> None:
    environment = Rps()
    by_name = {each.name: each for each in TRAIN + HELDOUT}
    for member in environment.members(split):
        for other in environment.swaps(member, split):
            assert payoff(best_moves(by_name[member]), by_name[other]) <= 0
    assert "lose-paper" not in environment.swaps("lose-rock", "heldout")


def test_without_memory_a_known_opponent_is_worth_the_best_response() -> None:
    assert one_episode((TRAIN[7],)) == pytest.approx(BEST_RESPONSE) == pytest.approx(0.95)


def test_without_memory_three_constants_cost_the_first_round() -> None:
    constants = TRAIN[:3]
    assert one_episode(constants) == pytest.approx(_greedy_value(constants))
    assert 0.65 < one_episode(constants) < 0.95 * 3 / 4  # the first round is worth 0


def test_nobody_without_memory_comes_near_what_memory_reaches() -> None:
    assert one_episode(TRAIN) == pytest.approx(0.339795, abs=1e-6)
    assert one_episode(HELDOUT) == pytest.approx(0.436970, abs=1e-6)
    assert 0.32 < _greedy_value(TRAIN) < one_episode(TRAIN)


def test_who_remembers_and_believes_rightly_knows_the_opponent_in_the_third_episode() -> None:
    # Without the pruning; the prototype simulated .32/.91/.94, .34/.88/.93 and -.11/.39/.58.
    right = bayes_greedy(TRAIN, TRAIN, 3)
    assert right == pytest.approx((0.327383, 0.915446, 0.938834), abs=1e-3)
    assert right[0] == pytest.approx(_greedy_value(TRAIN))
    everyone = bayes_greedy(HELDOUT, TRAIN + HELDOUT, 3)
    assert everyone == pytest.approx((0.342613, 0.887048, 0.933793), abs=1e-3)
    wrong = Rps().references("heldout", 3)["bayes"]
    assert wrong == pytest.approx((-0.129561, 0.369864, 0.576767), abs=1e-3)


def _greedy_value(prior: tuple[Opponent, ...]) -> float:
    """One episode of the player that always takes the move of greatest expected result: a bound
    from below."""

    def value(belief: np.ndarray, turn: int, last: int | None) -> float:
        if turn == NUM_ROUNDS:
            return 0.0
        rows = [np.full(3, NOISE / 3) for _ in prior]
        for row, opponent in zip(rows, prior, strict=True):
            row[opponent.move(turn, last)] += 1 - NOISE
        seen = belief[:, None] * np.array(rows)
        gains = [
            sum(result(mine, move) * seen[:, move].sum() for move in range(3)) for mine in range(3)
        ]
        mine = int(np.argmax(gains))
        return float(gains[mine]) + sum(value(seen[:, move], turn + 1, mine) for move in range(3))

    return value(np.full(len(prior), 1 / len(prior)), 0, None) / NUM_ROUNDS


def test_a_biased_opponent_has_a_move_of_at_least_two_fifths_and_the_same_in_all_episodes() -> None:
    game = BiasedRps()
    for member in game.members("train"):
        weights = game.weights(member)
        assert sum(weights) == pytest.approx(1.0)
        assert max(weights) >= 0.4
        assert game.weights(member) == weights
    favourites = Counter(game.family(member) for member in game.members("train"))
    assert min(favourites.values()) > 384 / 3 - 40


def test_at_least_half_of_the_rounds_win_an_episode() -> None:
    for rounds, needed in ((5, 3), (4, 2)):
        game = BiasedRps(rounds=rounds)
        for number in range(20):
            play = game.begin(Task("biased_rps", game.members("train")[number], number), 0)
            outcomes = [play.act("paper") for _ in range(rounds)]
            won = sum(each.observation.endswith("win") for each in outcomes)
            assert [each.reward for each in outcomes[:-1]] == [0.0] * (rounds - 1)
            assert outcomes[-1].reward == (won >= needed)


@pytest.mark.parametrize("num_opponents", [32, 512])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_what_beats_a_biased_opponent_loses_to_those_swapped_in(
    split: Split, num_opponents: int
) -> None:
    game = BiasedRps(opponents=num_opponents)
    for member in game.members(split):
        others = game.swaps(member, split)
        assert others
        for other in others:
            best = (MOVES.index(game.family(member)) + 1) % 3
            assert result(best, MOVES.index(game.family(other))) == -1


def test_too_few_biased_opponents_to_swap_are_refused() -> None:
    with pytest.raises(ConfigError, match="`opponents` must be a whole number from 32 to"):
        BiasedRps(opponents=31)


def test_counting_moves_over_episodes_wins_more_of_them() -> None:
    known = BiasedRps().references("heldout", 3)
    assert known["random"][0] == pytest.approx(0.2099, abs=1e-4)
    assert known["random"][0] < known["counts_episode"][0] == known["counts"][0]
    assert known["counts"][0] + 0.1 < known["counts"][2] < known["best_response"][2] < 0.9
