"""Wordle: each letter of a guessed word is green, gold or grey."""

from mage_async.environments.guessing.game import REWARDS, Guessing
from mage_async.environments.guessing.puzzle import Code, Puzzle
from mage_async.environments.guessing.words import WORDS
from mage_async.environments.options import check_whole

GREEN, GOLD, GREY = "green", "gold", "grey"
_RULES = """A word of five letters is hidden. Guess words of five letters, such as: {example}.
Each of your letters is told back: green in its place, gold elsewhere in the word, grey not in it.
"""


class Wordle(Guessing):
    """A word of five letters.

    Args:
        words: how many there are, which are also the guesses that are allowed.
        turns: guesses of an episode.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(self, words: int = 64, turns: int = 6) -> None:
        check_whole("wordle", "words", words, 8, len(WORDS))
        check_whole("wordle", "turns", turns, 1, 20)
        used = WORDS[:words]
        puzzle = Puzzle(tuple(tuple(word) for word in used), "", _answer, turns)
        letters = sorted({letter for word in used for letter in word})
        rules = _RULES.format(example=used[0]) + REWARDS.format(turns=turns, what="word")
        super().__init__("wordle", puzzle, (*used, *letters, GREEN, GOLD, GREY), rules)


def _answer(code: Code, guess: Code) -> str:
    """Greens first; a letter is gold as often as the word has it beyond those."""
    left = [letter for letter, other in zip(code, guess, strict=True) if letter != other]
    said = []
    for letter, other in zip(guess, code, strict=True):
        is_gold = letter != other and letter in left
        if is_gold:
            left.remove(letter)
        said.append(f"{letter} {GREEN if letter == other else GOLD if is_gold else GREY}")
    return " ".join(said)
