"""A tracker's process: told everything once, and in nobody's way when the tracker misbehaves."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import pytest

from mage_async.config.schema import Tracking
from mage_async.errors import ConfigError, RunError
from mage_async.results.run_directory import RunDirectory
from mage_async.results.summary import summarise, write_summary
from mage_services.cli.main import command_tree, main
from mage_services.processes.run_lock import hold
from mage_services.tracking.tracker import Mlflow, Send, TrackedRun, Tracker, Wandb
from mage_services.tracking.tracker_worker import (
    TrackerWorker,
    read_position,
    start,
    tracked,
    trackers_of,
)

PATIENCE_S = 100.0
Put = Callable[[str], None]
Make = Callable[..., RunDirectory]


def tell(run: RunDirectory, end_s: float = PATIENCE_S) -> int:
    """Tell W&B of a run that has ended; the exit code."""
    run.logs.mkdir(exist_ok=True)
    trackers = start(run, {"wandb": Wandb("project")}, end_s)
    trackers.end(PATIENCE_S)
    code = trackers.processes["wandb"].returncode
    assert code is not None
    return code


def track(arguments: list[str]) -> None:
    """`mage track`, whose errors are raised."""
    given = command_tree().parse_args(["track", *arguments])
    given.run(given)


def lines(told: Path) -> list:
    return [json.loads(line) for line in told.read_text().splitlines()]


def steps(told: Path) -> list[int]:
    """Of the points of training, in the order in which they were told."""
    return [each["step"] for each in lines(told) if "train/loss" in each]


def grow(run: RunDirectory, number: int) -> None:
    """Append a step."""
    record = json.loads(run.metrics.read_text().splitlines()[-1])
    with run.metrics.open("a") as out:
        out.write(json.dumps(record | {"step": number}) + "\n")


def test_a_finished_run_is_told_once_and_in_order(
    make_run: Make, wandb_that: Put, told: Path
) -> None:
    wandb_that("records")
    run = make_run(steps=20)
    write_summary(run, summarise(run, wall_s=40.0, processor_s=60.0))
    assert tell(run) == 0
    first = lines(told)
    assert first[0][2:] == ["project", 0]
    assert steps(told) == list(range(1, 21))
    assert [each["step"] for each in first if "evaluation/heldout/cut_short" in each] == [0, 10]
    assert first[-2]["final/heldout_blind/return_by_episode_3"] == pytest.approx(0.03, abs=0.1)
    assert first[-1] == "finish"
    assert tell(run) == 0
    assert lines(told)[len(first) :] == [first[0], "finish"]


def test_a_run_without_a_step_is_told_of_its_evaluation(
    make_run: Make, wandb_that: Put, told: Path
) -> None:
    wandb_that("records")
    run = make_run(steps=0)
    write_summary(run, summarise(run, wall_s=40.0, processor_s=60.0))
    assert [tell(run), tell(run)] == [0, 0]
    assert ["final/wall_s" in each for each in lines(told)] == [False, True, *[False] * 3]


def test_a_resumed_run_goes_on_in_the_trackers_run(
    make_run: Make, wandb_that: Put, told: Path
) -> None:
    wandb_that("records")
    run = make_run(steps=3, finished=False)
    tell(run)
    grow(run, 4)
    with run.metrics.open("a") as out:
        out.write('{"step": 5, "time_')  # a line that is being written
    tell(run)
    assert steps(told) == [1, 2, 3, 4]
    assert len({each[1] for each in lines(told) if isinstance(each, list)}) == 1


def test_steps_that_a_resumed_learner_cut_and_computed_again_are_told_once(
    make_run: Make, wandb_that: Put, told: Path
) -> None:
    wandb_that("records")
    run = make_run(steps=4, finished=False)
    tell(run)
    kept = run.metrics.read_text().splitlines(keepends=True)[:2]
    run.metrics.write_text("".join(kept).replace('"step": 1,', '"step":  1,'))
    tell(run)
    for number in range(3, 7):
        grow(run, number)
    tell(run)
    assert steps(told) == [1, 2, 3, 4, 5, 6]


def test_a_step_is_told_while_the_run_goes_on(make_run: Make, wandb_that: Put, told: Path) -> None:
    wandb_that("records")
    run = make_run(steps=1, finished=False)
    run.logs.mkdir()
    said: list[str] = []
    with tracked(run, {"wandb": Wandb("project")}, PATIENCE_S, said.append):
        wait_for(lambda: told.exists() and steps(told) == [1])
        grow(run, 2)
        wait_for(lambda: steps(told) == [1, 2])
    assert said == []


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_what_raised_is_told_again_by_a_tracker_opened_anew(
    make_run: Make, wandb_that: Put, told: Path
) -> None:
    wandb_that("breaks once")
    run = make_run(steps=4, finished=False)
    run.logs.mkdir()
    said: list[str] = []
    with tracked(run, {"wandb": Wandb("project")}, PATIENCE_S, print) as news:
        wait_for(lambda: said.extend(news()) or len(said) == 2)  # type: ignore[func-returns-value]
    assert said == [
        f"wandb does not receive the run (ConnectionError: gone for a moment; see "
        f"{run.log_of('tracker-wandb')}): it is tried again",
        "wandb receives the run again",
    ]
    position = read_position(run, "wandb")
    assert position is not None
    assert (position.step, position.num_faults, position.fault) == (4, 1, "")


def test_a_tracker_that_fails_for_an_hour_is_tried_again_every_minute(make_run: Make) -> None:
    class Pauses(threading.Event):
        found: ClassVar[list[float]] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.found.append(timeout or 0.0)
            if len(self.found) == 64:
                self.set()
            return self.is_set()

    class Fails(Tracker):
        def open(self, run: TrackedRun) -> AbstractContextManager[Send]:
            raise OSError("no route to the tracker")

    run = make_run(steps=1)
    run.tracking.mkdir()
    assert not TrackerWorker(run, Fails(), Pauses()).follow()
    assert Pauses.found == [4.0, 8.0, 16.0, 32.0, *[60.0] * 60]


def test_a_tracker_whose_process_has_ended_is_named_while_the_run_goes_on(
    make_run: Make, wandb_that: Put
) -> None:
    wandb_that("hangs")
    run = make_run(steps=4, finished=False)
    run.logs.mkdir()
    trackers = start(run, {"wandb": Wandb("project")}, PATIENCE_S)
    assert list(trackers.news(run)) == []
    trackers.processes["wandb"].kill()
    trackers.processes["wandb"].wait()
    (said,) = trackers.news(run)
    assert said.startswith(
        "wandb does not receive the run (its process was killed by SIGKILL; see "
    )
    assert said.endswith(f": `mage track {run.root}` sends the rest")
    assert list(trackers.news(run)) == []
    trackers.end(PATIENCE_S)


def test_a_tracker_that_raises_is_named_and_its_rest_is_not_lost(
    make_run: Make, wandb_that: Put, told: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb_that("raises")
    run = make_run(steps=4, settings=["tracking.wandb.project=project", "learner.steps=4"])
    run.logs.mkdir()
    write_summary(run, summarise(run, wall_s=40.0, processor_s=60.0))
    assert main(["track", str(run.root)]) == 1
    said = capsys.readouterr().out
    assert "received 0 steps so far (OSError: no route to the tracker), and no more" in said
    wandb_that("records")
    assert main(["track", str(run.root)]) == 0
    assert "wandb: the whole run was sent" in capsys.readouterr().out
    assert steps(told) == [1, 2, 3, 4]


def test_a_run_that_has_not_ended_is_not_said_to_be_told_whole(
    make_run: Make, wandb_that: Put, told: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb_that("records")
    run = make_run(steps=4, finished=False, settings=["tracking.wandb.project=project"])
    run.logs.mkdir()
    assert main(["track", str(run.root)]) == 0
    assert "wandb: 4 steps were sent so far; the run is not complete\n" in capsys.readouterr().out
    grow(run, 5)
    lock = hold(run.lock, "")
    assert main(["track", str(run.root)]) == 0
    said = capsys.readouterr().out
    assert "wandb: 5 steps were sent so far; the run goes on: the same command sends the" in said
    os.close(lock)
    assert steps(told) == [1, 2, 3, 4, 5]


def test_a_tracker_that_hangs_delays_no_end(make_run: Make, wandb_that: Put) -> None:
    wandb_that("hangs")
    run = make_run(steps=4)
    run.logs.mkdir()
    trackers = start(run, {"wandb": Wandb("project")}, 60.0)
    trackers.end(0.0)
    (said,) = trackers.unfinished(run)
    assert trackers.processes["wandb"].poll() is None
    assert "received 0 steps so far, and receives more for up to 60 s; after that, `mage" in said
    trackers.processes["wandb"].kill()
    trackers.processes["wandb"].wait()


def test_the_kernel_ends_a_tracker_that_hangs(make_run: Make, wandb_that: Put) -> None:
    wandb_that("hangs")
    assert tell(make_run(steps=4), end_s=0.2) == -signal.SIGALRM


def test_mlflow_gets_the_parameters_that_a_failed_try_did_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = SimpleNamespace(info=SimpleNamespace(run_id="1"), data=SimpleNamespace(params={}))
    client, runs, asked = MagicMock(), list[SimpleNamespace](), list[int]()
    client.search_runs.side_effect = lambda *_: runs
    client.create_run.side_effect = lambda *_, **__: runs.append(kept) or kept

    def log_batch(run_id: str, params: list[tuple[str, str]]) -> None:
        asked.append(len(params))
        if len(asked) == 2:
            raise ConnectionError("gone for a moment")
        kept.data.params.update(params)

    client.log_batch = log_batch
    entities = SimpleNamespace(Metric=None, Param=lambda key, value: (key, value))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    tracking = SimpleNamespace(MlflowClient=lambda: client)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    run = TrackedRun("run", "id", tmp_path, {"a": dict.fromkeys(map(str, range(150)), 7)}, 0.0, 0)
    with pytest.raises(ConnectionError), Mlflow().open(run):
        pass
    with Mlflow().open(run), Mlflow().open(run):
        pass
    assert asked == [100, 50, 50]
    assert kept.data.params == {f"a.{number}": "7" for number in range(150)}


def test_a_tracker_without_its_package_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mage_services.tracking.tracker.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking.mlflow needs .* 'mage_async\[mlflow\]'"):
        trackers_of(Tracking(mlflow=Mlflow("experiment")))
    assert trackers_of(Tracking()) == {}

    class Own(Tracker):
        package = "pastebin"

    with pytest.raises(
        ConfigError, match=r"tracking.own needs .* installed: pip install pastebin$"
    ):
        trackers_of(Tracking(own=Own()))
    assert main(["train", "--set", "tracking.tensorboard=true"]) == 2
    assert "'mage_async[tensorboard]'" in capsys.readouterr().err


def test_a_run_without_trackers_is_told_to_nobody(make_run: Make) -> None:
    run = make_run(steps=2)
    with pytest.raises(ConfigError, match=r"has no tracker: name one by --set, of tracking.wandb"):
        track([str(run.root)])
    with pytest.raises(ConfigError, match=r"--set learner.steps=9: only keys of \[tracking\]"):
        track([str(run.root), "--set", "tracking.tensorboard=true", "--set", "learner.steps=9"])
    with tracked(run, {}, 0.0, print):
        assert not run.tracking.exists()


def test_two_processes_never_tell_one_tracker(make_run: Make, wandb_that: Put) -> None:
    wandb_that("records")
    run = make_run(steps=2)
    run.tracking.mkdir()
    lock = hold(run.tracking / "wandb.lock", "")
    with pytest.raises(RunError, match=r"another process is sending .* to"):
        track([str(run.root), "--set", "tracking.wandb.project=project"])
    os.close(lock)
