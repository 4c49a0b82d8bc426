"""The journal on disk: durable before told, cut where torn, waiting where full."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mage_async.errors import RunError, WireError
from mage_async.protocol.journal_records import (
    Dropped,
    Granted,
    Record,
    SegmentHeader,
    first_segment_header,
)
from mage_async.protocol.messages import GroupGrant
from mage_services.journal import writer as module
from mage_services.journal.reader import open_journal
from mage_services.journal.writer import JournalFile, make_durable, segment_file

LARGE = 10**9


def dropped(number: int, size: int = 1) -> Dropped:
    return Dropped(grant=number, reason="x" * size)


def grant(member: str) -> GroupGrant:
    return GroupGrant(
        grant=0,
        epoch=0,
        environment="rps",
        member=member,
        seat=0,
        seed=0,
        num_trials=2,
        num_episodes=3,
        version=0,
        deadline_s=60.0,
    )


def made(
    folder: Path, *, version: int = 0, max_bytes: int = LARGE, roll_at: int = LARGE
) -> JournalFile:
    found = open_journal(folder)
    make_durable(found)
    return JournalFile(folder, found.segments, first_segment_header(version, 0), max_bytes, roll_at)


def on_disk(folder: Path, first: int = 1) -> list[Record]:
    return [r for r in open_journal(folder).records(first) if not isinstance(r, SegmentHeader)]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(limited())


def test_a_record_is_on_disk_when_its_writer_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        journal = made(tmp_path)
        for number in range(3):
            await journal.durable(dropped(number))
            assert on_disk(tmp_path) == [dropped(n) for n in range(number + 1)]
        journal.close()

    run(main)


def test_it_is_told_after_the_sync_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync = os.fdatasync

    def slow_sync(file: int) -> None:
        sync(file)
        events.append("synced")

    async def main() -> None:
        journal = made(tmp_path)
        await journal.durable(dropped(0))
        events.clear()
        journal.append(dropped(1), lambda: events.append("told"))
        await journal.durable(dropped(2))
        assert events[:2] == ["synced", "told"]
        journal.close()

    monkeypatch.setattr(module.os, "fdatasync", slow_sync)
    run(main)


def test_what_waits_together_is_synced_together(tmp_path: Path) -> None:
    async def main() -> None:
        journal = made(tmp_path)
        for number in range(500):
            journal.append(dropped(number))
        await journal.durable(dropped(500))
        assert on_disk(tmp_path) == [dropped(n) for n in range(501)]
        assert journal.num_syncs < 100
        journal.close()

    run(main)


def test_after_waits_for_what_was_appended_before_it(tmp_path: Path) -> None:
    async def main() -> None:
        journal, told = made(tmp_path), asyncio.Event()
        journal.append(dropped(0, 10**6))
        journal.after(told.set)
        await told.wait()
        assert on_disk(tmp_path) == [dropped(0, 10**6)]
        journal.close()

    run(main)


def test_what_an_earlier_life_wrote_is_synced_before_anybody_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        journal = made(tmp_path)
        await journal.durable(dropped(0))
        journal.close()

    run(main)
    synced: list[Path] = []
    monkeypatch.setattr(module, "sync", synced.append)
    assert make_durable(open_journal(tmp_path)) == 0  # whole; was it synced?
    assert synced == [segment_file(tmp_path, 1), tmp_path]


@pytest.mark.parametrize("lost", [1, 10, 10**5])
def test_a_torn_tail_is_cut_and_the_next_life_begins_behind_it(tmp_path: Path, lost: int) -> None:
    async def main() -> None:
        journal = made(tmp_path)
        await journal.durable(dropped(0))
        await journal.durable(dropped(1, 10**5))
        journal.close()
        file = segment_file(tmp_path, 1)
        os.truncate(file, file.stat().st_size - lost)
        again = made(tmp_path)
        await again.durable(dropped(2))
        again.close()
        assert on_disk(tmp_path) == [dropped(0), dropped(2)]
        assert open_journal(tmp_path).torn is None

    run(main)


@pytest.mark.parametrize("left", [0, 3, 30])
def test_a_segment_without_a_whole_head_never_was(tmp_path: Path, left: int) -> None:
    async def main() -> None:
        journal = made(tmp_path)
        await journal.durable(dropped(0))
        journal.close()
        segment_file(tmp_path, 2).write_bytes(segment_file(tmp_path, 1).read_bytes()[:left])
        again = made(tmp_path)
        await again.durable(dropped(1))
        again.close()
        assert on_disk(tmp_path) == [dropped(0), dropped(1)]

    run(main)


@pytest.mark.parametrize("left_of_last", [None, 3])
def test_damage_before_the_last_segment_is_an_error_and_not_a_tail(
    tmp_path: Path, left_of_last: int | None
) -> None:
    """The last segment is whole, or has only a part of its header."""

    async def main() -> None:
        for number in range(2):
            journal = made(tmp_path)
            await journal.durable(dropped(number))
            journal.close()
        if left_of_last is not None:
            os.truncate(segment_file(tmp_path, 2), left_of_last)
        file = segment_file(tmp_path, 1)
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(RunError, match=r"00000001.log is damaged at byte"):
            on_disk(tmp_path)

    run(main)


def last_segment(folder: Path) -> tuple[Path, list[int]]:
    """Write a segment with four records; return its file and the offsets of their ends."""
    file, ends = segment_file(folder, 1), list[int]()

    async def main() -> None:
        journal = made(folder)
        for number in range(4):
            await journal.durable(dropped(number, 100))
            ends.append(file.stat().st_size)
        journal.close()

    run(main)
    return file, ends


@pytest.mark.parametrize("place", [0, 4, 8, 50])
def test_a_byte_damaged_within_the_last_segment_is_no_torn_tail(tmp_path: Path, place: int) -> None:
    """The byte is in the length, the checksum, the kind or the body of the second record."""
    file, ends = last_segment(tmp_path)
    data = bytearray(file.read_bytes())
    data[ends[0] + place] ^= 0x10
    file.write_bytes(data)
    says = (
        rf"00000001.log is damaged at byte {ends[0]}, and whole records follow from byte {ends[1]}"
    )
    with pytest.raises(RunError, match=says):
        open_journal(tmp_path)
    assert file.read_bytes() == data


def test_a_last_segment_with_a_damaged_first_line_is_not_deleted(tmp_path: Path) -> None:
    file, _ = last_segment(tmp_path)
    data = b"X" + file.read_bytes()[1:]
    file.write_bytes(data)
    with pytest.raises(RunError, match=r"damaged at byte 0, and whole records follow"):
        open_journal(tmp_path)
    assert file.read_bytes() == data


@pytest.mark.parametrize("behind", [b"", bytes(3 * 4096), b"\x93\xa1\x02\x01" * 5000])
def test_a_record_in_part_is_cut_whatever_lies_behind_it(tmp_path: Path, behind: bytes) -> None:
    file, ends = last_segment(tmp_path)
    for kept in range(ends[2] + 1, ends[3], 7):
        file.write_bytes(file.read_bytes()[: ends[2]] + bytes(kept - ends[2]) + behind)
        found = open_journal(tmp_path)
        assert (found.torn, found.torn_at) == (file, ends[2])
        assert make_durable(found) == kept - ends[2] + len(behind)


def test_a_full_disk_is_said_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    is_full, refused = True, asyncio.Event()
    loop: asyncio.AbstractEventLoop

    def write_some(file: int, data: memoryview) -> int:
        if is_full:
            if len(data) > 5:
                return write(file, data[:5])
            loop.call_soon_threadsafe(refused.set)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    async def main() -> None:
        nonlocal is_full, loop
        loop = asyncio.get_running_loop()
        is_full = False
        journal = made(tmp_path)
        await journal.durable(dropped(0))
        is_full, told = True, asyncio.Event()
        journal.append(dropped(1), told.set)
        await refused.wait()
        while not journal.why_full():  # noqa: ASYNC110 - heard in the loop's next rounds
            await asyncio.sleep(0)
        assert "No space left on device" in journal.why_full()
        assert not told.is_set()
        is_full = False
        await told.wait()
        assert journal.why_full() == ""
        assert on_disk(tmp_path) == [dropped(0), dropped(1)]
        journal.close()

    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module.os, "write", write_some)
    run(main)


def test_another_fault_of_the_disk_ends_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def main() -> None:
        journal = made(tmp_path)
        await journal.durable(dropped(0))
        monkeypatch.setattr(module.os, "fdatasync", fail)
        journal.append(dropped(1))
        with pytest.raises(RunError, match="cannot be written"):
            await journal.watch()
        journal.close()

    run(main)


def test_a_callback_that_raises_ends_the_watch_and_keeps_no_other_waiting(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no such peer")

    async def main() -> None:
        journal, told = made(tmp_path), asyncio.Event()
        journal.append(dropped(0), fail)
        journal.append(dropped(1), told.set)
        await journal.settled()
        assert told.is_set()
        with pytest.raises(ValueError, match="no such peer"):
            await journal.watch()
        journal.close()

    run(main)


def test_a_record_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    async def main() -> None:
        journal = made(tmp_path)
        with pytest.raises(
            WireError, match=r"length <= 200 - at `\$\.grant\.member`; got .*member='xx"
        ):
            journal.append(Granted(peer="actor-0/1", version=0, grant=grant("x" * 201)))
        with pytest.raises(WireError, match="surrogates not allowed; got"):
            journal.append(Granted(peer="actor-0/1", version=0, grant=grant("\ud83d")))
        await journal.durable(dropped(0))
        journal.close()
        assert on_disk(tmp_path) == [dropped(0)]

    run(main)


def test_a_budget_used_up_is_full_until_a_checkpoint_frees_segments(tmp_path: Path) -> None:
    async def main() -> None:
        journal = made(tmp_path, max_bytes=5000, roll_at=1000)
        for version in range(1, 6):
            await journal.durable(dropped(version, 1000))
            journal.roll(lambda version=version: first_segment_header(version, 0))
        assert "journal.max_bytes is 5,000" in journal.why_full()
        journal.compact(5)
        assert journal.why_full() == ""
        await journal.durable(dropped(6))
        journal.close()
        assert not segment_file(tmp_path, 1).exists()
        assert on_disk(tmp_path, 0)[-1] == dropped(6)

    run(main)


def test_segments_are_so_short_that_a_checkpoint_frees_some_of_a_small_budget(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        journal = JournalFile(tmp_path, [], first_segment_header(0, 0), 50_000)
        for version in range(1, 30):
            await journal.durable(dropped(version, 5000))
            journal.roll(lambda version=version: first_segment_header(version, 0))
            journal.compact(version)
            await journal.settled()
            assert journal.why_full() == ""
        journal.close()

    run(main)


@pytest.mark.parametrize("max_bytes", [6000, LARGE])
def test_a_full_disk_waits_for_no_write_before_it_deletes_what_a_checkpoint_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    write = os.write
    is_full = False
    first = segment_file(tmp_path, 1)

    def write_while_there_is_space(file: int, data: memoryview) -> int:
        if is_full and first.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    async def main() -> None:
        nonlocal is_full
        journal, told = made(tmp_path, max_bytes=max_bytes, roll_at=1000), asyncio.Event()
        for version in range(1, 4):
            await journal.durable(dropped(version, 1000))
            journal.roll(lambda version=version: first_segment_header(version, 0))
        await journal.durable(dropped(4))
        is_full = True
        journal.append(dropped(5, 1000), told.set)
        while not journal.why_full():  # noqa: ASYNC110 - heard in the loop's next rounds
            await asyncio.sleep(0)
        assert "No space left on device" in journal.why_full()
        journal.compact(3)
        await told.wait()
        assert on_disk(tmp_path, 3) == [dropped(3, 1000), dropped(4), dropped(5, 1000)]
        journal.close()

    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module.os, "write", write_while_there_is_space)
    run(main)
    assert not first.exists()
    assert not segment_file(tmp_path, 2).exists()


def test_nothing_is_deleted_before_the_head_that_makes_it_unnecessary_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    is_full, refused = False, asyncio.Event()
    loop: asyncio.AbstractEventLoop

    def write_some(file: int, data: memoryview) -> int:
        if is_full:
            loop.call_soon_threadsafe(refused.set)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    async def main() -> None:
        nonlocal is_full, loop
        loop = asyncio.get_running_loop()
        journal = made(tmp_path, max_bytes=100, roll_at=1)
        for version in range(1, 3):
            await journal.durable(dropped(version))
            journal.roll(lambda version=version: first_segment_header(version, 0))
        await journal.durable(dropped(3))
        is_full = True
        journal.roll(lambda: first_segment_header(3, 0))
        journal.compact(3)
        for _ in range(3):
            refused.clear()
            await refused.wait()
        there = [segment_file(tmp_path, n).exists() for n in (1, 2, 3)]
        assert there == [False, True, True], "without version 3's head the second is needed"
        is_full = False
        await journal.settled()
        journal.close()
        assert [segment_file(tmp_path, n).exists() for n in (2, 3)] == [False, True]

    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module.os, "write", write_some)
    run(main)


def test_a_journal_closed_on_a_full_disk_has_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What still fits may rest on what did not, as a step does on its trials."""
    write = os.write
    is_tight = False

    def write_if_short(file: int, data: memoryview) -> int:
        if is_tight and len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    async def main() -> None:
        nonlocal is_tight
        journal = made(tmp_path)
        await journal.durable(dropped(0))
        is_tight = True
        journal.append(dropped(1, 1000))
        while not journal.why_full():  # noqa: ASYNC110 - heard in the loop's next rounds
            await asyncio.sleep(0)
        told: list[int] = []
        journal.append(dropped(2), lambda: told.append(2))
        journal.close()
        await asyncio.sleep(0)
        assert told == []
        assert on_disk(tmp_path) == [dropped(0)]

    monkeypatch.setattr(module.os, "write", write_if_short)
    run(main)
