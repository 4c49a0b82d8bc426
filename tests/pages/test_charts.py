"""Charts and the numbers in them."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_async.pages.charts import (
    LABEL_GAP,
    Series,
    age_bar,
    arrows,
    bin_edges,
    counted,
    duration,
    histogram,
    line_chart,
    percent,
    short_number,
    signed,
    small_chart,
    spread,
    ticks,
)
from mage_async.pages.curves import metric_charts, staleness, with_unit
from mage_async.pages.templating import svg
from mage_async.results.run_files import RunRecords


@given(st.lists(st.floats(0, 200), min_size=1, max_size=9), st.floats(1, 20), st.floats(100, 200))
def test_labels_keep_apart_and_in_order(wanted, gap, high):
    placed = spread(wanted, gap, 0.0, high)
    ordered = sorted(range(len(wanted)), key=lambda number: wanted[number])
    heights = [placed[number] for number in ordered]
    for upper, lower in itertools.pairwise(heights):
        assert lower - upper >= gap - 1e-6
    assert heights[0] >= -1e-6
    if gap * (len(wanted) - 1) <= high:
        assert heights[-1] <= high + 1e-6


def test_labels_with_room_stay_where_they_are():
    assert spread([80.0, 10.0, 40.0], 14.0, 0.0, 100.0) == [80.0, 10.0, 40.0]


def test_a_chart_of_many_lines_has_room_for_all_their_labels():
    lines = [Series(f"episode {k}", [(0.0, 0.0), (1.0, float(k))], "e0") for k in range(30)]
    chart = line_chart(lines, alt_text="")
    assert chart is not None
    assert max(height for _, height in chart.labels) < chart.area.height
    heights = sorted(height for _, height in chart.labels)
    assert all(b - a >= LABEL_GAP - 1e-9 for a, b in itertools.pairwise(heights))


def test_a_chart_draws_what_is_finite():
    line = Series("loss", [(0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 2.0)], "accent")
    drawn = svg(line_chart([line], alt_text="loss"))
    assert len(re.search(r'points="([^"]+)" class="line', drawn)[1].split()) == 2
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("nothing", "")
    assert "nothing was recorded" in svg(line_chart([], alt_text="loss"))
    assert "nothing was recorded" in svg(small_chart([(0.0, math.nan)], alt_text="loss"))


def test_a_long_line_is_thinned_and_keeps_its_ends_and_outliers():
    points = [(float(x), 9.0 if x == 33_333 else math.sin(x)) for x in range(50_000)]
    drawn = Series("", points, "").finite
    assert len(drawn) < 1100
    assert drawn == sorted(drawn)
    assert {points[0], points[33_333], points[-1]} <= set(drawn)
    assert len(Series("", points[:1000], "").finite) == 1000


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_round_ordered_and_inside(low, size, count):
    marks = ticks(low, low + size, count)
    assert marks == sorted(set(marks))
    assert len(marks) <= 2 * count
    slack = 1e-6 * max(1.0, abs(low), size)
    assert all(low - slack <= mark <= low + size + slack for mark in marks)


def test_ticks_of_a_tiny_range_are_apart():
    assert ticks(1e-12, 5e-12, 5) == [1e-12, 2e-12, 3e-12, 4e-12, 5e-12]
    assert ticks(0.0, 1e-11, 5) == [0.0, 2.5e-12, 5e-12, 7.5e-12, 1e-11]


@pytest.mark.parametrize(
    ("returns", "half", "shown"),
    [([0.4, 0.5], 0.05, 0.05), ([0.4, 0.5], 9.0, 0.4), ([0.4, 0.4], 0.3, 0.3)],
)
def test_an_interval_is_not_cut_by_the_axis_unless_its_line_would_be_flat(returns, half, shown):
    line = Series("held-out", [*enumerate(returns)], "heldout", [half, half])
    low, high = line_chart([line], alt_text="").area.y
    margin = 0.06 * (max(returns) - min(returns) + 2 * shown)
    assert (low, high) == pytest.approx((0.4 - shown - margin, returns[1] + shown + margin))


def test_an_axis_of_steps_has_no_halves():
    for last, names in ((3.0, ["1", "2", "3"]), (2.5, ["1", "1.5", "2", "2.5"])):
        chart = line_chart([Series("loss", [(1.0, 0.0), (last, 1.0)], "accent")], alt_text="")
        assert [name for _, name in chart.x_ticks] == names


@pytest.mark.parametrize("value", [1e17, -1e17, 1e300, 0.0])
def test_a_line_of_one_value_is_drawn_whatever_its_size(value):
    chart = line_chart([Series("kl", [(1.0, value), (2.0, value)], "accent")], alt_text="kl")
    assert chart.area.y[0] < value < chart.area.y[1]
    assert len(set(chart.y_ticks)) == len(chart.y_ticks) >= 2
    assert "nan" not in svg(chart)


def test_numbers_read_as_a_person_writes_them():
    assert [signed(v) for v in (0.754, -0.02, -0.001, 0.0)] == [
        "+0.75",
        "−0.02",
        "−0.00100",
        "0.00",
    ]
    assert [signed(-0.001, 2), signed(675.4), signed(-12e3)] == ["0.00", "+675", "−12,000"]
    assert arrows([0.0004, 0.00051]) == "+0.00040 → +0.00051"
    assert [short_number(v) for v in (0.0, 0.0123, 1.234, 56.78, 1234.0, 29376.0, 2.5e6)] == [
        "0",
        "0.0123",
        "1.23",
        "56.8",
        "1,234",
        "29.4k",
        "2.50M",
    ]
    assert [short_number(v) for v in (9_999.6, 999_940, 999_960, 999_996_000, 1e9, 2e17)] == [
        "10.0k",
        "999.9k",
        "1.00M",
        "1.00G",
        "1.00G",
        "2.0e17",
    ]
    assert [short_number(v) for v in (-0.5, 9e-7, 1.0004, 12345678)] == [
        "−0.5",
        "9.0e−7",
        "1",
        "12.35M",
    ]
    assert short_number(round(-0.003, 2)) == "0"
    assert [duration(s) for s in (9.34, 59.96, 96.3, 7500.0)] == [
        "9.3 s",
        "1 min 00 s",
        "1 min 36 s",
        "2 h 05 min",
    ]
    assert [percent(s) for s in (0.0, 0.004, 0.712, 1.0)] == ["0 %", "0.4 %", "71 %", "100 %"]
    assert [percent(s) for s in (1e-9, 0.0006, 0.0994, 0.0996, 0.1)] == [
        "< 0.1 %",
        "0.1 %",
        "9.9 %",
        "10 %",
        "10 %",
    ]


@pytest.mark.parametrize("written", [short_number, signed, percent])
def test_a_number_that_is_not_finite_is_written_as_such(written):
    assert [written(v) for v in (math.nan, math.inf, -math.inf)] == ["NaN", "∞", "−∞"]


def test_a_number_has_its_noun_in_the_right_number():
    assert [counted(n, "step") for n in (0, 1, 2048)] == ["no steps", "1 step", "2,048 steps"]
    units = [with_unit("staleness_max", n) for n in (1.0, 2.0)] + [with_unit("train_s", 1.0)]
    assert units == ["1 step", "2 steps", "1 s"]


def test_a_bar_of_ages_says_that_its_oldest_tokens_may_be_older():
    bar = age_bar("all", {0: 0.5, 1: 0.2, 8: 0.3})
    assert [part.title for part in bar.parts] == [
        "0 steps: 50 %",
        "1 step: 20 %",
        "8 or more steps: 30 %",
    ]
    assert [part.text for part in bar.parts] == ["0: 50 %", "1: 20 %", "8+: 30 %"]


def test_lines_in_a_small_unit_have_their_values_beside_their_labels():
    lines = [Series(name, [(0.0, y), (1.0, y)], "e0") for name, y in (("a", 4e-4), ("b", 9e-4))]
    drawn = svg(line_chart(lines, alt_text=""))
    assert re.findall(r'class="value">([^<]+)', drawn) == ["4.0e−4", "9.0e−4"]


def test_text_of_a_chart_is_escaped_and_its_markup_is_not():
    line = Series("<b>&", [(0.0, 1.0), (1.0, 2.0)], '"', has_dots=True)
    drawn = svg(line_chart([line], alt_text="<i>'"))
    assert drawn.startswith("<svg ")
    assert "<title>&lt;i&gt;&#39;</title>" in drawn
    assert "<title>&lt;b&gt;&amp;</title>&lt;b&gt;&amp; <tspan" in drawn
    assert 'class="line &#34;"' in drawn
    assert "<b>" not in drawn


def test_coordinates_are_written_to_a_hundredth():
    drawn = svg(small_chart([(0.0, 1.0), (3.0, 2.0)], alt_text=""))
    assert 'viewBox="0 0 240 84"' in drawn
    written = re.findall(r' (?:x|y|x1|x2|y1|y2)="([^"]*)"', drawn)
    assert written
    assert all(re.fullmatch(r"\d+(\.\d{1,2})?", number) for number in written)


@pytest.mark.parametrize("largest", [0.0, 2.0, 8.0, math.nan])
def test_the_chart_of_staleness_holds_the_bound_and_what_exceeds_it(largest):
    line = {"return_by_episode": [0.0], "staleness_mean": 0.5, "staleness_max": 1.0}
    chart = staleness([line | {"step": 1}, line | {"step": 2, "staleness_max": largest}], 2, 1)
    assert chart is not None
    heights = [chart.area.down(y) for series in chart.series for _, y in series.finite]
    assert len(heights) == 6 - math.isnan(largest)
    assert min(heights) >= chart.area.top
    assert max(heights) <= chart.area.height - chart.area.bottom


def test_the_mean_of_a_rate_is_over_time_also_if_only_some_steps_are_known():
    took = [4.0, 0.5] * 6  # seconds of steps of 144 trials, which wait for their batch in turns
    lines = [
        {"step": step, "time_s": sum(took[:step]), "trials_per_s": 144 / took[step - 1]}
        for step in range(1, 13)
    ]
    for known in (lines, lines[::3]):
        records = RunRecords(None, known, [], {}, {}, [], {})
        assert [each.mean for each in metric_charts(records, ["trials_per_s"])] == ["64"]


VALUES = st.lists(st.floats(-1e6, 1e6).map(lambda value: round(value, 6)), min_size=1, max_size=60)


@given(VALUES)
def test_every_value_lies_in_one_bin_and_bins_are_few(values):
    edges = bin_edges(values)
    assert 1 <= edges.count <= 32
    assert edges.low <= min(values) + 1e-6 * max(1, edges.width)
    for value in values:
        place = edges.bin_of(value)
        assert edges.low + place * edges.width <= value + 1e-6 * max(1, edges.width)
    bars = histogram(values, None, str, "reward")
    counts = [int(re.search(r": ([\d,]+) of", bar.title)[1].replace(",", "")) for bar in bars.bins]
    assert sum(counts) == len(values)


def test_whole_rewards_have_a_bin_each():
    bars = histogram([-1.0, 0.0, 0.0, 3.0], None, str, "reward")
    assert [bar.label for bar in bars.bins] == ["−1", "0", "1", "2", "3"]
    assert bars.bins[1].title == "0: 2 of 4 trials"


@pytest.mark.parametrize(
    ("values", "first", "count"), [([-1.0, 0.5, 1.0], "−1", 21), ([-2.0, 0.0, 1.5], "−2", 18)]
)
def test_the_first_bin_begins_at_a_lowest_value_that_is_an_edge(values, first, count):
    edges = bin_edges(values)
    assert (edges.label(0), edges.count) == (first, count)
    assert edges.bin_of(min(values)) == 0
