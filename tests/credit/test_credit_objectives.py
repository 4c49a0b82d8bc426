"""What the credits make of a whole trial: their objectives, and which behaviour each prefers."""

import math
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.credit.returns import (
    CumulativeCode,
    CumulativePaper,
    Differential,
    DifferentialDense,
    FinalOnly,
    SingleEpisode,
)
from tests.helpers.credits import CREDITS, credited

discounts = st.floats(0.0, 1.0)
rewards_of_a_turn = st.floats(-20.0, 20.0, allow_subnormal=False)
trials = st.lists(st.lists(rewards_of_a_turn, min_size=1, max_size=5), min_size=1, max_size=4)


def approx(expected):
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


def acts(credit, rewards, turn_discount, episode_discount):
    return credited(
        credit, rewards, turn_discount=turn_discount, episode_discount=episode_discount
    ).acts


def objective(credit, rewards, episode_discount):
    """What the trial is worth before its first turn, without discount inside episodes."""
    return acts(credit, rewards, 1.0, episode_discount)[0][0]


@settings(deadline=None)
@given(trials)
def test_differential_telescopes_at_discount_one(rewards):
    totals = [sum(episode) for episode in rewards]
    before = [0.0, *totals]
    for episode, returns in enumerate(acts(Differential, rewards, 1.0, 1.0)):
        assert returns == approx([totals[-1] - before[episode]] * len(returns))


@settings(deadline=None)
@given(trials, discounts)
def test_differential_weighs_the_last_episode_fully_and_the_others_by_what_discount_is_lost(
    rewards, g
):
    totals = [sum(episode) for episode in rewards]
    last = len(totals) - 1
    early = sum(g**k * total for k, total in enumerate(totals[:-1]))
    expected = g**last * totals[-1] + (1 - g) * early
    assert objective(Differential, rewards, g) == approx(expected)


@pytest.mark.parametrize(
    ("g", "weights"), [(0.6, (0.40, 0.24, 0.36)), (0.9, (0.10, 0.09, 0.81)), (1.0, (0, 0, 1))]
)
def test_mages_objective_is_the_final_episode_only_at_discount_one(g, weights):  # defect 13
    unit = [[[float(i == k)] for i in range(3)] for k in range(3)]
    assert [objective(Differential, rewards, g) for rewards in unit] == approx(list(weights))


@settings(deadline=None)
@given(trials, discounts)
def test_dense_has_the_objective_of_differential(rewards, g):
    assert objective(DifferentialDense, rewards, g) == approx(objective(Differential, rewards, g))


@settings(deadline=None)
@given(trials, discounts)
def test_dense_differs_from_differential_by_what_was_settled_before_the_turn(rewards, g):
    dense, literal = (acts(c, rewards, 1.0, g) for c in (DifferentialDense, Differential))
    for k, episode in enumerate(rewards):
        share = 1.0 if k == len(rewards) - 1 else 1.0 - g
        reward_before = sum(rewards[k - 1]) if k else 0.0
        for t in range(len(episode)):
            settled = share * sum(episode[:t]) - reward_before
            assert literal[k][t] - dense[k][t] == approx(settled)


@settings(deadline=None)
@given(trials, discounts, discounts, st.data())
def test_causal_credits_do_not_look_at_rewards_before_a_turn(rewards, d, g, data):
    k = data.draw(st.integers(0, len(rewards) - 1))
    t = data.draw(st.integers(0, len(rewards[k]) - 1))
    past = [[reward + 7.0 for reward in episode] for episode in rewards[:k]]
    episode = [reward + 7.0 for reward in rewards[k][:t]] + list(rewards[k][t:])
    changed = [*past, episode, *rewards[k + 1 :]]
    for name, credit in CREDITS.items():
        if name != "differential":
            assert acts(credit, changed, d, g)[k][t] == acts(credit, rewards, d, g)[k][t]


def test_differential_looks_at_the_episode_before():
    lost, drew = ([[reward], [1.0]] for reward in (-1.0, 0.0))
    assert acts(Differential, lost, 1.0, 1.0)[1] == [2.0]
    assert acts(Differential, drew, 1.0, 1.0)[1] == [1.0]


@settings(deadline=None)
@given(trials, discounts, discounts)
def test_lamers_code_and_paper_agree_where_episodes_have_one_turn(rewards, d, g):
    single_turns = [episode[:1] for episode in rewards]
    code, paper = (acts(c, single_turns, d, g) for c in (CumulativeCode, CumulativePaper))
    assert [e[0] for e in code] == approx([e[0] for e in paper])


@settings(deadline=None)
@given(trials, discounts)
def test_without_discount_inside_episodes_lamers_code_and_paper_agree(rewards, g):
    code, paper = (acts(c, rewards, 1.0, g) for c in (CumulativeCode, CumulativePaper))
    assert [approx(episode) for episode in paper] == code


@settings(deadline=None)
@given(trials, discounts)
def test_without_discount_across_episodes_lamer_is_ordinary_rl(rewards, d):
    alone = acts(SingleEpisode, rewards, d, 1.0)
    assert acts(CumulativeCode, rewards, d, 0.0) == alone
    assert acts(CumulativePaper, rewards, d, 0.0) == alone


@settings(deadline=None)
@given(trials)
def test_at_discount_one_dense_and_final_only_are_the_same(rewards):
    assert acts(DifferentialDense, rewards, 1.0, 1.0) == [
        approx(episode) for episode in acts(FinalOnly, rewards, 1.0, 1.0)
    ]


def test_the_order_of_an_episodes_rewards_does_not_change_what_mage_pays():
    paid = [
        acts(Differential, [episode], 1.0, 1.0) for episode in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])
    ]
    assert sum([0.1, 0.2, 0.3]) != sum([0.3, 0.2, 0.1])
    assert paid[0] == paid[1]


def reference(samples, mode, d, g):
    """The reference's loop over one trial's samples (kind, episode, reward), from last to first."""
    totals = {}
    for kind, k, reward in samples:
        totals[k] = totals.get(k, 0.0) + (reward if kind == "play" else 0.0)
    run, current, returns = 0.0, samples[-1][1], []
    for i in range(len(samples) - 1, -1, -1):
        kind, k, reward = samples[i]
        if kind == "play":
            is_last = i + 1 == len(samples) or samples[i + 1][1] != k
            gain = (totals[k] - totals.get(k - 1, 0.0)) if is_last else 0.0
            paid = reward if mode == "lamer" else gain
            run, current = paid + (d if k == current else g) * run, k
        returns.append(run)
    return returns[::-1]


@settings(deadline=None)
@given(trials, discounts, discounts, st.booleans())
def test_credits_agree_with_the_references_loop(rewards, d, g, reflects):
    samples = []
    for k, episode in enumerate(rewards):
        samples += [("reflect", k, 0.0)] if reflects and k else []
        samples += [("play", k, reward) for reward in episode]
    for mode, credit in (("lamer", CumulativeCode), ("mage", Differential)):
        found = chain.from_iterable(acts(credit, rewards, d, g))
        values = zip(samples, reference(samples, mode, d, g), strict=True)
        assert list(found) == approx([value for (kind, *_), value in values if kind == "play"])


ALWAYS_PASS = [[0.3], [0.3], [0.3]]


def probing(cost):
    """One dial of `scout`: pay to see the key in the first episode, use it in the others."""
    return [[-cost], [1.0], [1.0]]


def prefers_probing(credit, g, cost):
    return objective(credit, probing(cost), g) > objective(credit, ALWAYS_PASS, g)


@pytest.mark.parametrize("credit", [Differential, DifferentialDense])
def test_differential_prefers_probing_above_its_exact_threshold(credit):
    threshold = 2.3 / 3.0
    assert not prefers_probing(credit, 0.6, 2.0)
    assert not prefers_probing(credit, threshold - 1e-6, 2.0)
    assert prefers_probing(credit, threshold + 1e-6, 2.0)
    assert prefers_probing(credit, 1.0, 2.0)


@pytest.mark.parametrize("credit", [CumulativeCode, CumulativePaper])
def test_cumulative_prefers_probing_only_where_it_is_cheap_and_the_future_counts(credit):
    assert not prefers_probing(credit, 1.0, 2.0)
    threshold = (math.sqrt(1 + 4 / 0.7) - 1) / 2  # where g + g^2 = (0.7 + 0.3) / (1 - 0.3)
    assert threshold == pytest.approx(0.796, abs=5e-4)
    assert not prefers_probing(credit, threshold - 1e-6, 0.7)
    assert prefers_probing(credit, threshold + 1e-6, 0.7)


def test_ordinary_rl_never_prefers_probing_and_final_only_always_does():
    assert not prefers_probing(SingleEpisode, 1.0, 0.7)
    assert prefers_probing(FinalOnly, 0.1, 2.0)
