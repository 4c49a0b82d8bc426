"""What holds for the advantages of any batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.credit.turn_table import TurnTable
from mage_async.learning.advantages import Gigpo, GroupMean, LeaveOneOut

KEYS = st.sampled_from([(), ("group",), ("group", "kind", "episode", "index"), ("member", "seat")])
SCALES = st.sampled_from([None, (), ("group",), ("member",)])
WEIGHTS = st.sampled_from(["trial", "sample"])
finite = st.floats(-100.0, 100.0)
rewards = finite.map(lambda value: round(value, 6))


@st.composite
def tables(draw):
    """Up to 24 turns; group, member and seat belong to the trial."""
    trial = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=24)))

    def column(high):
        values = st.lists(st.integers(0, high), min_size=len(trial), max_size=len(trial))
        return np.array(draw(values))

    def floats():
        return np.array(draw(st.lists(rewards, min_size=len(trial), max_size=len(trial))))

    return TurnTable(
        group=trial % 3,
        component=trial % 3 % 2,
        trial=trial,
        member=trial % 3 % 2,
        seat=trial % 2,
        kind=column(1),
        episode=column(1),
        index=column(2),
        anchor=column(3),
        returns=floats(),
        episode_score=floats(),
        is_valid=np.ones(len(trial), bool),
        num_tokens=np.ones(len(trial), np.int64),
        memory=trial % 2,
        num_sampled=np.ones(len(trial), np.int64),
    )


def rows_of(table, rows, **changed):
    """The table with its rows taken in another order, or with columns changed."""
    columns = {name: getattr(table, name)[rows] for name in TurnTable.__dataclass_fields__}
    return TurnTable(**columns | changed)


def estimate(table, key, scale, weight, *, epsilon=0.1, leave_one_out=False):
    kind = LeaveOneOut if leave_one_out else GroupMean
    scale = "none" if scale is None else list(scale)
    own = kind(baseline=list(key), scale=scale, weight=weight, epsilon=epsilon)
    return own.estimate(table, "cpu").numpy()


def gigpo(table):
    own = Gigpo(baseline=["group"], scale="none", weight="sample", anchor_weight=1.0)
    return own.estimate(table, "cpu").numpy()


def close(expected):
    return pytest.approx(expected, rel=1e-7, abs=1e-7)


@settings(deadline=None)
@given(tables(), KEYS, SCALES, WEIGHTS, st.data())
def test_adding_a_constant_to_the_returns_of_a_cell_changes_nothing(
    table, key, scale, weight, data
):
    cells = table.cells(key)
    size = int(cells.max()) + 1
    shift = data.draw(st.lists(rewards, min_size=size, max_size=size))
    moved = rows_of(table, slice(None), returns=table.returns + np.array(shift)[cells])
    for leave_one_out in (False, True):
        before = estimate(table, key, scale, weight, leave_one_out=leave_one_out)
        assert estimate(moved, key, scale, weight, leave_one_out=leave_one_out) == close(before)


@settings(deadline=None)
@given(tables(), KEYS, SCALES, WEIGHTS, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(table, key, scale, weight, source):
    order = list(range(len(table)))
    source.shuffle(order)
    shuffled = rows_of(table, order)
    for leave_one_out in (False, True):
        before = estimate(table, key, scale, weight, leave_one_out=leave_one_out)
        assert estimate(shuffled, key, scale, weight, leave_one_out=leave_one_out) == close(
            before[order]
        )
    assert gigpo(shuffled) == close(gigpo(table)[order])


@settings(deadline=None)
@given(tables(), KEYS, SCALES, WEIGHTS, finite, st.sampled_from([0.0, 1e-6, 1.0]))
def test_equal_returns_give_exactly_zero_for_any_value(table, key, scale, weight, value, epsilon):
    equal = rows_of(table, slice(None), returns=np.full(len(table), value))
    for leave_one_out in (False, True):
        rule = {"epsilon": epsilon, "leave_one_out": leave_one_out}
        assert not estimate(equal, key, scale, weight, **rule).any()
    silent = rows_of(equal, slice(None), episode_score=np.zeros(len(table)))
    assert not gigpo(silent).any()


@settings(deadline=None)
@given(tables(), KEYS, WEIGHTS)
def test_the_weighted_mean_of_a_cells_advantages_is_zero(table, key, weight):
    made, cells = estimate(table, key, None, weight), table.cells(key)
    for cell in range(cells.max() + 1):
        inside = cells == cell
        trials = table.trial[inside]
        counts = np.array([np.sum(trials == trial) for trial in trials])
        weights = 1.0 / counts if weight == "trial" else np.ones(len(trials))
        assert np.average(made[inside], weights=weights) == close(0.0)


@settings(deadline=None)
@given(tables(), KEYS, st.sampled_from([(), ("group",), ("member",)]), WEIGHTS)
def test_doubling_all_returns_doubles_centred_and_keeps_scaled_advantages(
    table, key, scale, weight
):
    doubled = rows_of(table, slice(None), returns=2 * table.returns)
    assert (
        estimate(doubled, key, None, weight).tolist()
        == (2 * estimate(table, key, None, weight)).tolist()
    )
    before = estimate(table, key, scale, weight, epsilon=0.0)
    assert estimate(doubled, key, scale, weight, epsilon=0.0) == close(before)


@settings(deadline=None)
@given(tables(), st.sampled_from([(), ("group",), ("member",)]), KEYS, WEIGHTS)
def test_scaled_advantages_are_finite_and_have_root_mean_square_one_or_zero(
    table, scale, key, weight
):
    made = estimate(table, key, scale, weight, epsilon=0.0)
    cells = table.cells(scale)
    for cell in range(cells.max() + 1):
        inside = cells == cell
        trials = table.trial[inside]
        counts = np.array([np.sum(trials == trial) for trial in trials])
        weights = 1.0 / counts if weight == "trial" else np.ones(len(trials))
        mean_square = np.average(made[inside] ** 2, weights=weights)
        assert mean_square == close(0.0) or mean_square == close(1.0)


@settings(deadline=None)
@given(st.lists(rewards, min_size=2, max_size=10))
def test_leaving_one_out_stretches_the_group_mean_by_n_over_n_minus_one(returns):
    n, zeros = len(returns), np.zeros(len(returns), np.int64)
    columns = dict.fromkeys(TurnTable.__dataclass_fields__, zeros)
    table = TurnTable(**columns | {"returns": np.array(returns), "trial": np.arange(n)})
    others = estimate(table, (), None, "trial", leave_one_out=True)
    assert others == close(n / (n - 1) * estimate(table, (), None, "trial"))


@settings(deadline=None)
@given(tables(), KEYS, WEIGHTS, st.data())
def test_a_left_out_trials_baseline_does_not_depend_on_its_own_returns(table, key, weight, data):
    trial = data.draw(st.sampled_from(table.trial.tolist()))
    mine = table.trial == trial
    changed = rows_of(table, slice(None), returns=np.where(mine, 3.0, table.returns))
    baselines = []
    for rows in (table, changed):
        made = estimate(rows, key, None, weight, leave_one_out=True)
        baselines.append((rows.returns - made)[mine])
    cells = table.cells(key)
    alone = np.array([len(set(table.trial[cells == cell])) == 1 for cell in cells[mine]])
    assert baselines[0][~alone] == close(baselines[1][~alone])
