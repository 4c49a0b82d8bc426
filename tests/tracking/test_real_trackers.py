"""The real packages in their local modes, and what they kept read back by their own readers."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mage_async.config import config_file
from mage_async.config.components import TRACKERS, decode_component
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_async.results.summary import summarise, write_summary
from mage_services.tracking.tracker_worker import TrackerWorker, read_position

pytestmark = pytest.mark.filterwarnings("default")  # other people's packages warn
FIRST, ALL = 12, 20
"""Steps of the first life of a run, and of both."""
Make = Callable[..., RunDirectory]
Entropies = dict[int, float]


def tell(run: RunDirectory, name: str) -> None:
    """Tell one tracker of what is there, in this process."""
    run.tracking.mkdir(exist_ok=True)
    ended = threading.Event()
    ended.set()
    key = {} if name == "tensorboard" else {"experiment" if name == "mlflow" else "project": "mage"}
    tracker = decode_component(TRACKERS, {"kind": name, **key})
    assert TrackerWorker(run, tracker, ended).follow(), read_position(run, name)


def told(make_run: Make, name: str) -> RunDirectory:
    """A run that a tracker was told of in two lives, the second of which came to its end."""
    run = make_run(steps=ALL)
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:FIRST]))
    tell(run, name)
    run.metrics.write_text("".join(lines))
    longer = config_file.load_recorded(run.config, ["learner.steps=20", "learner.beta2=0.97"])
    run.config.write_text(config_file.dump(longer))
    write_summary(run, summarise(run, wall_s=40.0, processor_s=60.0))
    tell(run, name)
    return run


def expected(run: RunDirectory) -> Entropies:
    """The entropy of every step."""
    return {record["step"]: record["entropy"] for record in read_lines(run.metrics)}


def about(found: Entropies) -> object:
    return pytest.approx(found, rel=1e-6)


def test_tensorboard_reads_every_step_once(make_run: Make) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = told(make_run, "tensorboard")
    events = accumulator.EventAccumulator(str(run.tracking / "tensorboard"))
    events.Reload()
    found = events.Scalars("train/entropy")
    assert [event.step for event in found] == list(range(1, ALL + 1))
    assert {event.step: event.value for event in found} == about(expected(run))
    assert [event.wall_time for event in found] == sorted(event.wall_time for event in found)
    assert "final/heldout/return_by_episode_3" in events.Tags()["scalars"]
    assert "evaluation/train/return_by_episode_1" in events.Tags()["scalars"]


def test_mlflow_has_one_run_with_every_step(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    tracking = pytest.importorskip("mlflow.tracking")
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    run = told(make_run, "mlflow")
    client = tracking.MlflowClient(tracking_uri=address)
    (only,) = client.search_runs([client.get_experiment_by_name("mage").experiment_id])
    found = client.get_metric_history(only.info.run_id, "train/entropy")
    assert {metric.step: metric.value for metric in found} == about(expected(run))
    assert (only.info.status, only.info.run_name) == ("FINISHED", "run")
    assert only.data.params["admission.rule"] == "slots"
    assert "final/throughput/trials_per_s" in only.data.metrics


def test_trackio_has_one_run_with_every_step(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # trackio reads it when imported
    pytest.importorskip("trackio")
    run = told(make_run, "trackio")
    listed = trackio("list", "runs", "--project", "mage", "--json")["runs"]
    assert len(listed) == 1
    name = listed[0] if isinstance(listed[0], str) else listed[0]["name"]
    values = trackio(
        "get", "metric", "--project", "mage", "--run", name, "--metric", "train/entropy", "--json"
    )["values"]
    assert {each["step"]: each["value"] for each in values} == about(expected(run))


def trackio(*arguments: str) -> dict:
    """What trackio's own command prints."""
    command = [sys.executable, "-m", "trackio.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_wandb_keeps_two_offline_files_of_one_run(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = told(make_run, "wandb")
    files = sorted((run.tracking / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    found: Entropies = {}
    for data in (data for file in files for data in log_records(file.read_bytes())):
        record = internal.Record.FromString(data)
        items = {"/".join(item.nested_key) or item.key: item for item in record.history.item}
        if "train/entropy" in items:
            found[int(items["step"].value_json)] = float(items["train/entropy"].value_json)
    assert found == about(expected(run))
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run", *map(str, files)]
    synced = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Would sync 2 run(s)" in synced.stdout + synced.stderr


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, behind W&B's header of seven bytes."""
    assert data.startswith(b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""
