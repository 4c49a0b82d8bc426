"""A file in chunks: whatever is lost on the way, it arrives whole and in order."""

import random

from hypothesis import given
from hypothesis import strategies as st

from mage_async import blob
from mage_async.blob import CHUNK_BYTES, WINDOW, Download
from mage_async.blob_frames import Chunk
from mage_async.wire import Fetch

NAME, DIGEST = "weights/3", "0" * 32


def answer(fetch: Fetch, num_bytes: int, digest: str = DIGEST) -> Chunk:
    size = min(CHUNK_BYTES, num_bytes - fetch.offset)
    return Chunk(fetch.name, fetch.offset, num_bytes, digest, b"x" * size)


def test_the_first_chunk_is_asked_for_alone_and_then_as_many_as_there_are_credits() -> None:
    download = Download(NAME)
    first = download.requests()
    assert first == [Fetch(name=NAME, offset=0)]
    assert download.requests() == []
    assert download.takes(answer(first[0], 10 * CHUNK_BYTES))
    asked = [fetch.offset // CHUNK_BYTES for fetch in download.requests()]
    assert asked == list(range(1, 1 + WINDOW))
    assert download.requests() == []


def test_a_part_that_is_there_is_not_asked_for() -> None:
    download = Download(NAME, have=3 * CHUNK_BYTES + 5)
    (fetch,) = download.requests()
    assert fetch.offset == 3 * CHUNK_BYTES + 5
    assert download.takes(answer(fetch, 3 * CHUNK_BYTES + 9))
    assert download.is_complete


def test_another_file_under_the_same_name_begins_anew() -> None:
    download = Download(NAME)
    (fetch,) = download.requests()
    download.takes(answer(fetch, 3 * CHUNK_BYTES))
    second = download.requests()[0]
    assert not download.takes(answer(second, 3 * CHUNK_BYTES, "1" * 32))
    assert download.have == 0
    (again,) = download.requests()
    assert again.offset == 0


def test_a_part_longer_than_the_file_is_of_another_one() -> None:
    download = Download(NAME, have=100)
    download.requests()
    assert not download.takes(Chunk(NAME, 10, 50, DIGEST, b"x"))
    assert download.have == 0


def test_a_chunk_of_another_file_or_place_is_not_taken() -> None:
    download = Download(NAME)
    download.requests()
    assert not download.takes(Chunk("weights/2", 0, 50, DIGEST, b"x"))
    assert not download.takes(Chunk(NAME, 10, 50, DIGEST, b"x"))
    assert download.takes(Chunk(NAME, 0, 50, DIGEST, b"x"))


@given(st.integers(1, 300), st.integers(0, 2**32), st.floats(0.0, 0.4))
def test_with_any_losses_every_byte_comes_once_and_in_order(num_bytes, seed, loss) -> None:
    """Chunks of 16 bytes; at random the link breaks, and what was under way is lost."""
    source, taken = random.Random(seed), b""
    whole = bytes(source.randrange(256) for _ in range(num_bytes))
    size, blob.CHUNK_BYTES = blob.CHUNK_BYTES, 16
    try:
        download, way = Download(NAME), []
        while not download.is_complete:
            way += download.requests()
            assert len(way) <= WINDOW
            if source.random() < loss or not way:
                way.clear()
                download.link_broke()
                continue
            fetch = way.pop(0)
            chunk = Chunk(NAME, fetch.offset, num_bytes, DIGEST, whole[fetch.offset :][:16])
            if download.takes(chunk):
                taken += chunk.data
    finally:
        blob.CHUNK_BYTES = size
    assert taken == whole
