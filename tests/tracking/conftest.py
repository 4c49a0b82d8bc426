"""Trackers that misbehave: modules that stand in the way of the real packages."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

HANGS = """
import threading
class Settings:
    def __init__(self, **options): pass
def init(**options):
    threading.Event().wait()
"""
RAISES = """
class Settings:
    def __init__(self, **options): pass
def init(**options):
    raise OSError("no route to the tracker")
"""
RECORDS = """
import json, os
class Settings:
    def __init__(self, **options): pass
class Run:
    def __init__(self, options):
        self.file = open(os.environ["TOLD"], "a", buffering=1)
        self.write(["init", options["id"], options["project"], options["config"]["seed"]])
    def write(self, value): self.file.write(json.dumps(value) + "\\n")
    def define_metric(self, name, step_metric): pass
    def log(self, values): self.write(values)
    def finish(self): self.write("finish")
def init(**options):
    return Run(options)
"""
BREAKS_ONCE = (
    RECORDS
    + """
def log(self, values):
    broken = os.environ["TOLD"] + ".broken"
    if values["step"] == 3 and not os.path.exists(broken):
        open(broken, "w").close()
        raise ConnectionError("gone for a moment")
    self.write(values)
Run.log = log
"""
)
BEHAVIOURS = {"hangs": HANGS, "raises": RAISES, "records": RECORDS, "breaks once": BREAKS_ONCE}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module that records writes what it was told."""
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    return tmp_path / "told.jsonl"


@pytest.fixture
def wandb_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Path
) -> Callable[[str], None]:
    """Puts a module `wandb` of that behaviour in front of the real one."""

    def put(behaviour: str) -> None:
        folder = tmp_path / "packages"
        folder.mkdir(exist_ok=True)
        (folder / "wandb.py").write_text(BEHAVIOURS[behaviour])
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        monkeypatch.syspath_prepend(str(folder))

    return put
