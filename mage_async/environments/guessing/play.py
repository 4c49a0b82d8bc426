"""One episode of guessing, and a script that guesses what fits."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mage_async.environments.environment import Chance, Outcome, Play
from mage_async.environments.guessing.puzzle import Code, Puzzle, in_place

SOLVED, OVER, INVALID = "solved", "over", "invalid"


class GuessingPlay:
    """Guesses until the code is found or the turns are used up.

    Half of the return is for the most symbols that a guess has in place; the other half is for the
    solution, the more the sooner. The anchor is what this episode has been told.
    """

    __slots__ = ("_actions", "_best", "_code", "_is_over", "_puzzle", "chance", "told")

    def __init__(
        self, puzzle: Puzzle, actions: dict[str, Code], code: Code, chance: Chance
    ) -> None:
        self._puzzle, self._actions, self._code, self.chance = puzzle, actions, code, chance
        self._best, self._is_over = 0, False
        self.told: list[tuple[Code | None, str]] = []
        """Guesses and what they were told; None for what was no guess."""

    @property
    def observation(self) -> str:
        """Nothing is known."""
        return ""

    @property
    def anchor(self) -> str:
        """The guesses so far."""
        return "|".join(self._puzzle.written(guess) if guess else "" for guess, _ in self.told)

    def legal_actions(self) -> Sequence[str]:
        """All codes, until the episode is over."""
        return () if self._is_over else tuple(self._actions)

    def act(self, action: str) -> Outcome:
        """Guess; what is no guess uses up a turn and is told nothing."""
        assert not self._is_over, "the episode is done"
        guess = self._actions.get(action)
        is_solved, is_last = guess == self._code, len(self.told) + 1 == self._puzzle.turns
        answer = INVALID if guess is None else self._puzzle.answer(self._code, guess)
        reward = self._reward(guess, is_solved)
        self.told.append((guess, answer))
        self._is_over = is_solved or is_last
        end = OVER if is_last else ""
        said = SOLVED if is_solved else f"{answer} {end}".strip()
        return Outcome(said, reward, guess is not None, self._is_over)

    def _reward(self, guess: Code | None, is_solved: bool) -> float:
        placed = 0 if guess is None else in_place(self._code, guess)
        gained, self._best = max(0, placed - self._best), max(placed, self._best)
        turns = self._puzzle.turns
        sooner = (turns - len(self.told)) / turns if is_solved else 0.0
        return 0.5 * gained / self._puzzle.width() + 0.5 * sooner


@dataclass(slots=True)
class GuessingScript:
    """Guesses a code that fits what was told, or any code."""

    source: random.Random
    puzzle: Puzzle
    care: float
    """Probability of a guess that fits."""
    memory: float
    """Probability that the guess fits the earlier episodes too."""
    _plays: list[GuessingPlay] = field(default_factory=list)
    _fitting: dict[bool, tuple[int, list[Code]]] = field(default_factory=dict)
    """Codes that fit, with and without earlier episodes, and how many answers they were held
    against.
    """

    def choose(self, play: Play) -> str:
        """The next guess."""
        assert isinstance(play, GuessingPlay)
        if not self._plays or self._plays[-1] is not play:
            self._plays.append(play)
            self._fitting.pop(False, None)
        if self.source.random() >= self.care:
            return self.puzzle.written(self.source.choice(self.puzzle.codes))
        remembers = self.source.random() < self.memory
        return self.puzzle.written(self.source.choice(self._left(remembers)))

    def _left(self, remembers: bool) -> list[Code]:
        """Codes that fit; those known to fit before are held against what is new."""
        plays = self._plays if remembers else self._plays[-1:]
        told = [each for play in plays for each in play.told]
        seen, codes = self._fitting.get(remembers, (0, list(self.puzzle.codes)))
        for guess, answer in told[seen:]:
            if guess is not None:
                codes = [code for code in codes if self.puzzle.answer(code, guess) == answer]
        self._fitting[remembers] = len(told), codes
        return codes
