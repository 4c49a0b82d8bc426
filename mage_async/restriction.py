"""Restrict sampling: a turn draws only from the token sequences of its legal actions.

The legal actions of a turn, each as tokens, form a trie. At a node with more than one child the
policy is the softmax over the children alone; a node with one child forces its token, which is not
sampled: it has no log-prob and no gradient. With logits `z` and the children `C(v)` of node `v`,

    pi(t | v) = exp z_t / sum over u in C(v) of exp z_u

as in GLAM (arXiv 2302.02662). A trial records the set `C(v)` of every sampled token
(`AllowedSets`), so the learner computes the same distribution without the environment.

Shapes: `N` sampled tokens of a segment (a trial's context), `K` different sets, `M` tokens of all
these sets.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

FREE = -1
"""Value in `AllowedSets.index` of a token that was sampled from the whole vocabulary."""


class Restriction(Protocol):
    """Restrict a completion to a set of token sequences, by a trie or an automaton; protocol.

    Nodes of the trie, or states of the automaton, are numbers; the root is 0.
    """

    max_length: int
    """Bound on the length of a sequence, in tokens."""

    def after(self, node: int, token: int) -> int:
        """Return the node that a token leads to."""
        ...

    def is_end(self, node: int) -> bool:
        """Return whether a sequence ends at the node."""
        ...

    def allowed(self, node: int) -> np.ndarray:
        """Return the tokens that may follow a node at which no sequence ends, ascending: int32
        [at least 1].
        """
        ...

    def forced(self, node: int) -> tuple[list[int], int]:
        """Return the tokens that follow without a choice, and the node after them.

        At that node several tokens may follow, or the sequence ends.
        """
        ...


class TokenTrie:
    """Restrict a completion to given token sequences by a trie; nodes are numbers, the root is 0.

    No sequence may be the beginning of another one: each ends with tokens that end an action.

    Args:
        sequences: at least one, each of at least one token id.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._sets: dict[int, np.ndarray] = {}
        self.max_length = 0
        """Length of the longest sequence, in tokens."""
        for sequence in sequences:
            node = 0
            self.max_length = max(self.max_length, len(sequence))
            for token in sequence:
                node = self._children[node].setdefault(token, len(self._children))
                if node == len(self._children):
                    self._children.append({})

    def after(self, node: int, token: int) -> int:
        """Return the node that a token leads to."""
        return self._children[node][token]

    def is_end(self, node: int) -> bool:
        """Return whether a sequence ends at the node."""
        return not self._children[node]

    def allowed(self, node: int) -> np.ndarray:
        """Return the tokens that may follow a node at which no sequence ends, ascending: int32
        [at least 1].
        """
        if node not in self._sets:
            self._sets[node] = np.array(sorted(self._children[node]), np.int32)
        return self._sets[node]

    def forced(self, node: int) -> tuple[list[int], int]:
        """Return the tokens that follow without a choice, and the node after them.

        That node has several children, or none: there the sequence ends.
        """
        tokens: list[int] = []
        while len(children := self._children[node]) == 1:
            ((token, node),) = children.items()
            tokens.append(token)
        return tokens, node


@dataclass(frozen=True, slots=True, eq=False)
class AllowedSets:
    """Hold the set of tokens that each sampled token of a segment was drawn from; equal sets are
    stored once.
    """

    index: np.ndarray
    """int32 [N]: number of each sampled token's set, or `FREE`."""
    offsets: np.ndarray
    """int32 [K + 1]: set `k` is `tokens[offsets[k] : offsets[k + 1]]`."""
    tokens: np.ndarray
    """int32 [M]: token ids, ascending within each set of at least two."""

    @classmethod
    def of(cls, drawn_from: Sequence[np.ndarray | None]) -> "AllowedSets | None":
        """Store each different set once.

        Args:
            drawn_from: the set of each sampled token, int32 [at least 2]; `None` for a token that
                was sampled from the whole vocabulary.

        Returns:
            `None` if no token was restricted.
        """
        numbers: dict[bytes, int] = {}
        sets: list[np.ndarray] = []
        index = np.full(len(drawn_from), FREE, np.int32)
        for place, allowed in enumerate(drawn_from):
            if allowed is None:
                continue
            number = numbers.setdefault(allowed.tobytes(), len(sets))
            if number == len(sets):
                sets.append(allowed)
            index[place] = number
        if not sets:
            return None
        lengths = [0, *map(len, sets)]
        return cls(index, np.cumsum(lengths, dtype=np.int32), np.concatenate(sets))

    def __iter__(self) -> Iterator[np.ndarray | None]:
        """Yield the set of each sampled token, or `None`."""
        for number in self.index.tolist():
            yield None if number == FREE else self.set_of(number)

    def fault(self, sampled: np.ndarray) -> str | None:
        """Return why these cannot be the sets of a segment's sampled tokens, int32 [N]; or `None`.

        A set has at least two tokens in ascending order, and holds each token drawn from it.
        """
        # A peer may send any offsets: in int32 their differences could overflow.
        offsets = self.offsets.astype(np.int64)
        lengths = offsets[1:] - offsets[:-1]
        if not len(sampled) or not len(lengths):
            return "a segment with allowed sets has sampled tokens, and at least one set"
        is_covered = self.offsets[0] == 0 and self.offsets[-1] == len(self.tokens)
        if not is_covered or (lengths < 2).any():
            return "allowed sets have at least two tokens each, and each given token belongs to one"
        rises = np.diff(self.tokens) > 0
        rises[self.offsets[1:-1] - 1] = True  # the first token of the next set may be lower
        if self.tokens.min() < 0 or not rises.all():
            return "the tokens of an allowed set are at least 0, and ascend"
        if len(self.index) != len(sampled) or not (
            self.index.min() >= FREE and self.index.max() < len(lengths)
        ):
            return f"{len(sampled)} sampled tokens have set numbers {FREE} to {len(lengths) - 1}"
        restricted = self.index >= 0
        numbers, drawn = self.index[restricted].astype(np.int64), sampled[restricted]
        # Each set's tokens are raised by a multiple of `stride`, so that all together ascend, and
        # one search finds the sampled tokens of all sets.
        stride = int(self.tokens.max()) + 1
        keys = self.tokens.astype(np.int64) + stride * np.repeat(np.arange(len(lengths)), lengths)
        drawn_keys = drawn.astype(np.int64) + stride * numbers
        places = np.searchsorted(keys, drawn_keys)
        # A token of `stride` or more would be found among those of the next set.
        are_inside = (keys[np.minimum(places, len(keys) - 1)] == drawn_keys) & (drawn < stride)
        if are_inside.all():
            return None
        return "a sampled token lies in its allowed set, got one that does not"

    def set_of(self, number: int) -> np.ndarray:
        """Return a set by its number: int32 [at least 2]."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]
