"""Exact values of the bandit, by dynamic programming.

Contexts are independent of each other and are met by chance, so that the value of a trial is the
sum over contexts of one context's. A belief is how many more times each arm has paid than not:
with payments that are right in a share `1 - noise` of cases, the odds of two arms are
`((1 - noise) / noise) ** difference`.
"""

Belief = tuple[int, ...]
"""By arm: how often it has paid, minus how often it has not."""
Returns = tuple[float, ...]
"""By episode."""
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

    def worth(returns: Returns) -> float:
        weighted = sum(w * each for w, each in zip(weights, returns, strict=True))
        return weighted + _TIE * sum(returns)

    def pulled(belief: Belief, arm: int, episode: int) -> Returns:
        right = chances(belief, noise)[arm]
        pays = right * (1 - noise) + (1 - right) * noise
        after = [later[_told(belief, arm, change)] for change in (1, -1)]
        returns = [pays * won + (1 - pays) * lost for won, lost in zip(*after, strict=True)]
        returns[episode] += pays
        return tuple(returns)

    def value(belief: Belief, episode: int) -> Returns:
        best = max((pulled(belief, arm, episode) for arm in _unlike(belief)), key=worth)
        pairs = zip(best, later[belief], strict=True)
        return tuple((one + (num_contexts - 1) * other) / num_contexts for one, other in pairs)

    reached = _reached(num_arms, rounds * len(weights))
    later: dict[Belief, Returns] = dict.fromkeys(reached.pop(), (0.0,) * len(weights))
    while reached:
        episode = (len(reached) - 1) // rounds
        later = {belief: value(belief, episode) for belief in reached.pop()}
    return tuple(num_contexts * each / rounds for each in later[(0,) * num_arms])


def _reached(num_arms: int, num_turns: int) -> list[set[Belief]]:
    """The beliefs that there may be before each turn, and after the last one."""
    reached = [{(0,) * num_arms}]
    for _ in range(num_turns):
        new = {
            _told(belief, arm, change)
            for belief in reached[-1]
            for arm in _unlike(belief)
            for change in (1, -1)
        }
        reached.append(reached[-1] | new)
    return reached


def _unlike(belief: Belief) -> list[int]:
    """One of the arms of each belief: arms of which the same was seen are worth the same."""
    return [belief.index(each) for each in sorted(set(belief))]


def _told(belief: Belief, arm: int, change: int) -> Belief:
    """A belief after an arm has paid or not, sorted: only differences between arms matter."""
    changed = [each + change * (number == arm) for number, each in enumerate(belief)]
    return tuple(sorted(each - min(changed) for each in changed))
