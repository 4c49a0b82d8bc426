"""A journal in memory that syncs when it is told to, and crashes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mage_async.protocol.journal_records import Record, Segment, SegmentHeader, to_delete
from mage_services.journal.record_bytes import MAGIC, decode_record, encode_record, scan

DEADLINE_S, SMALL_BYTES = 30.0, 3000


@dataclass
class File:
    """A segment: its bytes, and how many of them a crash cannot take."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    durable: int = 0

    def segment(self, head: SegmentHeader) -> Segment:
        return Segment(self.number, head.version, head.oldest_version(), len(self.data))


@dataclass
class Disk:
    """A journal that syncs when it is told to, and crashes."""

    files: list[File] = field(default_factory=list)
    archive: list[File] = field(default_factory=list)
    """Every file there ever was, deleted ones too."""
    waiting: list[tuple[File, int, Callable[[], None] | None]] = field(default_factory=list)
    wants_roll: bool = False
    full: str = ""

    def append(self, record: Record, then: Callable[[], None] | None = None) -> None:
        file = self.files[-1]
        file.data += b"".join(bytes(piece) for piece in encode_record(record))
        self.waiting.append((file, len(file.data), then))

    def after(self, then: Callable[[], None]) -> None:
        self.waiting.append((self.files[-1], len(self.files[-1].data), then))

    def why_full(self) -> str:
        return self.full

    def roll(self, head: Callable[[], SegmentHeader]) -> None:
        if self.wants_roll:
            self.wants_roll = False
            self.begin(head())

    def begin(self, head: SegmentHeader) -> None:
        number = self.archive[-1].number + 1 if self.archive else 1
        self.files.append(File(number, bytearray(MAGIC)))
        self.archive.append(self.files[-1])
        self.append(head)

    def sync(self, count: int) -> None:
        """Make the oldest `count` waiting records durable, and tell."""
        for _ in range(min(count, len(self.waiting))):
            file, end, then = self.waiting.pop(0)
            file.durable = max(file.durable, end)
            if then is not None:
                then()

    def crash(self, left: float) -> None:
        """Lose what nobody was told of, but for a share of it."""
        self.waiting.clear()
        for file in self.files:
            file.durable = max(file.durable, 0)
            kept = file.durable + int(left * (len(file.data) - file.durable))
            del file.data[kept:]
            good = scan(bytes(file.data)).good_bytes
            assert good >= file.durable
            del file.data[good:]
            file.durable = good
        self.files = [file for file in self.files if scan(bytes(file.data)).bodies]
        self.archive = [file for file in self.archive if file.data]

    def records(self, files: list[File]) -> list[Record]:
        return [decode_record(body) for file in files for body in scan(bytes(file.data)).bodies]

    def segments(self) -> list[Segment]:
        heads = [self.records([file])[0] for file in self.files]
        return [
            f.segment(h)
            for f, h in zip(self.files, heads, strict=True)
            if isinstance(h, SegmentHeader)
        ]

    def compact(self, checkpoint: int) -> None:
        """As the journal does: deleted when all that was written before is durable."""
        doomed = to_delete(self.segments(), checkpoint, SMALL_BYTES)

        def delete() -> None:
            self.files = [file for file in self.files if file.number not in doomed]

        self.after(delete)
