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


def findings(run):
    build(run)
    with RunReader(run) as reader:
        return [each.name for each in examined(reader, _records(reader, config_of(run)))]


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
