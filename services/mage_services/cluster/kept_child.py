"""A process that a keeper keeps on a node, as the supervisor sees it: a child like any other.

A node that is lost is a child that was killed: the supervisor starts it again, and Ray places it
on a node that has room.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

from mage_services.cluster.keeper import ENDED, End
from mage_services.processes.child import Spec

LOST = -signal.SIGKILL


class KeptChild:
    """See the module; `mage_services.processes.child.Running` says what each method is for.

    Args:
        keeper: Ray's handle of a `Keeper`, which has been placed.
    """

    def __init__(self, spec: Spec, node: str, keeper: Any) -> None:
        self.spec, self.node = spec, node
        self._keeper = keeper
        self._end: End | None = None
        self._loss = ""

    @property
    def was_silent(self) -> bool:
        """Whether its keeper killed it for having said nothing."""
        return self._end is not None and self._end.was_silent

    async def events(self, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """As `Child.events`, which the keeper asks. Cancellation leaves the process running."""
        from ray.exceptions import RayError

        loop = asyncio.get_running_loop()
        life = self._keeper.live.options(num_returns="streaming").remote(self.spec, silence_s)
        try:
            async for each in life:
                event = await each
                if event["event"] == ENDED:
                    self._end = event["end"]
                else:
                    yield event | {"at": loop.time()}
        except RayError as fault:
            self._loss = _sentence_of(fault)
        if self._end is not None and self._end.printed:
            with self.spec.log.open("a") as log:
                log.write(self._end.printed)

    async def wait(self) -> int:
        """As `Child.wait`; that of a process that was killed, where its node is lost."""
        from ray.exceptions import RayError

        if self._end is not None:
            return self._end.code
        try:
            return await self._keeper.ended.remote()
        except RayError as fault:
            self._loss = self._loss or _sentence_of(fault)
            return LOST

    def terminate(self) -> None:
        """Ask it to end."""
        self._keeper.signal.remote(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._keeper.signal.remote(signal.SIGKILL)

    def epitaph(self, code: int) -> str:
        """One line: which process failed and why."""
        if self._end is not None:
            return f"{self._end.epitaph} (on {self.node})"
        return f"{self.spec.name} was lost on {self.node}: {self._loss}"


def _sentence_of(fault: Exception) -> str:
    """The last line of an error of Ray's that says something: the first ones name Ray's parts."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(fault).__name__
