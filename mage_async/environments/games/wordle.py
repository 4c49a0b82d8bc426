"""Wordle: guess a word of five letters. The answer colours each letter: green, gold or grey."""

from functools import lru_cache

from mage_async.environments.games.guessing import Code, Guessing, Puzzle
from mage_async.environments.options import check_whole

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
_RULES = """A word of five letters is hidden. Guess words of five letters, such as: {example}.
Each of your letters is told back: green in its place, gold elsewhere in the word, grey not in it.
"""


class Wordle(Guessing):
    """A word of five letters.

    Args:
        words: number of words, which are also the allowed guesses.
        turns: guesses of an episode.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(self, words: int = 64, turns: int = 6) -> None:
        check_whole("wordle", "words", words, 8, len(WORDS))
        used = WORDS[:words]
        puzzle = Puzzle(tuple(tuple(word) for word in used), "", _answer, turns)
        letters = sorted({letter for word in used for letter in word})
        told = (*used, *letters, GREEN, GOLD, GREY)
        super().__init__("wordle", puzzle, told, _RULES.format(example=used[0]), noun="word")


# A solver compares each guess with every word, again and again.
@lru_cache(maxsize=1 << 17)
def _answer(code: Code, guess: Code) -> str:
    """Colour a guess. A letter is gold as often as the word has it beyond the green ones."""
    left = [letter for letter, other in zip(code, guess, strict=True) if letter != other]
    colours = []
    for letter, other in zip(guess, code, strict=True):
        is_gold = letter != other and letter in left
        if is_gold:
            left.remove(letter)
        colours.append(f"{letter} {GREEN if letter == other else GOLD if is_gold else GREY}")
    return " ".join(colours)
