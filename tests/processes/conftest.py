"""Runs whose processes are scripts, supervised in this process or in one of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mage_async.config import config_file
from mage_services.processes import supervisor as supervisor_module
from tests.helpers.supervised_runs import OUTER, PATIENCE_S, STAND_IN, Outer, Site, resume

BESIDE_THE_REAL_ONES = """
from pkgutil import extend_path
__path__ = extend_path(__path__, __name__)
"""
"""Of a package of stand-ins: modules that have no stand-in are the real ones."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    stand_ins = tmp_path / "stand-ins"
    for module in ("learner/learner", "actor/actor", "actor/evaluator"):
        file = stand_ins / "mage_services" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name("__init__.py").write_text(BESIDE_THE_REAL_ONES)
        file.write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stand_ins), *sys.path]))
    monkeypatch.setattr(supervisor_module, "BACK_OFF_S", (0.0,))
    made = Site(tmp_path / "run")
    for name in ("learner", "actor-0", "actor-1", "evaluator"):
        made.plan(name, "ends well")
    return made


@pytest.fixture
def outer(site: Site) -> Iterator[Callable[[], Outer]]:
    started: list[Outer] = []

    def start() -> Outer:
        process = subprocess.Popen(
            [sys.executable, "-c", OUTER, str(site.run.root)], stdout=subprocess.PIPE, text=True
        )
        started.append(Outer(process))
        return started[0]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def resumed(site: Site) -> Iterator["subprocess.Popen[str]"]:
    """`mage --resume` of the site's run, whose processes live and said so."""
    for name in ("learner", "evaluator"):
        site.plan(name, "lives")
    site.plan("actor-0", "fails", "lives")
    site.run.config.write_text(config_file.dump(config_file.load(config_file.find(None), [])))
    with subprocess.Popen(resume(site.run), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "the disk is full" not in (line := process.stdout.readline()):
            assert line, "it ended"
        # On a busy machine the learner may begin after the actor's first end.
        due = time.monotonic() + PATIENCE_S
        while not (site.run.root / "learner.lives").exists():
            assert time.monotonic() < due
            time.sleep(0.05)
        yield process
        process.kill()
