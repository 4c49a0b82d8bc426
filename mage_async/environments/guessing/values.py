"""The exact return of a player that guesses at random."""

from collections.abc import Sequence

from mage_async.environments.guessing.puzzle import Code, Puzzle, in_place


def random_return(puzzle: Puzzle, secrets: Sequence[Code]) -> float:
    """Expected return of uniform guesses, drawn with replacement, over codes drawn uniformly."""
    return sum(_random_return(puzzle, secret) for secret in secrets) / len(secrets)


def _random_return(puzzle: Puzzle, secret: Code) -> float:
    """The most symbols in place after all turns, and the turn of the solution.

    A solution ends the episode with all symbols in place, so going on would not change the first.
    """
    width, turns, num_codes = puzzle.width(), puzzle.turns, len(puzzle.codes)
    placed = [in_place(secret, guess) for guess in puzzle.codes]
    below = [sum(each < most for each in placed) / num_codes for most in range(1, width + 1)]
    best = sum(1 - share**turns for share in below)
    chance = 1 / num_codes
    sooner = sum((1 - chance) ** turn * chance * (turns - turn) / turns for turn in range(turns))
    return 0.5 * best / width + 0.5 * sooner
