"""A file on its way to another machine: what to ask for next, and what to take.

Each `Fetch` is a credit for one chunk of 4 MiB; at most `WINDOW` are asked for at one time, so a
slow link delays nothing else by more than these. Bytes that have arrived are kept: after a broken
link, or by another process, the rest is asked for from there. The digest of the whole file, told
with every chunk, says at the end whether the parts belong together.
"""

from collections import deque
from dataclasses import dataclass, field

from mage_async.protocol.file_chunks import Chunk
from mage_async.protocol.messages import Enquiry, Fetch
from mage_async.protocol.trial_header import DEFAULT_LIMITS

WINDOW = 4
CHUNK_BYTES = DEFAULT_LIMITS.max_chunk_bytes
MAX_WAITING = 1 + 2 * WINDOW
"""An enquiry, what a peer asks for again, and as much once more: what it had asked for before may
still be on its way to it, and takes it on."""


@dataclass(slots=True)
class Download:
    """One file being received.

    Its owner writes what `takes` accepts at `have`, and sends `requests`.
    """

    name: str
    have: int = 0
    """Bytes that are there, from the start without a gap."""
    num_bytes: int | None = None
    """Length of the whole file; None until the first chunk."""
    digest: str = ""
    """Digest of the whole file; empty until the first chunk."""
    _asked: int = field(init=False)
    """Bytes that are there or asked for."""

    def __post_init__(self) -> None:
        self._asked = self.have

    def requests(self) -> list[Fetch]:
        """What to ask for now."""
        found = []
        while self._may_ask():
            found.append(Fetch(name=self.name, offset=self._asked))
            self._asked += CHUNK_BYTES
        return found

    def takes(self, chunk: Chunk) -> bool:
        """Whether a chunk is the next part; if so it counts as there.

        A chunk of a file that is another one by now makes everything begin anew: `have` is 0.
        """
        if chunk.name != self.name:
            return False
        if self.digest not in ("", chunk.digest) or self.have > chunk.num_bytes:
            self.begin_anew()
        if chunk.offset != self.have:
            return False  # it was asked for before the link broke, or of a file that is gone
        self.num_bytes, self.digest = chunk.num_bytes, chunk.digest
        self.have += len(chunk.data)
        return True

    def begin_anew(self) -> None:
        """What is there is of no use."""
        self.have = self._asked = 0
        self.num_bytes, self.digest = None, ""

    def link_broke(self) -> None:
        """What was asked for will not come."""
        self._asked = self.have

    @property
    def is_complete(self) -> bool:
        """Whether every byte is there; the digest is for the caller to compare."""
        return self.have == self.num_bytes

    def _may_ask(self) -> bool:
        if self.num_bytes is None:
            return self._asked == self.have  # one, which says how long the file is
        return self._asked < min(self.num_bytes, self.have + WINDOW * CHUNK_BYTES)


@dataclass(slots=True)
class Questions:
    """The sending end: what one peer has asked for and has not been sent yet.

    A peer asks for what follows. One that asks for anything else has given up what it asked for
    before: it is not answered, for it would take the place of what is waited for.
    """

    _waiting: deque[Enquiry | Fetch] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, question: Enquiry | Fetch) -> None:
        """Remember a question; one too many is not answered, for a peer counts its own."""
        if isinstance(question, Enquiry):
            self._waiting.clear()
        elif not all(_follows(question, other) for other in self._waiting):
            enquiries = [other for other in self._waiting if isinstance(other, Enquiry)]
            self._waiting = deque(enquiries)
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(question)

    def next(self) -> Enquiry | Fetch:
        """The one to answer now; there is one."""
        return self._waiting.popleft()


def _follows(fetch: Fetch, other: Enquiry | Fetch) -> bool:
    """Whether a peer may ask for a part and still wait for the answer to another question."""
    return isinstance(other, Enquiry) or (fetch.name == other.name and fetch.offset > other.offset)
