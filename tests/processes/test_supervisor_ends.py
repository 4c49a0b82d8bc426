"""How a supervised run ends: by a signal, by a fault, with nothing left behind."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mage_async.config import config_file
from mage_services.cli.main import EXIT_FAILED, EXIT_USAGE
from mage_services.processes import supervisor as supervisor_module
from mage_services.processes.run_lock import take_lock
from mage_services.processes.supervised_process import (
    ProcessSpec,
    RunningProcess,
    SupervisedProcess,
)
from mage_services.processes.supervisor import until_signalled
from tests.helpers.supervised_runs import (
    PATIENCE_S,
    Outer,
    Site,
    descriptors,
    descriptors_of,
    living_after,
    living_members,
    patiently,
    resume,
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_is_named(site: Site, number: signal.Signals) -> None:
    def tell(process: str, event: dict[str, Any]) -> None:
        if process == "learner" and event["event"] == "ready":
            os.kill(os.getpid(), number)

    site.plan("learner", "lives")
    site.view.on_event = tell
    assert patiently(until_signalled(site.supervisor())) == number
    (said,) = site.view.lines
    assert said.startswith("the run is being ended: its processes have 3 s, then they are killed")
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    assert signal.getsignal(number) == default


def test_a_run_under_nohup_outlives_its_terminal(site: Site) -> None:
    def hang_up(process: str, event: dict[str, Any]) -> None:
        if process == "learner" and event["event"] == "ready":
            os.kill(os.getpid(), signal.SIGHUP)

    site.view.on_event = hang_up
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert patiently(until_signalled(site.supervisor())) is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminated_supervisor_ends_all_and_leaves_no_orphan(
    site: Site, outer: Callable[[], Outer]
) -> None:
    for name in ("learner", "actor-0", "evaluator"):
        site.plan(name, "lives")
    site.plan("actor-1", "helped")
    run = outer()
    run.wait_until_ready(4)
    watched = descriptors(run.pids)
    run.process.terminate()
    assert living_after(watched, PATIENCE_S) == set()  # 5 s on an idle machine
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


class Uninterruptible(SupervisedProcess):
    """As in a call of the kernel that does not return: a kill does not end it."""

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


def test_a_process_that_the_kernel_does_not_end_is_named_and_not_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(spec: ProcessSpec) -> RunningProcess:
        kind = Uninterruptible if spec.name == "actor-0" else SupervisedProcess
        return await kind.start(spec)

    def tell(process: str, event: dict[str, Any]) -> None:
        if process == "actor-0" and event["event"] == "ready":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(supervisor_module, "GRACE_S", 0.1)
    monkeypatch.setattr(supervisor_module, "KILLED_S", 0.5)
    for name in ("learner", "actor-0", "evaluator"):
        site.plan(name, "lives")
    site.view.on_event = tell
    supervisor = site.supervisor()
    supervisor.start = start
    assert patiently(until_signalled(supervisor)) == signal.SIGTERM
    process, event = site.view.events[-1]
    assert (process, event["event"]) == ("supervisor", "note")
    assert event["text"].startswith("killed, but not ended after 0.5 s: actor-0. The kernel")


def test_a_run_ends_though_an_actor_still_waits_for_a_node_with_room(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(spec: ProcessSpec) -> RunningProcess:
        if spec.name == "actor-1":
            await asyncio.Event().wait()
        return await SupervisedProcess.start(spec)

    monkeypatch.setattr(supervisor_module, "LEAVE_S", 0.1)
    supervisor = site.supervisor(num_actors=2)
    supervisor.start = start
    patiently(supervisor.supervise())
    assert not (site.run.root / "actor-1.lives").exists()


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
    site.run.config.write_text(config_file.dump(config_file.load(config_file.find(None), [])))
    ended = subprocess.run(
        resume(site.run, "--set", "supervision.max_restarts=0"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == EXIT_FAILED == 1
    assert ended.stderr.startswith(
        "mage: actor-0 ended with exit code 2: the disk is full. It failed"
    )
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("place", ["a full disk", "a pipe without a reader"])
def test_a_run_goes_on_though_its_output_cannot_be_written(place: str, site: Site) -> None:
    site.plan("learner", "lives")
    site.run.config.write_text(config_file.dump(config_file.load(config_file.find(None), [])))
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full:
        output = full if place == "a full disk" else writing
        process = subprocess.Popen(
            resume(site.run), stdout=output, stderr=subprocess.PIPE, text=True
        )
    os.close(writing)
    with process:
        # The evaluator is started last, so much has been shown by then.
        while process.poll() is None and not (site.run.root / "evaluator.lives").exists():
            time.sleep(0.05)
        process.terminate()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.startswith("stdout cannot be written: ")
    assert said.count("\n") == 1


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
    listed = Path(f"/proc/{resumed.pid}/task/{resumed.pid}/children")
    while len(children := listed.read_text().split()) < 2:
        assert resumed.poll() is None
    while any(lock in descriptors_of(int(child)) for child in children):
        assert resumed.poll() is None  # a child has it between its fork and its program
    resumed.kill()
    resumed.wait()
    os.close(take_lock(site.run))


def test_a_run_that_another_process_holds_starts_no_process(site: Site) -> None:
    site.run.config.write_text(config_file.dump(config_file.load(config_file.find(None), [])))
    lock = take_lock(site.run)
    ended = subprocess.run(resume(site.run), capture_output=True, text=True, timeout=PATIENCE_S)
    os.close(lock)
    assert ended.returncode == EXIT_USAGE
    assert "is being run by another process" in ended.stderr
    assert not (site.run.root / "learner.lives").exists()
