"""A Bayes player of rock-paper-scissors, which takes the likeliest win.

The player remembers earlier episodes, so it earns what a policy with a perfect memory, but without
a plan, would earn. Its prior is given: where the opponents met are not in the prior, it is no upper
bound. All histories are followed at once, and those that lead to the same belief are one.
Values are exact to 0.001: between episodes, beliefs rarer than `_RAREST` are left out.

`N` beliefs, `P` opponents of the prior, `M` opponents met.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from mage_async.environments.rps.opponents import NUM_ROUNDS, Opponent, result

_RESULTS = np.array([[result(mine, theirs) for theirs in range(3)] for mine in range(3)])
_NO_MOVE = 3
_RAREST = 1e-6


@cache
def bayes_greedy(
    members: tuple[Opponent, ...], prior: tuple[Opponent, ...], num_episodes: int, noise: float
) -> tuple[float, ...]:
    """Value per round of each episode, against a uniform draw of `members`; `prior` is believed."""
    misses = np.zeros((1, len(prior)), np.int16)
    reach = np.full((1, len(members)), 1 / len(members))
    values: list[float] = []
    for _ in range(num_episodes):
        if values:
            misses, reach = _merge(misses, reach)
        misses, reach, earned = _episode(misses, reach, members, prior, noise)
        values.append(earned / NUM_ROUNDS)
    return tuple(values)


def _episode(
    misses: np.ndarray,
    reach: np.ndarray,
    members: Sequence[Opponent],
    prior: Sequence[Opponent],
    noise: float,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Follow every course of an episode.

    Args:
        misses: int16 [N, P], seen moves that an opponent would have played by noise alone.
        reach: float64 [N, M], probability of having met an opponent and come to a belief.
    """
    last = np.full(len(misses), _NO_MOVE)
    earned = 0.0
    for turn in range(NUM_ROUNDS):
        believed, played = _intended(prior, turn)[last], _intended(members, turn)[last]
        mine = _likeliest_win(misses, believed, noise)
        seen = [reach * (noise / 3 + (1 - noise) * (played == move)) for move in range(3)]
        for move, after in enumerate(seen):
            earned += float(_RESULTS[mine, move] @ after.sum(1))
        misses = np.concatenate([misses + (believed != move) for move in range(3)])
        reach, last = np.concatenate(seen), np.tile(mine, 3)
    return misses, reach, earned


def _intended(opponents: Sequence[Opponent], turn: int) -> np.ndarray:
    """What each intends after each last move of the agent, the fourth being none: int [4, P]."""
    lasts = (0, 1, 2, None)
    return np.array([[each.move(turn, last) for each in opponents] for last in lasts])


def _likeliest_win(misses: np.ndarray, believed: np.ndarray, noise: float) -> np.ndarray:
    """The move of greatest expected result under each belief: int [N]."""
    miss = (noise / 3) / (1 - noise + noise / 3)
    belief = miss ** misses.astype(float)
    weight = np.stack([(belief * (believed == move)).sum(1) for move in range(3)], axis=1)
    gains = weight / belief.sum(1, keepdims=True) @ _RESULTS.T
    return np.argmax(gains.round(9), axis=1)  # the first of equal ones


def _merge(misses: np.ndarray, reach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make equal beliefs one, as only differences of misses bear on them; leave out the rarest."""
    relative = misses - misses.min(1, keepdims=True)
    kept, where = np.unique(relative, axis=0, return_inverse=True)
    merged = np.zeros((len(kept), reach.shape[1]))
    np.add.at(merged, where.ravel(), reach)
    is_common = merged.sum(1) > _RAREST
    return kept[is_common], merged[is_common] / merged[is_common].sum()
