"""Scout's exact values, against the table that was worked out by hand."""

import pytest

from mage_async.environments.games.scout import Payoffs, Scout, solve
from tests.helpers.game_values import (
    cumulative_threshold,
    cumulative_weights,
    differential_threshold,
    differential_weights,
    gain_of_scouting,
)

ONE_DIAL = ((0,), (1,), (2,), (3,))
FINAL = (0.0, 0.0, 1.0)
DEAR, CHEAP = Payoffs(), Payoffs(cost=0.7)
# Returns by episode of one dial, of plans anybody would name.
PLANS = {
    "pass": lambda p: (p.safe, p.safe, p.safe),
    "scout": lambda p: (-p.cost, 1.0, 1.0),
    "pass, scout": lambda p: (p.safe, -p.cost, 1.0),
    "guess": lambda p: (-0.5, 0.25 + 0.75 * p.safe, 0.25 + 0.75 * p.safe),
    "guess, guess": lambda p: (-0.5, 0.25 + 0.75 * (1 / 3 - 2 / 3), 0.5 + 0.5 * p.safe),
}
OBJECTIVES = {
    "final": FINAL,
    "sum": cumulative_weights(3, 1.0),
    "sum .9": cumulative_weights(3, 0.9),
    "sum .6": cumulative_weights(3, 0.6),
    "single": (1.0, 0.0, 0.0),
}
train = tuple(
    tuple(("red", "green", "blue", "gold").index(key) for key in member.split("-"))
    for member in Scout().members("train")
)


def weighted(returns: tuple[float, ...], weights: tuple[float, ...]) -> float:
    return sum(w * r for w, r in zip(weights, returns, strict=True))


@pytest.mark.parametrize(
    ("payoffs", "objective", "plan", "total"),
    [
        (DEAR, "final", "scout", 1.0),
        (DEAR, "sum", "pass", 0.9),
        (DEAR, "sum .9", "pass", 0.813),
        (DEAR, "sum .6", "pass", 0.588),
        (DEAR, "single", "pass", 0.3),
        (CHEAP, "final", "scout", 1.0),
        (CHEAP, "sum", "scout", 1.3),
        (CHEAP, "sum .9", "scout", 1.010),
        (CHEAP, "sum .6", "pass", 0.588),
    ],
)
def test_the_best_plan_of_each_objective_is_the_one_worked_out_by_hand(
    payoffs: Payoffs, objective: str, plan: str, total: float
) -> None:
    weights = OBJECTIVES[objective]
    best = solve(ONE_DIAL, weights, payoffs)
    by_hand = {name: weighted(returns(payoffs), weights) for name, returns in PLANS.items()}
    best_total = weighted(best, weights)
    assert best_total == pytest.approx(max(by_hand.values()))
    assert best_total == pytest.approx(total)
    assert best_total == pytest.approx(by_hand[plan])
    if objective != "single":  # there, what follows the first episode weighs nothing
        assert best == pytest.approx(PLANS[plan](payoffs))


def test_only_scouting_reaches_the_full_final_return() -> None:
    for codes, without in ((train, 0.744), (ONE_DIAL, 0.65)):
        assert solve(codes, FINAL, DEAR)[-1] == pytest.approx(1.0)
        assert solve(codes, FINAL, DEAR, may_scout=False)[-1] == pytest.approx(without, abs=5e-4)


def test_what_is_known_of_the_train_codes_makes_no_sum_worth_scouting_for() -> None:
    for discount in (1.0, 0.9, 0.6):
        weights = cumulative_weights(3, discount)
        assert solve(train, weights, DEAR) == pytest.approx((0.3, 0.3, 0.3))


def test_independent_dials_are_worth_what_one_is() -> None:
    codes = tuple((a, b) for a in range(4) for b in range(4))
    for weights in (FINAL, cumulative_weights(3, 0.9)):
        together, alone = solve(codes, weights, CHEAP), solve(ONE_DIAL, weights, CHEAP)
        assert together == pytest.approx(alone)


def test_thresholds_are_those_of_the_closed_forms() -> None:
    assert cumulative_threshold(CHEAP, 3) == pytest.approx(0.7956, abs=1e-4)
    assert differential_threshold(DEAR) == pytest.approx(2.3 / 3)
    assert cumulative_threshold(DEAR, 3) is None


def test_at_its_threshold_scouting_gains_nothing_and_beyond_it_what_the_best_plan_does() -> None:
    at = cumulative_threshold(CHEAP, 3)
    assert at is not None
    assert gain_of_scouting(CHEAP, cumulative_weights(3, at)) == pytest.approx(0, abs=1e-9)
    weights = cumulative_weights(3, 0.845)
    best = solve(ONE_DIAL, weights, CHEAP)
    total, passing = weighted(best, weights), sum(weights) * CHEAP.safe
    assert gain_of_scouting(CHEAP, weights) == pytest.approx(total - passing)
    assert gain_of_scouting(CHEAP, weights) == pytest.approx(0.0913, abs=1e-4)


@pytest.mark.parametrize(
    ("payoffs", "weights", "threshold"),
    [
        (CHEAP, cumulative_weights, cumulative_threshold(CHEAP, 3)),
        (DEAR, differential_weights, differential_threshold(DEAR)),
        (CHEAP, differential_weights, differential_threshold(CHEAP)),
    ],
)
def test_scouting_begins_to_pay_exactly_at_the_threshold(payoffs, weights, threshold) -> None:
    above = solve(ONE_DIAL, weights(3, threshold + 1e-3), payoffs)
    below = solve(ONE_DIAL, weights(3, threshold - 1e-3), payoffs)
    assert above[0] == pytest.approx(-payoffs.cost)
    assert min(below) > -payoffs.cost


def test_differential_weights_are_those_of_the_sum_of_improvements() -> None:
    rewards, discount = (2.0, -1.0, 4.0), 0.6
    improvements = (2.0, -3.0, 5.0)
    direct = sum(discount**k * each for k, each in enumerate(improvements))
    weights = differential_weights(3, discount)
    assert sum(w * r for w, r in zip(weights, rewards, strict=True)) == pytest.approx(direct)
    assert differential_weights(3, 1.0) == FINAL


def test_references_tell_what_is_and_is_not_reached_by_scouting() -> None:
    references = Scout().references("heldout", 3)
    assert references["without_memory"] == pytest.approx((0.3, 0.3, 0.3))
    assert references["best_final"] == pytest.approx((-2.0, 1.0, 1.0))
    assert references["best_final_without_scouting"][-1] == pytest.approx(0.65)
    assert references["best_sum"] == references["always_pass"]
    assert references["random"][0] == pytest.approx((1 - 3 - 2 + 0.3) / 6)
