"""An evaluator that has nothing to play until the end holds no weights."""

import asyncio
from pathlib import Path

from mage_async.config import config_file
from mage_async.protocol.messages import Goodbye, Heartbeat, Hello, Loaded, Publication, Welcome
from mage_async.results.run_directory import RunDirectory
from mage_services.actor.evaluator import CurveEvaluator
from mage_services.processes.process import Status
from mage_services.processes.startup import Startup
from tests.helpers.memory_channels import MemoryLearnerChannel


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
        async with asyncio.timeout(30.0):
            await follower.wait_for_end(0)
            let_go = []
            while len(let_go) < 2:
                _, message = await channel.receive()
                assert isinstance(message, Loaded | Heartbeat)
                let_go += [message.version] if isinstance(message, Loaded) else []
        return let_go

    assert asyncio.run(main()) == [3, 3]
