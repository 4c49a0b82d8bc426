"""The supervisor starts its processes, and starts them again when they fail."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.processes import supervisor as supervisor_module
from mage_services.processes.supervisor import Supervisor
from mage_services.terminal.plain_lines import make_view
from tests.helpers.supervised_runs import PATIENCE_S, Site, living_members, patiently


def test_a_run_is_over_when_all_its_processes_have_ended_well(site: Site) -> None:
    site.supervise(num_actors=2)
    started = [event["text"] for _, event in site.view.events if event["event"] == "started"]
    assert sorted(started) == ["actor-0", "actor-1", "evaluator", "learner"]
    assert site.lives("actor-1") == ["--address ipc://none"]


def test_an_actor_that_fails_is_started_again_and_the_others_are_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    site.plan("actor-0", "fails", "dies", "ends well")
    site.supervise()
    failed, died = site.view.restarts()
    assert failed == "actor-0 ended with exit code 2: the disk is full. It is started again"
    assert died.startswith("actor-0 was killed by SIGKILL")
    assert len(site.lives("actor-0")) == 3
    assert len(site.lives("learner")) == len(site.lives("evaluator")) == 1


def test_a_process_that_cannot_be_started_is_started_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_room(process: str, event: dict[str, Any]) -> None:
        if event["event"] == "restarting":
            log.rmdir()

    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    log: Path = site.run.log_of("actor-0")
    log.mkdir()
    site.view.on_event = make_room
    site.supervise()
    assert site.view.restarts() == [
        f"actor-0 could not be started: [Errno 21] Is a directory: '{log}'. It is started again"
    ]
    assert len(site.lives("actor-0")) == 1


def test_news_is_shown_as_notes(site: Site) -> None:
    def end_after_the_news(process: str, event: dict[str, Any]) -> None:
        if event == {"event": "note", "text": "wandb receives the run again"}:
            site.plan("learner", "ends well")
            os.kill(pids["learner"], signal.SIGKILL)
        elif event["event"] == "ready" and process == "learner" and not pids:
            pids["learner"] = event["pid"]
            news.append("wandb receives the run again")

    pids, news = dict[str, int](), list[str]()
    site.plan("learner", "lives")
    site.view.on_event = end_after_the_news
    supervisor = site.supervisor()
    supervisor.news = lambda: [news.pop()] if news else []
    patiently(supervisor.supervise())
    assert len(site.lives("learner")) == 2


def test_a_process_that_can_never_be_started_ends_the_run_with_one_sentence(site: Site) -> None:
    site.plan("learner", "lives")
    site.run.log_of("actor-0").mkdir()
    with pytest.raises(ExceptionGroup) as caught:
        site.supervise(max_restarts=1)
    (reason,) = caught.value.exceptions
    assert isinstance(reason, RunError)
    assert str(reason).startswith("actor-0 could not be started: [Errno 21] Is a directory")
    assert len(site.view.restarts()) == 1


def test_an_actor_that_somebody_terminates_is_started_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)

    def terminate_first(process: str, event: dict[str, Any]) -> None:
        if process == "actor-0" and event["event"] == "ready" and len(site.lives("actor-0")) == 1:
            os.kill(event["pid"], signal.SIGTERM)

    site.plan("actor-0", "lives", "ends well")
    site.view.on_event = terminate_first
    site.supervise()
    assert site.view.restarts()[0].startswith("actor-0 ended with exit code 143")
    assert len(site.lives("actor-0")) == 2


@pytest.mark.parametrize("failure", ["fails", "progresses"])
def test_a_process_that_fails_more_often_than_its_budget_ends_the_run_with_its_failure_line(
    site: Site, failure: str
) -> None:
    site.plan("learner", "lives")
    site.plan("actor-0", failure)
    with pytest.raises(ExceptionGroup) as caught:
        site.supervise(max_restarts=2)
    (reason,) = caught.value.exceptions
    assert isinstance(reason, RunError)
    assert str(reason) == (
        "actor-0 ended with exit code 2: the disk is full. It failed 3 times in a row "
        "(between two failures it ran for less than 120 s or made no progress), and "
        "supervision.max_restarts = 2. Mend the cause, then go on with `mage train --resume "
        f"--run-dir {site.run.root}`"
    )
    assert len(site.lives("actor-0")) == 3


def test_failures_before_a_healthy_stretch_with_progress_are_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "HEALTHY_S", 0.0)
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    site.plan("actor-0", *["progresses"] * 3, "ends well")
    site.supervise(max_restarts=1)
    assert len(site.lives("actor-0")) == 4


def test_a_long_life_without_progress_forgets_no_failure(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "HEALTHY_S", 0.0)
    site.plan("learner", "lives")
    site.plan("actor-0", "fails")
    with pytest.raises(ExceptionGroup):
        site.supervise(max_restarts=2)
    assert len(site.lives("actor-0")) == 3


def test_a_process_is_not_started_again_where_its_error_is_deterministic(site: Site) -> None:
    site.plan("learner", "impossible")
    site.plan("actor-0", "lives")
    with pytest.raises(ExceptionGroup) as caught:
        site.supervise(max_restarts=3)
    assert str(caught.value.exceptions[0]) == "learner cannot go on: the gate is shut"
    assert len(site.lives("learner")) == 1
    assert site.view.restarts() == []


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
    failure_line, *later = site.view.restarts()
    assert failure_line.startswith("learner was killed by SIGKILL")
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
    supervisor, began = site.supervisor(), time.monotonic()
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
    site.plan("actor-0", "dies", "ends well")
    supervisor = site.supervisor()
    patiently(supervisor.supervise())
    assert "back-off" not in supervisor.time.seconds()


def test_kills_from_outside_are_no_failures_while_the_run_makes_progress(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    monkeypatch.setattr(supervisor_module, "BACK_OFF_S", (0.01,))
    site.plan("actor-0", *["plays and dies"] * 5, "ends well")
    supervisor = site.supervisor(max_restarts=1)
    patiently(supervisor.supervise())
    assert len(site.lives("actor-0")) == 6
    assert "see `dmesg`" in site.view.restarts()[0]
    assert "back-off" in supervisor.time.seconds()  # from the second one on


def test_kills_without_any_progress_end_the_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "BACK_OFF_S", (0.01,))
    site.plan("learner", "lives")
    site.plan("actor-0", "dies")
    with pytest.raises(ExceptionGroup) as caught:
        site.supervise(max_restarts=1)
    (reason,) = caught.value.exceptions
    assert "supervision.max_restarts = 1" in str(reason)
    assert "started again" not in str(reason)
    assert f"--resume --run-dir {site.run.root}" in str(reason)


def test_an_end_that_nobody_asked_for_is_a_failure_whatever_its_status(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    site.plan("actor-0", "vanishes", "ends well")
    site.supervise()
    assert len(site.lives("actor-0")) == 2
    assert "ended with exit code 0" in site.view.restarts()[0]
    assert "os._exit" in site.view.restarts()[0]


def test_a_process_that_is_killed_after_its_end_is_not_started_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    site.plan("evaluator", "ends slowly")
    site.supervise(silence_s=1.5)
    assert len(site.lives("evaluator")) == 1
    assert site.view.restarts() == []


def test_what_a_killed_process_has_forked_is_killed_before_its_restart(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    site.plan("actor-0", "forks", "ends well")
    site.supervise()
    assert len(site.lives("actor-0")) == 2
    (left,) = [e["text"] for p, e in site.view.events if p == "actor-0" and e["event"] == "note"]
    assert left.startswith("left processes behind, which are killed: ")
    groups = {e["pid"] for p, e in site.view.events if p == "actor-0" and e["event"] == "ready"}
    assert living_members(groups) == []


def test_a_deleted_folder_ends_the_run_with_one_sentence(site: Site) -> None:
    site.plan("learner", "lives")
    site.plan("actor-0", "lives")
    # It is moved away, which is atomic: files that the processes write do not disturb it.
    site.view.on_event = lambda process, event: (
        site.run.root.rename(site.run.root.with_name("deleted"))
        if event["event"] == "ready" and process == "actor-0"
        else None
    )
    with pytest.raises(ExceptionGroup) as caught:
        site.supervise()
    assert "was deleted while the run went on" in str(caught.value.exceptions[0])


def test_a_silent_process_is_killed_and_started_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_S", PATIENCE_S)
    site.plan("actor-0", "blocks", "ends well")
    assignments = ["supervision.silence_s=1.5"]
    config = config_file.load(config_file.find(None), assignments)
    supervisor = Supervisor(site.run, config, 1, "ipc://none", site.view)
    patiently(supervisor.supervise())
    assert site.view.restarts()[0].startswith(
        "actor-0 sent no heartbeat for too long and was killed"
    )
    assert len(site.lives("actor-0")) == 2


def test_engines_see_their_own_gpu_and_the_evaluators_is_the_last(tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), ["engine.devices=[0, 1, 2]"])
    run = RunDirectory(tmp_path)
    view = make_view(config, run, is_terminal=False)
    supervisor = Supervisor(run, config, 3, "ipc://none", view)
    seen = {spec.name: spec.devices for spec in supervisor._specs()}
    actors = {"actor-0": (0,), "actor-1": (1,), "actor-2": (2,)}
    assert seen == {"learner": (), **actors, "evaluator": (2,)}
    supervisor.config = config_file.load(config_file.find(None), [])
    assert {spec.devices for spec in supervisor._specs()} == {()}


def test_engines_that_share_their_model_see_a_group_of_gpus_each(tmp_path: Path) -> None:
    changes = ["engine.devices=[0, 1, 2, 3]", "engine.gpus_per_actor=2"]
    config = config_file.load(config_file.find("gpu8"), changes)
    run = RunDirectory(tmp_path)
    view = make_view(config, run, is_terminal=False)
    specs = Supervisor(run, config, 3, "ipc://none", view)._specs()
    seen = {spec.name: spec.devices for spec in specs}
    assert seen["actor-0"] == seen["actor-2"] == (0, 1)
    assert seen["actor-1"] == seen["evaluator"] == (2, 3)


def test_the_learner_of_a_pretrained_model_keeps_its_heap_together(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    found = {}
    for kind in ("tiny", "pretrained"):
        config = config_file.load(config_file.find(None), [f"policy.kind={kind}"])
        view = make_view(config, run, is_terminal=False)
        specs = Supervisor(run, config, 1, "ipc://none", view)._specs()
        found[kind] = {spec.name: dict(spec.variables) for spec in specs}
    assert found["tiny"] == {"learner": {}, "actor-0": {}, "evaluator": {}}
    assert found["pretrained"] == found["tiny"] | {"learner": supervisor_module.LARGE_TENSORS}


@pytest.mark.parametrize(
    ("change", "own", "expected"),
    [
        ("transport.weights=nccl", {}, {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}),
        ("transport.weights=nccl", {"NCCL_CUMEM_ENABLE": "0"}, {"NCCL_NVLS_ENABLE": "0"}),
        ("transport.weights=disk", {}, {}),
    ],
)
def test_all_processes_of_a_group_of_nccl_have_equal_settings_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, own, expected: dict[str, str]
) -> None:
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    config = config_file.load(config_file.find("gpu8"), [change])
    run = RunDirectory(tmp_path)
    view = make_view(config, run, is_terminal=False)
    for spec in Supervisor(run, config, 2, "ipc://none", view)._specs():
        assert {k: v for k, v in spec.variables.items() if k.startswith("NCCL")} == expected
