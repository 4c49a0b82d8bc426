"""A seeded mutator of bytes: what happens to sound inputs before a decoder gets them."""

import random
from collections.abc import Sequence

_INTERESTING = (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xCB, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF, 0xFF)
"""Edges of integers, and msgpack's marks for long binaries, floats, integers, texts and lists."""
_SIZES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def mutate(seeds: Sequence[bytes], source: random.Random) -> bytes:
    """A seed with one to eight things done to it."""
    data = bytearray(source.choice(seeds))
    for _ in range(1 << source.randrange(4)):
        source.choice(_MUTATIONS)(data, seeds, source)
    return bytes(data)


def _flip(data: bytearray, _: Sequence[bytes], source: random.Random) -> None:
    if data:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def _set(data: bytearray, _: Sequence[bytes], source: random.Random) -> None:
    if data:
        data[source.randrange(len(data))] = source.choice(_INTERESTING)


def _size(data: bytearray, _: Sequence[bytes], source: random.Random) -> None:
    """Write a length that is an edge, in either order of bytes."""
    width, order = source.choice((1, 2, 4, 8)), source.choice(("little", "big"))
    value = source.choice(_SIZES) % (1 << 8 * width)
    start = source.randrange(len(data) + 1)
    data[start : start + width] = value.to_bytes(width, order)


def _cut(data: bytearray, _: Sequence[bytes], source: random.Random) -> None:
    start = source.randrange(len(data) + 1)
    del data[start : start + source.randrange(1, 33)]


def _end(data: bytearray, _: Sequence[bytes], source: random.Random) -> None:
    del data[source.randrange(len(data) + 1) :]


def _insert(data: bytearray, _: Sequence[bytes], source: random.Random) -> None:
    start = source.randrange(len(data) + 1)
    data[start:start] = source.randbytes(source.randrange(1, 9))


def _repeat(data: bytearray, _: Sequence[bytes], source: random.Random) -> None:
    start = source.randrange(len(data) + 1)
    part = data[start : start + source.randrange(1, 33)]
    data[start:start] = part * source.randrange(1, 65)


def _splice(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    other = source.choice(seeds)
    start, stop = sorted(source.randrange(len(other) + 1) for _ in range(2))
    at = source.randrange(len(data) + 1)
    data[at : at + source.randrange(stop - start + 1)] = other[start:stop]


_MUTATIONS = (_flip, _set, _size, _cut, _end, _insert, _repeat, _splice)
