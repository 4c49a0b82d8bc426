"""Hangman: a hidden word, letter by letter; wrong letters cost.

The word is the same in all episodes, so that a letter found is known and need not be looked for. To
know the words that there are helps within one episode; only memory tells which of them it is.
"""

import random
from functools import cache, partial
from types import MappingProxyType

from mage_async.environments.environment import Chance, Environment, Facts, Ladders, Split
from mage_async.environments.hangman.play import (
    BLANK,
    HIT,
    INVALID,
    LETTERS,
    LOST,
    MISS,
    WON,
    HangmanPlay,
    HangmanScript,
)
from mage_async.environments.hangman.words import WORDS
from mage_async.environments.options import check_whole
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_HELDOUT_SHARE = 4  # one word in so many
_RULES = """A word of four different letters is hidden. Say one letter a turn, such as: e.
You see where it stands in the word; a letter not yet found is blank.
Each letter of the word earns {hit:g}. Any other answer costs {miss:.3g}; {lives} of them lose.
The word is the same in all episodes."""
_WIDTH = 4


class Hangman(Environment):
    """Hangman; the word is what a trial has to find out.

    Args:
        words: how many there are, a quarter of them held out.
        lives: wrong answers that end an episode.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders: Ladders = MappingProxyType(
        {"lives": tuple({"lives": count} for count in range(8, 1, -1))}
    )

    def __init__(self, words: int = len(WORDS), lives: int = 6) -> None:
        check_whole("hangman", "words", words, 8, len(WORDS))
        check_whole("hangman", "lives", lives, 1, 20)
        self._words, self._lives = WORDS[:words], lives
        num_heldout = words // _HELDOUT_SHARE
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": self._words[num_heldout:],
            "heldout": self._words[:num_heldout],
        }
        self.facts = Facts(
            name="hangman",
            num_seats=1,
            max_turns=_WIDTH + lives - 1,
            min_return=-1.0,
            max_return=1.0,
            units=1,
            has_chance=False,
            words=(*LETTERS, BLANK, HIT, MISS, WON, LOST, INVALID),
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Words, such as `cold`."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """All words are of one kind."""
        return "word"

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words, with the rewards."""
        return _RULES.format(hit=1 / _WIDTH, miss=1 / self._lives, lives=self._lives)

    def begin(self, task: Task, episode: int) -> HangmanPlay:
        """Start with all letters hidden."""
        if task.member not in self._words:
            raise EnvironmentFault(
                f"hangman: no word is {task.member!r}, as is e.g. {self._words[0]!r}"
            )
        return HangmanPlay(task.member, self._lives, Chance(task.seed, episode))

    def script(self, source: random.Random) -> HangmanScript:
        """Its care and its memory are drawn for the trial."""
        care, memory = source.choice((0.5, 0.9)), source.choice((0.0, 0.5, 0.95))
        return HangmanScript(source, self._words, care, memory)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Words of the split with the fewest letters in common."""
        others = [word for word in self._splits[split] if word != member]
        least = min(len(set(word) & set(member)) for word in others)
        return tuple(word for word in others if len(set(word) & set(member)) == least)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Returns per episode: exact for `random` and `known`, of 200 scripted trials for others.

        `random` tries letters in any order. `solver_without_memory` tries what most words have that
        fit the episode, `solver` what most have that fit all episodes; both know all words, and not
        which are held out. `known` says the word's letters.
        """
        solvers = {"solver_without_memory": 0.0, "solver": 1.0}
        return {
            "random": (random_return(self._lives),) * num_episodes,
            **{
                name: scripted_returns(self, split, num_episodes, partial(self._solver, memory))
                for name, memory in solvers.items()
            },
            "known": (1.0,) * num_episodes,
        }

    def _solver(self, memory: float, source: random.Random) -> HangmanScript:
        return HangmanScript(source, self._words, 1.0, memory)


def random_return(lives: int) -> float:
    """Expected return of letters tried in any order, exactly."""

    @cache
    def value(hits: int, misses: int) -> float:
        if hits == _WIDTH or misses == lives:
            return 0.0
        hit = (_WIDTH - hits) / (len(LETTERS) - hits - misses)
        after_hit = 1 / _WIDTH + value(hits + 1, misses)
        return hit * after_hit + (1 - hit) * (value(hits, misses + 1) - 1 / lives)

    return value(0, 0)
