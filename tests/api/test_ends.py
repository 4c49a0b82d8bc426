"""What a run says when it is stopped, and what its records count after a resumption."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from mage_async.config import config_file
from mage_async.doctor import Doctor
from mage_async.results import run_files
from mage_async.results.run_directory import RunDirectory, checkpoint_at
from mage_async.results.run_files import read_document
from mage_async.results.summary import summarise, write_summary
from mage_services.api import start_to_report
from mage_services.processes.supervisor import Supervisor


class Lines:
    """A view that remembers its lines."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, process: str, event: dict[str, Any]) -> None:
        pass

    def line(self, text: str) -> None:
        self.said.append(text)

    def close(self, summary: dict[str, Any] | None) -> None:
        pass


def test_the_costs_of_a_resumed_run_are_those_of_all_its_starts(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(steps=12)
    run.root.joinpath("sockets").mkdir()
    config = config_file.load(run.config)
    write_summary(run, summarise(run, wall_s=1000.0, processor_s=2000.0))

    async def until_signalled(supervisor: Supervisor) -> None:
        # `os.times` counts hundredths of a second.
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass

    monkeypatch.setattr(start_to_report, "until_signalled", until_signalled)
    before = sum(os.times()[:4])
    assert start_to_report.run_to_end(run, config, num_actors=1, view=Lines()) == 0
    spent = sum(os.times()[:4]) - before
    summary = read_document(run.summary)
    assert 1000.0 < summary["wall_s"] < 1100.0
    # What the process and its children had used before, such as an earlier run in a notebook, is no
    # cost of the run.
    assert before > 0.5
    assert 2000.0 < summary["processor_s"] <= 2000.0 + spent
    assert "wall time" in run.report.read_text()


@pytest.mark.parametrize(
    ("checkpoint", "repeated"),
    [
        (10, ", which first trains steps 11 to 12 again, from the journal: nothing is lost"),
        (11, ", which first trains step 12 again, from the journal: nothing is lost"),
        (12, ""),
        (0, ", which first trains steps 1 to 12 again, from the journal: nothing is lost"),
    ],
)
def test_a_stopped_run_names_the_command_that_goes_on_and_what_it_repeats(
    make_run: Callable[..., RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: int,
    repeated: str,
) -> None:
    run = make_run("a run", steps=12, finished=False)
    if checkpoint:
        checkpoint_at(run.checkpoints, checkpoint).mkdir(parents=True)

    async def until_signalled(supervisor: Supervisor) -> int:
        return signal.SIGTERM

    monkeypatch.setattr(start_to_report, "until_signalled", until_signalled)
    config, view = config_file.load(run.config), Lines()
    code = start_to_report._supervise(Supervisor(run, config, 1, "", view))
    assert code == 128 + signal.SIGTERM
    command = f"`mage train --resume --run-dir '{run.root}'`"
    if repeated:
        newest = f"the newest checkpoint is of step {checkpoint}"
        newest = newest if checkpoint else "no checkpoint is written"
        repeated += f"; until then {newest}, so `mage evaluate` and `mage play` have step "
        repeated += f"{checkpoint}"
    assert view.said == [f"ended by SIGTERM; go on with {command}{repeated}"]


def test_a_run_that_is_stopped_behind_its_final_sets_has_nothing_to_go_on_with(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until_signalled(supervisor: Supervisor) -> int:
        return signal.SIGINT

    monkeypatch.setattr(start_to_report, "until_signalled", until_signalled)
    run, view = make_run(), Lines()
    start_to_report._supervise(Supervisor(run, config_file.load(run.config), 1, "", view))
    ended = "ended by SIGINT; all steps are trained, and the final sets are played"
    assert view.said == [ended]
    monkeypatch.setattr(start_to_report, "LONG_STEPS", 60)
    start_to_report._supervise(Supervisor(run, config_file.load(run.config), 1, "", view))
    long = "the summary and the report of 60 steps are made, which may take a while"
    assert view.said[1:] == [long, ended]


def test_a_summary_is_written_before_the_page_that_may_fail(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> str:
        raise ArithmeticError("a page that cannot be made")

    run = make_run(steps=12)
    run.summary.unlink(missing_ok=True)
    monkeypatch.setattr(start_to_report, "render", fails)
    doctor, costs = Doctor.of(config_file.load(run.config)), {"wall_s": 1.0, "processor_s": 1.0}
    with pytest.raises(ArithmeticError):
        start_to_report._finish(run, doctor, Lines(), costs, {})
    assert read_document(run.summary)["wall_s"] == 1.0


def test_the_end_of_a_long_run_reads_its_metrics_once(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = make_run(steps=12), list[Any]()
    doctor = Doctor.of(config_file.load(run.config))
    # The steps were examined while they were trained.
    monkeypatch.setattr(Doctor, "step", lambda self, record: pytest.fail("examined again"))
    parsed = run_files.parsed
    monkeypatch.setattr(run_files, "parsed", lambda *given: read.append(given[0]) or parsed(*given))
    start_to_report._finish(run, doctor, Lines(), {"wall_s": 1.0, "processor_s": 1.0}, {})
    assert read.count(run.metrics) == 12
