"""What the guessing games share (Wordle, Mastermind, the number lock).

Rules: the agent guesses a hidden code; after each guess it sees an answer about how well the guess
fits. Half of the return is for the most symbols that a guess has in place, half for the solution,
worth more the sooner it comes. The code is the same in all episodes: every answer still holds in
the next episode, also one of a lost episode, and an agent that remembers a solved code guesses it
at once.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType

from mage_async.environments.environment import Chance, Facts, Ladders, Outcome, Play, Split
from mage_async.environments.games.game import (
    HELDOUT_SHARE,
    Game,
    num_equal,
    remember,
    with_least,
)
from mage_async.trajectory import Task

Code = tuple[str, ...]
"""Letters, colours or digits, in order."""
SOLVED, OVER, INVALID = "solved", "over", "invalid"
REWARD_RULES = """Half of the reward is for what stands in its place, half for the solution, which \
is worth more the sooner it comes. You have {turns} guesses.
The {what} is the same in all episodes."""
FEWER_GUESSES: Ladders = MappingProxyType(
    {"turns": tuple({"turns": count} for count in range(10, 1, -1))}
)
"""A ladder must not mix the splits. Longer codes and fewer guesses do not; with more symbols or
more words, some held-out codes would be ones that a run has trained on.
"""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """The differences between the games."""

    codes: tuple[Code, ...]
    """All codes, which are also all guesses."""
    joint: str
    """Separator between the symbols of a guess: a space, or nothing in a word."""
    answer: Callable[[Code, Code], str]
    """Maps the code and a guess to the answer."""
    turns: int

    def text(self, code: Code) -> str:
        """Return a code as an action."""
        return self.joint.join(code)

    def width(self) -> int:
        """Return the number of symbols of a code."""
        return len(self.codes[0])


@lru_cache(maxsize=1 << 17)
def num_shared(code: Code, guess: Code) -> int:
    """Count the symbols that code and guess share at any position, with multiplicity."""
    return sum(min(code.count(symbol), guess.count(symbol)) for symbol in set(guess))


class GuessingPlay:
    """Guesses until the code is found or the turns are used up. The anchor is the guesses so
    far.
    """

    def __init__(
        self, puzzle: Puzzle, actions: dict[str, Code], code: Code, chance: Chance
    ) -> None:
        self._puzzle, self._actions, self._code, self.chance = puzzle, actions, code, chance
        self._best, self._is_over = 0, False
        self.answers: list[tuple[Code | None, str]] = []
        """Guesses and their answers; the guess is `None` for an invalid action."""

    @property
    def observation(self) -> str:
        """Nothing is known."""
        return ""

    @property
    def anchor(self) -> str:
        """The guesses so far."""
        return "|".join(self._puzzle.text(guess) if guess else "" for guess, _ in self.answers)

    def legal_actions(self) -> Sequence[str]:
        """Return all codes, until the episode is over."""
        return () if self._is_over else tuple(self._actions)

    def act(self, action: str) -> Outcome:
        """Guess; an invalid action uses up a turn and shows nothing."""
        assert not self._is_over, "the episode is done"
        guess = self._actions.get(action)
        is_solved, is_last = guess == self._code, len(self.answers) + 1 == self._puzzle.turns
        answer = INVALID if guess is None else self._puzzle.answer(self._code, guess)
        reward = self._reward(guess, is_solved)
        self.answers.append((guess, answer))
        self._is_over = is_solved or is_last
        observation = SOLVED if is_solved else f"{answer} {OVER}" if is_last else answer
        return Outcome(observation, reward, guess is not None, self._is_over)

    def _reward(self, guess: Code | None, is_solved: bool) -> float:
        placed = 0 if guess is None else num_equal(self._code, guess)
        gained, self._best = max(0, placed - self._best), max(placed, self._best)
        turns = self._puzzle.turns
        sooner = (turns - len(self.answers)) / turns if is_solved else 0.0
        return 0.5 * gained / self._puzzle.width() + 0.5 * sooner


@dataclass(slots=True)
class GuessingScript:
    """Guesses a code that fits the answers, or any code."""

    source: random.Random
    puzzle: Puzzle
    care: float
    """Probability of a guess that fits."""
    memory: float
    """Probability that the guess fits the earlier episodes too."""
    _plays: list[GuessingPlay] = field(default_factory=list)
    _fitting: dict[bool, tuple[int, list[Code]]] = field(default_factory=dict)
    """With and without earlier episodes: the number of answers used so far, and the codes that fit
    them.
    """

    def choose(self, play: Play) -> str:
        """Return the next guess."""
        assert isinstance(play, GuessingPlay)
        if remember(self._plays, play):
            self._fitting.pop(False, None)
        if self.source.random() >= self.care:
            return self.puzzle.text(self.source.choice(self.puzzle.codes))
        remembers = self.source.random() < self.memory
        return self.puzzle.text(self.source.choice(self._update_fitting(remembers)))

    def _update_fitting(self, remembers: bool) -> list[Code]:
        """Filter the codes that fitted before by the new answers."""
        plays = self._plays if remembers else self._plays[-1:]
        answers = [each for play in plays for each in play.answers]
        num_used, codes = self._fitting.get(remembers, (0, list(self.puzzle.codes)))
        for guess, answer in answers[num_used:]:
            if guess is not None:
                codes = [code for code in codes if self.puzzle.answer(code, guess) == answer]
        self._fitting[remembers] = len(answers), codes
        return codes


class Guessing(Game):
    """A guessing game; the task variant is the code, with hyphens for spaces.

    Args:
        name: of the game.
        puzzle: what distinguishes the game from the others.
        words: words of guesses and answers, without the words that all games have.
        rules: the rules in plain words.
    """

    ladders = FEWER_GUESSES

    def __init__(self, name: str, puzzle: Puzzle, words: Sequence[str], rules: str) -> None:
        self.puzzle, self._rules = puzzle, rules
        self._by_action = {puzzle.text(code): code for code in puzzle.codes}
        self._codes = {text.replace(" ", "-"): code for text, code in self._by_action.items()}
        facts = Facts(
            name=name,
            max_turns=puzzle.turns,
            min_return=0.0,
            max_return=1.0,
            words=tuple(dict.fromkeys((*words, SOLVED, OVER, INVALID))),
            wins_above=0.5,
            loses_below=0.5,
            example=puzzle.text(puzzle.codes[0]),
        )
        super().__init__(facts, _splits(name, tuple(self._codes)))

    def rules(self) -> str:
        """Return the rules in plain words."""
        return self._rules

    def begin(self, task: Task, episode: int) -> GuessingPlay:
        """Start with nothing known."""
        self.check(task.member)
        code, chance = self._codes[task.member], Chance(task.seed, episode)
        return GuessingPlay(self.puzzle, self._by_action, code, chance)

    def script(self, source: random.Random) -> GuessingScript:
        """Return a script whose care and memory are drawn for the trial."""
        care, memory = source.choice((0.5, 0.9)), source.choice((0.0, 0.5, 0.95))
        return GuessingScript(source, self.puzzle, care, memory)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the codes of the split with the fewest symbols in the same place."""
        others = super().swaps(member, split)
        code = self._codes[member]
        return with_least({other: num_equal(code, self._codes[other]) for other in others})

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return returns per episode: exact for `random` and `known`, over 200 scripted trials
        otherwise.

        `random` guesses any code. `solver_without_memory` guesses any code that fits the answers of
        the episode, `solver` one that fits all episodes; both know all codes, but not which are
        held out. `known` guesses the code at once.
        """
        secrets = [self._codes[name] for name in self._splits[split]]
        solver = partial(GuessingScript, puzzle=self.puzzle, care=1.0)
        solvers = {
            "solver_without_memory": partial(solver, memory=0.0),
            "solver": partial(solver, memory=1.0),
        }
        return {
            "random": (random_return(self.puzzle, secrets),) * num_episodes,
            **self.measured(split, num_episodes, solvers),
            "known": (1.0,) * num_episodes,
        }


def _splits(game: str, names: Sequence[str]) -> dict[Split, tuple[str, ...]]:
    """Hold out a quarter of the codes, the same in all runs."""
    shuffled = list(names)
    random.Random(f"{game}/heldout").shuffle(shuffled)
    heldout = set(shuffled[: len(names) // HELDOUT_SHARE])
    return {
        "train": tuple(name for name in names if name not in heldout),
        "heldout": tuple(name for name in names if name in heldout),
    }


def random_return(puzzle: Puzzle, secrets: Sequence[Code]) -> float:
    """Return the exact expected return of uniform guesses with replacement, over uniform
    secrets.
    """
    return sum(_random_return(puzzle, secret) for secret in secrets) / len(secrets)


def _random_return(puzzle: Puzzle, secret: Code) -> float:
    # A solution ends the episode with all symbols in place, so the expected number of placed
    # symbols is the same as if the player went on for all turns.
    width, turns, num_codes = puzzle.width(), puzzle.turns, len(puzzle.codes)
    placed = [num_equal(secret, guess) for guess in puzzle.codes]
    below = [sum(each < most for each in placed) / num_codes for most in range(1, width + 1)]
    best = sum(1 - share**turns for share in below)
    chance = 1 / num_codes
    sooner = sum((1 - chance) ** turn * chance * (turns - turn) / turns for turn in range(turns))
    return 0.5 * best / width + 0.5 * sooner
