"""The queue from other threads to an event loop."""

import asyncio
import threading

from mage_services.environments.call_runner import Handover


def started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    threading.Thread(target=run, daemon=True).start()
    return loop


def test_a_loop_that_is_blocked_after_its_put_does_not_keep_what_another_loop_puts() -> None:
    async def main() -> None:
        taken: asyncio.Queue[str] = asyncio.Queue()
        handover = Handover(asyncio.get_running_loop(), taken.put_nowait)
        is_blocked, release = threading.Event(), threading.Event()

        def put_and_block() -> None:
            handover.put("first")
            is_blocked.set()
            release.wait()

        blocked, healthy = started_loop(), started_loop()
        blocked.call_soon_threadsafe(put_and_block)
        await asyncio.to_thread(is_blocked.wait)
        healthy.call_soon_threadsafe(handover.put, "second")
        async with asyncio.timeout(30):
            assert [await taken.get(), await taken.get()] == ["first", "second"]
        release.set()
        for loop in (blocked, healthy):
            loop.call_soon_threadsafe(loop.stop)

    asyncio.run(main())
