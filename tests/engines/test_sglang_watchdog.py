"""What is said of an SGLang process that was killed because it did not answer."""

import asyncio
import signal

import pytest

from mage_async.errors import RunError
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang import watchdog
from mage_services.engines.sglang.watchdog import EngineWatchdog


class Silent:
    """A process that serves, and then answers nothing until it is killed."""

    pid = 1

    def __init__(self) -> None:
        self._said: asyncio.Queue[say.Message | None] = asyncio.Queue()
        self._said.put_nowait(say.Serving("silent"))

    def send(self, message: say.Message) -> None:
        """It reads nothing."""

    async def receive(self) -> say.Message | None:
        return await self._said.get()

    def kill(self) -> None:
        self._said.put_nowait(None)

    async def wait(self) -> int:
        return -signal.SIGKILL


def test_a_process_that_misses_a_deadline_is_not_taken_for_one_that_the_system_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(threads: int) -> Silent:
        return Silent()

    monkeypatch.setattr(watchdog, "start_process", start)
    monkeypatch.setattr(watchdog, "WATCH_S", 0.01)
    dog = EngineWatchdog(
        lambda number: None,  # type: ignore[arg-type, return-value]
        lambda message: dog.expect("a turn", 0.0),
        lambda: None,
        threads=1,
        max_deaths=0,
    )

    async def main() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(dog.watch())
            with pytest.raises(RunError, match="SGLang's process did not answer a request in time"):
                await dog.run()
            watching.cancel()

    asyncio.run(main())
