"""Runs side by side: which belong together, what their page says, and what is refused."""

import math
import re

import pytest

from mage_async.compare import read_run
from mage_async.errors import RunError
from mage_async.intervals import interval
from mage_async.report.arms import arms, paired
from mage_async.report.comparison import compare, lines
from mage_async.summary import summarise, write_summary

LAST = ("evaluation", "heldout", "return_by_episode", -1)


@pytest.fixture
def runs(make_run):
    """Three seeds with a discount of 1 and two with 0.6; one has a journal of another size."""
    made = []
    for discount, seeds in ((1.0, (0, 1, 2)), (0.6, (0, 1))):
        for seed in seeds:
            settings = [f"credit.episode_discount={discount}", f"journal.max_bytes={10**9 + seed}"]
            place = make_run(f"{discount}-{seed}", seed=seed, settings=settings)
            write_summary(place, summarise(place, wall_s=60.0 + seed, processor_s=60.0))
            made.append(read_run(place))
    return made


def test_an_arm_is_the_runs_that_differ_in_nothing_but_their_seed(runs):
    found = arms(reversed(runs))
    assert [arm.settings for arm in found] == [
        {"credit.episode_discount": 0.6},
        {"credit.episode_discount": 1.0},
    ]
    assert [[run.records.config.seed for run in arm.runs] for arm in found] == [[0, 1], [0, 1, 2]]
    assert found[0].label == "episode_discount 0.6"


def test_runs_of_one_configuration_are_one_arm(runs):
    assert [arm.label for arm in arms(runs[:3])] == ["all runs"]


def test_an_interval_over_runs_is_students():
    assert interval([1.0, 3.0]) == pytest.approx((2.0, 12.706), abs=1e-9)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)), abs=1e-9)
    mean, half = interval([4.0])
    assert mean == 4.0
    assert math.isnan(half)


def test_differences_are_taken_seed_by_seed(runs):
    first, second = arms(runs)
    expected = [
        b.summary["evaluation"]["heldout"]["return_by_episode"][-1]
        - a.summary["evaluation"]["heldout"]["return_by_episode"][-1]
        for a, b in zip(first.runs, second.runs, strict=False)
    ]
    assert paired(first, second, *LAST) == pytest.approx(expected)


def test_the_page_names_the_arms_and_says_what_each_reached(runs):
    page = compare(runs)
    assert "2 arms; they differ in credit.episode_discount" in page
    reached = page[page.index("What was reached") :]
    assert re.findall(r"<th>(episode_discount [\d.]+)</th>", reached)[:2] == [
        "episode_discount 1",
        "episode_discount 0.6",
    ]
    mean, half = interval(arms(runs)[0].values(*LAST))
    assert f"+{mean:.3f} ± {half:.3f}" in reached
    assert "fewer than three runs supports no statement" in reached


def test_a_terminal_gets_a_line_an_arm(runs):
    assert [(row["arm"], row["runs"]) for row in lines(runs)] == [
        ("episode_discount 1", 3),
        ("episode_discount 0.6", 2),
    ]


def test_a_single_run_is_no_comparison(runs):
    with pytest.raises(ValueError, match="at least two runs, got 1"):
        compare(runs[:1])


def test_a_run_that_has_not_ended_is_refused(make_run):
    with pytest.raises(RunError, match=r"no summary\.json: it has not ended"):
        read_run(make_run())
