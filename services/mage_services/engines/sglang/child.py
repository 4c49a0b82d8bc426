"""The process of an SGLang engine as its actor sees it."""

from typing import Self

from mage_services.engines.sglang.messages import Message, packed, unpacked
from mage_services.processes.paired_process import PairedProcess

MODULE = "mage_services.engines.sglang.main"


class SglangChild(PairedProcess):
    """A running process and its messages."""

    @classmethod
    async def start(cls, threads: int) -> Self:
        """Start it. Cancellation leaves at most a process that ends with this one."""
        return await cls.begin(MODULE, {"OMP_NUM_THREADS": str(threads)})

    def send(self, message: Message) -> None:
        """Say something; one that has ended does not hear it, and is no error."""
        self.say(packed(message))

    async def receive(self) -> Message | None:
        """Its next message; None when it has ended. Cancellation may lose a message."""
        body = await self.hear()
        return None if body is None else unpacked(body)
