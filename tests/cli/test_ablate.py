"""Cells of a matrix as processes: what is done is read, what is missing is run."""

import asyncio
import json
import operator
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest

from mage_async.assembly import own_sources
from mage_async.config import config_file
from mage_async.config.presets import presets
from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_async.results.sweep import Cell, Matrix
from mage_services.cli import sweep_runs
from mage_services.cli.ablate import ablation_of
from mage_services.cli.main import command_tree
from mage_services.processes.run_lock import take_lock
from tests.helpers.supervised_runs import PATIENCE_S, descriptors, living_after

SMALL = [
    *("--bounds", "1", "--rules", "slots", "--corrections", "decoupled", "--seeds", "0"),
    *("--trials", "36", "--parallel", "1"),
    *("--set", "warm_start.steps=2", "--set", "warm_start.gate=1.0"),
    *("--set", "warm_start.max_steps=2", "--set", "warm_start.trials=64"),
    *("--set", "admission.groups_per_step=2", "--set", "admission.trials_per_group=2"),
    *("--set", "learner.steps=2"),
]


def read_ablation(arguments: list[str]) -> Matrix:
    """The matrix of a command line."""
    return ablation_of(command_tree().parse_args(["ablate", *arguments]))


def test_what_cannot_be_begun_in_time_is_left_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ablation = read_ablation([*SMALL, "--run-dir", str(tmp_path), "--for-s", "0"])
    assert sweep_runs.run_matrix(replace(ablation, note="it takes long")) == 0
    said = capsys.readouterr()
    assert "1 run left; run the same command again" in said.out
    assert said.err.count("it takes long") == 1
    assert not (tmp_path / "report.html").exists()


OVER = {
    "both_seats": ["--config", "kuhn"],
    "graph_memory": [],
    "information_bonus": [],
    "mage_population": ["--config", "kuhn"],
    "metacure": [],
    "rema": [],
    "sac_glam": ["--set", "environment.name=grid"],
    "scaling_inter": ["--set", "environment.name=grid"],
    "sge": ["--set", "engine.max_tokens=240"],
    "stepagent_implicit": [],
    "stepagent_irl": [],
}
"""By method, a configuration it can be written over."""


@pytest.mark.parametrize("method", OVER)
def test_every_cell_is_of_the_method_asked_for(method: str, tmp_path: Path) -> None:
    correction = "none" if method == "sac_glam" else "decoupled"
    cells = ["--bounds", "0", "--corrections", correction, "--lags", "0", "4", "--seeds", "0"]
    asked = ["--method", method, *OVER[method], "--rules", "sync", "--run-dir", str(tmp_path)]
    ablation = read_ablation([*cells, *asked])
    assert len(ablation.configs) == 2
    assert method in ablation.title
    for config in ablation.configs.values():
        said = tomllib.loads(config_file.dump(config))
        for key, value in presets()[method].items():
            if not key.startswith("learner.correction"):
                found = reduce(operator.getitem, key.split("."), said)
                assert found in (value, {"kind": value})


def test_two_matrices_never_run_in_one_folder(tmp_path: Path) -> None:
    ablation = read_ablation([*SMALL, "--run-dir", str(tmp_path), "--for-s", "0"])
    with (
        sweep_runs.lock_folder(tmp_path),
        pytest.raises(RunError, match="another `mage sweep` or"),
    ):
        sweep_runs.run_matrix(ablation)


def test_a_cell_that_a_killed_call_left_alive_is_not_removed(tmp_path: Path) -> None:
    ablation = read_ablation([*SMALL, "--run-dir", str(tmp_path), "--for-s", "0"])
    run = RunDirectory(tmp_path / "slots-1-decoupled-seed0")
    run.root.mkdir()
    lock = take_lock(run)
    with pytest.raises(RunError, match="seed0 is being run by another process"):
        sweep_runs.run_matrix(ablation)
    os.close(lock)
    assert sweep_runs.run_matrix(ablation) == 0


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_matrix_that_a_signal_ends_has_the_exit_status_of_the_signal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    status: int,
) -> None:
    async def run(matrix: Matrix, cell: Cell) -> sweep_runs.RunEnd:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()
        return "done"

    monkeypatch.setattr(sweep_runs, "_run", run)
    ablation = read_ablation([*SMALL, "--run-dir", str(tmp_path)])
    assert sweep_runs.run_matrix(ablation) == status
    stopped = "stopped; run the same command again to continue\n"
    assert capsys.readouterr().out.endswith(f"stopping 1 run, which takes seconds\n{stopped}")


def test_a_killed_ablation_leaves_no_run_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mage_async.launch", "ablate", *SMALL]
    with subprocess.Popen([*command, "--run-dir", str(tmp_path)]) as ablation:
        config = RunDirectory(tmp_path / "slots-1-decoupled-seed0").config
        while not config.exists():
            assert ablation.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{ablation.pid}/task/{ablation.pid}/children")
        (run,) = map(int, children.read_text().split())
        watched = descriptors({"run": run})
        ablation.kill()
    assert living_after(watched, PATIENCE_S) == set()


def test_a_run_that_ends_without_a_result_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert sweep_runs.run_matrix(read_ablation([*SMALL, "--run-dir", str(tmp_path)])) == 1
    said = capsys.readouterr().out
    assert "slots-1-decoupled-seed0: failed, see " in said
    assert said.endswith("\n1 run failed; the same command runs them again\n")


def test_a_run_that_was_killed_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killed").write_text("#!/bin/sh\necho step 3\nkill -9 $$\n")
    (tmp_path / "killed").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "killed"))
    assert sweep_runs.run_matrix(read_ablation([*SMALL, "--run-dir", str(tmp_path / "m")])) == 1
    assert "seed0.log: killed by SIGKILL\n" in capsys.readouterr().out


def test_a_cancelled_cell_leaves_no_configuration_beside_its_folder(tmp_path: Path) -> None:
    ablation = read_ablation([*SMALL, "--run-dir", str(tmp_path)])
    (cell,) = ablation.configs
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(sweep_runs._run(ablation, cell), 0.5))
    assert ablation.log_of(cell).is_file()
    assert not list(tmp_path.glob("*.toml"))


def test_a_finished_run_with_another_number_of_actors_is_refused(tmp_path: Path) -> None:
    ablation = read_ablation([*SMALL, "--run-dir", str(tmp_path), "--actors", "1"])
    ((cell, config),) = ablation.configs.items()
    run = ablation.run_of(cell)
    run.root.mkdir()
    run.config.write_text(config_file.dump(config))
    run.summary.write_text('{"complete": true}')
    run.launch.write_text('{"actors": 1}')
    assert sweep_runs._is_finished(ablation, cell)
    run.launch.write_text('{"actors": 3}')
    with pytest.raises(RunError, match="is done, and had 3 actors: give --actors 3, or another"):
        sweep_runs._is_finished(ablation, cell)


def test_a_finished_run_with_a_correction_that_was_edited_since_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = "from mage_async.learning.corrections import Tis\nclass Edited(Tis): pass\n"
    (tmp_path / "edited_loss.py").write_text(source)
    options = ["--run-dir", str(tmp_path), "--corrections", "edited_loss:Edited"]
    ablation = read_ablation([*SMALL, *options])
    ((cell, config),) = ablation.configs.items()
    run = ablation.run_of(cell)
    run.root.mkdir()
    run.config.write_text(config_file.dump(config))
    run.summary.write_text('{"complete": true}')
    run.launch.write_text(json.dumps({"sources": own_sources(config)}))
    assert sweep_runs._is_finished(ablation, cell)
    (tmp_path / "edited_loss.py").write_text(f"{source}    max_weight: float = 9.0\n")
    with pytest.raises(RunError, match="is done, and edited_loss:Edited was edited since: undo"):
        sweep_runs._is_finished(ablation, cell)


def test_a_finished_run_of_another_configuration_is_refused_with_the_keys(tmp_path: Path) -> None:
    options = [*SMALL, "--run-dir", str(tmp_path)]
    before = read_ablation([*options, "--set", "learner.entropy=0.5"])
    ((cell, config),) = before.configs.items()
    run = before.run_of(cell)
    run.root.mkdir()
    run.config.write_text(config_file.dump(config))
    run.summary.write_text('{"complete": true}')
    with pytest.raises(RunError, match=r"\(learner.entropy was 0.5 and is 0.02\): give the"):
        sweep_runs._is_finished(read_ablation(options), cell)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_matrix_runs_reports_resumes_and_refuses_another_configuration(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mage_async.launch", "ablate", *SMALL]
    command += ["--run-dir", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "[1/1] slots-1-decoupled-seed0: last held-out episode" in first.stdout
    assert (tmp_path / "runs.csv").read_text().count("\n") == 2
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "1 of 1 runs done" in again.stdout
    other = [*command, "--set", "learner.entropy=0.5"]
    refused = subprocess.run(other, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "another configuration" in refused.stderr
