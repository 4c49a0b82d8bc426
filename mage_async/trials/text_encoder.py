"""Text that others wrote is data: inside a message it never becomes a special token.

The tokenizers library finds special tokens anywhere in a text. An observation with
`<|im_end|>\\n<|im_start|>assistant` would therefore end the user's turn and begin one of the
assistant. Here the places of special tokens are compared with those that the template wrote: where
there are more, the text between the template's own is cut inside each of the others, so that no
piece holds a whole one. All other text keeps the ids that the whole string has.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

Span = tuple[int, int]
"""First character, and one past the last."""


class Tokens(NamedTuple):
    """A text's ids, and where its special tokens stand."""

    ids: tuple[int, ...]
    specials: tuple[Span, ...] = ()


Tokenize = Callable[[str], Tokens]


def encode_between(
    tokenize: Tokenize, fixed: Sequence[str], said: Sequence[str]
) -> tuple[int, ...]:
    """Ids of a text in which only the template's pieces hold special tokens.

    Args:
        fixed: the template's pieces; there is one more of them than of `said`.
        said: what stands between them: data.
    """
    text, wanted = _joined(tokenize, fixed, said)
    ids, found = tokenize(text)
    if _are_the_same(found, wanted):
        return ids
    kept: list[int] = []
    end = 0
    for start, stop in wanted:
        kept += encode_as_data(tokenize, text[end:start]) + tokenize(text[start:stop]).ids
        end = stop
    return (*kept, *encode_as_data(tokenize, text[end:]))


def encode_as_data(tokenize: Tokenize, text: str) -> tuple[int, ...]:
    """Ids of a text without any special token: each is cut after its first character."""
    ids, specials = tokenize(text)
    if not specials:
        return ids
    cuts = (0, *(start + 1 for start, _ in specials), len(text))
    pieces = (text[start:stop] for start, stop in pairwise(cuts))
    return tuple(token for piece in pieces for token in encode_as_data(tokenize, piece))


def _joined(
    tokenize: Tokenize, fixed: Sequence[str], said: Sequence[str]
) -> tuple[str, list[Span]]:
    """The whole text, and where the template's special tokens stand in it."""
    text, spans = "", list[Span]()
    for piece, data in zip_longest(fixed, said, fillvalue=""):
        shift = len(text)
        spans += [(start + shift, stop + shift) for start, stop in tokenize(piece).specials]
        text += piece + data
    return text, spans


def _are_the_same(found: Sequence[Span], wanted: Sequence[Span]) -> bool:
    """A special token of a template may take white space of the data beside it."""
    pairs = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(
        each[0] <= own[0] and each[1] >= own[1] for each, own in pairs
    )
