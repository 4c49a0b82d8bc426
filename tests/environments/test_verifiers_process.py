"""The process of verifiers sends what cannot be read."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mage_async.errors import EnvironmentFault, WireError
from mage_services.verifiers.process import Report, VerifiersProcess


class Garbled:
    """Stands for a child process, and for its channel, whose first message cannot be read."""

    is_running = True
    is_closing = False

    def __init__(self) -> None:
        self.channel, self.begun = self, asyncio.Event()

    def send(self, message: Any) -> None:
        self.begun.set()

    async def messages(self) -> AsyncIterator[Report]:
        await self.begun.wait()
        raise WireError("no JSON")
        yield Report()

    def close(self) -> None:
        self.is_closing = True

    async def wait(self) -> int:
        return 0


def test_a_garbled_message_ends_the_rollouts_and_the_process() -> None:
    async def run() -> bool:
        process = VerifiersProcess(Garbled())  # type: ignore[arg-type]
        with pytest.raises(EnvironmentFault, match="sent what cannot be read: no JSON"):
            async with asyncio.timeout(5):
                await process.play(0, "http://127.0.0.1/")
        return process.is_alive

    assert not asyncio.run(run())
