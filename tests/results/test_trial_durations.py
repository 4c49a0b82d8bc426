"""What becomes of long trials, counted in bins."""

import random

import pytest

from mage_async.results import dropped_bias as counted
from mage_async.results.dropped_bias import DurationHistogram, TrialDurations, length_bias
from tests.helpers.flow_simulation import exact_length_bias


def histogram(lengths_s):
    made = DurationHistogram()
    made.add(lengths_s)
    return made


def test_a_trial_counts_once_and_one_of_a_dropped_group_counts_as_lost():
    lengths = TrialDurations()
    for grant in range(10):
        lengths.arrived(grant, 0, 1.0 + grant)
    lengths.arrived(3, 0, 100.0)  # sent again
    lengths.trained(range(9))
    lengths.arrived(2, 0, 100.0)  # a late duplicate
    assert lengths.length_bias(in_flight={9}) == 1.0
    assert lengths.wasted_share(in_flight={9}) == 0.0
    assert lengths.length_bias(in_flight=()) == 0.0
    assert lengths.wasted_share(in_flight=()) == pytest.approx(10 / 55)


def test_what_is_forgotten_is_still_counted_and_its_results_are_not(monkeypatch):
    monkeypatch.setattr(counted, "NUM_REMEMBERED", 4)
    lengths = TrialDurations()
    for grant in range(20):
        lengths.arrived(grant, 0, 1.0 + grant)
    lengths.trained(range(10))
    before = lengths.length_bias(in_flight=()), lengths.wasted_share(in_flight=())
    lengths.forget_before(20)
    lengths.arrived(2, 0, 1000.0)
    lengths.arrived(12, 1, 1000.0)
    assert (lengths.length_bias(in_flight=()), lengths.wasted_share(in_flight=())) == before
    assert len(lengths._untrained_durations) + len(lengths._trained_grants) == 4


@pytest.mark.parametrize("kept", ["all", "short ones", "half"])
def test_bins_of_one_percent_say_what_all_lengths_say(kept):
    source = random.Random(0)
    started = [source.lognormvariate(2.0, 0.8) for _ in range(5000)]
    chosen = {"all": started, "short ones": sorted(started)[:4600], "half": started[::2]}[kept]
    exact = exact_length_bias(started, chosen)
    assert length_bias(histogram(started), histogram(chosen)) == pytest.approx(exact, abs=0.05)


def test_nothing_is_biased_before_a_trial_is_trained():
    assert length_bias(histogram([1.0]), histogram([])) == 1.0
    assert length_bias(histogram([]), histogram([])) == 1.0
