"""A file in chunks: whatever is lost on the way, it arrives whole and in order."""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.protocol import file_transfer
from mage_async.protocol.file_chunks import Chunk
from mage_async.protocol.file_transfer import CHUNK_BYTES, MAX_WAITING, WINDOW, Download, Questions
from mage_async.protocol.messages import Enquiry, Fetch

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
    size, file_transfer.CHUNK_BYTES = file_transfer.CHUNK_BYTES, 16
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
        file_transfer.CHUNK_BYTES = size
    assert taken == whole


def fetches(*offsets: int, name: str = NAME) -> list[Fetch]:
    return [Fetch(name=name, offset=offset) for offset in offsets]


def waiting(*questions: Enquiry | Fetch) -> list[Enquiry | Fetch]:
    """What is left to answer of some questions."""
    asked = Questions()
    for question in questions:
        asked.take(question)
    return [asked.next() for _ in range(len(asked))]


def test_what_is_asked_for_again_is_answered_and_what_was_asked_before_it_is_not() -> None:
    assert waiting(*fetches(1, 2, 3)) == fetches(1, 2, 3)
    assert waiting(*fetches(1, 2, 3, 0, 1)) == fetches(0, 1)
    assert waiting(*fetches(1, 2, 3, 3)) == fetches(3)
    assert waiting(*fetches(1, 2), *fetches(7, name="weights/4")) == fetches(7, name="weights/4")


def test_an_enquiry_begins_anew_and_is_answered_whatever_is_asked_after_it() -> None:
    enquiry = Enquiry(name="far", build="b1")
    asked = [*fetches(1, 2), enquiry, *fetches(5, 0)]
    assert waiting(*asked) == [enquiry, *fetches(0)]
    assert waiting(enquiry, enquiry) == [enquiry]


def test_more_questions_than_credits_are_not_remembered() -> None:
    assert waiting(*fetches(*range(100))) == fetches(*range(MAX_WAITING))


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(0, 2**32))
def test_a_file_is_whole_when_nothing_is_under_way_whenever_its_peer_asked_again(
    num_bytes, seed
) -> None:
    """Chunks of 16 bytes. Both directions are queues, of which a broken link loses the oldest; a
    peer that is welcomed asks again though nothing is lost.
    """
    source = random.Random(seed)
    size, file_transfer.CHUNK_BYTES = file_transfer.CHUNK_BYTES, 16
    try:
        ends = Ends(num_bytes)
        moves = {"take": ends.take, "answer": ends.answer, "hear": ends.hear}
        speeds = [source.choice([1, 4, 16]) for _ in moves]
        num_again = source.randrange(4)
        while num_again or not ends.are_idle():
            if num_again and source.random() < 0.05:
                num_again -= 1
                ends.ask_again(source.choice([0.0, source.random(), 1.0]))
            moves[source.choices(list(moves), speeds)[0]]()
    finally:
        file_transfer.CHUNK_BYTES = size
    assert ends.download.is_complete


class Ends:
    """A download, the questions of its peer, and what is on its way between them."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.download, self.questions = Download(NAME), Questions()
        self.going, self.coming = deque(self.download.requests()), deque()

    def are_idle(self) -> bool:
        return not (self.going or len(self.questions) or self.coming)

    def take(self) -> None:
        if self.going:
            self.questions.take(self.going.popleft())

    def answer(self) -> None:
        if len(self.questions):
            fetch = self.questions.next()
            data = b"x" * min(16, self.num_bytes - fetch.offset)
            self.coming.append(Chunk(NAME, fetch.offset, self.num_bytes, DIGEST, data))

    def hear(self) -> None:
        if self.coming:
            self.download.takes(self.coming.popleft())
            self.going += self.download.requests()

    def ask_again(self, share: float) -> None:
        """After a share of what was on its way was lost."""
        for way in (self.going, self.coming):
            for _ in range(round(share * len(way))):
                way.popleft()
        self.download.link_broke()
        self.going += self.download.requests()
