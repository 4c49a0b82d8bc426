"""Play the guessing games: Mastermind, the number lock and Wordle.

Rules: the agent guesses a hidden code; after each guess an answer says how well the guess fits.
Half of the return is for the best guess, by its number of symbols in place; the other half is for
the solution, and is larger the sooner it comes; with the option `wins_only` the solution alone
pays. The code is the same in all episodes, so every answer still holds in the next one, and an
agent that remembers a solved code guesses it at once.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from string import ascii_lowercase

from mage_async.environments.environment import (
    HELDOUT_EVERY,
    Chance,
    Outcome,
    Split,
    check_flag,
    check_whole,
    split_by,
)
from mage_async.environments.games.game import (
    Game,
    SoloPlay,
    TrialScript,
    facts_of,
    ladders_of,
    num_equal,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

Code = tuple[str, ...]
"""Letters, colours or digits of a code, in order."""
DIGITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBERS = ("none", *DIGITS)
SOLVED, OVER, INVALID = "solved", "over", "invalid"
_REWARD_RULES = """Half of the reward is for what stands in its place, half for the solution, \
which is worth more the sooner it comes. You have {turns} guesses.
The {what} is the same in all episodes."""
_WIN_RULES = """Finding it earns 1, nothing else does. You have {turns} guesses.
The {what} is the same in all episodes."""
TURN_LADDER = range(10, 1, -1)
"""Numbers of guesses of an episode, easiest first: the rungs of the ladder `turns`, by which
`mage_async/environments/ladders.py` finds easier and harder tasks.

A curriculum trains on easier rungs first, so a code that a harder rung holds out must not be a code
of an easier one. So a ladder may change the number of guesses, which leaves the split as it is, or
make codes longer, which makes all of them new.
"""
LETTERS = frozenset(ascii_lowercase)


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Describe what distinguishes one guessing game from the others."""

    codes: tuple[Code, ...]
    """All codes, which are also all guesses."""
    separator: str
    """Separator between the symbols of a guess: a space, or "" in a word."""
    answer: Callable[[Code, Code], str]
    """Returns the answer to a guess; called with the code and the guess."""
    turns: int
    """Number of guesses of an episode."""
    wins_only: bool = False
    """Whether the solution pays 1 and nothing else does."""
    tells_last: bool = True
    """Whether the last guess of an episode is answered."""
    takes_any: bool = False
    """Whether every string of lowercase letters that is as long as a code is a legal guess."""

    def text(self, code: Code) -> str:
        """Return a code as an action."""
        return self.separator.join(code)

    def width(self) -> int:
        """Return the number of symbols of a code."""
        return len(self.codes[0])


class AnyLetters(tuple[str, ...]):
    """Represent the legal actions of a game in which every string of lowercase letters as long as a
    code is a guess; iteration lists the codes alone.
    """

    is_whole = False
    """More actions are legal than are listed (`Play.legal_actions`)."""

    def __contains__(self, action: object) -> bool:
        """Return whether an action is legal."""
        if not isinstance(action, str) or len(action) != len(self[0]):
            return False
        return LETTERS.issuperset(action)


class GuessingPlay(SoloPlay):
    """Guess until the code is found or the turns are used up. The anchor, which is equal for equal
    states, is the guesses so far.
    """

    def __init__(
        self, puzzle: Puzzle, actions: dict[str, Code], code: Code, chance: Chance
    ) -> None:
        self._puzzle, self._actions, self._code, self.chance = puzzle, actions, code, chance
        self.legal_pattern = f"[a-z]{{{puzzle.width()}}}" if puzzle.takes_any else None
        self.observation = ""
        self._most_placed = 0
        self.answers: list[tuple[Code | None, str]] = []
        """Guesses and their answers; the guess is None if it was invalid or got no answer."""

    @property
    def anchor(self) -> str:
        """The guesses so far."""
        return "|".join(self._puzzle.text(guess) if guess else "" for guess, _ in self.answers)

    def actions(self) -> Sequence[str]:
        """Return all codes, as `AnyLetters` where other letters are legal too."""
        kind = AnyLetters if self._puzzle.takes_any else tuple
        return kind(self._actions)

    def apply(self, action: str) -> Outcome:
        """Guess; an invalid action uses up a turn and is answered by `INVALID`."""
        guess = self._actions.get(action)
        if guess is None and action in self.actions():  # letters that are no code (`takes_any`)
            guess = tuple(action)
        is_solved, is_last = guess == self._code, len(self.answers) + 1 == self._puzzle.turns
        answer = INVALID if guess is None else self._puzzle.answer(self._code, guess)
        reward = self._reward(guess, is_solved)
        is_answered = self._puzzle.tells_last or not is_last
        self.answers.append((guess if is_answered or is_solved else None, answer))
        if is_solved:
            observation = SOLVED
        elif is_last:
            observation = f"{answer} {OVER}" if is_answered else OVER
        else:
            observation = answer
        return Outcome(observation, reward, guess is not None, is_solved or is_last)

    def _reward(self, guess: Code | None, is_solved: bool) -> float:
        """Return the reward of a guess: for further symbols in place, and for the solution."""
        if self._puzzle.wins_only:
            return float(is_solved)
        placed = 0 if guess is None else num_equal(self._code, guess)
        gained = max(0, placed - self._most_placed)
        self._most_placed += gained
        turns = self._puzzle.turns
        sooner = (turns - len(self.answers)) / turns if is_solved else 0.0
        return 0.5 * gained / self._puzzle.width() + 0.5 * sooner


@dataclass(slots=True)
class GuessingScript(TrialScript[GuessingPlay]):
    """Guess a code that fits the answers, or any code."""

    puzzle: Puzzle
    care: float
    """Probability of a guess that fits."""
    memory: float
    """Probability that the guess fits the earlier episodes too."""

    def action(self, play: GuessingPlay) -> str:
        """Return the next guess."""
        codes: Sequence[Code] = self.puzzle.codes
        if self.source.random() < self.care:
            plays = self.plays if self.source.random() < self.memory else [play]
            answers = [(guess, answer) for each in plays for guess, answer in each.answers if guess]
            for guess, answer in dict.fromkeys(answers):
                codes = [code for code in codes if self.puzzle.answer(code, guess) == answer]
        return self.puzzle.text(self.source.choice(codes))


class Guessing(Game[Code]):
    """Play a guessing game; the task variant is the code, with hyphens for spaces.

    Args:
        name: Name of the game.
        puzzle: What distinguishes the game from the others.
        words: Words of guesses and answers, without the words that all guessing games have.
        rules: The rules in plain words, without those about rewards.
        noun: Word for the hidden code in the rules.

    Raises:
        ConfigError: the number of turns is out of its range.
    """

    ladders = ladders_of(turns=TURN_LADDER)

    def __init__(
        self, name: str, puzzle: Puzzle, words: Sequence[str], rules: str, noun: str = "code"
    ) -> None:
        check_whole(name, "turns", puzzle.turns, 1, 20)
        self.puzzle = puzzle
        rewards = _WIN_RULES if puzzle.wins_only else _REWARD_RULES
        self._rules = rules + rewards.format(turns=puzzle.turns, what=noun)
        self._by_action = {puzzle.text(code): code for code in puzzle.codes}
        codes = {text.replace(" ", "-"): code for text, code in self._by_action.items()}
        shuffled = list(puzzle.codes)
        random.Random(f"{name}/heldout").shuffle(shuffled)
        heldout = set(shuffled[: len(shuffled) // HELDOUT_EVERY])
        words = tuple(dict.fromkeys((*words, SOLVED, OVER, INVALID)))
        example = puzzle.text(puzzle.codes[0])
        facts = facts_of(
            name,
            puzzle.turns,
            words,
            threshold=0.5,
            example=example,
            has_open_text=puzzle.takes_any,
        )
        super().__init__(facts, split_by(codes, heldout.__contains__))

    def rules(self) -> str:
        """Return the rules in plain words."""
        return self._rules

    def begin(self, task: Task, episode: int) -> GuessingPlay:
        """Start an episode without guesses."""
        code, chance = self.variant(task.member), Chance(task.seed, episode)
        return GuessingPlay(self.puzzle, self._by_action, code, chance)

    def script(self, source: random.Random) -> GuessingScript:
        """Return a script whose care and memory are drawn for the trial."""
        care, memory = source.choice((0.5, 0.9)), source.choice((0.0, 0.5, 0.95))
        return GuessingScript(source, self.puzzle, care, memory)

    def overlap(self, one: Code, other: Code) -> int:
        """Return the number of symbols that both codes have in the same place."""
        return num_equal(one, other)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return values per episode: `random` and `known` are exact, the others are means over 200
        scripted trials.

        `random` guesses any code. `solver_without_memory` guesses any code that fits the answers of
        the episode, `solver` one that fits all episodes; both know all codes, but not which are
        held out. `known` guesses the code at once.
        """
        secrets = tuple(self._splits[split].values())
        solver = partial(GuessingScript, puzzle=self.puzzle, care=1.0)
        return {
            "random": (random_return(self.puzzle, secrets),) * num_episodes,
            **self.measured(
                split,
                num_episodes,
                solver_without_memory=partial(solver, memory=0.0),
                solver=partial(solver, memory=1.0),
            ),
            "known": (1.0,) * num_episodes,
        }


def random_return(puzzle: Puzzle, secrets: Sequence[Code]) -> float:
    """Return the exact expected return of uniform guesses with replacement, over uniform
    secrets.
    """
    return sum(_random_return(puzzle, secret) for secret in secrets) / len(secrets)


def _random_return(puzzle: Puzzle, secret: Code) -> float:
    """Return the expected return of uniform guesses at one secret."""
    # Compute the largest number of symbols in place as if the player used all turns. A solution
    # ends the episode earlier, but it has all symbols in place already.
    width, turns, num_codes = puzzle.width(), puzzle.turns, len(puzzle.codes)
    placed = [num_equal(secret, guess) for guess in puzzle.codes]
    # For each number `most`, the probability that a guess has fewer symbols in place.
    below = [sum(each < most for each in placed) / num_codes for most in range(1, width + 1)]
    best = sum(1 - probability**turns for probability in below)
    chance = 1 / num_codes
    if puzzle.wins_only:
        return 1 - (1 - chance) ** turns
    sooner = sum((1 - chance) ** turn * chance * (turns - turn) / turns for turn in range(turns))
    return 0.5 * best / width + 0.5 * sooner


COLOURS = ("red", "green", "blue", "gold", "black", "white")
_MASTERMIND = """\
A code of {pegs} colours from {colours} is hidden; {repeats}.
Guess all {pegs}, such as: {example}. You are told how many are in place, and how many more of your
colours are elsewhere in the code.
"""


class Mastermind(Guessing):
    """Play Mastermind: guess a code of colours. Each answer counts the colours in place, and the
    further colours that are elsewhere in the code.

    Args:
        pegs: Number of colours in a code.
        colours: Number of different colours.
        turns: Number of guesses of an episode.
        repeats: Whether a colour may come more than once.
        wins_only: Whether the solution pays 1 and nothing else does.
        tells_last: Whether the last guess of an episode is answered.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders = ladders_of(pegs=range(2, 6), turns=TURN_LADDER)

    def __init__(
        self,
        pegs: int = 3,
        colours: int = 4,
        turns: int = 6,
        repeats: bool = True,
        wins_only: bool = False,
        tells_last: bool = True,
    ) -> None:
        check_whole("mastermind", "pegs", pegs, 2, 5)
        check_whole("mastermind", "colours", colours, 3, len(COLOURS))
        check_flag("mastermind", "repeats", repeats)
        check_flag("mastermind", "wins_only", wins_only)
        check_flag("mastermind", "tells_last", tells_last)
        if not repeats and colours <= pegs:
            raise ConfigError(
                f"mastermind: without `repeats`, `colours` must be more than `pegs` = {pegs}, got "
                f"{colours}"
            )
        used = COLOURS[:colours]
        codes = itertools.product(used, repeat=pegs)
        allowed = tuple(code for code in codes if repeats or len(set(code)) == pegs)
        puzzle = Puzzle(allowed, " ", colours_in_place, turns, wins_only, tells_last)
        rules = _MASTERMIND.format(
            pegs=pegs,
            colours=", ".join(used),
            example=" ".join((used * 2)[:pegs]),
            repeats="a colour may come more than once" if repeats else "no colour comes twice",
        )
        words = (*used, *NUMBERS[: pegs + 1], "place", "elsewhere")
        super().__init__("mastermind", puzzle, words, rules)


# Cached, because solvers compare each guess with every code many times.
@lru_cache(maxsize=1 << 17)
def colours_in_place(code: Code, guess: Code) -> str:
    """Return the answer of Mastermind to a guess."""
    placed = num_equal(code, guess)
    num_shared = sum(min(code.count(colour), guess.count(colour)) for colour in set(guess))
    return f"place {NUMBERS[placed]} elsewhere {NUMBERS[num_shared - placed]}"


_NUMBER_LOCK = """A lock opens with {dials} different digits from one to {last}.
Guess all {dials}, such as: {example}. You are told how many of them are in place.
"""


class NumberLock(Guessing):
    """Play the number lock: guess a code of different digits. Each answer counts only the digits in
    place.

    Args:
        dials: Number of digits in a code.
        digits: Number of different digits, at least 4 and more than `dials`.
        turns: Number of guesses of an episode.

    Raises:
        ConfigError: an option is out of its range.
    """

    ladders = ladders_of(dials=range(2, 5), turns=TURN_LADDER)

    def __init__(self, dials: int = 3, digits: int = 5, turns: int = 6) -> None:
        check_whole("numberlock", "dials", dials, 2, 5)
        check_whole("numberlock", "digits", digits, 4, len(DIGITS))
        if digits <= dials:
            raise ConfigError(
                f"numberlock: `digits` must be more than `dials` = {dials}, got {digits}"
            )
        used = DIGITS[:digits]
        puzzle = Puzzle(tuple(itertools.permutations(used, dials)), " ", _digits_in_place, turns)
        rules = _NUMBER_LOCK.format(dials=dials, last=used[-1], example=" ".join(used[:dials]))
        words = (*used, *(word for word in NUMBERS[: dials + 1] if word not in used), "place")
        super().__init__("numberlock", puzzle, words, rules)


def _digits_in_place(code: Code, guess: Code) -> str:
    """Return the answer of the number lock to a guess."""
    return f"place {NUMBERS[num_equal(code, guess)]}"


_TEXT = """
stone bread plant chair house river light grain apple water music night paper train smile cloud
tiger beach dance sugar wheel grass horse knife lemon mouse ocean piano queen robot sheep table
uncle voice world young zebra angel brick candy dream eagle flame ghost heart igloo jelly koala
lunch magic north olive pearl quilt roast snake toast under video whale yacht bloom crown depth
earth frost globe honey ivory juice karma ledge medal nurse onion paint quiet rider scarf torch
urban visit wagon brush clock drive empty field grape hotel index jumbo kayak label motor novel
"""
WORDS = tuple(_TEXT.split())
"""Common words of five letters, written for this game. A game with fewer words takes the first
ones.
"""
GREEN, GOLD, GREY = "green", "gold", "grey"
_WORDLE = """A word of five letters is hidden. Guess words of five letters, such as: {example}.
Each of your letters is told back: green in its place, gold elsewhere in the word, grey not in it.
"""


class Wordle(Guessing):
    """Play Wordle: guess a word of five letters. The answer colours each letter: green, gold or
    grey.

    Args:
        words: Number of words, which are also the allowed guesses.
        turns: Number of guesses of an episode.
        any_guess: Whether any five letters are a guess.
        wins_only: Whether the solution pays 1 and nothing else does.
        tells_last: Whether the last guess of an episode is answered.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self,
        words: int = 64,
        turns: int = 6,
        any_guess: bool = False,
        wins_only: bool = False,
        tells_last: bool = True,
    ) -> None:
        check_whole("wordle", "words", words, 8, len(WORDS))
        check_flag("wordle", "any_guess", any_guess)
        check_flag("wordle", "wins_only", wins_only)
        check_flag("wordle", "tells_last", tells_last)
        used = WORDS[:words]
        codes = tuple(tuple(word) for word in used)
        puzzle = Puzzle(codes, "", _letter_colours, turns, wins_only, tells_last, any_guess)
        letters = ascii_lowercase if any_guess else sorted({x for word in used for x in word})
        vocabulary = (*used, *letters, GREEN, GOLD, GREY)
        super().__init__("wordle", puzzle, vocabulary, _WORDLE.format(example=used[0]), noun="word")


# Cached, because solvers compare each guess with every word many times.
@lru_cache(maxsize=1 << 17)
def _letter_colours(code: Code, guess: Code) -> str:
    """Return the answer of Wordle to a guess: each letter with its colour.

    If a guess repeats a letter more often than the word has it, the surplus ones that are not green
    are grey.
    """
    left = [letter for letter, other in zip(code, guess, strict=True) if letter != other]
    colours = []
    for letter, other in zip(guess, code, strict=True):
        is_gold = letter != other and letter in left
        if is_gold:
            left.remove(letter)
        colours.append(f"{letter} {GREEN if letter == other else GOLD if is_gold else GREY}")
    return " ".join(colours)
