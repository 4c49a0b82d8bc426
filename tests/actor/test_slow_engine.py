"""An actor whose engine takes long to make: reading a large model's weights blocks no message."""

import asyncio
import threading
from pathlib import Path

import pytest

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.environments.catalogue import load
from mage_async.errors import PolicyError
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.protocol.messages import Heartbeat, Hello, Welcome
from mage_services.actor import actor as actor_module
from mage_services.actor.actor import play
from mage_services.processes.process import Status
from mage_services.transport.access_control import AccessControl
from tests.helpers.actor_site import PATIENCE_S
from tests.helpers.memory_channels import MemoryLearnerChannel

HEARTBEATS = 3


def test_heartbeats_and_a_hello_to_a_restarted_learner_are_sent_while_the_engine_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(build_tokenizer(load("rps").facts.words), tmp_path)
    monkeypatch.setattr(actor_module, "HEARTBEAT_S", 0.02)
    are_heard = threading.Event()

    def make_slowly(config: Config, directory: Path, name: str) -> None:
        assert are_heard.wait(PATIENCE_S), "no heartbeat came"
        raise PolicyError("the weights are here")

    monkeypatch.setattr(actor_module, "make_engine", make_slowly)

    async def main() -> None:
        config = config_file.load(config_file.find(None), [])
        channel = MemoryLearnerChannel()
        peer = channel.connect(
            Hello(role="actor", name="a", build="test", config_digest="test", group_quota=3)
        )
        who, _ = await channel.receive()
        channel.send(who, Welcome(version=0, weights_path="no-weights"))
        playing = asyncio.create_task(play(peer, config, tmp_path, "a", Status()))
        for _ in range(HEARTBEATS):
            _, message = await channel.receive()
            assert isinstance(message, Heartbeat)
        channel.access = AccessControl("test", "test")  # the learner restarts
        _, message = await channel.receive()
        assert isinstance(message, Hello)
        are_heard.set()
        with pytest.raises(ExceptionGroup) as caught:
            await playing
        assert caught.group_contains(PolicyError, match="the weights are here")

    async def patiently() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main()

    asyncio.run(patiently())
