"""The process of an SGLang engine as its actor sees it: started, spoken to, killed."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress

from mage_services.engines.sglang.messages import Message, read, write

MODULE = "mage_services.engines.sglang.main"


class SglangChild:
    """A running process and the socket to it. It prints where its actor prints."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @staticmethod
    async def start(threads: int) -> "SglangChild":
        """Start it. Cancellation leaves at most a process that ends with this one."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULE,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_environment(threads),
            )
        return SglangChild(process, *await asyncio.open_connection(sock=ours))

    @property
    def pid(self) -> int:
        """Its process id, and that of its process group."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Say something; one that has ended does not hear it, and is no error."""
        if not self._writer.is_closing():
            write(self._writer, message)

    async def receive(self) -> Message | None:
        """Its next message; None when it has ended. Cancellation may lose a message."""
        return await read(self._reader)

    def kill(self) -> None:
        """End it, with whatever it started."""
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> str:
        """Wait for its end; how it ended, in a few words."""
        code = await self._process.wait()
        self._writer.close()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _environment(threads: int) -> dict[str, str]:
    """What it inherits; not the pipe to our supervisor, which would outlive us in it."""
    own = {key: value for key, value in os.environ.items() if key != "MAGE_STATUS_FD"}
    return own | {
        "MAGE_ENGINE_PARENT": str(os.getpid()),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
    }
