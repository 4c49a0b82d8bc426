"""Token buckets: a burst at once, a rate in the long run."""

from hypothesis import given
from hypothesis import strategies as st

from mage_async.protocol.rate_limits import Allowance, Level, Meter, Rate, spend

RATE = Rate(per_s=10.0, burst=20.0)


def test_a_full_bucket_gives_its_burst_at_once_and_its_rate_after_that() -> None:
    level = spend(Level(20.0, 0.0), 20, RATE, now=0.0)
    assert level.tokens == 0.0
    assert spend(level, 1, RATE, now=0.0).tokens < 0
    assert spend(level, 1, RATE, now=0.1).tokens == 0.0


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    assert spend(Level(20.0, 0.0), 0, RATE, now=1e9).tokens == 20.0


def test_a_clock_that_goes_back_adds_nothing_and_a_later_second_counts_once() -> None:
    level = spend(Level(0.0, 100.0), 0, RATE, now=50.0)
    assert level == Level(0.0, 100.0)
    assert spend(level, 0, RATE, now=101.0).tokens == 10.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100)), min_size=1, max_size=50))
def test_what_is_let_through_is_at_most_burst_and_rate(spendings) -> None:
    level, now, passed = Level(RATE.burst, 0.0), 0.0, 0.0
    for wait_s, amount in spendings:
        now += wait_s
        after = spend(level, amount, RATE, now=now)
        if after.tokens >= 0:
            level, passed = after, passed + amount
    assert passed <= RATE.burst + RATE.per_s * now + 1e-6


def test_a_meter_says_which_rate_was_passed() -> None:
    allowance = Allowance(Rate(1, 2), Rate(2**20, 2**20), Rate(1, 1))
    meter = Meter(allowance, now=0.0)
    assert meter.arrived(10, now=0.0) == ""
    assert meter.arrived(2**20, now=0.0) == "over 1 MiB a second"
    assert meter.arrived(0, now=0.0) == "over 1 messages a second"
    assert meter.was_malformed(now=0.0) == ""
    assert meter.was_malformed(now=0.0) == "over 1 malformed messages"


def test_messages_that_were_wanted_do_not_count_however_many_they_are() -> None:
    meter = Meter(Allowance(Rate(1, 2), Rate(2**20, 2**20), Rate(1, 1)), now=0.0)
    for _ in range(1000):
        assert meter.arrived(0, now=0.0) == ""
        meter.was_wanted()
    reasons = [meter.arrived(0, now=0.0) for _ in range(3)]
    assert reasons == ["", "", "over 1 messages a second"]


def test_wanted_messages_are_no_store_for_later_ones() -> None:
    meter = Meter(Allowance(Rate(1, 2), Rate(2**20, 2**20), Rate(1, 1)), now=0.0)
    for _ in range(1000):
        meter.was_wanted()
    reasons = [meter.arrived(0, now=0.0) for _ in range(3)]
    assert reasons == ["", "", "over 1 messages a second"]
