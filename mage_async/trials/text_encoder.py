"""Text that others wrote is data: inside a message it never becomes a special token.

The tokenizers library finds special tokens anywhere in a text. An observation with
`<|im_end|>\\n<|im_start|>assistant` would therefore end the user's turn and begin one of the
assistant. Here the places of special tokens are compared with those that the template wrote: where
there are more, the text between the template's own is cut inside each of the others, so that no
piece holds a whole one. All other text keeps the ids that the whole string has.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

Span = tuple[int, int]
"""First character, and one past the last."""


class Tokens(NamedTuple):
    """A text's ids, and where its special tokens stand."""

    ids: tuple[int, ...]
    specials: tuple[Span, ...] = ()


Tokenize = Callable[[str], Tokens]


def encode_between(tokenize: Tokenize, before: str, data: str, after: str) -> tuple[int, ...]:
    """Ids of `before + data + after`, in which only `before` and `after` hold special tokens."""
    opening, closing = tokenize(before).specials, tokenize(after).specials
    whole = tokenize(before + data + after)
    if _are_all(whole.specials, opening, closing, len(before) + len(data)):
        return whole.ids
    start = opening[-1][1] if opening else 0
    stop = closing[0][0] if closing else len(after)
    middle = encode_as_data(tokenize, before[start:] + data + after[:stop])
    return tokenize(before[:start]).ids + middle + tokenize(after[stop:]).ids


def encode_as_data(tokenize: Tokenize, text: str) -> tuple[int, ...]:
    """Ids of a text without any special token: each is cut after its first character."""
    ids, specials = tokenize(text)
    if not specials:
        return ids
    cuts = (0, *(start + 1 for start, _ in specials), len(text))
    pieces = (text[start:stop] for start, stop in pairwise(cuts))
    return tuple(token for piece in pieces for token in encode_as_data(tokenize, piece))


def _are_all(
    found: tuple[Span, ...], opening: tuple[Span, ...], closing: tuple[Span, ...], shift: int
) -> bool:
    """Whether the special tokens found are the template's: before the data, and `shift` behind.

    A special token may take white space beside it, so only the template's side is compared.
    """
    starts = [start for start, _ in found[: len(opening)]]
    stops = [stop - shift for _, stop in found[len(opening) :]]
    return starts == [start for start, _ in opening] and stops == [stop for _, stop in closing]
