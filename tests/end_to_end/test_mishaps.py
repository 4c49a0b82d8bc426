"""Mishaps outside of us: each ends in a clear line, nothing hangs, nothing is left behind."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mage_services.cli.main import main

Start = Callable[..., Any]
RAISES = """
from itertools import count
from mage_async.environments.games.rps import Rps

BEGUN = count()

class Cursed(Rps):
    def begin(self, task, episode):
        if next(BEGUN) > 50:  # more than are begun before any process starts
            raise ValueError("the dice are gone")
        return super().begin(task, episode)
"""


def _ended(process: Any, within_s: float = 60.0) -> str:
    output, _ = process.communicate(timeout=within_s)
    assert process.returncode not in (0, None), output
    return output


@pytest.mark.slow
def test_ctrl_c_ends_everything(
    start: Start, tmp_path: Path, processes_of: Callable[[Path], list[int]]
) -> None:
    process = start(tmp_path / "run", "--actors", "2")
    assert process.stdout is not None
    for line in process.stdout:
        if "phase=training" in line:
            break
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20.0  # 5 s where a machine does nothing else
    assert process.returncode == 130
    assert "--resume" in output
    assert processes_of(tmp_path / "run") == []


@pytest.mark.slow
def test_children_die_with_a_killed_supervisor(
    start: Start, tmp_path: Path, processes_of: Callable[[Path], list[int]]
) -> None:
    process = start(tmp_path / "run", "--actors", "1")
    assert process.stdout is not None
    for line in process.stdout:
        if "phase=training" in line:
            break
    process.kill()
    process.communicate(timeout=60)
    # One that is still importing torch on a busy machine ends afterwards.
    deadline = time.monotonic() + 75.0
    while processes_of(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path / "run") == []


@pytest.mark.slow
def test_a_port_in_use_is_named(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        changes = (f"transport.address={address}", "supervision.max_restarts=0")
        output = _ended(start(tmp_path / "run", "--actors", "1", changes=changes))
    assert f"{address} is in use" in output


def test_a_model_directory_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = ["--set", f"policy.source={tmp_path}", "--set", "warm_start.steps=0"]
    assert main(["--run-dir", str(tmp_path / "run"), "--actors", "1", *policy]) == 2
    assert f"{tmp_path}: no config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_an_environment_that_raises_ends_the_run_with_its_words(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    (tmp_path / "cursed_game.py").write_text(RAISES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(environment, "PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    changes = (
        "environment.name=cursed_game:Cursed",
        "environment.retries=0",
        "supervision.max_restarts=0",
    )
    output = _ended(start(tmp_path / "run", "--actors", "1", changes=changes))
    assert "ValueError: the dice are gone" in output


def test_a_run_directory_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--run-dir", "/proc/nowhere", "--actors", "1"]) == 2
    assert "/proc/nowhere cannot be written" in capsys.readouterr().err


def test_a_run_is_not_overwritten(start: Start, finished: tuple[Path, str]) -> None:
    output = _ended(start(finished[0], "--actors", "1"))
    assert "holds a run already: add --resume" in output
