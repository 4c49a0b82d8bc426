"""The lanes of the prefix cache: which context holds each, and what a new prompt can reuse.

A lane is one context's room for keys and values. Lanes outlive their contexts: a released lane
still lends its prefix to others until its room is needed. A prefix is lent only where the present
weights made it, so a new context never begins with stale keys.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np


class Opened(NamedTuple):
    """What a prompt found."""

    lane: int
    source: int
    """The lane that lends `num_reused` tokens; the lane itself where nothing is to be copied."""
    num_reused: int
    num_repeated: int
    is_extension: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """What is remembered of a context that lost its lane."""

    num_known: int
    num_computed: int
    digest: bytes


class Contexts:
    """The table of lanes. All arrays and lists are indexed by lane."""

    def __init__(self, lanes: int, max_tokens: int) -> None:
        self.tokens = np.zeros((lanes, max_tokens), np.int32)
        """[lanes, positions]: prompt and drawn tokens; the exploiter's as `~token`"""
        self.makers = np.zeros((lanes, max_tokens), np.int32)
        """[lanes, positions]: which loading of weights, counted from 0, made the keys and values"""
        self.num_known = [0] * lanes
        """Tokens of the context"""
        self.num_computed = [0] * lanes
        """How many of them have keys and values"""
        self.oldest = [0] * lanes
        """The oldest policy version among the keys and values"""
        self.versions = [0]
        """The policy version of each loading"""
        self.num_evictions = 0
        self._is_busy = [False] * lanes
        self._last_use = [0] * lanes
        self._clock = 0
        self._lanes: dict[str, int] = {}
        self._names: list[str | None] = [None] * lanes
        self._evicted: dict[str, Evicted] = {}
        self._lent: set[int] = set()

    @property
    def num_contexts(self) -> int:
        """Contexts that hold a lane."""
        return len(self._lanes)

    def begin(self) -> None:
        """A new forward is being planned: no lane is about to lend."""
        self._lent.clear()

    def lane(self, name: str) -> int | None:
        """The lane of a context."""
        return self._lanes.get(name)

    def load(self, version: int) -> None:
        """From here on, keys and values are made by other weights."""
        self.versions.append(version)

    def open(self, name: str, tokens: np.ndarray, *, is_fresh: bool) -> Opened | None:
        """Give a prompt a lane with as much of it computed as can be.

        None where it has to wait for a later forward: every lane is busy, or about to lend. Within
        a forward, contexts that hold a lane are opened before others: what is lent must not change.

        The lane is busy until `close`. The prompt's last token is always left to compute, for its
        logits; it counts as neither reused nor repeated.

        Args:
            tokens: int32 [T]
            is_fresh: take nothing that older weights made.
        """
        held = self._lanes.get(name)
        if held is None:
            opened = self._open_new(name, tokens)
        else:
            opened = self._open_held(held, tokens, is_fresh)
        if opened is not None:
            self._occupy(opened, tokens)
        return opened

    def num_to_compute(self, lane: int) -> int:
        """Tokens without keys and values."""
        return self.num_known[lane] - self.num_computed[lane]

    def compute(self, lane: int, count: int) -> None:
        """The next `count` known tokens of a lane are computed by the forward being planned."""
        start = self.num_computed[lane]
        version = self.versions[-1]
        self.makers[lane, start : start + count] = len(self.versions) - 1
        self.oldest[lane] = min(version, self.oldest[lane]) if start else version
        self.num_computed[lane] = start + count

    def close(self, lane: int) -> None:
        """A lane's completion is done; its context is idle."""
        self._is_busy[lane] = False

    def take_back(self, lane: int, num_tokens: int) -> None:
        """Tokens drawn after the first `num_tokens` were discarded; the context is idle."""
        self.num_known[lane] = num_tokens
        self.num_computed[lane] = min(num_tokens, self.num_computed[lane])
        self._is_busy[lane] = False

    def lose_keys(self, lane: int) -> int:
        """All of a lane's tokens are to be computed again; returns how many had been."""
        count, self.num_computed[lane] = self.num_computed[lane], 0
        return count

    def release(self, name: str) -> None:
        """Forget a context; its lane lends until it is taken."""
        self._evicted.pop(name, None)
        lane = self._lanes.pop(name, None)
        if lane is not None:
            self._names[lane] = None

    def _open_held(self, lane: int, tokens: np.ndarray, is_fresh: bool) -> Opened:
        known, computed = self.num_known[lane], self.num_computed[lane]
        common = _common(self.tokens[lane, :known], tokens)
        have = min(common, computed, len(tokens) - 1)
        reused = min(have, self._num_fresh(lane, have)) if is_fresh else have
        assert lane not in self._lent, "contexts that hold a lane are opened before others"
        return Opened(lane, lane, reused, have - reused, common == known)

    def _open_new(self, name: str, tokens: np.ndarray) -> Opened | None:
        source, common, any_common = self._longest_match(tokens)
        lane = self._free_lane()
        if lane is None:
            return None
        self._take(lane, name)
        past = self._evicted.pop(name, None)
        is_extension = past is None or past.digest == _digest(tokens[: past.num_known])
        if past is not None and is_extension:
            any_common = max(any_common, past.num_computed)
        reused = min(common, len(tokens) - 1)
        repeated = max(0, min(any_common, len(tokens) - 1) - reused)
        if reused and source != lane:
            self._lent.add(source)
        return Opened(lane, source if reused else lane, reused, repeated, is_extension)

    def _occupy(self, opened: Opened, tokens: np.ndarray) -> None:
        lane, start = opened.lane, opened.num_reused
        if opened.source != lane:
            self.makers[lane, :start] = self.makers[opened.source, :start]
        if start:
            self.oldest[lane] = self._oldest(lane, start)
        begin = start if opened.source == lane else 0
        self.tokens[lane, begin : len(tokens)] = tokens[begin:]
        self.num_known[lane], self.num_computed[lane] = len(tokens), start
        self._is_busy[lane] = True
        self._clock += 1
        self._last_use[lane] = self._clock

    def _oldest(self, lane: int, start: int) -> int:
        first, last = self.makers[lane, 0], self.makers[lane, start - 1]
        if first == last:  # loadings only count up along a lane
            return self.versions[first]
        return min(self.versions[maker] for maker in np.unique(self.makers[lane, :start]))

    def _num_fresh(self, lane: int, length: int) -> int:
        """How many leading tokens the present weights computed."""
        is_stale = self.makers[lane, :length] != len(self.versions) - 1
        return int(is_stale.argmax()) if is_stale.any() else length

    def _longest_match(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """The lane with the longest common prefix made by the present weights.

        Returns:
            That lane, the length of its prefix, and of the longest one made by any weights.
        """
        length = min(len(tokens), self.tokens.shape[1])
        is_equal = self.tokens[:, :length] == tokens[:length]
        any_length = np.minimum(_run_lengths(is_equal), self.num_computed)
        is_equal &= self.makers[:, :length] == len(self.versions) - 1
        lengths = np.minimum(_run_lengths(is_equal), self.num_computed)
        source = int(lengths.argmax())
        return source, int(lengths[source]), int(any_length.max())

    def _free_lane(self) -> int | None:
        """The lane least worth keeping: released before idle, then the least recently used."""
        free = [
            lane
            for lane, is_busy in enumerate(self._is_busy)
            if not is_busy and lane not in self._lent
        ]
        return min(free, key=self._worth, default=None)

    def _worth(self, lane: int) -> tuple[bool, int]:
        return self._names[lane] is not None, self._last_use[lane]

    def _take(self, lane: int, name: str) -> None:
        """Give a lane to `name`; a living context that held it is evicted."""
        old = self._names[lane]
        if old is not None:
            known = self.num_known[lane]
            digest = _digest(self.tokens[lane, :known])
            self._evicted[old] = Evicted(known, self.num_computed[lane], digest)
            del self._lanes[old]
            self.num_evictions += 1
        self._lanes[name], self._names[lane] = lane, name


def _common(known: np.ndarray, tokens: np.ndarray) -> int:
    """Length of the common prefix."""
    length = len(known)
    if known.tobytes() == tokens[:length].tobytes():  # the usual case, and the fast way
        return length
    length = min(length, len(tokens))
    is_equal = known[:length] == tokens[:length]
    return length if is_equal.all() else int(is_equal.argmin())


def _run_lengths(is_equal: np.ndarray) -> np.ndarray:
    """How many leading values of each row are true: int64 [rows]"""
    first = is_equal.argmin(1)
    return np.where(is_equal[np.arange(len(first)), first], is_equal.shape[1], first)


def _digest(tokens: np.ndarray) -> bytes:
    return blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16).digest()
