"""Advantages worked by hand."""

from dataclasses import replace

import numpy as np
import pytest

import mage_kernels
from mage_async.config.defaults import ON_CORES, ONE_SCALE
from mage_async.credit.turn_table import TurnTable
from mage_async.learning.advantages import Gigpo, GroupMean, LeaveOneOut

PER_TURN = ("group", "kind", "episode", "index")
ACT, REFLECT = 0, 1


def table(returns, **columns):
    """A table of one group, one trial a row, all else equal, unless said."""
    returns = np.array(returns, np.float64)
    zeros = np.zeros(len(returns), np.int64)
    names = ("group", "component", "member", "seat", "kind", "episode", "index", "anchor")
    given = {name: np.array(values) for name, values in columns.items()}
    defaults = {name: zeros for name in names} | {
        "trial": np.arange(len(returns)),
        "returns": returns,
        "episode_score": returns,
        "is_valid": np.ones(len(returns), bool),
        "num_tokens": np.ones(len(returns), np.int64),
        "memory": np.zeros(len(returns), np.int64),
        "num_sampled": np.ones(len(returns), np.int64),
    }
    return TurnTable(**defaults | given)


def advantages(rows, *, baseline, scale, leave_one_out=False, **rules):
    kind = LeaveOneOut if leave_one_out else GroupMean
    scale = "none" if scale is None else list(scale)
    return kind(baseline=list(baseline), scale=scale, **rules).estimate(rows, "cpu").numpy()


class LamersGigpo(Gigpo, tag="gigpo_of_lamer"):
    anchor_key = ("group", "anchor")


class LocalGigpo(Gigpo, tag="gigpo_local"):
    anchor_key = ("group", "episode", "anchor")


def anchor_term(rows, kind=LamersGigpo):
    """The second of GiGPO's terms, where the first is zero."""
    silent = replace(rows, episode_score=np.zeros(len(rows)))
    own = kind(baseline=["group"], scale="none", weight="sample", anchor_weight=1.0)
    return own.estimate(silent, "cpu").numpy()


def minus_mean_of_others(rows, baseline, weight):
    rule = {"baseline": baseline, "scale": None, "epsilon": 0.0, "leave_one_out": True}
    return advantages(rows, weight=weight, **rule)


def centred(rows, baseline, weight="trial"):
    return advantages(rows, baseline=baseline, scale=None, weight=weight, epsilon=0.0).tolist()


def scaled(rows, baseline, scale, weight="trial", epsilon=0.0):
    made = advantages(rows, baseline=baseline, scale=scale, weight=weight, epsilon=epsilon)
    return made.tolist()


def test_a_groups_mean_is_its_baseline():
    rows = table([1.0, 3.0, 10.0, 30.0], group=[0, 0, 1, 1])
    assert centred(rows, ("group",)) == [-1.0, 1.0, -10.0, 10.0]


def test_a_per_turn_baseline_compares_the_same_turn_of_different_trials():
    rows = table([1.0, 5.0, 3.0, 9.0], trial=[0, 0, 1, 1], episode=[0, 0, 0, 0], index=[0, 1, 0, 1])
    assert centred(rows, PER_TURN) == [-1.0, -2.0, 1.0, 2.0]
    assert centred(rows, ("group",)) == [-3.5, 0.5, -1.5, 4.5]


def test_a_trial_counts_once_or_each_of_its_turns_does():
    rows = table([0.0, 0.0, 0.0, 4.0], trial=[0, 0, 0, 1])
    assert centred(rows, ("group",), "trial") == [-2.0, -2.0, -2.0, 2.0]
    assert centred(rows, ("group",), "sample") == [-1.0, -1.0, -1.0, 3.0]
    assert scaled(rows, ("group",), (), "trial") == [-1.0, -1.0, -1.0, 1.0]
    assert scaled(rows, ("group",), (), "sample") == pytest.approx([-1 / 3**0.5] * 3 + [3**0.5])


def test_a_scale_pools_over_its_own_key():
    rows = table([1.0, 3.0, 10.0, 30.0], group=[0, 0, 1, 1], member=[0, 0, 1, 1])
    pooled = (101 / 2) ** 0.5
    assert scaled(rows, ("group",), ("member",)) == [-1.0, 1.0, -1.0, 1.0]
    assert scaled(rows, ("group",), ()) == pytest.approx(
        [-1 / pooled, 1 / pooled, -10 / pooled, 10 / pooled]
    )


def test_a_members_scale_pools_all_groups_that_face_it():
    rows = table(
        [-1.0, 1.0, -7.0, 7.0, 0.0, 4.0], group=[0, 0, 1, 1, 2, 2], member=[0, 0, 0, 0, 1, 1]
    )
    assert scaled(rows, ("group",), ("member",)) == pytest.approx([-0.2, 0.2, -1.4, 1.4, -1.0, 1.0])
    assert scaled(rows, ("group",), ("group",)) == [-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]


def test_the_scale_of_a_class_of_ones_own_rewards_no_action_that_earns_less_than_the_mean():
    """One trial of four acts otherwise: it earns 0.5 more in two tasks and 2 less in the third.
    With a scale for each task its advantages have a positive mean."""
    returns = np.ravel([[0, 0, 0, 0.5], [0, 0, 0, 0.5], [2, 2, 2, 0]])
    tasks = np.repeat([0, 1, 2], 4)
    rows = table(returns, group=tasks, member=tasks)
    odd = [3, 7, 11]
    by_task = advantages(rows, baseline=PER_TURN, scale=("member",))
    assert by_task[odd].mean() > 0
    own = ONE_SCALE["advantage"]["scale"]
    assert advantages(rows, baseline=PER_TURN, scale=own)[odd].mean() < 0


def test_epsilon_is_added_to_the_root_mean_square():
    assert scaled(table([1.0, 3.0]), ("group",), (), epsilon=1.0) == [-0.5, 0.5]


@pytest.mark.parametrize("unit", [1e-4, 1.0, 1000.0])
def test_advantages_of_a_class_of_ones_own_do_not_depend_on_the_unit_of_its_rewards(unit):
    keys = ONE_SCALE["advantage"] | {"baseline": ("group",)}
    returns, halves = np.array([0.0, 1.0, 0.25, 0.5]), np.repeat([0, 1], 4)
    rows = table([*returns, *(unit * returns - unit)], group=halves, component=halves)
    found = advantages(rows, **keys)
    assert found[4:] == pytest.approx(found[:4])
    assert found.max() > 1.0
    assert advantages(table([unit] * 4), **keys).tolist() == [0.0] * 4
    # Nor do those of early episodes, with a scale of their own, depend on what the last one pays.
    keys |= {"baseline": ("episode",), "scale": ("episode",)}
    assert advantages(table(rows.returns, episode=halves), **keys) == pytest.approx(found)


def test_a_turn_alone_in_its_cell_gets_zero():
    rows = table([5.0, 1.0, 3.0], index=[1, 0, 0])
    assert centred(rows, PER_TURN) == [0.0, -1.0, 1.0]
    assert scaled(table([5.0]), ("group",), ()) == [0.0]


@pytest.mark.parametrize("weight", ["trial", "sample"])
@pytest.mark.parametrize("scale", [None, (), ("group",), ("member",)])
def test_equal_returns_give_exactly_zero(weight, scale):
    rows = table([0.1] * 3, trial=[0, 0, 1])
    assert sum([0.1] * 3) / 3 != 0.1  # a plain mean would leave rounding behind
    assert scaled(rows, ("group",), scale, weight) == [0.0] * 3
    made = advantages(
        rows,
        baseline=("group",),
        scale=scale,
        weight=weight,
        epsilon=0.0,
        leave_one_out=True,
    )
    assert made.tolist() == [0.0] * 3


def test_rounding_of_equal_returns_is_not_scaled_up():
    rows = table([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], member=[0, 0])
    assert np.ptp(rows.returns) > 0
    assert scaled(rows, ("group",), ("group",)) == [0.0, 0.0]
    assert scaled(table([1e-9, 3e-9]), ("group",), ("group",)) == pytest.approx([-1.0, 1.0])


def test_leaving_one_out_compares_a_trial_with_the_mean_of_the_others():
    rows = table([1.0, 2.0, 6.0, 7.0], group=[0, 0, 0, 1])
    made = advantages(
        rows,
        baseline=("group",),
        scale=None,
        weight="trial",
        epsilon=0.0,
        leave_one_out=True,
    )
    assert made.tolist() == [-3.0, -1.5, 4.5, 0.0]


def test_leaving_one_out_says_nothing_of_a_trial_without_others():
    rows = table([1.0, 3.0], trial=[0, 0])
    for weight in ("trial", "sample"):
        assert minus_mean_of_others(rows, ("group",), weight).tolist() == [0.0, 0.0]


def test_leaving_one_out_leaves_out_all_turns_of_the_trial():
    rows = table([1.0, 3.0, 8.0, 2.0, 4.0], trial=[0, 0, 1, 2, 2])
    by_trial = minus_mean_of_others(rows, ("group",), "trial")
    assert by_trial == pytest.approx(rows.returns - [5.5, 5.5, 2.5, 5.0, 5.0])
    by_sample = minus_mean_of_others(rows, ("group",), "sample")
    assert by_sample == pytest.approx(rows.returns - [14 / 3, 14 / 3, 2.5, 4.0, 4.0])


@pytest.mark.parametrize("kind", [GroupMean, LeaveOneOut])
def test_only_what_leaves_one_out_sends_parts_of_cells_to_a_device(kind, monkeypatch):
    sent = []
    for name in ("minus_baseline", "over_rms"):
        kernel = getattr(mage_kernels, name)

        def spy(values, cells, *rest, kernel=kernel, **more):
            sent.append(cells.parts is not None)
            return kernel(values, cells, *rest, **more)

        monkeypatch.setattr(mage_kernels, name, spy)
    rows = table([0.0, 1.0, 4.0], trial=np.array([0, 1, 1]))
    kind(baseline=("group",), scale=("group",), weight="trial").estimate(rows, "cpu")
    assert sent == [kind is LeaveOneOut, False]


def test_parts_of_a_mix_have_baselines_and_scales_of_their_own_under_the_defaults_on_cores():
    key = ON_CORES["advantage"]
    rows = table([0, 1, 0, 100], group=[0, 1, 2, 3], component=[0, 0, 1, 1])
    assert scaled(rows, key["baseline"], key["scale"]) == [-1, 1, -1, 1]
    # Without a mix the column is constant, and changes nothing.
    rows = table([0, 1, 0, 100], group=[0, 1, 2, 3])
    found = advantages(rows, baseline=key["baseline"], scale=key["scale"])
    without = advantages(rows, baseline=["kind", "episode", "index"], scale=[])
    np.testing.assert_array_equal(found, without)


def test_the_anchor_term_compares_turns_in_the_same_state_of_a_group():
    rows = table(
        [1.0, 5.0, 9.0, 2.0, 4.0],
        group=[0, 0, 0, 1, 1],
        trial=[0, 1, 1, 2, 3],
        anchor=[3, 3, 4, 3, 3],
        episode=[0, 1, 1, 0, 0],
    )
    assert anchor_term(rows).tolist() == [-2.0, 2.0, 0.0, -1.0, 1.0]
    local = anchor_term(rows, LocalGigpo)
    assert local.tolist() == [0.0, 0.0, 0.0, -1.0, 1.0]


def test_the_anchor_term_is_added_with_its_weight_and_then_scaled():
    rows = table([1.0, 5.0, 3.0], anchor=[0, 0, 1])
    made = advantages(
        rows, baseline=("group",), scale=None, weight="trial", epsilon=0.0, anchor_weight=0.5
    )
    assert made.tolist() == [-3.0, 3.0, 0.0]
    made = advantages(
        rows, baseline=("group",), scale=(), weight="trial", epsilon=0.0, anchor_weight=0.5
    )
    assert made == pytest.approx([-(1.5**0.5), 1.5**0.5, 0.0])


def test_defect_10_long_trials_weigh_no_more_than_short_ones_when_trials_are_weighted():
    rows = table([0.0] * 9 + [10.0], trial=[0] * 9 + [1])
    assert centred(rows, ("group",), "sample")[-1] == 9.0
    assert centred(rows, ("group",), "trial")[-1] == 5.0


def test_defect_10_reflections_are_compared_with_reflections():
    rows = table([1.0, 8.0, 3.0, 10.0], trial=[0, 0, 1, 1], kind=[ACT, REFLECT, ACT, REFLECT])
    assert centred(rows, PER_TURN) == [-1.0, -1.0, 1.0, 1.0]


def test_opponents_of_one_group_are_kept_apart_by_the_key():
    rows = table([1.0, -5.0, 3.0, -7.0], member=[0, 1, 0, 1])
    assert centred(rows, ("group", "member")) == [-1.0, 1.0, 1.0, -1.0]
