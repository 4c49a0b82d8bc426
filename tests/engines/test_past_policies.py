"""Past versions of the policy, held in the memory of an engine."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from mage_services.engines.embedded import PastPolicies


def test_a_version_is_read_only_after_the_read_of_a_cancelled_load() -> None:
    began, may_end = threading.Event(), threading.Event()
    num_reading = most_reading = 0
    guard = threading.Lock()

    def make(version: int, path: Path) -> Any:
        nonlocal num_reading, most_reading
        with guard:
            num_reading += 1
            most_reading = max(most_reading, num_reading)
        began.set()
        assert may_end.wait(20)
        with guard:
            num_reading -= 1

    async def run() -> None:
        past = PastPolicies(make)
        first = asyncio.create_task(past.load(1, Path()))
        await asyncio.to_thread(began.wait, 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(past.load(2, Path()))
        await asyncio.sleep(0.2)  # what the second reads beside the first would show by then
        may_end.set()
        await second

    asyncio.run(run())
    assert most_reading == 1
