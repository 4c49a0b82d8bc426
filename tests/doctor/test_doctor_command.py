"""`mage doctor`, the report's section and the line of the terminal."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

import mage_async as mage
from mage_async.doctor import SIGNATURES
from mage_async.pages.report import render
from mage_async.results.run_directory import RunDirectory
from mage_async.results.summary import summarise
from mage_services.cli.main import main
from mage_services.processes.run_lock import take_lock
from mage_services.processes.supervisor import RecordedView
from mage_services.terminal.plain_lines import make_view
from mage_services.view.page_request import PageRequest
from mage_services.view.run_pages import overview
from tests.doctor.sick_runs import made_sick
from tests.helpers.made_up_runs import make_run
from tests.helpers.status_events import POLICY, in_view, started


def make_sick_run(root: Path, name: str) -> RunDirectory:
    """A made-up run whose steps have a signature."""
    run = RunDirectory(root)
    make_run(run)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    sick = [line | record for line, record in zip(lines, made_sick(name), strict=True)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in sick))
    return run


def test_a_run_that_is_well_ends_with_status_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(RunDirectory(tmp_path / "run"))
    assert main(["doctor", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run'}: 60 steps, no findings\n"


def test_a_folder_of_runs_is_looked_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(RunDirectory(tmp_path / "a"))
    make_sick_run(tmp_path / "deeper" / "b", "truncation")
    make_run(RunDirectory(tmp_path / "short"), steps=1)
    assert main(["doctor", str(tmp_path)]) == 1
    well, sick, finding, short = capsys.readouterr().out.splitlines()
    assert well.endswith(": 60 steps, no findings")
    assert sick.endswith(": 60 steps, 1 finding")
    assert short.endswith(": 1 step, no findings")
    assert finding.startswith("  truncation since step 31: 20% of actions")
    assert finding.endswith(SIGNATURES["truncation"].remedy)
    (found,) = mage.load(tmp_path / "deeper" / "b").findings()
    assert finding == f"  {found.sentence()}"


def test_a_run_before_its_end_goes_on_or_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    make_run(run, finished=False)
    os.close(take_lock(run))
    assert main(["doctor", str(run.root)]) == 0
    last = "\n  it ended after step 60 of 60, before its final evaluation: go on with `"
    assert last in capsys.readouterr().out
    run.metrics.write_text("".join(run.metrics.read_text().splitlines(keepends=True)[:7]))
    lock = take_lock(run)
    assert main(["doctor", str(run.root)]) == 0
    assert "\n  it has trained 7 of 60 steps, and goes on\n" in capsys.readouterr().out
    os.close(lock)
    assert main(["doctor", str(run.root)]) == 0
    assert f"ended after step 7 of 60: go on with `{run.resume_command}`" in capsys.readouterr().out


def test_how_deep_a_folder_is_searched_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "at most 3 levels below it" in " ".join(capsys.readouterr().out.split())
    make_run(RunDirectory(tmp_path / "1" / "2" / "3"), steps=1)
    assert main(["doctor", str(tmp_path)]) == 0
    make_run(RunDirectory(tmp_path / "deep" / "1" / "2" / "3" / "4"), steps=1)
    assert main(["doctor", str(tmp_path / "deep")]) == 2
    assert "no config.toml in it, nor at most 3 levels below it" in capsys.readouterr().err


def test_an_evaluation_inside_a_run_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    make_run(run)
    elsewhere = run.root / "environment_maze" / "episodes_5"
    elsewhere.mkdir(parents=True)
    (elsewhere / run.config.name).write_text(run.config.read_text())
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{run.root}: 60 steps, no findings\n"


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "neither a run nor a folder with runs" in capsys.readouterr().err


def test_the_report_shows_findings_as_text(tmp_path: Path) -> None:
    run = make_sick_run(tmp_path / "run", "over_bound")
    run.metrics.write_text(run.metrics.read_text().replace("actor-2", "<script>"))
    page = render(run, summarise(run, wall_s=1.0, processor_s=1.0))
    assert "What the doctor found" in page
    assert "<b>over_bound</b> of &lt;script&gt; since step 31" in page


def test_the_page_has_a_row_for_every_signature() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "doctor.md").read_text()
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rows == list(SIGNATURES)


def test_a_run_without_a_step_says_what_it_waits_for_and_what_was_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path)
    config = make_run(run, steps=0, finished=False)
    clock = iter(range(1000, 2000))
    screen = make_view(config, run, is_terminal=False, console=Console(file=io.StringIO()))
    view = RecordedView(screen, run, lambda: float(next(clock)))
    view.event(*started("learner"))
    assert main(["doctor", str(run.root)]) == 0
    assert "nothing is played yet: learner starting" in capsys.readouterr().out
    view.event(*POLICY)
    drop = "a group is dropped: missed its deadline 5 times. Raise admission.grant_deadline_s."
    view.event(*in_view(5, [drop], dropped={"missed its deadline": 1}))
    assert main(["doctor", str(run.root)]) == 1
    said = capsys.readouterr().out
    assert f"{run.root}: no steps, no findings, 1 note\n  it ended " in said
    assert "step 1/60 waits for trials, for 8 s: 5 of 128 trials are in" in said
    assert "1 groups dropped (1 missed its deadline)" in said
    assert f"  note: learner: {drop}\n" in said
    request = PageRequest("/", {"run": run}, "run", {}, {}, credits=None)
    page = overview(request)
    assert "step 1/60 waits for trials, for 8 s: 5 of 128 trials are in" in page
    assert f"note: learner: {drop}" in page
