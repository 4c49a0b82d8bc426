"""Play Hangman: find a hidden word letter by letter.

Rules: the agent sees a blank for each letter of the word and tries one letter a turn. Each of the n
letters of the word earns 1/n; any other action costs one of L lives and a reward of 1/L. With the
option `says_word` only saying the word pays, 1, and wins; the agent has a number of turns in place
of lives. The word is hidden, and the same in all episodes. Knowing the list of words helps within
one episode; knowing the word itself needs memory of earlier episodes.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

from mage_async.environments.environment import (
    Chance,
    Outcome,
    Split,
    check_flag,
    check_whole,
    hold_out,
    named,
)
from mage_async.environments.games.game import Game, SoloPlay, TrialScript, facts_of, ladders_of
from mage_async.trajectory import Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HIT, MISS, BLANK, WON, LOST, INVALID = "hit", "miss", "blank", "won", "lost", "invalid"
_WIDTH = 4
"""Number of letters of each word without `says_word`."""
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
_SHORT_TEXT = """
ant arm art ash axe bag bat bay bed bee bin bow box bus cab can cap car cat cob cow
cup day den dog dew ear eel egg elm fan fig fin fir fog fox fur gem hat hen hip hut ice ink inn ivy
jam jar jet jug key kid lap leg lid lip log map mat mud mug net nut oak oar oat oil owl pad pan paw
pea pen pet pie pig pin pit pod pot ram rat ray rib rod rug rye saw sea sky son spa sun tar tea tin
toe top toy tub van vat wax web wig yak zoo
"""
SHORT_WORDS = tuple(_SHORT_TEXT.split())
"""Common words of three letters, written for `says_word`."""
_SHORT_RULES = """A word of three letters is hidden. Say a letter, such as: e, or the word.
You see where a letter stands in the word; a letter not yet found is blank.
Saying the word earns 1, nothing else does. You have {turns} turns.
The word is the same in all episodes."""
_RULES = """A word of four different letters is hidden. Say one letter a turn, such as: e.
You see where it stands in the word; a letter not yet found is blank.
Each letter of the word earns {hit:g}. Any other answer costs {miss:.3g}; after {lives} of them
the episode is lost.
The word is the same in all episodes."""


class HangmanPlay(SoloPlay):
    """Try one letter a turn, until the word is complete or the lives are used up.

    The anchor, which is equal for equal states, is the letters tried, the lives left and the words
    said.

    Args:
        word: The hidden word.
        lives: Number of wrong actions that end the episode; with `words`, number of all actions,
            right or wrong.
        chance: Record of the draws.
        words: Words that may be said besides letters: the episode is won by saying the hidden one.
            Empty without `says_word`.
    """

    def __init__(self, word: str, lives: int, chance: Chance, words: tuple[str, ...] = ()) -> None:
        self.word, self._lives, self._lives_left, self.chance = word, lives, lives, chance
        self._words = words
        self.tried: set[str] = set()
        self.said: set[str] = set()
        """Words said, none of which is the hidden one unless the episode is won."""

    @property
    def observation(self) -> str:
        """The word, with a blank for each letter not yet found."""
        return " ".join(x if x in self.tried else BLANK for x in self.word)

    @property
    def anchor(self) -> str:
        """Letters tried, lives left, and words said."""
        letters = "".join(sorted(self.tried))
        return " ".join((f"{letters}{self._lives_left}", *sorted(self.said)))

    def actions(self) -> Sequence[str]:
        """Return the letters and words not tried in this episode."""
        return tuple(x for x in (*LETTERS, *self._words) if x not in self.tried | self.said)

    def fitting(self, words: tuple[str, ...]) -> frozenset[str]:
        """Return the words that agree with everything this episode has shown."""
        shown = "".join(x if x in self.tried else " " for x in self.word)
        return _fitting(words, shown, frozenset(self.tried)) - (self.said - {self.word})

    def apply(self, action: str) -> Outcome:
        """Try a letter or say a word; an invalid action costs a life too."""
        if self._words:
            return self._say(action)
        is_valid = action in self.actions()
        is_hit = is_valid and action in self.word
        if is_valid:
            self.tried.add(action)
        self._lives_left -= not is_hit
        result = HIT if is_hit else MISS if is_valid else INVALID
        reward = 1 / len(set(self.word)) if is_hit else -1 / self._lives
        end = self._end(is_won=set(self.word) <= self.tried)
        return Outcome(f"{result} {self.observation}{end}", reward, is_valid, bool(end))

    def _say(self, action: str) -> Outcome:
        """Try a letter or say a word under the rules of `says_word`: saying the hidden word wins,
        and every action uses up a turn.
        """
        is_valid, is_won = action in self.actions(), action == self.word
        if is_valid:
            (self.tried if len(action) == 1 else self.said).add(action)
        self._lives_left -= 1
        result = HIT if is_valid and action in self.word else MISS if is_valid else INVALID
        end = self._end(is_won=is_won)
        return Outcome(f"{result} {self.observation}{end}", float(is_won), is_valid, bool(end))

    def _end(self, *, is_won: bool) -> str:
        """Return the word for the end of the episode, after a space; "" if it goes on."""
        if is_won:
            return f" {WON}"
        return "" if self._lives_left else f" {LOST}"


@dataclass(slots=True)
class HangmanScript(TrialScript[HangmanPlay]):
    """Try the most frequent letter of the fitting words, or any letter."""

    words: tuple[str, ...]
    care: float
    """Probability of a letter chosen by the fitting words rather than any letter."""
    memory: float
    """Probability that the fitting words must fit earlier episodes too."""
    says_word: bool = False
    """Whether the word has to be said; the script says one of the last two that fit."""

    def action(self, play: HangmanPlay) -> str:
        """Return the next letter."""
        legal = play.legal_actions()
        if self.source.random() >= self.care:
            return self.source.choice(legal)
        known = self.plays if self.source.random() < self.memory else [play]
        words = set(self.words).intersection(*(each.fitting(self.words) for each in known))
        if self.says_word and len(words) <= 2:
            return self.source.choice(sorted(words))
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
        words: Number of words, a quarter of them held out; by default all of the game's list.
        lives: Number of wrong actions that end an episode.
        says_word: Whether the agent has to say the word, of three letters, within `turns` turns,
            and earns 1 for that alone. These are the rules of GEM's `Hangman-v0-easy` (arXiv
            2510.01051).
        turns: Number of turns of an episode with `says_word`.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders = ladders_of(lives=range(8, 1, -1))
    """The option whose values make harder tasks, easiest first."""

    def __init__(
        self,
        words: int | None = None,
        lives: int = 6,
        says_word: bool = False,
        turns: int = 10,
    ) -> None:
        check_flag("hangman", "says_word", says_word)
        every = SHORT_WORDS if says_word else WORDS
        words = len(every) if words is None else words
        check_whole("hangman", "words", words, 8, len(every))
        check_whole("hangman", "lives", lives, 1, 20)
        check_whole("hangman", "turns", turns, 1, 100)
        self._words, self._says_word = every[:words], says_word
        self._lives = turns if says_word else lives
        if says_word:
            self.ladders = ladders_of()  # `lives` changes nothing
        vocabulary = (*LETTERS, BLANK, HIT, MISS, WON, LOST, INVALID)
        if says_word:
            facts = facts_of("hangman", turns, (*vocabulary, *self._words), threshold=0.5)
        else:
            # The longest episodes try all letters of the word and lose all lives but one, or lose
            # all lives and try all letters but one.
            facts = facts_of("hangman", _WIDTH + lives - 1, vocabulary, (-1.0, 1.0))
        super().__init__(facts, hold_out(named(self._words)), "word")

    def rules(self) -> str:
        """Return the rules in plain words, with the rewards."""
        if self._says_word:
            return _SHORT_RULES.format(turns=self._lives)
        return _RULES.format(hit=1 / _WIDTH, miss=1 / self._lives, lives=self._lives)

    def begin(self, task: Task, episode: int) -> HangmanPlay:
        """Start with all letters hidden."""
        word, chance = self.variant(task.member), Chance(task.seed, episode)
        return HangmanPlay(word, self._lives, chance, self._words if self._says_word else ())

    def script(self, source: random.Random) -> HangmanScript:
        """Return a script whose care and memory are drawn for the trial."""
        care, memory = source.choice((0.5, 0.9)), source.choice((0.0, 0.5, 0.95))
        return HangmanScript(source, self._words, care, memory, self._says_word)

    def overlap(self, one: str, other: str) -> int:
        """Return the number of letters that both words have."""
        return len(set(one) & set(other))

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return values per episode: `known` is exact, and so is `random` without `says_word`; the
        others are means over 200 scripted trials.

        `random` tries letters, or with `says_word` letters and words, in any order.
        `solver_without_memory` tries the most frequent letter of the words that fit the episode,
        `solver` of the words that fit all episodes; both know all words, but not which are held
        out. `known` tries only the word's letters, or says it.
        """
        script = partial(HangmanScript, words=self._words, says_word=self._says_word)
        solver = partial(script, care=1.0)
        if self._says_word:
            anything = partial(script, care=0.0, memory=0.0)
            random_returns = self.measured(split, num_episodes, random=anything)["random"]
        else:
            random_returns = (random_return(self._lives),) * num_episodes
        return {
            "random": random_returns,
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
        """Return the expected return after the given numbers of hits and misses."""
        if hits == _WIDTH or misses == lives:
            return 0.0
        hit = (_WIDTH - hits) / (len(LETTERS) - hits - misses)
        after_hit = 1 / _WIDTH + value(hits + 1, misses)
        return hit * after_hit + (1 - hit) * (value(hits, misses + 1) - 1 / lives)

    return value(0, 0)
