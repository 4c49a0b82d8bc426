"""Play Hangman: find a hidden word letter by letter.

Rules: the agent sees a blank for each letter of the word and tries one letter a turn. Each of the n
letters of the word earns 1/n; any other action costs one of L lives and 1/L. The word is hidden,
and the same in all episodes. Knowing the list of words helps within one episode; knowing the word
itself needs memory of earlier episodes.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

from mage_async.environments.environment import Chance, Outcome, Split
from mage_async.environments.games.game import Game, SoloPlay, TrialScript, facts_of, ladders_of
from mage_async.environments.options import check_whole
from mage_async.environments.splits import hold_out, named
from mage_async.trajectory import Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HIT, MISS, BLANK, WON, LOST, INVALID = "hit", "miss", "blank", "won", "lost", "invalid"
_WIDTH = 4
"""Number of letters of each word."""
_TEXT = """
sofa dawn rust horn skip fork maze knot road pony yard crab frog lime gulf walk ring line ship
joke goat bear fire spin glow lake verb wolf cups dusk unit salt jars rain tide lace duck year
pear bark boat kite note palm farm rock rose coat cape sand rope hero bowl barn sock path mars
corn mint hawk swan harp lids vine mail wind drum oars gems gate desk mule wave wing chip dish
gold echo lamb opal mast kelp gift lamp word yarn vest nest pans oven sail game poem moth bike
fern quiz song worm belt nail milk raft hour dust fish gale rugs rice foam leaf calm silk twig
page shoe cold jump lion star tune bolt inch snow bird card cake lute cord zinc tuna jade stem
dice iron cave
"""
WORDS = tuple(_TEXT.split())
"""Common words of four different letters, written for this game. A game with fewer words takes the
first ones.
"""
_RULES = """A word of four different letters is hidden. Say one letter a turn, such as: e.
You see where it stands in the word; a letter not yet found is blank.
Each letter of the word earns {hit:g}. Any other answer costs {miss:.3g}; {lives} of them lose.
The word is the same in all episodes."""


class HangmanPlay(SoloPlay):
    """Try one letter a turn, until the word is complete or the lives are used up.

    The anchor is the set of letters tried, and the lives left.
    """

    def __init__(self, word: str, lives: int, chance: Chance) -> None:
        self.word, self._lives, self._left, self.chance = word, lives, lives, chance
        self.tried: set[str] = set()

    @property
    def observation(self) -> str:
        """The word, with a blank for each letter not yet found."""
        return " ".join(x if x in self.tried else BLANK for x in self.word)

    @property
    def anchor(self) -> str:
        """Letters tried, and lives left."""
        return f"{''.join(sorted(self.tried))}{self._left}"

    def actions(self) -> Sequence[str]:
        """Return the letters not tried in this episode."""
        return tuple(x for x in LETTERS if x not in self.tried)

    def fitting(self, words: tuple[str, ...]) -> frozenset[str]:
        """Return the words that agree with everything this episode has shown."""
        shown = "".join(x if x in self.tried else " " for x in self.word)
        return _fitting(words, shown, frozenset(self.tried))

    def apply(self, action: str) -> Outcome:
        """Try a letter; an invalid action costs a life too."""
        is_valid = action in self.actions()
        is_hit = is_valid and action in self.word
        if is_valid:
            self.tried.add(action)
        self._left -= not is_hit
        result = HIT if is_hit else MISS if is_valid else INVALID
        reward = 1 / len(set(self.word)) if is_hit else -1 / self._lives
        end = f" {WON}" if set(self.word) <= self.tried else "" if self._left else f" {LOST}"
        return Outcome(f"{result} {self.observation}{end}", reward, is_valid, bool(end))


@dataclass(slots=True)
class HangmanScript(TrialScript[HangmanPlay]):
    """Try the letter that occurs in most of the fitting words, or any letter."""

    words: tuple[str, ...]
    care: float
    """Probability of a letter chosen by the fitting words rather than any letter."""
    memory: float
    """Probability that the fitting words must fit earlier episodes too."""

    def action(self, play: HangmanPlay) -> str:
        """Return the next letter."""
        legal = play.legal_actions()
        if self.source.random() >= self.care:
            return self.source.choice(legal)
        known = self.plays if self.source.random() < self.memory else [play]
        words = set(self.words).intersection(*(each.fitting(self.words) for each in known))
        counts = Counter(x for word in words for x in word if x in legal)
        best = max(counts.values())
        return self.source.choice(sorted(x for x, count in counts.items() if count == best))


@lru_cache(maxsize=1 << 14)
def _fitting(words: tuple[str, ...], shown: str, tried: frozenset[str]) -> frozenset[str]:
    """Return the words that have the shown letters in their places and, where `shown` has a space,
    no letter that was tried.
    """
    return frozenset(
        word
        for word in words
        if all(x == y if y != " " else x not in tried for x, y in zip(word, shown, strict=True))
    )


class Hangman(Game[str]):
    """Play Hangman; the task variant is the word, such as `cold`.

    Args:
        words: Number of words, a quarter of them held out.
        lives: Number of wrong actions that end an episode.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders = ladders_of(lives=range(8, 1, -1))

    def __init__(self, words: int = len(WORDS), lives: int = 6) -> None:
        check_whole("hangman", "words", words, 8, len(WORDS))
        check_whole("hangman", "lives", lives, 1, 20)
        self._words, self._lives = WORDS[:words], lives
        vocabulary = (*LETTERS, BLANK, HIT, MISS, WON, LOST, INVALID)
        facts = facts_of("hangman", _WIDTH + lives - 1, vocabulary, (-1.0, 1.0))
        super().__init__(facts, hold_out(named(self._words)), "word")

    def rules(self) -> str:
        """Return the rules in plain words, with the rewards."""
        return _RULES.format(hit=1 / _WIDTH, miss=1 / self._lives, lives=self._lives)

    def begin(self, task: Task, episode: int) -> HangmanPlay:
        """Start with all letters hidden."""
        return HangmanPlay(self.variant(task.member), self._lives, Chance(task.seed, episode))

    def script(self, source: random.Random) -> HangmanScript:
        """Return a script whose care and memory are drawn for the trial."""
        care, memory = source.choice((0.5, 0.9)), source.choice((0.0, 0.5, 0.95))
        return HangmanScript(source, self._words, care, memory)

    def overlap(self, one: str, other: str) -> int:
        """Return the number of letters that both words have."""
        return len(set(one) & set(other))

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return returns per episode: exact for `random` and `known`, over 200 scripted trials
        otherwise.

        `random` tries letters in any order. `solver_without_memory` tries the letter of most words
        that fit the episode, `solver` of most words that fit all episodes; both know all words, but
        not which are held out. `known` tries only the word's letters.
        """
        solver = partial(HangmanScript, words=self._words, care=1.0)
        return {
            "random": (random_return(self._lives),) * num_episodes,
            **self.measured(
                split,
                num_episodes,
                solver_without_memory=partial(solver, memory=0.0),
                solver=partial(solver, memory=1.0),
            ),
            "known": (1.0,) * num_episodes,
        }


def random_return(lives: int) -> float:
    """Return the exact expected return of trying letters in random order."""

    @cache
    def value(hits: int, misses: int) -> float:
        """Return the expected return after so many hits and misses."""
        if hits == _WIDTH or misses == lives:
            return 0.0
        hit = (_WIDTH - hits) / (len(LETTERS) - hits - misses)
        after_hit = 1 / _WIDTH + value(hits + 1, misses)
        return hit * after_hit + (1 - hit) * (value(hits, misses + 1) - 1 / lives)

    return value(0, 0)
