"""Staleness metrics on tokens few enough to count."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_async.learning.token_metrics import (
    TokenAges,
    effective_share,
    mean_k3,
    staleness_metrics,
)
from mage_async.results.metrics import check_names
from tests.helpers.flow_simulation import exact_length_bias

log_ratios = st.lists(st.floats(-5.0, 5.0, width=32), min_size=1, max_size=20)


def ages(staleness, episodes, *, ratios=None, clipped=(), masked=(), known=None):
    places = np.arange(len(staleness))
    return TokenAges(
        np.array(staleness, np.int32),
        np.array(episodes, np.int32),
        np.log(np.array(ratios or [1.0] * len(staleness), np.float32)),
        np.isin(places, clipped),
        np.isin(places, masked),
        np.array(known or [0] * len(staleness), np.int32),
    )


def test_the_share_over_the_bound_is_of_tokens_and_by_episode():
    found = staleness_metrics(ages([3, 3, 1, 0], [0, 0, 0, 1]), max_staleness=2)
    assert found["over_bound_share"] == 0.5
    assert found["over_bound_share_episode_1"] == pytest.approx(2 / 3)
    assert found["over_bound_share_episode_2"] == 0.0
    assert (found["staleness_mean"], found["staleness_max"]) == (1.75, 3.0)


def test_each_age_says_its_share_and_what_was_done_to_it():
    found = staleness_metrics(ages([0, 1, 1, 9], [0] * 4, clipped=[1], masked=[3]), max_staleness=2)
    assert (found["token_share_age_1"], found["clipped_share_age_1"]) == (0.5, 0.5)
    assert (found["token_share_age_8"], found["masked_share_age_8"]) == (0.25, 1.0)
    assert found["clipped_share_age_0"] == 0.0
    assert "token_share_age_2" not in found


def test_the_histogram_of_ages_is_of_the_episode_s_own_tokens():
    found = staleness_metrics(ages([3, 3, 1, 0], [0, 0, 0, 1]), max_staleness=2)
    assert found["token_share_age_3"] == 0.5
    assert found["token_share_age_3_episode_1"] == pytest.approx(2 / 3)
    assert found["token_share_age_0_episode_2"] == 1.0


def test_an_approximate_version_never_passes_for_an_exact_one():
    found = staleness_metrics(ages([0, 2, 4, 4], [0] * 4, known=[0, 0, 1, 2]), max_staleness=2)
    assert found["exact_staleness_mean"] == 1.0
    assert found["reply_staleness_mean"] == 4.0
    assert "segment_staleness_mean" in found
    check_names(found)


def test_every_name_is_explained():
    check_names(staleness_metrics(ages([0, 1, 12], [0, 1, 2]), max_staleness=1))


def test_a_step_without_tokens_has_no_staleness():
    assert staleness_metrics(ages([], []), max_staleness=1) == {}


def test_one_heavy_token_of_four_leaves_little_of_the_sample():
    found = staleness_metrics(ages([0] * 4, [0] * 4, ratios=[3.0, 1.0, 1.0, 1.0]), max_staleness=1)
    assert found["effective_share"] == pytest.approx(36 / (4 * 12))
    assert found["k3_mean"] == pytest.approx((3 - math.log(3) - 1) / 4)


@given(log_ratios)
def test_the_effective_share_lies_between_one_token_and_all(values):
    share = effective_share(np.array(values, np.float32))
    assert 1 / len(values) - 1e-9 <= share <= 1 + 1e-9


@given(log_ratios)
def test_k3_is_zero_for_equal_policies_and_never_negative(values):
    assert mean_k3(np.zeros(len(values), np.float32)) == 0.0
    assert mean_k3(np.array(values, np.float32)) >= -1e-12


def test_length_bias_is_zero_where_the_longest_tenth_is_never_trained():
    started = list(range(100))
    assert exact_length_bias(started, started) == 1.0
    assert exact_length_bias(started, started[:90]) == 0.0
    assert exact_length_bias(started, started[50:]) == pytest.approx(2.0)
    assert exact_length_bias([], []) == 1.0
