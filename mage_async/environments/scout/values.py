"""Exact values of Scout, by dynamic programming, per dial.

An objective weighs the returns of a trial's episodes; `weights[e]` is episode e's. The
weights decide whether scouting pays at all, so a wrong return between episodes shows in what is
learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Code = tuple[int, ...]
"""The key of each dial."""

_TIE = 1e-9
"""Between plans of equal value, the one that earns more over the whole trial."""


@dataclass(frozen=True, slots=True)
class Payoffs:
    """What a turn earns: a right key 1, a wrong one -`wrong`, passing `safe`, scouting -`cost`."""

    safe: float = 0.3
    cost: float = 2.0
    wrong: float = 1.0


@dataclass(frozen=True, slots=True)
class Value:
    """What the best plan for some weights earns, per dial."""

    total: float
    """Weighted sum over episodes."""
    returns: tuple[float, ...]
    """Unweighted, by episode."""
    probes: tuple[float, ...]
    """Share of dials scouted, by episode."""


def cumulative_weights(num_episodes: int, discount: float) -> tuple[float, ...]:
    """Weights of returns under the discounted sum of episodes (LaMer)."""
    return tuple(discount**episode for episode in range(num_episodes))


@cache
def solve(
    codes: tuple[Code, ...],
    weights: tuple[float, ...],
    payoffs: Payoffs,
    *,
    may_scout: bool = True,
) -> Value:
    """The best plan over a whole trial against a code drawn uniformly from `codes`."""
    search = _Search(codes, weights, payoffs, may_scout)
    best = search.best(0, (_ANY,) * len(codes[0]))
    num_dials = len(codes[0])
    return Value(
        best.total / num_dials,
        tuple(earned / num_dials for earned in best.returns),
        tuple(probed / num_dials for probed in best.probes),
    )


_Known = int | frozenset[int]
"""What is known of one dial: its key, or the keys that have been ruled out."""
_Belief = tuple[_Known, ...]
_ANY: _Known = frozenset()


class _Search:
    def __init__(
        self,
        codes: Sequence[Code],
        weights: tuple[float, ...],
        payoffs: Payoffs,
        may_scout: bool,
    ) -> None:
        self._codes, self._weights, self._payoffs = codes, weights, payoffs
        self._may_scout, self._num_dials = may_scout, len(codes[0])
        self._fitting: dict[_Belief, list[Code]] = {}
        self._found: dict[tuple[int, _Belief], Value] = {}

    def best(self, turn: int, belief: _Belief) -> Value:
        """Value from a turn of the trial on, in sums over dials."""
        if turn == len(self._weights) * self._num_dials:
            nothing = (0.0,) * len(self._weights)
            return Value(0.0, nothing, nothing)
        if (turn, belief) not in self._found:
            options = self._options(turn, belief)
            best = max(options, key=lambda value: value.total + _TIE * sum(value.returns))
            self._found[turn, belief] = best
        return self._found[turn, belief]

    def _options(self, turn: int, belief: _Belief) -> list[Value]:
        dial = turn % self._num_dials
        chances = self._chances(belief, dial)
        options = [self._after(turn, self._payoffs.safe, {belief: 1.0}, is_probe=False)]
        if self._may_scout:
            seen = {_learn(belief, dial, key): chance for key, chance in chances.items()}
            options.append(self._after(turn, -self._payoffs.cost, seen, is_probe=True))
        return options + [self._guess(turn, belief, key, chances[key]) for key in chances]

    def _guess(self, turn: int, belief: _Belief, key: int, chance: float) -> Value:
        dial = turn % self._num_dials
        seen = {_learn(belief, dial, key): chance}
        if chance < 1:
            known = belief[dial]
            assert isinstance(known, frozenset)
            seen[_learn(belief, dial, known | {key})] = 1 - chance
        reward = chance - self._payoffs.wrong * (1 - chance)
        return self._after(turn, reward, seen, is_probe=False)

    def _after(
        self, turn: int, reward: float, seen: dict[_Belief, float], *, is_probe: bool
    ) -> Value:
        """Earn `reward` in expectation now, and go on from what is seen with its probability."""
        episode = turn // self._num_dials
        total = self._weights[episode] * reward
        returns, probes = [0.0] * len(self._weights), [0.0] * len(self._weights)
        returns[episode], probes[episode] = reward, float(is_probe)
        for belief, chance in seen.items():
            after = self.best(turn + 1, belief)
            total += chance * after.total
            for index in range(len(returns)):
                returns[index] += chance * after.returns[index]
                probes[index] += chance * after.probes[index]
        return Value(total, tuple(returns), tuple(probes))

    def _chances(self, belief: _Belief, dial: int) -> dict[int, float]:
        """Probability of each key on a dial, where not 0."""
        if belief not in self._fitting:
            self._fitting[belief] = [code for code in self._codes if all(map(_fits, belief, code))]
        keys = [code[dial] for code in self._fitting[belief]]
        return {key: keys.count(key) / len(keys) for key in sorted(set(keys))}


def _fits(known: _Known, key: int) -> bool:
    return known == key if isinstance(known, int) else key not in known


def _learn(belief: _Belief, dial: int, known: _Known) -> _Belief:
    return (*belief[:dial], known, *belief[dial + 1 :])
