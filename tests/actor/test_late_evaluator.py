"""An evaluator that has not played all points of the curve when the learner ends."""

import asyncio
import errno
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mage_async.config import config_file
from mage_async.protocol.messages import Goodbye, Hello, Message, Publication, Welcome
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor import evaluator as evaluator_module
from mage_services.actor.evaluator import CurveEvaluator, Evaluator, at_intervals
from mage_services.environments.call_runner import CallRunner
from mage_services.processes import process
from mage_services.processes.process import Startup, Status
from tests.helpers.memory_channels import MemoryLearnerChannel
from tests.helpers.scripted_engine import ScriptedEngine, UniformWords

KEYS = ("learner.steps=30", "evaluation.trials=2", "evaluation.final_trials=2")


class Noted(Status):
    """Keeps the events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self._changed = asyncio.Event()

    def send(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})
        self._changed.set()

    async def measured(self, num_points: int) -> None:
        """Wait for this many points of the curve."""
        while sum(each["event"] == "curve" for each in self.events) < num_points:
            self._changed.clear()
            await self._changed.wait()


async def follow(
    tmp_path: Path, chat: ChatFormat, *messages: Message, version: int = 0, num_points: int = 0
) -> list[dict[str, Any]]:
    """Let an evaluator that is welcomed with a version follow a run of 30 steps; return its events.

    The learner says goodbye when the evaluator has measured `num_points` points.
    """
    channel, status = MemoryLearnerChannel(), Noted()
    hello = Hello(role="evaluator", name="e", build="test", config_digest="test", group_quota=0)
    peer = channel.connect(hello)
    who, _ = await channel.receive()
    config = config_file.load(config_file.find(None), list(KEYS))
    startup = Startup(RunDirectory(tmp_path), config, "test", "test", "e", "")
    late = CurveEvaluator(startup, status, peer)
    words = UniformWords(chat, ActionParser("both"), ("rock", "paper", "scissors"))
    async with CallRunner() as workers:
        engine = ScriptedEngine(words)
        evaluator = Evaluator(config, chat, engine, workers, 3)
        for message in messages:
            channel.send(who, message)
        async with asyncio.timeout(60.0), late.receiving(), asyncio.TaskGroup() as tasks:
            tasks.create_task(late.follow(evaluator, version, Path("no-weights")))
            await status.measured(num_points)
            channel.send(who, Goodbye(reason="the run is complete"))
    return status.events


def publication(version: int) -> Publication:
    return Publication(version=version, path="no-weights", digest="none")


def test_it_plays_the_final_sets_first_and_says_what_is_left(
    tmp_path: Path, chat: ChatFormat
) -> None:
    run = RunDirectory(tmp_path)
    events = asyncio.run(follow(tmp_path, chat, *map(publication, (10, 20, 30))))
    assert json.loads(run.evaluation.read_text())["version"] == 30
    assert [line["version"] for line in read_lines(run.curve)] == [0, 10, 20]
    assert {line["version"] for line in read_lines(run.samples)} == {0, 30}
    found = [(each["event"], each.get("version")) for each in events]
    assert found == [
        ("curve", 0),
        ("evaluating", 30),
        ("note", None),
        ("curve", 10),
        ("curve", 20),
    ]
    assert "evaluation.json is written; 2 points of the curve are still to be" in events[2]["text"]


@pytest.mark.parametrize("num_points", [0, 3])
def test_a_due_version_that_a_restarted_learner_names_in_its_welcome_alone_is_measured_once(
    tmp_path: Path, chat: ChatFormat, num_points: int
) -> None:
    # The learner was killed before it announced version 20, and was restarted three times.
    welcomes = [Welcome(version=version, weights_path="no-weights") for version in (20, 20, 25)]
    messages = publication(10), *welcomes, publication(30)
    asyncio.run(follow(tmp_path, chat, *messages, num_points=num_points))
    run = RunDirectory(tmp_path)
    assert json.loads(run.evaluation.read_text())["version"] == 30
    assert [line["version"] for line in read_lines(run.curve)] == [0, 10, 20]


def test_a_restarted_evaluator_measures_the_version_that_it_is_welcomed_with_unless_it_has(
    tmp_path: Path, chat: ChatFormat
) -> None:
    curve = RunDirectory(tmp_path).curve
    curve.write_text('{"version": 0}\n{"version": 10}\n')
    for version in (10, 20, 25):
        asyncio.run(follow(tmp_path, chat, publication(30), version=version))
    assert [line["version"] for line in read_lines(curve)] == [0, 10, 20]


def test_an_evaluator_that_begins_late_measures_the_policy_that_the_run_began_with(
    tmp_path: Path, chat: ChatFormat
) -> None:
    asyncio.run(follow(tmp_path, chat, publication(30), version=20, num_points=2))
    run = RunDirectory(tmp_path)
    assert [line["version"] for line in read_lines(run.curve)] == [0, 20]
    assert {line["version"] for line in read_lines(run.samples)} == {0, 30}


def test_what_was_measured_waits_while_the_disk_is_full(
    tmp_path: Path, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first write of each of the three files finds no space.
    tried: set[Path] = set()

    def once_full(write: Callable[..., None]) -> Callable[..., None]:
        def limited(*args: Any, **given: Any) -> None:
            file = args[0].evaluation if isinstance(args[0], RunDirectory) else args[0]
            if file not in tried:
                tried.add(file)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
            write(*args, **given)

        return limited

    for name in ("append_lines", "write_evaluation"):
        monkeypatch.setattr(evaluator_module, name, once_full(getattr(evaluator_module, name)))
    monkeypatch.setattr(process, "RETRY_S", 0.01)
    run = RunDirectory(tmp_path)
    events = asyncio.run(follow(tmp_path, chat, *map(publication, (10, 20, 30)), num_points=3))
    assert json.loads(run.evaluation.read_text())["version"] == 30
    assert [line["version"] for line in read_lines(run.curve)] == [0, 10, 20]
    assert len(read_lines(run.samples)) == 12
    notes = [each["text"] for each in events if each["event"] == "note"]
    assert [note.split(": ")[0] for note in notes] == [
        f"cannot write {file}" for file in (run.samples, run.curve, run.evaluation)
    ]
    assert all("Make room, and the run goes on by itself" in note for note in notes)


@pytest.mark.parametrize(("episodes", "num_sets"), [(3, 4), (1, 2)])
def test_a_final_evaluation_reports_how_many_trials_are_played(
    chat: ChatFormat, episodes: int, num_sets: int
) -> None:
    async def main() -> list[tuple[int, int]]:
        config = config_file.load(config_file.find(None), list(KEYS))
        words = UniformWords(chat, ActionParser("both"), ("rock", "paper", "scissors"))
        reported: list[tuple[int, int]] = []
        async with CallRunner() as workers:
            engine = ScriptedEngine(words)
            evaluator = Evaluator(config, chat, engine, workers, episodes)
            await evaluator.final(2, lambda played, of: reported.append((played, of)))
        return reported

    # training tasks, held-out ones, and with earlier episodes blind and swapped, two trials each
    num = 2 * num_sets
    assert asyncio.run(main()) == [(played, num) for played in range(1, num + 1)]


def test_reports_are_passed_on_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(evaluator_module.time, "monotonic", lambda: now)
    passed: list[int] = []
    report = at_intervals(5.0, lambda played, of: passed.append(played))
    for now in (1.0, 5.0, 6.0, 9.9, 10.0):
        report(int(10 * now), 200)
    assert passed == [50, 100]


WELCOME = Welcome(version=20, weights_path="no-weights")


@pytest.mark.parametrize("every", [0, 10])
@pytest.mark.parametrize("messages", [[], [WELCOME], [WELCOME, publication(25)]])
def test_it_plays_the_final_sets_though_the_goodbye_was_lost(
    tmp_path: Path,
    chat: ChatFormat,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    messages: list[Message],
) -> None:
    run = RunDirectory(tmp_path)

    async def main() -> None:
        channel = MemoryLearnerChannel()
        hello = Hello(role="evaluator", name="e", build="test", config_digest="test", group_quota=0)
        peer = channel.connect(hello)
        who, _ = await channel.receive()
        for message in messages:
            channel.send(who, message)
        monkeypatch.setattr(evaluator_module, "PeerChannel", lambda *_, **__: nullcontext(peer))
        monkeypatch.setattr(evaluator_module, "load_chat", lambda *_, **__: chat)
        made = nullcontext(ScriptedEngine(words))
        monkeypatch.setattr(evaluator_module, "make_engine", lambda *_: made)
        monkeypatch.setattr(evaluator_module, "GOODBYE_WAIT_S", 0.2)
        config = config_file.load(config_file.find(None), [*KEYS, f"evaluation.every={every}"])
        startup = Startup(run, config, "test", "test", "e", "")
        async with asyncio.timeout(60.0):
            await asyncio.gather(evaluator_module.main(startup, status), finish())

    async def finish() -> None:
        """The learner's last step, after the evaluator has begun to wait."""
        await asyncio.sleep(0.5)
        run.learner.write_text('{"version": 30}')

    words, status = UniformWords(chat, ActionParser("both"), ("rock", "paper", "scissors")), Noted()
    asyncio.run(main())
    assert json.loads(run.evaluation.read_text())["version"] == 30
    assert any("its goodbye did not arrive" in each.get("text", "") for each in status.events)
