"""Keep the table of the prefix cache: which sequence holds which KV slot, and which tokens a prompt
can reuse.

A KV slot has room for the keys and values of one sequence, which `Prompt.context` names. A released
slot keeps its contents: until another sequence gets it, a prefix can be copied from it. A prefix is
copied only if the present weights computed it, so a new sequence never begins with stale keys and
values. Only the table is here; `model.py` holds the tensors.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np


class Opened(NamedTuple):
    """Report the slot that a prompt got, and how many of its tokens have keys and values."""

    slot: int
    source: int
    """Slot from which the first `num_reused` tokens are copied; `slot` itself if no token is
    copied.
    """
    num_reused: int
    """Number of prompt tokens with keys and values in the cache."""
    num_repeated: int
    """Number of prompt tokens that were computed before, but must be computed again."""
    is_extension: bool
    """Whether the prompt begins with all earlier tokens of its sequence."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Describe a sequence that lost its slot, for statistics of repeated computation."""

    num_known: int
    """Number of its tokens."""
    num_computed: int
    """Number of these tokens that had keys and values."""
    digest: bytes
    """Digest of the `num_known` tokens."""


class PrefixCache:
    """Hold the table of KV slots. All arrays and lists are indexed by slot."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        self.tokens = np.zeros((slots, max_tokens), np.int32)
        """Prompt and sampled tokens, int32 [slots, positions]; tokens of the policy's second role,
        if it has two (`Prompt.role_changes`), as `~token`.
        """
        self.makers = np.zeros((slots, max_tokens), np.int32)
        """For each position, which weights computed its key and value, as an index into `versions`:
        int32 [slots, positions].
        """
        self.num_known = [0] * slots
        """Number of tokens of each slot's sequence."""
        self.num_computed = [0] * slots
        """Number of these tokens, from the first one on, that have keys and values."""
        self.oldest = [0] * slots
        """Oldest policy version among the weights that computed the slot's keys and values."""
        self.versions = [0]
        """Policy version of each load of weights, in order; the last one computes all further keys
        and values."""
        self.num_evictions = 0
        self._is_busy = [False] * slots
        self._last_use = [0] * slots
        """Value of `_clock` when a prompt last got the slot."""
        self._clock = 0
        """Number of prompts that got a slot so far."""
        self._slots: dict[str, int] = {}
        """Slot of each sequence that holds one, by the sequence's name."""
        self._names: list[str | None] = [None] * slots
        """Sequence that holds each slot, the inverse of `_slots`; None if it was released."""
        self._evicted: dict[str, Evicted] = {}
        """Evicted sequences by name, until they get a slot again or are released."""
        self._sources: set[int] = set()
        """Slots from which the planned forward copies a prefix."""

    @property
    def num_contexts(self) -> int:
        """Number of sequences that hold a slot."""
        return len(self._slots)

    def begin(self) -> None:
        """Begin to plan a forward: no slot is the source of a copy yet."""
        self._sources.clear()

    def slot(self, name: str) -> int | None:
        """Return the slot of a sequence; None if it holds none."""
        return self._slots.get(name)

    def open(self, name: str, tokens: np.ndarray, *, is_fresh: bool) -> Opened | None:
        """Give a prompt a slot, and reuse as many computed tokens as possible.

        Within a forward, sequences that hold a slot must be opened before others. The others may
        copy a prefix from such a slot, whose tokens must not change afterwards. The keys and values
        to copy may be computed by this same forward: it copies after it has stored them
        (`PolicyForward.copies`).

        The slot is busy until `close`. The prompt's last token is always computed, for its logits;
        it counts as neither reused nor repeated.

        Args:
            name: Name of the sequence.
            tokens: Prompt: int32 [T]
            is_fresh: Whether a sequence that holds a slot reuses only tokens that the present
                weights computed. A sequence without a slot reuses only such tokens in any case.

        Returns:
            None if the prompt has to wait for a later forward: every slot is busy, or the source of
            a copy.
        """
        held = self._slots.get(name)
        if held is None:
            opened = self._open_new(name, tokens)
        else:
            opened = self._open_held(held, tokens, is_fresh)
        if opened is not None:
            self._occupy(opened, tokens)
        return opened

    def num_to_compute(self, slot: int) -> int:
        """Return the number of tokens without keys and values."""
        return self.num_known[slot] - self.num_computed[slot]

    def compute(self, slot: int, count: int) -> None:
        """Record that the planned forward computes the next `count` tokens of a slot; prompts that
        are opened from here on may copy them.
        """
        start = self.num_computed[slot]
        version = self.versions[-1]
        self.makers[slot, start : start + count] = len(self.versions) - 1
        self.oldest[slot] = min(version, self.oldest[slot]) if start else version
        self.num_computed[slot] = start + count

    def close(self, slot: int) -> None:
        """Mark a slot idle: its completion is done."""
        self._is_busy[slot] = False

    def take_back(self, slot: int, num_tokens: int) -> None:
        """Discard the tokens after the first `num_tokens`, and mark the slot idle."""
        self.num_known[slot] = num_tokens
        self.num_computed[slot] = min(num_tokens, self.num_computed[slot])
        self._is_busy[slot] = False

    def discard_kv(self, slot: int) -> int:
        """Discard the keys and values of a slot; return how many tokens had them."""
        count, self.num_computed[slot] = self.num_computed[slot], 0
        return count

    def discard_released(self) -> None:
        """Discard the keys and values of released slots, so that no prefix is copied from them."""
        for slot, name in enumerate(self._names):
            if name is None:
                self.num_computed[slot] = 0

    def release(self, name: str) -> None:
        """Forget a sequence; its slot remains a source of prefixes until another one takes it."""
        self._evicted.pop(name, None)
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._names[slot] = None

    def _open_held(self, slot: int, tokens: np.ndarray, is_fresh: bool) -> Opened:
        """Open a prompt of a sequence that holds a slot."""
        known, computed = self.num_known[slot], self.num_computed[slot]
        common = common_length(self.tokens[slot, :known], tokens)
        # The last prompt token is always computed, for its logits.
        have = min(common, computed, len(tokens) - 1)
        reused = min(have, self._num_fresh(slot, have)) if is_fresh else have
        assert slot not in self._sources, "sequences that hold a slot are opened before others"
        return Opened(slot, slot, reused, have - reused, common == known)

    def _open_new(self, name: str, tokens: np.ndarray) -> Opened | None:
        """Open a prompt of a sequence without a slot, and give it one; None if it has to wait."""
        source, common, any_common = self._longest_match(tokens)
        slot = self._free_slot()
        if slot is None:
            return None
        self._give(slot, name)
        past = self._evicted.pop(name, None)
        is_extension = past is None or past.digest == _digest(tokens[: past.num_known])
        if past is not None and is_extension:
            any_common = max(any_common, past.num_computed)
        reused = min(common, len(tokens) - 1)
        repeated = max(0, min(any_common, len(tokens) - 1) - reused)
        if reused and source != slot:
            self._sources.add(source)
        return Opened(slot, source if reused else slot, reused, repeated, is_extension)

    def _occupy(self, opened: Opened, tokens: np.ndarray) -> None:
        """Write the tokens of an opened prompt into its slot's row, and mark the slot busy."""
        slot, start = opened.slot, opened.num_reused
        if opened.source != slot:
            self.makers[slot, :start] = self.makers[opened.source, :start]
        if start:
            self.oldest[slot] = self._oldest_version(slot, start)
        begin = start if opened.source == slot else 0
        self.tokens[slot, begin : len(tokens)] = tokens[begin:]
        self.num_known[slot], self.num_computed[slot] = len(tokens), start
        self._is_busy[slot] = True
        self._clock += 1
        self._last_use[slot] = self._clock

    def _oldest_version(self, slot: int, start: int) -> int:
        """Return the oldest version that computed any of a slot's first `start` positions."""
        first, last = self.makers[slot, 0], self.makers[slot, start - 1]
        if first == last:  # the index never decreases along a slot
            return int(self.versions[first])
        # The first load need not have the oldest version: an older version may be loaded later.
        return min(int(self.versions[maker]) for maker in np.unique(self.makers[slot, :start]))

    def _num_fresh(self, slot: int, length: int) -> int:
        """Count the leading tokens that the present weights computed."""
        is_stale = self.makers[slot, :length] != len(self.versions) - 1
        return int(is_stale.argmax()) if is_stale.any() else length

    def _longest_match(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Find the slot with the longest common prefix that the present weights computed.

        Returns:
            That slot, the length of its prefix, and the length of the longest common prefix in any
            slot, whichever weights computed it.
        """
        length = min(len(tokens), self.tokens.shape[1])
        is_equal = self.tokens[:, :length] == tokens[:length]
        any_length = np.minimum(_run_lengths(is_equal), self.num_computed)
        is_equal &= self.makers[:, :length] == len(self.versions) - 1
        lengths = np.minimum(_run_lengths(is_equal), self.num_computed)
        source = int(lengths.argmax())
        return source, int(lengths[source]), int(any_length.max())

    def _free_slot(self) -> int | None:
        """Choose a free slot: a released one or, if there is none, an idle one; of several, the
        least recently used.
        """
        free = [
            slot
            for slot, is_busy in enumerate(self._is_busy)
            if not is_busy and slot not in self._sources
        ]
        return min(
            free,
            key=lambda slot: (self._names[slot] is not None, self._last_use[slot]),
            default=None,
        )

    def _give(self, slot: int, name: str) -> None:
        """Give a slot to `name`; evict the sequence that held it."""
        old = self._names[slot]
        if old is not None:
            known = self.num_known[slot]
            digest = _digest(self.tokens[slot, :known])
            self._evicted[old] = Evicted(known, self.num_computed[slot], digest)
            del self._slots[old]
            self.num_evictions += 1
        self._slots[name], self._names[slot] = slot, name


def common_length(known: np.ndarray, tokens: np.ndarray) -> int:
    """Return the length of the common prefix of two token arrays."""
    length = len(known)
    if known.tobytes() == tokens[:length].tobytes():  # the usual case, and the fast way
        return length
    length = min(length, len(tokens))
    is_equal = known[:length] == tokens[:length]
    return length if is_equal.all() else int(is_equal.argmin())


def _run_lengths(is_equal: np.ndarray) -> np.ndarray:
    """Count the leading true values of each row: int64 [rows]."""
    # `argmin` finds the first false value; it is 0 for a row that is all true.
    first = is_equal.argmin(1)
    lengths: np.ndarray = np.where(is_equal[np.arange(len(first)), first], is_equal.shape[1], first)
    return lengths


def _digest(tokens: np.ndarray) -> bytes:
    """Return a digest of token ids."""
    return blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16).digest()
