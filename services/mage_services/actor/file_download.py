"""The other end of `file_server.py`: files of a run brought to a machine that sees none of them.

A part of a file lies under its name with `.part`, a whole file under its own name; so what has
arrived is kept after a broken link, and for another process that is given the same folder.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from mage_async.errors import RunError
from mage_async.protocol.file_transfer import Download
from mage_async.protocol.messages import Chunk, Message, ServedFile
from mage_services.learner.file_server import digest_of

MAX_DAMAGED = 3
"""How often a file may arrive with another digest before its fetching is given up."""


class FileDownload:
    """One file being downloaded into a folder. Its owner passes on the learner's chunks."""

    def __init__(self, name: str, file: Path, send: Callable[[Message], Awaitable[None]]) -> None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.file = file
        self._part = file.with_name(f"{file.name}.part")
        there = self._part.stat().st_size if self._part.exists() else 0
        self._download = Download(name, there)
        self._send = send
        self._num_damaged = 0

    @property
    def name(self) -> str:
        """The name of the file at the learner."""
        return self._download.name

    async def ask(self) -> None:
        """Ask for what may be asked for. Cancellation leaves some of it unasked."""
        for request in self._download.requests():
            await self._send(request)

    async def ask_again(self) -> None:
        """The link broke: what was asked for will not come."""
        self._download.link_broke()
        await self.ask()

    async def take(self, chunk: Chunk) -> bool:
        """Write a chunk down, and ask for more; whether the file is whole now.

        Raises:
            RunError: it cannot be written, or arrives damaged again and again.
        """
        if self._download.takes(chunk):
            self._write(chunk)
            if self._download.is_complete:
                return await self._finish()
        await self.ask()
        return False

    def _write(self, chunk: Chunk) -> None:
        try:
            with self._part.open("r+b" if self._part.exists() else "xb") as part:
                part.truncate(chunk.offset)
                part.seek(chunk.offset)
                part.write(chunk.data)
        except OSError as fault:
            raise RunError(f"{self._part} cannot be written: {fault.strerror}") from fault

    async def _finish(self) -> bool:
        """Rename the file if its digest is the one that was told; else begin anew."""
        if await asyncio.to_thread(digest_of, self._part) == self._download.digest:
            self._part.replace(self.file)
            return True
        self._num_damaged += 1
        if self._num_damaged >= MAX_DAMAGED:
            raise RunError(f"{self.name} arrived damaged {MAX_DAMAGED} times: its digest is wrong")
        self._download.begin_anew()
        await self.ask()
        return False


def is_there(wanted: ServedFile, file: Path) -> bool:
    """Whether a file was brought before; one without bytes is made here."""
    if wanted.num_bytes == 0:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(b"")
    if not file.is_file() or file.stat().st_size != wanted.num_bytes:
        return False
    return digest_of(file) == wanted.digest
