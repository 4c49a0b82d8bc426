"""Read the pattern of legal actions that a class declares (`legal_pattern`): list or draw texts
that match it, and refuse one from which actions cannot be sampled.
"""

import itertools
import random
import re

# `re` does not say how long the texts that match are; its parser does (`getwidth`), in every
# version of Python so far.
import re._parser  # type: ignore[import-not-found]
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CHARACTERS = 1000
"""Longest action that a pattern may describe."""
NUM_TEXTS = 256
"""Largest number of texts of a pattern that are listed; if it has more, this many are drawn."""


@lru_cache(maxsize=256)
def pattern_fault(pattern: str) -> str:
    """Return why actions cannot be sampled from a pattern, in a sentence; "" if they can."""
    where = f"the legal_pattern {pattern!r:.100}"
    try:
        shortest, longest = lengths(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"{where} cannot be read: {error}"
    if longest > MAX_CHARACTERS:
        return (
            f"{where} matches actions of more than {MAX_CHARACTERS:,} characters. Bound its "
            "repetitions, such as {1,8} instead of +"
        )
    if not shortest:
        return f"{where} matches an empty action. Let it have at least one character"
    if (matcher := _byte_matcher(pattern)).is_error():
        return f"{where} cannot be read: {' '.join(matcher.get_error().split()):.200}"
    if text := _text_with_spaces(pattern):
        return (
            f"{where} matches {text!r:.60}, and not {text.strip()!r:.60}: spaces at the ends of an "
            "action are removed before it is judged. Leave them out of the pattern"
        )
    return ""


def regex_form(pattern: str) -> str:
    """Return a regular expression as a literal of llguidance's grammars: between slashes, in one
    line.
    """
    # `\\.` takes a backslash with the character after it, so an escaped slash is not escaped again.
    escaped = {"/": r"\/", "\n": r"\n"}
    body = re.sub(r"(?s)\\.|[/\n]", lambda found: escaped.get(found[0][-1], found[0]), pattern)
    return f"/(?:{body})/"


def _text_with_spaces(pattern: str) -> str:
    """Return a text of a pattern that does not match any more once the spaces at its ends are
    removed; "" if there is none, or the automaton that finds it would be too large.
    """
    # `CORE` is a text without spaces at its ends that does not match.
    grammar = f"""start: FOUND
FOUND: LEGAL & SPACED
LEGAL: {regex_form(pattern)}
CORE: ~LEGAL & /\\S((?s:.)*\\S)?/
SPACED: /\\s*/ CORE /\\s*/
"""
    matcher = _automaton("lark", grammar)
    # A grammar that no text matches is an error too.
    return "" if matcher.is_error() else next(_all_texts(matcher), "")


def lengths(pattern: str) -> tuple[int, int]:
    """Return the fewest and the most characters of a text that a pattern matches.

    Raises:
        re.error: the pattern is no regular expression.
        OverflowError: a number in it is too large.
        RecursionError: its groups are nested too deeply.
    """
    shortest, longest = re._parser.parse(pattern).getwidth()
    return int(shortest), int(longest)


class DrawnTexts(tuple[str, ...]):
    """Hold texts drawn from those that match a pattern; `in` is true for all that match."""

    is_whole = False
    """More actions are legal than are listed (`Play.legal_actions`)."""
    pattern: str

    def __new__(cls, texts: Iterable[str], pattern: str) -> "DrawnTexts":
        made = super().__new__(cls, texts)
        made.pattern = pattern
        return made

    def __contains__(self, action: object) -> bool:
        """Return whether an action is legal."""
        return isinstance(action, str) and re.fullmatch(self.pattern, action) is not None


@lru_cache(maxsize=1024)
def matching_texts(pattern: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return all texts that match a pattern, sorted, if there are at most `NUM_TEXTS`; otherwise
    `NUM_TEXTS` drawn ones, the same at every call.

    Players without a model choose among these texts as among listed actions.

    Args:
        pattern: One without a `pattern_fault`.
        words: Words of the environment. A drawn text may contain them as wholes where they match,
            because the tiny model writes whole words.
    """
    matcher = _byte_matcher(pattern)
    found = tuple(itertools.islice(_all_texts(matcher), NUM_TEXTS + 1))
    if len(found) <= NUM_TEXTS:
        return found
    source, encoded = random.Random(pattern), [word.encode() for word in words]
    return DrawnTexts((_drawn(matcher, encoded, source) for _ in range(NUM_TEXTS)), pattern)


def _byte_matcher(pattern: str) -> "LLMatcher":
    """Return the automaton of a pattern, whose tokens are bytes. `allowed_tokens.py` restricts a
    policy's sampling by the automaton of the same expression.
    """
    return _automaton("regex", f"(?:{pattern})")


def _automaton(syntax: Literal["lark", "regex"], grammar: str) -> "LLMatcher":
    """Return the automaton of a grammar, whose tokens are bytes."""
    # Imported only here, because the worker processes of most classes meet no pattern.
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    return LLMatcher(LLTokenizer("byte"), grammar_from(syntax, grammar))


def _next_bytes(matcher: "LLMatcher") -> list[int]:
    """Return the bytes that may follow, ascending."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    tokens: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
    return [token for token in tokens if token < 256]  # the others are special tokens


def _all_texts(matcher: "LLMatcher") -> Iterator[str]:
    """Yield all texts that an automaton accepts, sorted by their bytes."""
    # Entries: an automaton, the text that led to it, and the byte to add.
    waiting = [(matcher, b"", b"")]
    while waiting:
        before, text, byte = waiting.pop()
        after, text = before.deep_copy(), text + byte
        after.consume_tokens(list(byte))
        if after.is_accepting():
            yield text.decode()
        following = reversed(_next_bytes(after))
        waiting.extend((after, text, bytes([each])) for each in following)


def _drawn(matcher: "LLMatcher", words: Sequence[bytes], source: random.Random) -> str:
    """Draw a text that an automaton accepts, piece by piece.

    A piece is one byte, one of `words` at the beginning or after a space, or, where the text may
    end, the end; all pieces are equally likely.
    """
    matcher, text = matcher.deep_copy(), b""
    while True:
        following = _next_bytes(matcher)
        # "." matches any character, but people and models hardly ever write anything but ASCII.
        following = [each for each in following if 32 <= each < 127] or following
        pieces = [bytes([each]) for each in following]
        if not text or text.endswith(b" "):
            pieces += [each for each in words if matcher.validate_tokens(list(each)) == len(each)]
        if matcher.is_accepting():
            pieces.append(b"")
        if not (piece := source.choice(pieces)):
            return text.decode()
        matcher.consume_tokens(list(piece))
        text += piece
