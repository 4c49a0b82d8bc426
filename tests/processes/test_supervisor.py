"""The supervisor with real processes. Its learner, actors and evaluator are scripts of a few lines
that stand in the way of the real modules: `mage_services` has no `__init__.py`, so the first folder
on the path that has a `learner.py` wins.

Longer than most: all tests start runs of the same scripts.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.launch import EXIT_USAGE
from mage_async.results.run_directory import RunDirectory
from mage_services.processes import supervisor as supervisor_module
from mage_services.processes.run_lock import take_lock
from mage_services.processes.supervisor import Supervisor, until_signalled
from mage_services.terminal.view import make_view

T = TypeVar("T")
PATIENCE_S = 30.0
"""For a loaded machine; nothing here takes two seconds on an idle one."""

STAND_IN = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
from mage_async.errors import RunError
from mage_services.processes.process import run_process

root, name = Path(sys.argv[1]), sys.argv[3]

async def main(status):
    lives = root / f"{name}.lives"
    number = len(lives.read_text().splitlines()) if lives.exists() else 0
    with lives.open("a") as out:
        out.write(" ".join(sys.argv[4:]) + "\\n")
    plan = (root / f"{name}.plan").read_text().split()
    what = plan[min(number, len(plan) - 1)]
    helper = subprocess.Popen(["sleep", "3600"]) if what == "helped" else None
    status.send("ready", pid=os.getpid(), helper=helper and helper.pid)
    match what:
        case "fails":
            raise RunError("the disk is full")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "lives" | "helped":
            await asyncio.Event().wait()
        case "blocks":
            time.sleep(3600)
        case "deaf":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            status.send("deaf")
            await asyncio.Event().wait()

run_process(main)
"""

OUTER = """
import json, sys
from pathlib import Path
import uvloop
from mage_async.config import config_file
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.supervisor import Supervisor, until_signalled
from mage_services.terminal.view import make_view

class View:
    def event(self, process, event):
        print(json.dumps([process, event]), flush=True)

root = Path(sys.argv[1])
supervisor = Supervisor(
    RunDirectory(root), config_file.load(config_file.find(None), []), 2, "ipc://none", View()
)
print(json.dumps(["ended by", uvloop.run(until_signalled(supervisor))]), flush=True)
"""


@dataclass
class Recorder:
    """A view that remembers."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    on_event: Callable[[str, dict[str, Any]], None] = lambda process, event: None

    def event(self, process: str, event: dict[str, Any]) -> None:
        self.events.append((process, event))
        self.on_event(process, event)

    def line(self, text: str) -> None:
        raise AssertionError(text)

    def close(self, summary: dict[str, Any] | None) -> None:
        raise AssertionError(summary)

    def restarts(self) -> list[str]:
        return [e["text"] for p, e in self.events if p == "supervisor" and e["event"] != "started"]


class Site:
    """A run directory whose processes live as a test plans."""

    def __init__(self, root: Path) -> None:
        self.run = RunDirectory(root)
        self.run.logs.mkdir(parents=True)
        self.view = Recorder()

    def plan(self, name: str, *lives: str) -> None:
        """What a process does in each of its lives; the last goes for all later ones."""
        (self.run.root / f"{name}.plan").write_text(" ".join(lives))

    def lives(self, name: str) -> list[str]:
        """The arguments after its name of each life that a process had."""
        return (self.run.root / f"{name}.lives").read_text().splitlines()

    def supervisor(self, num_actors: int = 1, max_restarts: int = 3) -> Supervisor:
        assignments = [f"supervision.max_restarts={max_restarts}"]
        config = config_file.load(config_file.find(None), assignments)
        return Supervisor(self.run, config, num_actors, "ipc://none", self.view)

    def supervise(self, **options: int) -> None:
        patiently(self.supervisor(**options).supervise())


def patiently(main: Coroutine[Any, Any, T]) -> T:
    """Run a supervisor as its process would; one that hangs fails its test."""

    async def whole() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return uvloop.run(whole())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    stand_ins = tmp_path / "stand-ins"
    for module in ("learner/learner", "actor/actor", "actor/evaluator"):
        file = stand_ins / "mage_services" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name("__init__.py").touch()
        file.write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stand_ins), *sys.path]))
    monkeypatch.setattr(supervisor_module, "BACK_OFF_S", (0.0,))
    made = Site(tmp_path / "run")
    for name in ("learner", "actor-0", "actor-1", "evaluator"):
        made.plan(name, "ends well")
    return made


@dataclass
class Outer:
    """A supervisor in a process of its own."""

    process: subprocess.Popen[str]
    pids: dict[str, int] = field(default_factory=dict)

    def said(self) -> Any:
        """The next line."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def wait_until_ready(self, num_processes: int, last: str = "ready") -> None:
        """Return when each process has said its last word before it waits."""
        while num_processes:
            process, event = self.said()
            if event["event"] == "ready":
                self.pids[process] = event["pid"]
                if event["helper"]:
                    self.pids["helper"] = event["helper"]
            num_processes -= event["event"] == last


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


def descriptors(pids: dict[str, int]) -> dict[int, str]:
    """Of living processes, so that their ends can be waited for."""
    return {os.pidfd_open(pid): name for name, pid in pids.items()}


def living_after(watched: dict[int, str], seconds: float) -> set[str]:
    """Which of them have not ended by then; returns as soon as all have."""
    due, left = time.monotonic() + seconds, dict(watched)
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    while left and (remaining := due - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(remaining * 1000):
            poll.unregister(descriptor)
            del left[descriptor]
    for descriptor in watched:
        os.close(descriptor)
    return set(left.values())


def living_members(groups: set[int]) -> list[str]:
    """Processes of some process groups; not those that only wait to be reaped."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            name, _, rest = file.read_text().rpartition(")")
            state, _, group, *_ = rest.split()
            if int(group) in groups and state not in "ZX":
                found.append(name)
    return found


def test_a_run_is_over_when_all_its_processes_have_ended_well(site: Site) -> None:
    site.supervise(num_actors=2)
    started = [event["text"] for process, event in site.view.events if process == "supervisor"]
    assert sorted(started) == ["actor-0", "actor-1", "evaluator", "learner"]
    assert site.lives("actor-1") == ["--address ipc://none"]


def test_an_actor_that_fails_is_started_again_and_the_others_are_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    site.plan("actor-0", "fails", "dies", "ends well")
    site.supervise()
    failed, died = site.view.restarts()
    assert failed == "actor-0 ended with exit code 2: the disk is full"
    assert died.startswith("actor-0 was killed by SIGKILL")
    assert len(site.lives("actor-0")) == 3
    assert len(site.lives("learner")) == len(site.lives("evaluator")) == 1


def test_an_actor_that_somebody_terminates_is_started_again(site: Site) -> None:
    def terminate_first(process: str, event: dict[str, Any]) -> None:
        if process == "actor-0" and event["event"] == "ready" and len(site.lives("actor-0")) == 1:
            os.kill(event["pid"], signal.SIGTERM)

    site.plan("actor-0", "lives", "ends well")
    site.view.on_event = terminate_first
    site.supervise()
    assert site.view.restarts()[0].startswith("actor-0 ended with exit code 143")
    assert len(site.lives("actor-0")) == 2


def test_a_process_that_fails_more_often_than_its_budget_ends_the_run_with_its_epitaph(
    site: Site,
) -> None:
    site.plan("learner", "lives")
    site.plan("actor-0", "fails")
    with pytest.raises(ExceptionGroup) as caught:
        site.supervise(max_restarts=2)
    (reason,) = caught.value.exceptions
    assert isinstance(reason, RunError)
    assert str(reason) == "actor-0 ended with exit code 2: the disk is full"
    assert len(site.lives("actor-0")) == 3


def test_failures_before_a_healthy_stretch_are_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "HEALTHY_S", 0.0)
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    site.plan("actor-0", "fails", "fails", "fails", "ends well")
    site.supervise(max_restarts=1)
    assert len(site.lives("actor-0")) == 4


def test_a_killed_learner_is_started_again_and_its_peers_live_on(site: Site) -> None:
    pids: dict[str, int] = {}

    def kill_when_all_live(process: str, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            pids[process] = event["pid"]
            if len(pids) == 3 and len(site.lives("learner")) == 1:
                os.kill(pids.pop("learner"), signal.SIGKILL)
            elif process == "learner" and len(site.lives("learner")) == 2:
                for name in ("actor-0", "evaluator"):
                    os.kill(pids[name], signal.SIGTERM)

    for name in ("actor-0", "evaluator"):
        site.plan(name, "lives", "ends well")
    site.plan("learner", "lives", "ends well")
    site.view.on_event = kill_when_all_live
    site.supervise()
    assert len(site.lives("learner")) == 2
    epitaph, *later = site.view.restarts()
    assert epitaph.startswith("learner was killed by SIGKILL")
    assert all("SIGKILL" not in restart for restart in later)


def test_an_actor_that_did_not_hear_the_learners_goodbye_is_ended_after_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", 3.0)  # enough to begin a life in
    site.plan("actor-0", "lives")
    site.supervise()
    assert site.view.restarts() == []
    assert len(site.lives("actor-0")) == 1


def test_the_supervisors_time_is_booked_on_what_it_waits_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    monkeypatch.setattr(supervisor_module, "BACK_OFF_S", (0.3,))
    site.plan("actor-0", "fails", "ends well")
    began, supervisor = time.monotonic(), site.supervisor()
    patiently(supervisor.supervise())
    booked = supervisor.time.seconds()
    assert set(booked) <= {"process starting", "view", "back-off", "processes", "ending"}
    assert booked["back-off"] >= 0.15  # the rest may have been drawing others' events
    assert booked["process starting"] > 0.0
    assert sum(booked.values()) == pytest.approx(time.monotonic() - began, abs=0.1)


def test_a_process_that_somebody_killed_starts_again_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    monkeypatch.setattr(supervisor_module, "BACK_OFF_S", (2 * PATIENCE_S,))
    site.plan("actor-0", "dies", "dies", "ends well")
    supervisor = site.supervisor()
    patiently(supervisor.supervise())
    assert "back-off" not in supervisor.time.seconds()


def test_a_silent_process_is_killed_and_started_again(site: Site) -> None:
    site.plan("actor-0", "blocks", "ends well")
    assignments = ["supervision.silence_s=1.5"]
    config = config_file.load(config_file.find(None), assignments)
    supervisor = Supervisor(site.run, config, 1, "ipc://none", site.view)
    patiently(supervisor.supervise())
    assert site.view.restarts()[0].startswith("actor-0 said nothing for too long and was killed")
    assert len(site.lives("actor-0")) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_is_named(site: Site, number: signal.Signals) -> None:
    def tell(process: str, event: dict[str, Any]) -> None:
        if process == "learner" and event["event"] == "ready":
            os.kill(os.getpid(), number)

    site.plan("learner", "lives")
    site.view.on_event = tell
    assert patiently(until_signalled(site.supervisor())) == number


def test_a_terminated_supervisor_ends_all_within_five_seconds_and_leaves_no_orphan(
    site: Site, outer: Callable[[], Outer]
) -> None:
    for name in ("learner", "actor-0", "evaluator"):
        site.plan(name, "lives")
    site.plan("actor-1", "helped")
    run = outer()
    run.wait_until_ready(4)
    watched = descriptors(run.pids)
    run.process.terminate()
    assert living_after(watched, 5.0) == set()
    assert run.process.wait(PATIENCE_S) == 0
    assert len(run.pids) == 5
    assert living_members(set(run.pids.values())) == []
    assert run.said() == ["ended by", signal.SIGTERM]


def test_a_process_that_will_not_hear_is_killed_in_the_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(process: str, event: dict[str, Any]) -> None:
        if event["event"] == "deaf":
            pids.append(os.pidfd_open(next(e["pid"] for p, e in site.view.events if p == process)))
            os.kill(os.getpid(), signal.SIGTERM)

    pids: list[int] = []
    monkeypatch.setattr(supervisor_module, "GRACE_S", 0.1)
    site.plan("learner", "deaf")
    site.view.on_event = tell
    assert patiently(until_signalled(site.supervisor())) == signal.SIGTERM
    assert living_after(dict.fromkeys(pids, "learner"), 0.1) == set()


def test_children_die_with_a_killed_supervisor(site: Site, outer: Callable[[], Outer]) -> None:
    for name in ("learner", "actor-0", "actor-1", "evaluator"):
        site.plan(name, "lives")
    run = outer()
    run.wait_until_ready(4)
    watched = descriptors(run.pids)
    run.process.kill()
    assert living_after(watched, PATIENCE_S) == set()


def test_an_exhausted_budget_is_exit_code_1_and_one_line_for_the_person(site: Site) -> None:
    site.plan("learner", "lives")
    site.plan("actor-0", "fails")
    config = config_file.load(config_file.find(None), ["supervision.max_restarts=0"])
    site.run.config.write_text(config_file.dump(config))
    ended = subprocess.run(
        [sys.executable, "-m", "mage_services.cli.run", str(site.run.root), "--actors", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 1
    assert ended.stderr == "mage: actor-0 ended with exit code 2: the disk is full\n"


def descriptors_of(pid: int) -> set[str]:
    """What a process has open."""
    return {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}


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
        yield process
        process.kill()


def resume(run: RunDirectory, *more: str) -> list[str]:
    start = [sys.executable, "-m", "mage_async.launch", "--resume", "--actors", "1"]
    return [*start, "--run-dir", str(run.root), *more]


def test_a_run_that_lives_is_not_resumed_beside_itself(
    site: Site, resumed: "subprocess.Popen[str]"
) -> None:
    before = site.run.config.read_text()
    second = subprocess.run(
        resume(site.run, "--set", "seed=7"), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert second.returncode == EXIT_USAGE
    assert second.stderr == (
        f"mage: {site.run.root} is being run by another process: wait for it or end it, or choose "
        "another --run-dir\n"
    )
    assert site.run.config.read_text() == before
    assert (site.run.root / "sockets").is_dir()
    assert len(site.lives("learner")) == 1


def test_a_killed_supervisor_leaves_nobody_who_holds_its_run(
    site: Site, resumed: "subprocess.Popen[str]"
) -> None:
    lock = str(site.run.lock)
    assert lock in descriptors_of(resumed.pid)
    children = Path(f"/proc/{resumed.pid}/task/{resumed.pid}/children").read_text().split()
    assert len(children) >= 2
    assert all(lock not in descriptors_of(int(child)) for child in children)
    resumed.kill()
    resumed.wait()
    os.close(take_lock(site.run))


def test_a_supervisor_that_no_launch_started_locks_its_run_itself(site: Site) -> None:
    site.run.config.write_text(config_file.dump(config_file.load(config_file.find(None), [])))
    lock = take_lock(site.run)
    command = [sys.executable, "-m", "mage_services.cli.run", str(site.run.root), "--actors", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    os.close(lock)
    assert ended.returncode == 1
    assert "is being run by another process" in ended.stderr
    assert not (site.run.root / "learner.lives").exists()


def test_engines_see_their_own_gpu_and_the_evaluators_is_the_last(tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), ["engine.devices=[0, 1, 2]"])
    run = RunDirectory(tmp_path)
    view = make_view(config, run, is_terminal=False)
    supervisor = Supervisor(run, config, 3, "ipc://none", view)
    seen = {spec.name: spec.device for spec in supervisor._specs()}
    assert seen == {"learner": None, "actor-0": 0, "actor-1": 1, "actor-2": 2, "evaluator": 2}
    supervisor.config = config_file.load(config_file.find(None), [])
    assert {spec.device for spec in supervisor._specs()} == {None}
