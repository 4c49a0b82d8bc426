"""Exact values of rock-paper-scissors against a hidden opponent, per round.

`P` opponents of a prior. A belief is the likelihood of each; a node is what a player can have seen.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from mage_async.environments.rps.bayes import bayes_greedy
from mage_async.environments.rps.opponents import NUM_ROUNDS, Opponent, result

NOISE = 0.05
"""Probability that a move of the opponent is drawn uniformly instead."""

_RESULTS = np.array([[result(mine, theirs) for theirs in range(3)] for mine in range(3)])


def references(
    members: tuple[Opponent, ...], prior: tuple[Opponent, ...], num_episodes: int
) -> dict[str, tuple[float, ...]]:
    """Values against a uniform draw of `members`, by name, per round and episode.

    `random` and `nash` play uniformly. `best_response` knows the opponent. `without_memory` is the
    best player that forgets every episode but knows which opponents there are. `bayes` remembers,
    believes that the opponent is one of `prior`, and takes the likeliest win; where `members` are
    not in `prior`, it is no upper bound.
    """
    best = sum(best_response(opponent) for opponent in members) / len(members)
    return {
        "random": (0.0,) * num_episodes,
        "nash": (0.0,) * num_episodes,
        "best_response": (best,) * num_episodes,
        "without_memory": (one_episode(members),) * num_episodes,
        "bayes": bayes_greedy(members, prior, num_episodes, NOISE),
    }


def best_response(opponent: Opponent) -> float:
    """Value of knowing the opponent: the best over all sequences of moves."""
    return _best_from(opponent, 0, None) / NUM_ROUNDS


def _best_from(opponent: Opponent, turn: int, last: int | None) -> float:
    if turn == NUM_ROUNDS:
        return 0.0
    gains = _RESULTS @ _chances(opponent.move(turn, last))
    return max(float(gains[move]) + _best_from(opponent, turn + 1, move) for move in range(3))


def _chances(intended: int) -> np.ndarray:
    """Probability of each move of an opponent that intends one: float64 [3]."""
    return NOISE / 3 + (1 - NOISE) * np.eye(3)[intended]


@cache
def one_episode(prior: tuple[Opponent, ...]) -> float:
    """Value of the best single episode against an unknown opponent, uniform over `prior`."""
    belief = np.full(len(prior), 1 / len(prior))
    return _best_under(prior, belief, 0, None) / NUM_ROUNDS


def _best_under(
    prior: Sequence[Opponent], belief: np.ndarray, turn: int, last: int | None
) -> float:
    """Best return-to-go, times the probability of what was seen: `belief` [P] is not normalised."""
    if turn == NUM_ROUNDS:
        return 0.0
    moves = np.array([opponent.move(turn, last) for opponent in prior])
    seen = np.array([belief * (NOISE / 3 + (1 - NOISE) * (moves == move)) for move in range(3)])
    gains = _RESULTS @ seen.sum(1)
    return max(
        float(gains[mine]) + sum(_best_under(prior, after, turn + 1, mine) for after in seen)
        for mine in range(3)
    )
