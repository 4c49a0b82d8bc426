"""A process of this server that speaks JSON, a line a message: for what no page may wait for."""

import asyncio
import json
import os
import select
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mage_async.errors import RunError

Message = dict[str, Any]
MAX_LINE_BYTES = 1 << 26


class LineProcess:
    """One side: the server's. The other side ends when this one does, since its stdin ends."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self._module, self._process = module, process

    @staticmethod
    async def start(module: str, *arguments: str) -> "LineProcess":
        """Start a module. Cancellation in here leaves a process that ends with this one."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=pipe,
            stdout=pipe,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the server
        )
        return LineProcess(module, process)

    def say(self, message: Message) -> None:
        """Send a message; to a process that has ended it is lost."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def messages(self) -> AsyncIterator[Message]:
        """What it says until it ends. Cancellation leaves the process as it is.

        Raises:
            RunError: the process ended badly.
        """
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield json.loads(line)
        if code := await self._process.wait():
            raise RunError(f"{self._module} ended with exit code {code}")

    async def end(self) -> None:
        """Have the process end after what it does now. Cancellation leaves it to do so alone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    def kill(self) -> None:
        """End the process at once."""
        if self._process.returncode is None:
            self._process.kill()


class ServerLines:
    """The other side: what the server says, read without waiting where there is work to do.

    From the first moment on only `say` reaches the server. What else is printed, be it by a user's
    class or by a process that was started here, goes to stderr.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.has_ended = False
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def read(self, *, waits: bool) -> Iterator[Message]:
        """The messages that have come; where there are none, the next ones if it `waits`."""
        if not select.select([sys.stdin], [], [], None if waits else 0.0)[0]:
            return
        data = os.read(sys.stdin.fileno(), 1 << 16)
        self.has_ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from map(json.loads, lines)

    def say(self, message: Message) -> None:
        """Tell the server."""
        print(json.dumps(message), file=self._out, flush=True)
