"""What the doctor finds in a run that is looked at again and again."""

import json

import pytest

from mage_async.doctor import Doctor
from mage_services.view.index import RunReader
from mage_services.view.page_request import PageRequest
from mage_services.view.run_pages import _records, config_of, examined, overview
from mage_services.view.trial_pages import step
from tests.helpers.recorded_runs import unpack
from tests.view.conftest import build


@pytest.fixture
def looked_at(tmp_path, monkeypatch):
    """A run, and the steps that a doctor was shown so far."""
    shown, examine = [], Doctor.step

    def noted(self, record):
        shown.append(record["step"])
        return examine(self, record)

    monkeypatch.setattr(Doctor, "step", noted)
    return unpack("finished", tmp_path), shown


def examine(run):
    build(run)
    with RunReader(run) as reader:
        return examined(reader, _records(reader, config_of(run)))


def findings(run):
    return [each.name for each in examine(run)[0]]


def append(run, **changes):
    record = json.loads(run.metrics.read_text().splitlines()[-1])
    with run.metrics.open("a") as out:
        out.write(json.dumps(record | {"step": record["step"] + 1} | changes) + "\n")


def test_a_step_is_examined_once_and_what_was_found_stays(looked_at):
    run, shown = looked_at
    assert "not_finite" not in findings(run)
    append(run, loss=float("nan"))
    assert "not_finite" in findings(run)
    append(run, loss=0.1)
    assert "not_finite" in findings(run)
    assert shown == [1, 2, 3, 4, 5, 6]


def test_a_step_that_is_indexed_while_a_page_is_made_is_examined(looked_at, monkeypatch):
    run, shown = looked_at
    findings(run)
    append(run)

    def stale(self):
        return 4

    monkeypatch.setattr(RunReader, "last_step", stale)
    append(run)
    findings(run)
    assert shown == [1, 2, 3, 4, 5, 6]


def test_what_a_page_shows_does_not_change_while_another_page_is_made(looked_at):
    run, _ = looked_at
    append(run, trained_groups=[["kind", "task", 3, 7]])
    before = examine(run)[1]
    append(run, trained_groups=[["kind", "task", 3, 2]])
    assert examine(run)[1].whole().trained == 9
    assert before.whole().trained == 7


@pytest.mark.parametrize("num_steps", [120, 121])
def test_the_page_says_whether_steps_are_left_out(looked_at, num_steps):
    run, _ = looked_at
    for _ in range(4, num_steps):
        append(run)
    build(run)
    page = overview(PageRequest("/token/", {"run": run}, "run", {}, {}, None))
    assert ("evenly spaced steps are shown" in page) == (num_steps > 120)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_pages_of_a_run_show_a_step_that_is_not_finite(looked_at, value):
    run, _ = looked_at
    append(run, loss=value, grad_norm=value)
    build(run)
    assert "loss" in overview(PageRequest("/token/", {"run": run}, "run", {}, {}, None))
    shown = step(PageRequest("/token/", {"run": run}, "run", {"step": 5}, {}, None))
    assert ("NaN" if value != value else "∞") in shown


def test_the_steps_of_a_run_are_known_before_its_index_is_built(looked_at):
    run, _ = looked_at
    RunReader(run)  # makes an empty index
    page = overview(PageRequest("/token/", {"run": run}, "run", {}, {}, None))
    assert "step 4 of 4" in page
    assert "Before the first step" not in page
    assert "no step was trained" not in page
    assert "known when the index has read a step" in page


def test_a_run_that_began_anew_is_examined_anew(looked_at):
    run, shown = looked_at
    lines = run.metrics.read_text().splitlines(keepends=True)
    append(run, loss=float("nan"))
    findings(run)
    run.metrics.write_text("".join(lines[:2]).replace('"step": 1,', '"step":  1,'))
    assert "not_finite" not in findings(run)
    assert shown == [1, 2, 3, 4, 5, 1, 2]
