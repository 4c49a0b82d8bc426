"""Versions of the policy that an engine holds beside the current one, to play opponents' seats.

Each has a scheduler of its own, and so keys and values of its own: a context of one is never read
by another. Versions that no group plays against any more stay for a while, for the next group.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mage_async.errors import RunError
from mage_async.inference.scheduler import Scheduler

MAX_IDLE = 4


@dataclass(slots=True)
class _Held:
    scheduler: Scheduler
    num_users: int = 0


class Rivals:
    """Schedulers by version. `make` reads weights, in a thread, and never twice at once."""

    def __init__(self, make: Callable[[int, Path], Scheduler]) -> None:
        self._make, self._held = make, dict[int, _Held]()
        self._reading = asyncio.Lock()
        self._past_s = 0.0

    async def hold(self, version: int, path: Path) -> None:
        """Hold a version until `let_go`; held twice, it is to be let go twice.

        Cancellation leaves it as it was.

        Raises:
            PolicyError: the file cannot be used.
        """
        async with self._reading:
            if version not in self._held:
                self._held[version] = _Held(await asyncio.to_thread(self._make, version, path))
            held = self._held.pop(version)
            held.num_users += 1
            self._held[version] = held  # the latest used is the last

    def let_go(self, version: int) -> None:
        """Release a version; of those that no group needs, the latest used are kept."""
        self._held[version].num_users -= 1
        idle = [each for each, held in self._held.items() if not held.num_users]
        for each in idle[:-MAX_IDLE]:
            self._past_s += self._held.pop(each).scheduler.statistics().forward_s

    def scheduler(self, version: int) -> Scheduler:
        """The scheduler of a version that is held.

        Raises:
            RunError: it is not.
        """
        if version not in self._held:
            raise RunError(f"version {version} is not held beside the current one")
        return self._held[version].scheduler

    def schedulers(self) -> list[Scheduler]:
        """Schedulers of all versions."""
        return [held.scheduler for held in self._held.values()]

    def forward_s(self) -> float:
        """Time spent computing for any of them."""
        own = (each.statistics().forward_s for each in self.schedulers())
        return self._past_s + sum(own)

    def cache_bytes(self) -> int:
        """Memory of their keys and values."""
        return sum(each.statistics().cache_bytes for each in self.schedulers())
