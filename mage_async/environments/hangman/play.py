"""One episode of Hangman, and scripts that know the words there are."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from mage_async.environments.environment import Chance, Outcome, Play

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HIT, MISS, BLANK, WON, LOST, INVALID = "hit", "miss", "blank", "won", "lost", "invalid"


class HangmanPlay:
    """Letters, one a turn, until the word is whole or the lives are used up.

    A letter of the word earns its share of 1, any other answer costs a life and its share of 1. The
    anchor is what this episode has tried, in no order.
    """

    __slots__ = ("_left", "_lives", "chance", "tried", "word")

    def __init__(self, word: str, lives: int, chance: Chance) -> None:
        self.word, self._lives, self._left, self.chance = word, lives, lives, chance
        self.tried: set[str] = set()

    @property
    def observation(self) -> str:
        """A blank for each letter."""
        return self._shown()

    @property
    def anchor(self) -> str:
        """Letters tried, and lives left."""
        return f"{''.join(sorted(self.tried))}{self._left}"

    def legal_actions(self) -> Sequence[str]:
        """Letters that were not tried in this episode."""
        return () if self._is_over() else tuple(x for x in LETTERS if x not in self.tried)

    def fitting(self, words: tuple[str, ...]) -> frozenset[str]:
        """The words that could have shown what this episode has."""
        shown = "".join(x if x in self.tried else " " for x in self.word)
        return _fitting(words, shown, frozenset(self.tried))

    def act(self, action: str) -> Outcome:
        """Try a letter; what is none, or was tried, costs a life too."""
        assert not self._is_over(), "the episode is done"
        is_valid = len(action) == 1 and action in LETTERS and action not in self.tried
        is_hit = is_valid and action in self.word
        if is_valid:
            self.tried.add(action)
        self._left -= not is_hit
        told = HIT if is_hit else MISS if is_valid else INVALID
        reward = 1 / len(set(self.word)) if is_hit else -1 / self._lives
        said = f"{told} {self._shown()}{self._end()}"
        return Outcome(said, reward, is_valid, self._is_over())

    def _shown(self) -> str:
        return " ".join(x if x in self.tried else BLANK for x in self.word)

    def _is_whole(self) -> bool:
        return set(self.word) <= self.tried

    def _is_over(self) -> bool:
        return self._is_whole() or not self._left

    def _end(self) -> str:
        return f" {WON}" if self._is_whole() else "" if self._left else f" {LOST}"


@dataclass(slots=True)
class HangmanScript:
    """Tries the letter that most of the fitting words have, or any letter."""

    source: random.Random
    words: tuple[str, ...]
    care: float
    """Probability of a letter by the fitting words."""
    memory: float
    """Probability that a letter is chosen by what earlier episodes have shown too."""
    _plays: list[HangmanPlay] = field(default_factory=list)

    def choose(self, play: Play) -> str:
        """The next letter."""
        assert isinstance(play, HangmanPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
        legal = play.legal_actions()
        if self.source.random() >= self.care:
            return self.source.choice(legal)
        remembers = self.source.random() < self.memory
        known = self._plays if remembers else self._plays[-1:]
        words = set(self.words).intersection(*(each.fitting(self.words) for each in known))
        counts = Counter(x for word in words for x in word if x in legal)
        best = max(counts.values())
        return self.source.choice(sorted(x for x, count in counts.items() if count == best))


@lru_cache(maxsize=1 << 14)
def _fitting(words: tuple[str, ...], shown: str, tried: frozenset[str]) -> frozenset[str]:
    """Words with the letters shown, and nowhere else a letter that was tried."""
    return frozenset(
        word
        for word in words
        if all(x == y if y != " " else x not in tried for x, y in zip(word, shown, strict=True))
    )
