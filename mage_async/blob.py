"""A file on its way to another machine: what to ask for next, and what to take.

Each `Fetch` is a credit for one chunk of 4 MiB; at most `WINDOW` are asked for at one time, so a
slow link delays nothing else by more than these. What is there is kept: after a broken link, or by
another process, the rest is asked for from there. The digest of the whole file, told with every
chunk, says at the end whether the parts belong together.
"""

from dataclasses import dataclass, field

from mage_async.blob_frames import Chunk
from mage_async.trial_frames import DEFAULT_LIMITS
from mage_async.wire import Fetch

WINDOW = 4
CHUNK_BYTES = DEFAULT_LIMITS.max_chunk_bytes


@dataclass(slots=True)
class Download:
    """One file. Whoever holds it writes what `takes` accepts at `have`, and sends `requests`."""

    name: str
    have: int = 0
    """Bytes that are there, from the start without a gap."""
    num_bytes: int | None = None
    """Of the whole file; None until a chunk has said so."""
    digest: str = ""
    """Of the whole file; empty until a chunk has said so."""
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
