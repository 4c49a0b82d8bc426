"""Files for peers on other machines: what the learner answers to Enquiry and Fetch.

    queue       filled by       emptied by    bound
    turns       the inbox       the task      one a peer that waits for an answer
    questions   the inbox       the task      MAX_WAITING a peer, which says when it has a chunk

A peer is given the files of the model's directory and published weights, by name and by nothing
else. One thread reads them; a file's digest is computed once, when it is first asked for.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mage_async.protocol.file_transfer import CHUNK_BYTES, Questions
from mage_async.protocol.messages import (
    Chunk,
    Enquiry,
    Fetch,
    Message,
    NoFile,
    Prospectus,
    ServedFile,
)
from mage_services.transport.access import Peer
from mage_services.transport.learner_channel import LearnerChannel, PeerGone

DIGEST_BYTES = 16
MAX_KNOWN = 64
"""Files whose digest is remembered."""
_Stamp = tuple[Path, int, int]


class FileServer:
    """See the module.

    Args:
        policy: the directory of the model's files.
        weights: where a version is published.
    """

    def __init__(
        self,
        channel: LearnerChannel,
        config: str,
        policy: Path,
        weights: Callable[[int], Path],
    ) -> None:
        self._channel, self._config = channel, config
        self._policy, self._weights = policy, weights
        self._turns: asyncio.Queue[Peer] = asyncio.Queue()
        self._questions: dict[Peer, Questions] = {}
        self._digests: dict[_Stamp, str] = {}

    def take(self, peer: Peer, message: Enquiry | Fetch) -> None:
        """Remember a question, as `Questions` does."""
        if peer not in self._questions:
            self._questions[peer] = Questions()
            self._turns.put_nowait(peer)
        self._questions[peer].take(message)

    async def run(self) -> None:
        """Answer what is asked, peer by peer in turn. Cancellation leaves a question unanswered: it
        is asked again.
        """
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="files") as reader:
            while True:
                peer = await self._turns.get()
                questions = self._questions[peer]
                answer = await loop.run_in_executor(reader, self._answer, questions.next())
                self._send(peer, answer)
                if questions:
                    self._turns.put_nowait(peer)
                else:
                    del self._questions[peer]

    def _send(self, peer: Peer, answer: Message) -> None:
        try:
            self._channel.send(peer, answer)
        except PeerGone:
            return  # it asks again when it is back

    def _answer(self, message: Enquiry | Fetch) -> Message:
        if isinstance(message, Enquiry):
            return self._prospectus()
        try:
            return self._chunk(message)
        except OSError as fault:
            return NoFile(name=message.name, reason=fault.strerror or "it cannot be read")

    def _prospectus(self) -> Prospectus:
        files = [file for file in sorted(self._policy.iterdir()) if file.is_file()]
        return Prospectus(config=self._config, files=tuple(map(self._described, files)))

    def _described(self, file: Path) -> ServedFile:
        name, size = f"policy/{file.name}", file.stat().st_size
        return ServedFile(name=name, num_bytes=size, digest=self._digest(file))

    def _chunk(self, fetch: Fetch) -> Message:
        file = self._file(fetch.name)
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(fetch.offset)
            data = opened.read(CHUNK_BYTES)
        if not data:
            return NoFile(name=fetch.name, reason=f"it has {size} bytes, not {fetch.offset}")
        return Chunk(fetch.name, fetch.offset, size, self._digest(file), data)

    def _file(self, name: str) -> Path:
        """Names were checked by their pattern; none leads out of its folder."""
        kind, _, rest = name.partition("/")
        return self._weights(int(rest)) if kind == "weights" else self._policy / rest

    def _digest(self, file: Path) -> str:
        stat = file.stat()
        stamp = file, stat.st_size, stat.st_mtime_ns
        if stamp not in self._digests:
            while len(self._digests) >= MAX_KNOWN:
                del self._digests[next(iter(self._digests))]
            self._digests[stamp] = digest_of(file)
        return self._digests[stamp]


def digest_of(file: Path) -> str:
    """What `FileDigest` says."""
    with file.open("rb") as opened:
        made = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
    return made.hexdigest()
