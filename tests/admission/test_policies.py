"""Each admission policy on a flow small enough to follow, and what it guarantees in any flow."""

import math
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.admission.policies import POLICIES, AdmissionState, take_from_window
from mage_async.config.schema import Admission
from tests.helpers.flow_simulation import Workload, simulate

DONE, PLAYED = True, False
HARD = {"sync": 0, "one_step": 1, "strict": 2, "drop": 2, "slots": 2, "overtake": 2}
"""Staleness no group may exceed, where max_staleness is 2."""


class Pending(NamedTuple):
    grant: int
    version: int
    is_complete: bool


def flow(*groups, version=3, training=0, groups_per_step=2, max_staleness=2):
    """`groups` are (version granted at, is complete), in order of grant, from number 0."""
    pending = [Pending(number, *group) for number, group in enumerate(groups)]
    return AdmissionState(groups_per_step, max_staleness, version, pending, training)


def test_slots_wait_for_the_oldest_and_count_lets_it_be_overtaken():
    now = flow((1, PLAYED), (2, DONE), (3, DONE))
    assert POLICIES["slots"].next_batch(now) == []
    assert POLICIES["strict"].next_batch(now) == []
    assert POLICIES["count"].next_batch(now) == [1, 2]


def test_a_group_may_be_overtaken_until_it_is_due():
    young = flow((2, PLAYED), (2, DONE), (3, PLAYED), (3, DONE))
    assert POLICIES["overtake"].next_batch(young) == [1, 3]
    due = flow((1, PLAYED), (2, DONE), (3, DONE))
    assert POLICIES["overtake"].next_batch(due) == []
    assert POLICIES["overtake"].next_batch(flow((1, DONE), (2, PLAYED), (3, DONE))) == [0, 2]


def test_no_more_groups_are_left_behind_than_the_batches_before_they_are_due_can_take():
    two = flow((2, PLAYED), (2, PLAYED), (2, DONE), (3, DONE))
    assert POLICIES["overtake"].next_batch(two) == [2, 3]
    three = flow((2, PLAYED), (2, PLAYED), (2, PLAYED), (2, DONE), (3, DONE))
    assert POLICIES["overtake"].next_batch(three) == []


def test_a_batch_in_training_leaves_overtaken_groups_a_batch_less():
    now = flow((2, PLAYED), (2, DONE), (3, DONE), training=1)
    assert POLICIES["overtake"].next_batch(now) == []


def test_a_window_slides_over_what_is_taken_and_stops_at_what_is_not():
    now = flow((1, DONE), (1, PLAYED), (2, DONE), (3, DONE))
    assert take_from_window(now, 1) == []
    assert take_from_window(now, 2) == [0, 2]
    stuck = flow((1, PLAYED), (1, PLAYED), (2, DONE), (3, DONE))
    assert take_from_window(stuck, 2) == []
    assert take_from_window(stuck, 3) == [2, 3]


def test_drop_gives_up_what_could_only_be_trained_over_age():
    now = flow((0, DONE), (1, PLAYED), (1, DONE), (3, DONE))
    assert POLICIES["drop"].over_age(now) == [0]
    assert POLICIES["drop"].next_batch(now) == [2, 3]
    assert POLICIES["count"].over_age(now) == []


def test_a_batch_taken_while_another_trains_is_a_step_staler():
    now = flow((1, DONE), (2, DONE), (3, DONE), training=1)
    assert POLICIES["drop"].next_batch(now) == [1, 2]


def test_groups_in_training_count_against_slots_and_not_against_the_next_batch():
    full = flow(*[(3, PLAYED)] * 4, training=1)
    assert not POLICIES["slots"].may_grant(full)
    assert POLICIES["slots"].may_grant(flow(*[(3, PLAYED)] * 3, training=1))
    assert POLICIES["one_step"].may_grant(flow((3, PLAYED), training=1))
    assert not POLICIES["one_step"].may_grant(flow((3, PLAYED), (3, PLAYED)))
    assert not POLICIES["sync"].may_grant(flow(training=1))
    assert POLICIES["unbounded"].may_grant(full)


def test_the_configuration_knows_exactly_the_rules_there_are():
    assert set(POLICIES) == set(Admission.__annotations__["rule"].__args__)


@pytest.mark.parametrize("name", HARD)
@given(
    sigma=st.floats(0.0, 2.5),
    in_play=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    groups_per_step=st.integers(1, 5),
)
@settings(max_examples=15, deadline=None)
def test_a_hard_rule_holds_under_any_lengths(name, sigma, in_play, seed, groups_per_step):
    work = Workload(groups_per_step, in_play, max_staleness=2, sigma=sigma, steps=25, settle=0)
    assert simulate(POLICIES[name], work, seed).staleness_max <= HARD[name]


@given(sigma=st.floats(0.0, 2.0), seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_strict_and_slots_make_the_same_decisions(sigma, seed):
    work = Workload(4, 8, sigma=sigma, steps=30, settle=5)
    assert simulate(POLICIES["strict"], work, seed) == simulate(POLICIES["slots"], work, seed)


def test_every_rule_says_what_it_guarantees():
    said = {name: rule.guarantee.split(":")[0] for name, rule in POLICIES.items()}
    assert {name for name, words in said.items() if words.startswith("hard")} == set(HARD)
    assert said["count"] == said["window"] == "mean only"
    assert said["unbounded"] == "nothing"


def test_without_variance_nothing_is_late_under_any_rule():
    work = Workload(4, 4, sigma=0.0, steps=40, settle=10)
    for rule in POLICIES.values():
        outcome = simulate(rule, work, 0)
        assert outcome.work_wasted == 0.0
        assert math.isclose(outcome.length_bias, 1.0)
