"""Exact values of the bandit, by dynamic programming.

Contexts are independent of each other and are met by chance, so that the value of a trial is the
sum over contexts of one context's. A belief is how many more times each arm has paid than not:
with payments that are right in a share `1 - noise` of cases, the odds of two arms are
`((1 - noise) / noise) ** difference`.
"""

from functools import cache

Belief = tuple[int, ...]
"""By arm: how often it has paid, minus how often it has not."""
_TIE = 1e-9
"""Between plans of equal value, the one that earns more over the whole trial."""


def chances(belief: Belief, noise: float) -> list[float]:
    """The probability of each arm to be the one that pays."""
    most = max(belief)
    odds = [(noise / (1 - noise)) ** (most - each) for each in belief]
    return [each / sum(odds) for each in odds]


def best_returns(
    num_arms: int, num_contexts: int, rounds: int, noise: float, weights: tuple[float, ...]
) -> tuple[float, ...]:
    """Return a round of each episode, of the best plan for a weighted sum of episodes' returns."""
    num_turns, nothing = rounds * len(weights), (0.0,) * len(weights)

    @cache
    def value(turn: int, belief: Belief) -> tuple[float, ...]:
        if turn == num_turns:
            return nothing
        later, met = value(turn + 1, belief), best(turn, belief)
        pairs = zip(met, later, strict=True)
        return tuple((one + (num_contexts - 1) * other) / num_contexts for one, other in pairs)

    def best(turn: int, belief: Belief) -> tuple[float, ...]:
        options = [pulled(turn, belief, arm) for arm in range(num_arms)]
        return max(options, key=worth)

    def worth(returns: tuple[float, ...]) -> float:
        weighted = sum(w * each for w, each in zip(weights, returns, strict=True))
        return weighted + _TIE * sum(returns)

    def pulled(turn: int, belief: Belief, arm: int) -> tuple[float, ...]:
        right = chances(belief, noise)[arm]
        pays = right * (1 - noise) + (1 - right) * noise
        after = [value(turn + 1, _told(belief, arm, change)) for change in (1, -1)]
        returns = [pays * won + (1 - pays) * lost for won, lost in zip(*after, strict=True)]
        returns[turn // rounds] += pays
        return tuple(returns)

    return tuple(num_contexts * each / rounds for each in value(0, (0,) * num_arms))


def _told(belief: Belief, arm: int, change: int) -> Belief:
    """A belief after an arm has paid or not; only differences matter."""
    changed = [each + change * (number == arm) for number, each in enumerate(belief)]
    return tuple(each - min(changed) for each in changed)
