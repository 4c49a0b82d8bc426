"""Where the tokens of sequences stand in one row: sequence after sequence, without padding.

Sequences that begin alike (the chat's first turn, the rules of the game, the first observation) may
be laid with that opening once, at the beginning of the row: what they share goes through the model
once, with the gradient of all.

Shapes: `T` tokens of the row, `S` sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from mage_async.completion import without_roles


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One row of tokens."""

    tokens: np.ndarray
    """int64 [T]"""
    positions: np.ndarray
    """int64 [T]: place in its own sequence"""
    exploits: np.ndarray
    """bool [T]: which tokens are the exploiter's"""
    opening: int
    """Tokens at the row's beginning that belong to every sequence."""
    starts: np.ndarray
    """int64 [S]: how far a sequence's own tokens stand behind their places in the sequence"""
    lengths: np.ndarray
    """int64 [S]: tokens of each sequence past the opening"""

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], *, shares_opening: bool) -> Self:
        """Lay sequences, integers [tokens] each, in their order; the exploiter's as `~token`."""
        opening = opening_of(sequences) if shares_opening else 0
        lengths = np.array([len(tokens) - opening for tokens in sequences], np.int64)
        starts = np.cumsum(lengths) - lengths
        tokens = np.concatenate((sequences[0][:opening], *(each[opening:] for each in sequences)))
        places = np.arange(len(tokens))
        own = places[opening:] - np.repeat(starts, lengths)
        positions = np.concatenate((places[:opening], own))
        plain = without_roles(tokens).astype(np.int64)
        return cls(plain, positions, tokens < 0, opening, starts, lengths)

    def where(self, number: int, places: np.ndarray) -> np.ndarray:
        """Where tokens of a sequence stand in the row, by their places in the sequence."""
        return np.where(places < self.opening, places, places + self.starts[number])


def opening_of(sequences: Sequence[np.ndarray]) -> int:
    """How many tokens all sequences begin with alike; 0 for a single sequence."""
    return min((alike(sequences[0], other) for other in sequences[1:]), default=0)


def alike(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences begin with alike, not counting the last one of either."""
    most = min(len(one), len(other)) - 1
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most
