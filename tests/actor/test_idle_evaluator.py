"""An evaluator that has nothing to play until the end holds no weights."""

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from mage_async.config import config_file
from mage_async.protocol.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Publication,
    Welcome,
)
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor import evaluator
from mage_services.actor.evaluator import CurveEvaluator
from mage_services.processes.process import Startup, Status
from tests.helpers.memory_channels import MemoryLearnerChannel
from tests.helpers.scripted_engine import ScriptedEngine, UniformWords

GOODBYE = Goodbye(reason="the run is complete")


def test_versions_are_let_go_without_being_loaded(tmp_path: Path) -> None:
    async def main() -> list[int]:
        channel = MemoryLearnerChannel()
        hello = Hello(role="evaluator", name="e", build="test", config_digest="test", group_quota=0)
        peer = channel.connect(hello)
        who, _ = await channel.receive()
        config = config_file.load(config_file.find(None), ["evaluation.every=0"])
        startup = Startup(RunDirectory(tmp_path), config, "test", "test", "e", "")
        follower = CurveEvaluator(startup, Status(), peer)
        channel.send(who, Publication(version=3, path="no-weights", digest="none"))
        channel.send(who, Welcome(version=2, weights_path="no-weights"))  # of an older life
        channel.send(who, Goodbye(reason="the run is complete"))
        async with asyncio.timeout(30.0), follower.receiving():
            await follower.wait_for_end(0)
            let_go = []
            while len(let_go) < 2:
                _, message = await channel.receive()
                assert isinstance(message, Loaded | Heartbeat)
                let_go += [message.version] if isinstance(message, Loaded) else []
        return let_go

    assert asyncio.run(main()) == [3, 3]


@pytest.mark.parametrize(
    ("every", "messages", "curve"),
    [
        (0, (Welcome(version=20, weights_path="no-weights"), GOODBYE), []),
        (10, (GOODBYE,), [0]),  # the training ended before the evaluator had begun
    ],
)
def test_a_late_evaluator_still_plays_the_policy_that_the_run_began_with(
    tmp_path: Path,
    chat: ChatFormat,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    messages: tuple[Message, ...],
    curve: list[int],
) -> None:
    async def main() -> None:
        channel = MemoryLearnerChannel()
        hello = Hello(role="evaluator", name="e", build="test", config_digest="test", group_quota=0)
        peer = channel.connect(hello)
        who, _ = await channel.receive()
        keys = ["evaluation.trials=2", "evaluation.final_trials=2", "learner.steps=30"]
        keys.append(f"evaluation.every={every}")
        config = config_file.load(config_file.find(None), keys)
        words = UniformWords(chat, ActionParser("both"), ("rock", "paper", "scissors"))
        made = nullcontext(ScriptedEngine(words))
        monkeypatch.setattr(evaluator, "PeerChannel", lambda *_, **__: nullcontext(peer))
        monkeypatch.setattr(evaluator, "load_chat", lambda *_, **__: chat)
        monkeypatch.setattr(evaluator, "make_engine", lambda *_: made)
        monkeypatch.setattr(evaluator, "_last", lambda _: (30, tmp_path))
        for message in messages:
            channel.send(who, message)
        startup = Startup(RunDirectory(tmp_path), config, "test", "test", "e", "")
        async with asyncio.timeout(60.0):
            await evaluator.main(startup, Status())

    asyncio.run(main())
    assert {line["version"] for line in read_lines(RunDirectory(tmp_path).samples)} == {0, 30}
    points = read_lines(RunDirectory(tmp_path).curve)
    assert [line["version"] for line in points] == curve
