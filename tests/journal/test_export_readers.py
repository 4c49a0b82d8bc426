"""Exports of a recorded run, opened by the readers of those who made the formats."""

import json
import os
import subprocess
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from mage_async.results.run_directory import RunDirectory
from mage_services.cli.main import main
from mage_services.journal import export as export_module
from tests.helpers.recorded_runs import unpack

STEP, NUM_TRIALS = 3, 12
HARBOR = os.environ.get("MAGE_HARBOR_PYTHON", "")
"""A Python with the package harbor, which needs 3.12."""
LOOK = """
import sys
from pathlib import Path
from harbor.utils.trajectory_validator import TrajectoryValidator
from harbor.viewer.scanner import JobScanner
root = Path(sys.argv[1])
scanner, validator = JobScanner(root.parent), TrajectoryValidator()
assert root.name in scanner.list_jobs()
names = scanner.list_trials(root.name)
assert all(scanner.get_trial_config(root.name, name).trial_name == name for name in names)
for name in names:
    assert validator.validate(root / name / "agent" / "trajectory.json"), validator.errors
print(len(names))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return unpack("other", tmp_path_factory.mktemp("recorded"))


def exported(run: RunDirectory, file: Path) -> Path:
    """The trials of a step, as `mage journal` writes them."""
    assert main(["journal", str(run.root), "--step", str(STEP), "--export", str(file)]) == 0
    return file


def rows_of(run: RunDirectory, folder: Path) -> list[dict[str, Any]]:
    lines = exported(run, folder / "trials.jsonl").read_text().splitlines()
    assert len(lines) == NUM_TRIALS
    return [json.loads(line) for line in lines]


def test_a_trajectory_holds_what_was_drawn_and_what_came_of_it(
    run: RunDirectory, tmp_path: Path
) -> None:
    folder = exported(run, tmp_path / "trials.atif")
    assert len(list(folder.iterdir())) == NUM_TRIALS
    for row in rows_of(run, tmp_path):
        file = folder / f"group-{row['grant']}-trial-{row['trial']}" / "agent" / "trajectory.json"
        found = json.loads(file.read_text())
        assert (found["schema_version"], found["session_id"]) == ("ATIF-v1.8", "other")
        steps = found["steps"]
        assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
        drawn = [step for step in steps if step["source"] == "agent"]
        for step, turn in zip(drawn, row["turns"], strict=True):
            metrics, extra = step["metrics"], step["extra"]
            assert metrics["prompt_tokens"] == len(metrics["prompt_token_ids"]) == turn["start"]
            assert len(metrics["completion_token_ids"]) == turn["stop"] - turn["start"]
            assert len(metrics["logprobs"]) == len(metrics["completion_token_ids"])
            assert (extra["return"], extra["advantage"]) == (turn["return"], turn["advantage"])
            assert step["observation"]["results"][0]["extra"]["reward"] == turn["reward"]
        for before, after in pairwise(drawn):  # of one context, token by token
            known = (
                before["metrics"]["prompt_token_ids"] + before["metrics"]["completion_token_ids"]
            )
            assert after["metrics"]["prompt_token_ids"][: len(known)] == known
        told = "".join(
            step["message"] + "".join(part["content"] for part in results_of(step))
            for step in steps
        )
        assert told == "".join(row["contexts"])


def results_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    return step["observation"]["results"] if "observation" in step else []


@pytest.mark.skipif(not HARBOR, reason="MAGE_HARBOR_PYTHON names no Python with harbor")
def test_harbor_validates_and_lists_every_trajectory(run: RunDirectory, tmp_path: Path) -> None:
    folder = exported(run, tmp_path / "trials.atif")
    command = [HARBOR, "-c", LOOK, str(folder)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=clean)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == NUM_TRIALS


@pytest.mark.filterwarnings("default")  # another package's
def test_datasets_loads_the_folder_and_the_file(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs the extra `export`")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = rows_of(run, tmp_path)
    folder, file = exported(run, tmp_path / "a.dataset"), exported(run, tmp_path / "a.parquet")
    cache = str(tmp_path / "cache")
    of_folder = datasets.load_dataset(str(folder), split="train", cache_dir=cache)
    of_file = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=cache)
    for found in (of_folder, of_file):
        assert [row["grant"] for row in found] == [row["grant"] for row in rows]
        assert found[5]["turns"] == rows[5]["turns"]
        assert found.features["logprobs"].feature.feature.dtype == "float32"


def test_a_folder_that_is_there_is_not_written_over(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(run, tmp_path / "trials.atif")
    before = sorted(folder.rglob("*"))
    assert main(["journal", str(run.root), "--export", str(folder)]) == 2
    assert "trials.atif is a folder, which is not overwritten" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
    assert [each.name for each in tmp_path.iterdir()] == ["trials.atif"]


@pytest.mark.parametrize(("count", "said"), [(1, "1 trial in "), (2, "2 trials in ")])
def test_an_export_says_how_many_trials_it_has(
    run: RunDirectory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    said: str,
) -> None:
    all_of = export_module.journaled_trials

    def some(*given: Any, **filters: Any) -> Iterator[Any]:
        return islice(all_of(*given, **filters), count)

    monkeypatch.setattr(export_module, "journaled_trials", some)
    file = exported(run, tmp_path / "trials.jsonl")
    assert capsys.readouterr().out == f"{said}{file}\n"


def test_an_export_of_nothing_is_refused_and_leaves_no_file(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trials.jsonl"
    assert main(["journal", str(run.root), "--step", "77", "--export", str(file)]) == 2
    assert "no such trial; the journal has steps " in capsys.readouterr().err
    assert not file.exists()


def test_a_wrong_ending_is_refused_before_the_policy_is_read(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mage_async.inference.chat_files.load_chat", None)
    assert main(["journal", str(run.root), "--export", "trials.txt"]) == 2
    assert "trials.txt: an export ends in .jsonl, .parquet" in capsys.readouterr().err
