"""What a full disk leaves of a run: one line for the person, and files that the next start can
read.
"""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.doctor import Doctor
from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document, read_lines
from mage_async.results.score import Score
from mage_services.actor.evaluator import CurveEvaluator
from mage_services.api import start_to_report
from mage_services.api.start_to_report import site_of
from mage_services.cli.main import EXIT_USAGE, main
from mage_services.learner.resume import _remove_lines_after
from mage_services.processes.process import Startup, Status, append_lines
from mage_services.processes.supervisor import Supervisor

WHOLE = '{"version": 10, "sets": {}}\n'
HALF = '{"version": 20, "se'


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be made and emptied, and take no byte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Lines:
    """A view that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.summary: dict[str, Any] | None = None

    def event(self, process: str, event: dict[str, Any]) -> None:
        raise AssertionError(process, event)

    def line(self, text: str) -> None:
        self.said.append(text)

    def close(self, summary: dict[str, Any] | None) -> None:
        self.summary = summary


class Measures:
    """An evaluator without an engine."""

    async def curve(self, num_trials: int) -> dict[str, Score]:
        return {"heldout": Score(1, [0.0], *([] for _ in range(6)), {}, {}, {}, 0.0, [], 0.0)}


@pytest.fixture
def config() -> Config:
    return config_file.load(config_file.find(None), [])


@pytest.fixture
def run(tmp_path: Path, config: Config) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.root.mkdir()
    directory.config.write_text(config_file.dump(config))
    return directory


def test_a_run_that_ends_on_a_full_disk_says_why_and_leaves_nothing_in_shared_memory(
    run: RunDirectory, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(supervisor: object) -> None:
        raise ExceptionGroup("", [RunError("learner ended with exit code 2")])

    monkeypatch.setattr(start_to_report, "until_signalled", ends)
    run.supervisor.write_text('{"blocked_s": {}}\n')
    run.shared_weights.mkdir()
    view = Lines()
    with (
        full_disk(),
        pytest.raises(RunError, match="learner ended with exit code 2"),
        site_of(run, config, 1, "", view.line) as (address, start),
    ):
        start_to_report._supervise(
            Supervisor(run, config, 1, address, view, Doctor.of(config), start)
        )
    assert view.said == [f"{run.supervisor} cannot be written: File too large"]
    assert not run.shared_weights.exists()
    assert not (run.root / "sockets").exists()
    assert read_document(run.supervisor) == {"blocked_s": {}}


def test_a_summary_that_cannot_be_written_is_shown_and_said_in_one_line(
    run: RunDirectory, config: Config
) -> None:
    view = Lines()
    costs = {"wall_s": 1.0, "processor_s": 1.0}
    with full_disk(), pytest.raises(RunError, match="no summary and report"):
        start_to_report._finish(run, Doctor.of(config), view, costs, {})
    assert view.summary is not None


def test_a_configuration_that_cannot_be_written_leaves_the_old_one(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.config.read_text()
    with full_disk():
        status = main(["--resume", "--run-dir", str(run.root), "--set", "seed=7"])
    assert status == EXIT_USAGE
    assert capsys.readouterr().err == (
        f"mage: {run.root} cannot be written: File too large; choose another --run-dir, or make "
        "room\n"
    )
    assert run.config.read_text() == before


def test_what_the_evaluator_measures_stands_behind_whole_lines(
    run: RunDirectory, config: Config
) -> None:
    startup = Startup(run, config, "", "", "evaluator", "")
    follower = CurveEvaluator(startup, Status(), None)
    run.curve.write_text(WHOLE + HALF)
    asyncio.run(follower._point(Measures(), 30))
    assert [line["version"] for line in read_lines(run.curve)] == [10, 30]


@pytest.mark.parametrize("left", [None, "", HALF, WHOLE, WHOLE + HALF, WHOLE + "\n"])
def test_a_line_is_appended_to_whatever_was_left(run: RunDirectory, left: str | None) -> None:
    if left is not None:
        run.curve.write_text(left)
    append_lines(run.curve, [{"version": 30}, {"version": 40}])
    before = [10] if left and left.startswith(WHOLE) else []
    assert [line["version"] for line in read_lines(run.curve)] == [*before, 30, 40]


def test_a_line_that_does_not_fit_leaves_those_before_it(run: RunDirectory) -> None:
    run.curve.write_text(WHOLE)
    with full_disk(), pytest.raises(OSError, match="too large"):
        append_lines(run.curve, [{"version": 30}])
    assert run.curve.read_text() == WHOLE


def test_a_learner_begins_behind_half_a_line_that_somebody_wrote_on(run: RunDirectory) -> None:
    later = '{"version": 40, "sets": {}}\n'
    run.curve.write_text(WHOLE + HALF + later.replace("40", "30") + WHOLE + later + HALF)
    _remove_lines_after(run.curve, "version", 30)
    assert run.curve.read_text() == WHOLE + WHOLE


def test_a_learner_begins_behind_lines_that_a_loss_of_power_left(run: RunDirectory) -> None:
    run.curve.write_bytes(WHOLE.encode() + bytes(40) + b"\n\xff{}\n" + WHOLE.encode())
    _remove_lines_after(run.curve, "version", 30)
    assert run.curve.read_text() == WHOLE + WHOLE
