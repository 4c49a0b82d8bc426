"""Exchange words of a user's class in training, so that a few tasks cannot be learned by heart.

The attribute `interchangeable` of a class lists sets of words that play the same part in its tasks:
the names of its cups, its colours. Each group of training trials exchanges the words of each set at
random, in everything that the agent reads and writes; the class itself reads and writes its own
words. For example, if four of the six orders of three cups are trained on, then with exchanged
names of the cups the agent meets all six. Held-out tasks keep their words.
"""

import random
import re
from collections.abc import Iterable, Sequence
from functools import cached_property

WordSets = tuple[tuple[str, ...], ...]
FORM = 'a list of sets of words, as in [("left", "right"), ("red", "green", "blue")]'
"""Form of the attribute, for errors."""


class Exchange:
    """Map the words of a class to those that one group of trials reads and writes.

    Args:
        sets: Sets of words that are exchanged.
        seed: Seed of the permutation of each set.
    """

    def __init__(self, sets: WordSets, seed: int) -> None:
        source = random.Random(f"{seed}/interchangeable")
        self._shown = {
            own: shown
            for words in sets
            for own, shown in zip(words, source.sample(words, len(words)), strict=True)
        }

    def to_shown(self, text: str) -> str:
        """Return a text of the class in the words that the agent reads."""
        return self._word.sub(lambda found: self._shown[found[0]], text)

    def to_own(self, text: str) -> str:
        """Return a text of the agent in the words of the class."""
        return self._word.sub(lambda found: self._own[found[0]], text)

    @cached_property
    def _own(self) -> dict[str, str]:
        return {shown: own for own, shown in self._shown.items()}

    @cached_property
    def _word(self) -> re.Pattern[str]:
        return whole_word(self._shown)


def whole_word(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of the words, or groups of words, where it is whole in a text."""
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)")


def fault_of(sets: Sequence[object], words: Sequence[str]) -> str:
    """Return why a declaration of interchangeable words cannot be used; "" if it can.

    Args:
        sets: The declared list or tuple.
        words: Closed vocabulary of the class; empty if it has none.
    """
    seen = set[str]()
    for each in sets:
        if not isinstance(each, list | tuple) or len(each) < 2:
            return f"must be {FORM}, got the set {each!r:.60}"
        for word in each:
            if not isinstance(word, str) or word.split() != [word]:
                return f"must be {FORM}: {word!r:.60} is not one word"
            if word in seen:
                return f"must list each word once, got {word!r:.60} twice"
            if words and word not in words:
                return f"must list words of `words`, got {word!r:.60}, which is not among them"
            seen.add(word)
    # With "blue" shown as "red", the text "blue-hot" would be shown as "red-hot", which is read as
    # the one word.
    for word in sorted(seen):
        pattern = whole_word([word])
        for other in sorted(seen - {word}):
            if pattern.search(other):
                return f"must not list {word!r:.60} beside {other!r:.60}, in which it is a word too"
    return ""
