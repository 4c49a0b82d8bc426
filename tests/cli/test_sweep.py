"""`mage sweep`: its matrix, its page, its search, and what it refuses."""

import asyncio
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mage_async.errors import ConfigError, RunError
from mage_async.pages.sweep import render_matrix
from mage_async.results.sweep import Cell, FinishedRun, Matrix, Setting
from mage_services.cli import sweep_runs, sweep_search
from mage_services.cli.main import command_tree, main
from mage_services.cli.sweep import _axes, _matrix, sweep_of
from mage_services.cli.sweep_search import search
from tests.cli.test_ablate import SMALL

OVER = ["--over", "learner.learning_rate=1e-3,3e-3"]


def read_sweep(*arguments: str) -> Matrix:
    return sweep_of(command_tree().parse_args(["sweep", *arguments]))


def test_every_cell_has_its_values_and_its_seed(tmp_path: Path) -> None:
    matrix = read_sweep(*OVER, "--seeds", "0,1", "2", "--run-dir", str(tmp_path))
    found = [(config.learner.learning_rate, config.seed) for config in matrix.configs.values()]
    assert found == [(rate, seed) for seed in range(3) for rate in (1e-3, 3e-3)]
    assert matrix.title == "quickstart · learner.learning_rate=1e-3,3e-3"
    assert matrix.subject.axis == "learner.learning_rate"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--over", "learner.learning_speed=1,2"], "learner.learning_speed"),
        (["--over", "learner.learning_rate=fast,slow"], "learner.learning_rate"),
        (["--over", "seed=0,1"], "seeds are given by --seeds"),
        ([*OVER, *OVER], "names a key twice"),
        ([], "which key is varied"),
        ([*OVER, "--seeds", "one"], "takes whole numbers, got 'one'"),
        ([*OVER, "--random", "0"], "must be at least 1, got 0"),
        ([*OVER, "--parallel", "0"], "must be at least 1"),
        ([*OVER, "--for-s", "nan"], "--for-s must be a number from 0, got nan"),
        ([*OVER, "--set", "seed = 5"], "itself sets this key in every run, so --set has no effect"),
        (
            [*OVER, "--set", OVER[1].partition(",")[0]],
            "--set learner.learning_rate: `mage sweep` itself",
        ),
    ],
)
def test_what_is_no_sweep_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["sweep", "--run-dir", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("default")  # another package's
@pytest.mark.parametrize("way", ["--random", "--search"])
def test_a_sweep_says_once_that_a_preset_takes_stale_tokens_for_fresh(
    way: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if way == "--search":
        pytest.importorskip("optuna")
    said = "--method grpo: stale tokens are trained on as if they were fresh"
    # A sweep over corrections shows what each does.
    for over in ("learner.learning_rate=1e-3,3e-3", "learner.correction=none,decoupled"):
        some = [over, way, "2", "--method", "grpo", "--for-s", "0"]  # no run begins within 0 s
        assert main(["sweep", "--run-dir", str(tmp_path / over[:12]), "--over", *some]) == 0
        assert capsys.readouterr().err.count(said) == ("rate" in over)


def finished(setting: Setting, seed: int, last: float) -> FinishedRun:
    """A run that says what a page shows of it."""
    from tests.results.test_ablation import FIGURES

    curve = [(144 * step, 0.5 * step, last * step / 30) for step in range(1, 31)]
    figures = FIGURES | {"heldout_last_return": last}
    return FinishedRun(Cell(setting, seed), figures, curve, [{0: 0.25, 1: 0.75}])


def test_the_page_is_that_of_the_ablation_with_its_own_words(tmp_path: Path) -> None:
    matrix = read_sweep(*OVER, "--over", "credit.kind=final_only,differential", "--seeds", "0,1")
    runs = [finished(cell.setting, cell.seed, 0.7) for cell in matrix.configs]  # type: ignore[arg-type]
    page = render_matrix(runs, num_cells=8, title=matrix.title, subject=matrix.subject)
    assert "<h1>learner.learning_rate, credit.kind<small>" in page
    assert "held-out return of the last episode against learner.learning_rate" in page
    assert "learner.learning_rate=3e-3, credit.kind=differential" in page
    assert "staleness costs" not in page
    assert "8 of 8 runs, seeds 0, 1" in page
    assert "Careful: the best of 4 settings is chosen by these held-out returns" in page


@pytest.mark.parametrize(
    ("values", "ticks"), [("history,none", ["history", "none"]), ("1e-3,3e-3", [])]
)
def test_values_that_are_words_are_named_on_the_axis(
    tmp_path: Path, values: str, ticks: list[str]
) -> None:
    key = "learner.learning_rate" if "3" in values else "trial.memory"
    matrix = read_sweep("--over", f"{key}={values}", "--run-dir", str(tmp_path))
    runs = [finished(cell.setting, cell.seed, 0.7) for cell in matrix.configs]
    page = render_matrix(runs, num_cells=2, title=matrix.title, subject=matrix.subject)
    assert re.findall(r'class="tick middle">([a-z]\w+)<', page) == ticks


def known(cell: Cell) -> float:
    return -abs(cell.setting.place - 0.003)


class Runs:
    """Runs whose return is known: best at a rate of 0.003."""

    def __init__(self) -> None:
        self.done: list[Cell] = []
        self.calls = 0
        self.code = 0
        self.seeds = {0, 1}
        self.notes: list[str] = []
        """Of the matrix of each call."""
        self.reached: dict[int, float] = {}
        """By seed, in place of what is known."""

    def __call__(self, matrix: Matrix) -> int:
        self.calls += 1
        self.notes.append(matrix.note)
        if not self.code:
            self.done = [cell for cell in matrix.configs if cell.seed in self.seeds]
        return self.code

    def finished_runs(self, matrix: Matrix) -> list[FinishedRun]:
        return [
            finished(cell.setting, cell.seed, self.reached.get(cell.seed, known(cell)))  # type: ignore[arg-type]
            for cell in matrix.configs
            if cell in self.done
        ]


def searched(
    count: int,
    runs: Runs,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *over: str,
    seeds: Sequence[int] = (0, 1),
) -> int:
    arguments = ["sweep", "--run-dir", str(folder), "--parallel", "4"]
    arguments += [f"--over={each}" for each in over or ["learner.learning_rate=1e-4..1e-1:log"]]
    given = command_tree().parse_args(arguments)
    axes = _axes(given)
    monkeypatch.setattr(Matrix, "finished_runs", lambda matrix: runs.finished_runs(matrix))
    num_empty = 0

    def matrix_of(settings: Sequence[Setting]) -> Matrix:
        nonlocal num_empty
        num_empty += not settings
        return replace(_matrix(given, axes, settings, seeds), note="it takes long")

    monkeypatch.setattr(sweep_search, "run_missing", runs)
    code = search(axes, count, 0, matrix_of)
    assert num_empty == 1
    return code


@pytest.mark.filterwarnings("default")  # another package's
def test_a_search_ends_with_the_best_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    runs = Runs()
    assert searched(8, runs, tmp_path, monkeypatch) == 0
    assert (runs.calls, len(runs.done)) == (2, 16)
    assert runs.notes == ["it takes long", ""]  # each of which `run_missing` prints
    eight = {cell.setting for cell in runs.done}
    runs.code = 143
    assert searched(12, runs, tmp_path, monkeypatch) == 143
    runs.code = 0
    assert searched(12, runs, tmp_path, monkeypatch) == 0
    assert len(runs.done) == 24
    assert eight < {cell.setting for cell in runs.done}
    best = min((cell.setting.place for cell in runs.done), key=lambda x: abs(x - 0.003))
    said = capsys.readouterr().out
    assert f"best: learner.learning_rate={best:.4g}: " in said
    assert (
        "careful: the best of 12 settings is chosen by these held-out returns, so its own " in said
    )


@pytest.mark.filterwarnings("default")  # another package's
def test_a_search_that_has_ended_is_run_again_with_the_seeds_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    over, runs = ["credit.kind=differential,final_only"], Runs()
    runs.reached = {0: 0.2, 1: 0.4}
    assert searched(8, runs, tmp_path, monkeypatch, *over, seeds=[0]) == 0
    assert len(runs.done) == 2
    assert searched(8, runs, tmp_path, monkeypatch, *over) == 0
    assert len(runs.done) == 4
    said = capsys.readouterr().out
    assert said.count(": 0.200\n") == said.count(": 0.300\n") == 1
    assert said.count("the best of 2 settings") == 2


@pytest.mark.filterwarnings("default")  # another package's
def test_a_search_waits_for_all_seeds_and_ends_where_no_number_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    runs = Runs()
    runs.seeds = {0}
    assert searched(4, runs, tmp_path, monkeypatch) == 0
    assert runs.calls == 1
    runs.seeds, runs.reached = {0, 1}, {1: math.nan}
    assert searched(4, runs, tmp_path, monkeypatch) == 0
    assert runs.calls == 2
    assert "best" not in capsys.readouterr().out


@pytest.mark.filterwarnings("default")  # another package's
def test_a_combination_whose_run_fails_twice_is_given_up_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    bad: list[str] = []

    class SomeFail(Runs):
        def __call__(self, matrix: Matrix) -> int:
            missing = [cell for cell in matrix.configs if cell not in self.done]
            bad[:] = bad or [missing[0].name()]
            failed = [cell for cell in missing if cell.name() in bad]
            for cell in failed:
                with matrix.failures_of(cell).open("a") as failures:
                    failures.write("failed\n")
            self.done += [cell for cell in missing if cell not in failed]
            return 1 if failed else 0

    runs = SomeFail()
    assert [searched(8, runs, tmp_path, monkeypatch) for _ in range(3)] == [1, 1, 0]
    assert len(runs.done) == 2 * 8 - 1
    said = capsys.readouterr().out
    assert said.count("given up, because a run failed 2 times") == 1
    assert "best: " in said


@pytest.mark.filterwarnings("default")  # another package's
@pytest.mark.parametrize("over", ["learner.grad_clip=0.5..1.0", "learner.learning_rate=1e-3,3e-3"])
def test_a_search_over_other_keys_or_choices_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    pytest.importorskip("optuna")
    searched(4, Runs(), tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"holds a search over learner.learning_rate with other"):
        searched(8, Runs(), tmp_path, monkeypatch, over)


@pytest.mark.filterwarnings("default")  # another package's
@pytest.mark.parametrize("heads", ["4,8", "8,4"])
def test_a_search_leaves_out_a_combination_that_is_no_valid_configuration(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    heads: str,
) -> None:
    pytest.importorskip("optuna")
    runs, keys = Runs(), [f"policy.heads={heads}", "policy.hidden_size=40,64"]
    assert searched(12, runs, tmp_path, monkeypatch, *keys) == 0
    assert runs.done
    assert searched(24, runs, tmp_path, monkeypatch, *keys) == 0
    assert not [
        cell for cell in runs.done if "heads=8, policy.hidden_size=40" in cell.setting.label
    ]
    said = capsys.readouterr().out
    assert "policy.heads=8, policy.hidden_size=40: left out: " in said
    assert "best: policy.heads=" in said


@pytest.mark.filterwarnings("default")  # another package's
def test_a_search_with_other_ends_of_a_range_keeps_the_runs_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    runs = Runs()
    assert searched(4, runs, tmp_path, monkeypatch, "learner.beta2=0.9..0.99999") == 0
    four = set(runs.done)
    assert searched(8, runs, tmp_path, monkeypatch, "learner.beta2=0.9999..0.99999") == 0
    assert four < set(runs.done)
    assert len(runs.done) == 16


@pytest.mark.filterwarnings("default")  # another package's
def test_the_time_of_a_search_is_that_of_all_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    now, begun = 0.0, list[Cell]()

    async def run(matrix: Matrix, cell: Cell) -> str:
        nonlocal now
        now += 10.0
        begun.append(cell)
        return "done"

    monkeypatch.setattr(sweep_runs, "_run", run)
    monkeypatch.setattr(sweep_runs, "_is_finished", lambda _, cell: cell in begun)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(
        Matrix, "finished_runs", lambda matrix: [finished(each.setting, 0, 0.5) for each in begun]
    )
    over = ["--over=learner.grad_clip=0.5..1.0", "--search=5", "--for-s=25", "--parallel=1"]
    assert main(["sweep", *over, "--run-dir", str(tmp_path)]) == 0
    assert len(begun) == 3
    assert "\n1 run left; run the same command again" in capsys.readouterr().out


@pytest.mark.filterwarnings("default")  # another package's
def test_two_searches_in_one_folder_at_once_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")

    class Nested(Runs):
        def __call__(self, matrix: Matrix) -> int:
            with pytest.raises(RunError, match="another `mage sweep` or `mage ablate` runs there"):
                searched(4, Runs(), tmp_path, monkeypatch)
            monkeypatch.setattr(Matrix, "finished_runs", lambda matrix: self.finished_runs(matrix))
            return super().__call__(matrix)

    assert searched(4, Nested(), tmp_path, monkeypatch) == 0


def test_a_matrix_whose_runs_all_failed_names_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(matrix: Matrix, cell: Cell) -> str:
        return "failed"

    monkeypatch.setattr(sweep_runs, "_run", fail)
    assert main(["sweep", *OVER, "--run-dir", str(tmp_path)]) == 1
    assert "report" not in capsys.readouterr().out


def test_a_run_that_goes_on_has_a_line_twice_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_said, line_of = asyncio.Event(), sweep_runs.Progress.going

    def going(progress: sweep_runs.Progress, cell: Cell, log: Path) -> str:
        is_said.set()
        return line_of(progress, cell, log)

    async def run_until_said(matrix: Matrix, cell: Cell) -> str:
        matrix.log_of(cell).write_text("step 1\nstep 2 of 120\n")
        await is_said.wait()
        return "failed"

    assert sweep_runs.GOING_S == 30.0
    monkeypatch.setattr(sweep_runs, "GOING_S", 0.01)
    monkeypatch.setattr(sweep_runs.Progress, "going", going)
    monkeypatch.setattr(sweep_runs, "_run", run_until_said)
    assert main(["sweep", *OVER, "--run-dir", str(tmp_path)]) == 1
    place = "[0/2] learner.learning_rate=1e-3-seed0"
    assert f"{place}: step 2 of 120" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = read_sweep(*OVER, "--run-dir", str(tmp_path))
    runs = Runs()
    runs(matrix)
    monkeypatch.setattr(Matrix, "finished_runs", lambda matrix: runs.finished_runs(matrix))
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RunError, match=f"cannot write {tmp_path}.*run the same command again"):
        sweep_runs.write_files(matrix)


def test_a_search_without_optuna_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'mage_async\[search\]'"):
        searched(4, Runs(), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_sweep_runs_and_resumes(tmp_path: Path) -> None:
    own = SMALL[SMALL.index("--trials") :]
    command = [sys.executable, "-m", "mage_async.launch", "sweep", *OVER, *own]
    command += ["--run-dir", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "[2/2] learner.learning_rate=3e-3-seed0: last held-out episode" in first.stdout
    assert "learner.learning_rate" in (tmp_path / "runs.csv").read_text().splitlines()[0]
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "ablation.txt").exists()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "2 of 2 runs done" in again.stdout
