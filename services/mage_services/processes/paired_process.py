"""A process that is spoken to over a private pair of sockets: started, told, heard, killed.

A message is its length, four bytes in little endian, and its bytes. Both ends are of one
installation, so nothing is negotiated.
"""

import asyncio
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

from mage_services.processes.parent_death_signal import PARENT

_LENGTH = struct.Struct("<I")


class PairedProcess:
    """A running process and the socket to it. It prints where its parent prints."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def begin(cls, module: str, variables: Mapping[str, str]) -> Self:
        """Run a module, whose only argument is the number of its socket. Cancellation leaves at
        most a process that ends with this one.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_environment(variables),
            )
        return cls(process, *await asyncio.open_connection(sock=ours))

    @property
    def pid(self) -> int:
        """Its process id, and that of its process group."""
        return self._process.pid

    def say(self, body: bytes) -> None:
        """Send bytes; a process that has ended does not hear them, and is no error."""
        if not self._writer.is_closing():
            write(self._writer, body)

    async def hear(self) -> bytes | None:
        """Its next message; None when it has ended. Cancellation may lose a message."""
        return await read(self._reader)

    def kill(self) -> None:
        """End it, with whatever it started."""
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> str:
        """Wait for its end; how it ended, in a few words. Cancellation leaves it running."""
        code = await self._process.wait()
        self._writer.close()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def write(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Send a message; it waits in memory while the other side does not read."""
    writer.write(_LENGTH.pack(len(body)) + body)


async def read(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None where the other side has ended, be it within a message.

    Cancellation may lose the message under way, so it is for ending only.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What it inherits; not the pipe to our supervisor, which would outlive us in it."""
    own = {key: value for key, value in os.environ.items() if key != "MAGE_STATUS_FD"}
    return own | {
        PARENT: str(os.getpid()),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
