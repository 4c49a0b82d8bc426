"""The learner's one thread that computes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any


class Worker:
    """Takes one call after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work` in the thread. Cancellation lets what has begun finish, unheard."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args))

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
