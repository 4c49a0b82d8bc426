"""A run on the nodes of a Ray cluster that are all on this machine, and what the doctor says."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAULTY = """
import os, socket, time

real_time, real_connect = time.time, socket.create_connection
time.time = lambda: real_time() + 10.0

def closed(address, *given, **named):
    if address[1] == int(os.environ["CLOSED_PORT"]):
        raise ConnectionRefusedError(111, "Connection refused")
    return real_connect(address, *given, **named)

socket.create_connection = closed
"""
"""The `sitecustomize.py` of a node whose clock is 10 s ahead, and that cannot reach a port."""
PORT = 45_981
SMALL = (
    "warm_start.steps=8",
    "warm_start.gate=1.0",
    "warm_start.max_steps=8",
    "warm_start.trials=64",
    "admission.groups_per_step=4",
    "admission.trials_per_group=4",
    "learner.checkpoint_every=2",
    "learner.steps=12",
    "learner.threads=1",
    "engine.threads=1",
    "evaluation.every=0",
    "evaluation.final_trials=24",
    "admission.rule=sync",
    "admission.max_staleness=0",
    "engine.arithmetic=exact",
)
"""A run that is a function of its configuration, wherever its trials are played."""


def mage(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "mage_async.launch", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | variables
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def hub_with(folder: Path, weights: bytes) -> str:
    """A hub's cache that holds one model; the value of HF_HOME."""
    model = folder / "hub" / "models--org--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "model.safetensors").write_bytes(weights)
    return str(folder)


def test_the_doctor_names_a_wrong_model_a_closed_port_and_a_clock_of_a_node(
    nodes_of: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "sitecustomize.py").write_text(FAULTY)
    ours, theirs = hub_with(tmp_path / "a", b"a" * 100), hub_with(tmp_path / "b", b"b" * 100)
    path = os.pathsep.join([str(tmp_path / "faulty"), *filter(None, sys.path)])
    faulty = {"PYTHONPATH": path, "CLOSED_PORT": str(PORT), "HF_HOME": theirs}
    sound = {"HF_HOME": ours}
    nodes = nodes_of([{"cpus": 4, "env": sound}, {"cpus": 2, "env": faulty}])
    asked = ("--set", "policy.source=org/small", "--set", "engine.threads=1")
    address = ("--set", f"transport.address=tcp://127.0.0.1:{PORT}")
    doctor = mage("doctor", "--cluster", nodes.address, *asked, *address, HF_HOME=ours)
    output, _ = doctor.communicate(timeout=300)
    assert doctor.returncode == 1, output
    # Before its first line a library may warn, which torchao does next to a torch for CPU cores.
    _, heading, found = output.partition(f"{nodes.address}: 2 nodes in ")
    assert heading, output
    first, *faults = found.strip().splitlines()
    assert first.endswith(", 3 faults"), output
    clock, model, port, note = faults
    assert "its clock is 10." in clock or "its clock is 9.9" in clock
    assert "org/small is another model there" in model
    assert f":{PORT} from there (Connection refused): open the port" in port
    assert len({line.split(":")[0] for line in (clock, model, port)}) == 1  # the faulty node
    assert "room for the weights was not checked: policy.source 'org/small' is not on" in note


def test_a_run_whose_actors_lose_their_node_makes_the_weights_of_one_on_one_machine(
    nodes_of: Callable[..., Any], tmp_path: Path
) -> None:
    """The head has room for learner and evaluator alone, so actors are on another node."""
    nodes = nodes_of([{"cpus": 2}, {"cpus": 2}, {"cpus": 2}])
    run = tmp_path / "run"
    settings = [part for change in SMALL for part in ("--set", change)]
    where = ("--cluster", nodes.address, "--actors", "2", "--run-dir", str(run))
    training = mage("train", *where, *settings)
    wait_for_steps(run, 2, training)
    nodes.kill(nodes_of_processes(run)["actor-0"])
    output, _ = training.communicate(timeout=500)
    assert training.returncode == 0, output
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lost = [event["text"] for event in events if event["event"] == "restarting"]
    assert any(each.startswith("actor-0 was lost on ") for each in lost), lost
    homes = {e["node"] for e in events if e["event"] == "started" and e["text"] == "actor-0"}
    assert len(homes) == 2
    trials = json.loads((run / "summary.json").read_text())["trials"]
    assert trials["granted"] == trials["trained"] + trials["dropped"] + trials["in_flight"]
    assert trials["trained"] == 12 * 4 * 4
    replay = mage("replay", str(run))
    output, _ = replay.communicate(timeout=200)
    assert replay.returncode == 0, output
    undisturbed = mage("train", "--actors", "2", "--run-dir", str(tmp_path / "here"), *settings)
    output, _ = undisturbed.communicate(timeout=300)
    assert undisturbed.returncode == 0, output
    assert last_weights(run) == last_weights(tmp_path / "here")


def last_weights(run: Path) -> bytes:
    """Of the newest checkpoint."""
    return max((run / "checkpoints").glob("step_*/model.safetensors")).read_bytes()


def wait_for_steps(run: Path, steps: int, training: "subprocess.Popen[str]") -> None:
    """Return when a run has trained so many steps."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert training.poll() is None, training.communicate()[0]
        time.sleep(0.2)


def nodes_of_processes(run: Path) -> dict[str, str]:
    """By its name, where each process was started last."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["text"]: event["node"] for event in events if event["event"] == "started"}
