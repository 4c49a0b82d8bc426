"""Strategies drawn by their scores, one after the other, and the gradient of having drawn them.

The first is drawn with probability p(m) = exp(rho(m)) / sum of exp(rho) over all strategies, as the
paper says; the next in the same way among those that are left and speak of other states
(Plackett and Luce). For one strategy that is the paper's draw.
"""

import math
import random
from collections.abc import Mapping, Sequence

from mage_async.graph_memory.paths import Decision

Scores = Mapping[Decision, float]
"""Relevance of each strategy, rho."""


def probabilities(scores: Scores) -> dict[Decision, float]:
    """The softmax of scores."""
    most = max(scores.values())
    parts = {decision: math.exp(score - most) for decision, score in scores.items()}
    total = math.fsum(parts.values())
    return {decision: part / total for decision, part in parts.items()}


def drawn(scores: Scores, count: int, source: random.Random) -> tuple[Decision, ...]:
    """At most `count` strategies by chance, no two for one state."""
    found: list[Decision] = []
    while len(found) < count and (left := _left(scores, found)):
        weights = probabilities(left)
        found.append(source.choices(list(weights), list(weights.values()))[0])
    return tuple(found)


def best(scores: Scores, count: int) -> tuple[Decision, ...]:
    """At most `count` strategies, those of the highest scores, no two for one state."""
    found: list[Decision] = []
    while len(found) < count and (left := _left(scores, found)):
        found.append(max(left, key=lambda decision: left[decision]))
    return tuple(found)


def logprob(scores: Scores, decisions: Sequence[Decision]) -> float:
    """The log-probability, in nats, of drawing these strategies in this order."""
    return math.fsum(
        math.log(max(probabilities(_left(scores, decisions[:place]))[decision], 1e-300))
        for place, decision in enumerate(decisions)
    )


def gradient(scores: Scores, decisions: Sequence[Decision]) -> dict[Decision, float]:
    """The gradient of `logprob` by each score."""
    found = dict.fromkeys(scores, 0.0)
    for place, decision in enumerate(decisions):
        for each, share in probabilities(_left(scores, decisions[:place])).items():
            found[each] -= share
        found[decision] += 1.0
    return found


def _left(scores: Scores, found: Sequence[Decision]) -> dict[Decision, float]:
    taken = {state for state, _ in found}
    return {each: score for each, score in scores.items() if each[0] not in taken}
