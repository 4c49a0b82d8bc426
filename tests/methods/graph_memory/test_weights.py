"""Drawing strategies and training the weights of edges, against closed forms."""

import itertools
import math
import random

import pytest

from mage_async.methods.graph_memory import (
    LEAST,
    Graph,
    best,
    drawn,
    gradient,
    logprob,
    probabilities,
)
from mage_async.trajectory import Guidance, Task

QUERY = ("rps", 0)
LEFT, RIGHT = ("s", "left"), ("s", "right")
SCORES = {("a", "x"): 0.3, ("a", "y"): -0.4, ("b", "x"): 1.1, ("c", "x"): 0.0}


def bandit(weights):
    """A graph of two strategies, each behind a path of its own, with given w_qt and w_tm."""
    graph = Graph()
    for decision, (to, behind) in weights.items():
        path = ((*decision, "+"),)
        graph.add(QUERY, path, decision, born=0, weight=1.0)
        graph.queries[QUERY, path], graph.supports[path, decision] = to, behind
    return graph


def told(graph, decision, version=0):
    chance = logprob(graph.scores(QUERY), [decision])
    return Guidance(version, 1, (decision,), "", chance)


def test_the_expected_update_of_a_two_strategy_bandit_is_the_closed_form(
    config, memory_of, group_of
):
    """Following a strategy earns what its arm pays, and no strategy earns 0.25. In expectation over
    draws w_tm moves by rate * w_qt * p * (1 - p) * (gap - gap of the other), and w_qt likewise.
    """
    weights, pays = {LEFT: (0.6, 0.9), RIGHT: (0.4, 0.5)}, {LEFT: 0.9, RIGHT: 0.1}
    share = probabilities({LEFT: 0.6 * 0.9, RIGHT: 0.4 * 0.5})
    gap = {decision: pay - 0.25 for decision, pay in pays.items()}
    moved = dict.fromkeys(itertools.product(weights, ("to", "behind")), 0.0)
    for decision in weights:
        memory = memory_of(config(rate=0.01))
        memory.graph = bandit(weights)
        steps = [[[("s", "other", pays[decision])]], [[("s", "other", 0.25)]]]
        memory.learn([group_of(steps, told(memory.graph, decision))])
        for each in weights:
            path = ((*each, "+"),)
            to, behind = memory.graph.queries[QUERY, path], memory.graph.supports[path, each]
            moved[each, "to"] += share[decision] * (to - weights[each][0])
            moved[each, "behind"] += share[decision] * (behind - weights[each][1])
    for each, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
        expected = 0.01 * share[each] * share[other] * (gap[each] - gap[other])
        assert moved[each, "to"] == pytest.approx(expected * weights[each][1], abs=1e-12)
        assert moved[each, "behind"] == pytest.approx(expected * weights[each][0], abs=1e-12)


def test_a_gradient_of_several_strategies_is_that_of_their_log_probability():
    order = [("b", "x"), ("a", "x")]
    found = gradient(SCORES, order)
    for decision in SCORES:
        up, down = (SCORES | {decision: SCORES[decision] + shift} for shift in (1e-5, -1e-5))
        slope = (logprob(up, order) - logprob(down, order)) / 2e-5
        assert found[decision] == pytest.approx(slope, abs=1e-8)


def test_draws_come_as_often_as_their_probability_and_never_twice_for_a_state():
    source, counts, number = random.Random(0), {}, 4000
    for _ in range(number):
        order = drawn(SCORES, 2, source)
        assert len({state for state, _ in order}) == 2
        counts[order] = counts.get(order, 0) + 1
    total = sum(math.exp(logprob(SCORES, order)) for order in counts)
    assert total == pytest.approx(1.0)
    for order, count in counts.items():
        chance = math.exp(logprob(SCORES, order))
        assert abs(count / number - chance) < 4 * math.sqrt(chance / number)


def test_the_best_are_the_highest_scores_of_different_states():
    assert best(SCORES, 5) == (("b", "x"), ("a", "x"), ("c", "x"))
    assert drawn({}, 3, random.Random(0)) == best({}, 3) == ()


def test_another_seat_counts_half_and_another_environment_not_at_all():
    graph = bandit({LEFT: (0.6, 0.5)})
    assert graph.scores(QUERY) == {LEFT: 0.3}
    assert graph.scores(("rps", 1)) == {LEFT: 0.15}
    assert graph.scores(("boxes", 0)) == {}


def test_weights_stay_positive_and_old_draws_count_less(config, memory_of, group_of):
    memory = memory_of(config(rate=1000))
    memory.graph = bandit({LEFT: (0.5, 0.5), RIGHT: (0.5, 0.5)})
    guidance = told(memory.graph, LEFT)
    harm = [[[("s", "left", -1.0)]], [[("s", "left", 0.0)]]]
    memory.learn([group_of(harm, guidance)])
    assert min(memory.graph.supports.values()) == LEAST
    now = logprob(memory.graph.scores(QUERY), [LEFT])
    assert now < guidance.logprob
    before = dict(memory.graph.supports)
    memory.adopt(memory_of(config(rate=0.1)).settings, config(rate=0.1))
    memory.learn([group_of(harm, guidance)])
    path = ((*RIGHT, "+"),)
    to, p = 10.0, math.exp(now)
    step = 0.1 * -1.0 * math.exp(now - guidance.logprob) * to * (p - 1)
    assert memory.graph.supports[path, RIGHT] == pytest.approx(
        min(10.0, before[path, RIGHT] + step)
    )


def test_a_group_is_told_what_its_number_draws(config, memory_of):
    memory = memory_of(config())
    memory.graph = bandit({LEFT: (0.6, 0.9), RIGHT: (0.4, 0.5)})
    task = Task("rps", "m", 1)
    all_told = [memory.guidance(number, task) for number in range(40)]
    assert all_told == [memory.guidance(number, task) for number in range(40)]
    assert {each.decisions for each in all_told} == {(LEFT,), (RIGHT,)}
    assert {each.text for each in all_told} == {"s left", "s right"}
    assert {each.num_guided for each in all_told} == {1}
