"""The thread that awaits the coroutines of a class: how late its event loop begins a call."""

import threading
import time

import pytest

from mage_services.environments.call_runner import RECENT_S, CoroutineThread


def test_a_late_call_is_forgotten_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, now = CoroutineThread(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    may_begin, begun = threading.Event(), threading.Event()

    async def nothing() -> None:
        pass

    thread.loop.call_soon_threadsafe(may_begin.wait)
    thread.call("late", nothing, lambda _: begun.set())
    now += 3.0
    assert thread.latest_s() == 3.0  # it waits still
    may_begin.set()
    begun.wait()
    assert thread.latest_s() == 3.0
    now += RECENT_S + 1.0
    assert thread.latest_s() == 0.0
