"""Play Scout, in which exploring costs reward now and pays only in a later episode.

Rules: a lock has three dials with one of four keys each. An episode visits each dial once; at a
dial the agent names a key, scouts (pays to see the key) or passes. The code of keys is hidden,
and the same in the whole trial. Knowledge of a dial helps only in later episodes. There is no
chance.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from mage_async.environments.environment import Belief, Chance, Outcome, Play, Split, split_by
from mage_async.environments.games.game import (
    Game,
    SoloPlay,
    TrialScript,
    facts_of,
    is_number,
    num_equal,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

KEYS = ("red", "green", "blue", "gold")
DIALS = ("alpha", "beta", "gamma")
SCOUT, PASS = "scout", "pass"
ACTIONS = (*KEYS, SCOUT, PASS)
NUM_DIALS = len(DIALS)

Code = tuple[int, ...]
"""Key of each dial, as an index into `KEYS`."""

_CODES: dict[str, Code] = {
    "-".join(KEYS[key] for key in code): code
    for code in itertools.product(range(len(KEYS)), repeat=NUM_DIALS)
}
# The held-out codes form a Latin square: every key on a dial, and every pair of keys on two dials,
# has the same share in both splits. So one or two dials do not reveal the split.
_SPLITS = split_by(_CODES, lambda code: (code[0] + code[1] - code[2]) % len(KEYS) == 0)
_ONE_DIAL = tuple((key,) for key in range(len(KEYS)))
"""Codes of a lock with a single dial, for values on held-out codes. A player knows of a held-out
code only that it is one of all 64. So the dials are independent, and each has the same value.
"""

_RULES = """A lock has three dials: alpha, beta and gamma.
Each is opened by one hidden key: red, green, blue or gold.
An episode visits each dial once. At a dial, name a key, or say scout or pass.
The right key earns 1, a wrong key {wrong:g}. Pass earns {safe:g} and tells nothing.
Scout earns {cost:g} and tells the dial's key. Anything else is invalid and earns {cost:g}.
The keys stay the same in all episodes."""


@dataclass(frozen=True, slots=True)
class Payoffs:
    """Hold the rewards of a turn: a right key earns 1, a wrong one -`wrong`, passing `safe`,
    scouting -`cost`.
    """

    safe: float = 0.3
    cost: float = 2.0
    wrong: float = 1.0


class ScoutPlay(SoloPlay):
    """Visit each dial once. The anchor, which is equal for equal states, is the dial alone: earlier
    turns do not affect the reward at a dial.
    """

    def __init__(self, code: Code, payoffs: Payoffs, chance: Chance) -> None:
        self._code, self._payoffs, self.chance = code, payoffs, chance
        self.dial, self.observation = 0, DIALS[0]
        self.known: dict[int, str] = {}
        """Keys that this episode has shown, by the number of the dial."""
        self.missed: dict[int, str] = {}
        """Keys that this episode has shown to be wrong, by the number of the dial."""

    @property
    def anchor(self) -> str:
        """The dial, or `done`."""
        return DIALS[self.dial] if self.dial < NUM_DIALS else "done"

    def actions(self) -> Sequence[str]:
        """Return the keys, scout and pass."""
        return ACTIONS

    def apply(self, action: str) -> Outcome:
        """Visit a dial; an invalid action costs as much as scouting and shows nothing."""
        feedback, reward = self._visit(action)
        self.dial += 1
        is_done = self.dial == NUM_DIALS
        observation = feedback if is_done else f"{feedback} {DIALS[self.dial]}"
        return Outcome(observation, reward, feedback != "invalid", is_done)

    def _visit(self, action: str) -> tuple[str, float]:
        """Act at the current dial; return the observation and the reward."""
        dial, key = self.dial, KEYS[self._code[self.dial]]
        if action == PASS:
            return "ok", self._payoffs.safe
        if action in (SCOUT, key):
            self.known[dial] = key
            result, reward = ("win", 1.0) if action == key else ("cost", -self._payoffs.cost)
            return f"{result} {DIALS[dial]} {key}", reward
        if action in KEYS:
            self.missed[dial] = action
            return "lose", -self._payoffs.wrong
        return "invalid", -self._payoffs.cost


@dataclass(slots=True)
class ScoutScript(TrialScript[ScoutPlay]):
    """Scout and guess with fixed probabilities; play a key that was seen with probability 0.95."""

    scout_chance: float
    """Probability of scouting."""
    guess_chance: float
    """Probability of guessing a key."""

    def facts(self) -> Sequence[str]:
        """Return the dial and the key of each known dial."""
        known = {dial: key for play in self.plays for dial, key in play.known.items()}
        return [f"{DIALS[dial]} {key}" for dial, key in sorted(known.items())]

    def action(self, play: ScoutPlay) -> str:
        """Return the next action."""
        known = [seen.known[play.dial] for seen in self.plays if play.dial in seen.known]
        if known and self.source.random() < 0.95:
            return known[0]
        drawn = self.source.random()
        if drawn < self.scout_chance:
            return SCOUT
        return self._guess(play.dial) if drawn < self.scout_chance + self.guess_chance else PASS

    def _guess(self, dial: int) -> str:
        """Return a random key that no episode has shown to be wrong."""
        missed = [seen.missed[dial] for seen in self.plays if dial in seen.missed]
        return self.source.choice([key for key in KEYS if key not in missed])


class Scout(Game[Code]):
    """Play Scout; the task variant is a code, such as `red-blue-gold`: 48 to train on, 16 held out.

    Args:
        safe: Reward of passing.
        cost: Price of scouting, and of an invalid action.
        wrong: Price of a wrong key.

    Raises:
        ConfigError: a payoff is not a finite number, or a price is negative.
    """

    def __init__(self, safe: float = 0.3, cost: float = 2.0, wrong: float = 1.0) -> None:
        for name, value in (("safe", safe), ("cost", cost), ("wrong", wrong)):
            if not is_number(value):
                raise ConfigError(f"scout: `{name}` must be a finite number, got {value!r}")
            if name != "safe" and value < 0:
                raise ConfigError(
                    f"scout: `{name}` is a price and must be at least 0, got {value!r}"
                )
        self.payoffs = Payoffs(safe, cost, wrong)
        words = (*ACTIONS, *DIALS, "cost", "win", "lose", "ok", "invalid")
        returns = (NUM_DIALS * min(-cost, -wrong, safe), NUM_DIALS * max(1.0, safe))
        facts = facts_of("scout", NUM_DIALS, words, returns, units=NUM_DIALS)
        super().__init__(facts, _SPLITS)

    def rules(self) -> str:
        """Return the rules in plain words, with the payoffs."""
        payoffs = self.payoffs
        return _RULES.format(wrong=-payoffs.wrong, safe=payoffs.safe, cost=-payoffs.cost)

    def begin(self, task: Task, episode: int) -> ScoutPlay:
        """Start at the first dial."""
        return ScoutPlay(self.variant(task.member), self.payoffs, Chance(task.seed, episode))

    def script(self, source: random.Random) -> ScoutScript:
        """Return a script whose probabilities are drawn for the trial."""
        scout_chance = source.choice((0.0, 0.3, 0.6))
        return ScoutScript(source, scout_chance, source.choice((0.0, 0.2)))

    def overlap(self, one: Code, other: Code) -> int:
        """Return the number of dials on which the codes agree."""
        return num_equal(one, other)

    def belief(self, split: Split) -> Belief:
        """Return the Bayes filter: uniform over the codes that no observation has contradicted."""
        return partial(_consistent, _SPLITS[split])

    def is_probe(self, action: str) -> bool:
        """Return whether the action is scouting."""
        return action == SCOUT

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return exact values per dial and episode.

        `random` draws from the legal actions, `always_pass` passes. `without_memory` plays the best
        single episode again and again; `best_final` maximises the last episode,
        `best_final_without_scouting` does so by guessing alone; `best_sum` maximises the sum. The
        solvers know the 48 codes of `train`; of a held-out code they know only that it is one of
        all 64.
        """
        payoffs, last = self.payoffs, (0.0,) * (num_episodes - 1) + (1.0,)
        return {
            "random": (self._uniform_value(),) * num_episodes,
            "always_pass": (payoffs.safe,) * num_episodes,
            "without_memory": self._best(split, (1.0,)) * num_episodes,
            "best_final": self._best(split, last),
            "best_final_without_scouting": self._best(split, last, may_scout=False),
            "best_sum": self._best(split, (1.0,) * num_episodes),
        }

    def _best(
        self, split: Split, weights: tuple[float, ...], *, may_scout: bool = True
    ) -> tuple[float, ...]:
        """Return the returns of the best plan for weighted episodes."""
        codes = tuple(_SPLITS[split].values()) if split == "train" else _ONE_DIAL
        return solve(codes, weights, self.payoffs, may_scout=may_scout)

    def _uniform_value(self) -> float:
        """Return the expected reward of a random action."""
        wrong_keys = len(KEYS) - 1
        payoffs = self.payoffs
        return (1 - wrong_keys * payoffs.wrong - payoffs.cost + payoffs.safe) / len(ACTIONS)


def _consistent(codes: Mapping[str, Code], plays: Sequence[Play]) -> dict[str, float]:
    """Return equal probabilities for all codes that agree with all episodes."""
    agree = {name: all(_agrees(code, play) for play in plays) for name, code in codes.items()}
    return {name: agrees / sum(agree.values()) for name, agrees in agree.items()}


def _agrees(code: Code, play: Play) -> bool:
    """Return whether a code is consistent with an episode."""
    assert isinstance(play, ScoutPlay)
    keys = [KEYS[number] for number in code]
    found = all(keys[dial] == key for dial, key in play.known.items())
    return found and all(keys[dial] != key for dial, key in play.missed.items())


# The code below computes exact values per dial, by dynamic programming.


_TIE = 1e-9
"""Weight of the return over the whole trial, so small that it decides only between plans of equal
value.
"""


@cache
def solve(
    codes: tuple[Code, ...],
    weights: tuple[float, ...],
    payoffs: Payoffs,
    *,
    may_scout: bool = True,
) -> tuple[float, ...]:
    """Return the return per dial of each episode of the best plan, not multiplied by its weight,
    against a code drawn uniformly from `codes`.

    Args:
        weights: Weight of each episode's return. With little weight on later episodes no plan
            scouts.
    """
    num_dials = len(codes[0])
    search = _Search(codes, weights, payoffs, may_scout)
    return tuple((search.best(0, (_ANY,) * num_dials) / num_dials).tolist())


_Known = int | frozenset[int]
"""Knowledge of one dial: its key, or the set of keys that are ruled out."""
_Belief = tuple[_Known, ...]
"""Knowledge of each dial."""
_ANY: _Known = frozenset()
"""Knowledge of a dial of which no key is ruled out."""


class _Search:
    """Search the best plan by dynamic programming over the turns of a trial and the beliefs about
    its code.

    The value of a plan, from a given turn on, is float64 [episodes]: what it adds to the return of
    each episode.
    """

    def __init__(
        self, codes: Sequence[Code], weights: Sequence[float], payoffs: Payoffs, may_scout: bool
    ) -> None:
        self._codes, self._weights, self._payoffs = codes, np.array(weights), payoffs
        self._may_scout, self._num_dials = may_scout, len(codes[0])
        self._fitting: dict[_Belief, list[Code]] = {}
        """Codes that agree with each belief."""
        self._found: dict[tuple[int, _Belief], np.ndarray] = {}
        """Value of the best plan from each turn and belief on."""

    def best(self, turn: int, belief: _Belief) -> np.ndarray:
        """Return the value of the best plan from a turn of the trial on."""
        if turn == len(self._weights) * self._num_dials:
            return np.zeros(len(self._weights))
        if (turn, belief) not in self._found:
            self._found[turn, belief] = max(
                self._options(turn, belief), key=lambda value: value @ (self._weights + _TIE)
            )
        return self._found[turn, belief]

    def _options(self, turn: int, belief: _Belief) -> list[np.ndarray]:
        """Return the value of each possible action in a turn."""
        dial = turn % self._num_dials
        chances = self._chances(belief, dial)
        options = [self._after(turn, self._payoffs.safe, {belief: 1.0})]
        if self._may_scout:
            seen = {_learn(belief, dial, key): chance for key, chance in chances.items()}
            options.append(self._after(turn, -self._payoffs.cost, seen))
        return options + [self._guess(turn, belief, key, chances[key]) for key in chances]

    def _guess(self, turn: int, belief: _Belief, key: int, chance: float) -> np.ndarray:
        """Return the value of naming a key, which is right with probability `chance`."""
        dial = turn % self._num_dials
        seen = {_learn(belief, dial, key): chance}
        if chance < 1:
            known = belief[dial]
            assert isinstance(known, frozenset)
            seen[_learn(belief, dial, known | {key})] = 1 - chance
        reward = chance - self._payoffs.wrong * (1 - chance)
        return self._after(turn, reward, seen)

    def _after(self, turn: int, reward: float, seen: dict[_Belief, float]) -> np.ndarray:
        """Return the value of a turn that earns the expected `reward` and leads to the beliefs
        `seen` with their probabilities.
        """
        value = np.zeros(len(self._weights))
        value[turn // self._num_dials] = reward
        for belief, chance in seen.items():
            value += chance * self.best(turn + 1, belief)
        return value

    def _chances(self, belief: _Belief, dial: int) -> dict[int, float]:
        """Return the probability of each possible key of a dial."""
        if belief not in self._fitting:
            self._fitting[belief] = [code for code in self._codes if all(map(_fits, belief, code))]
        keys = [code[dial] for code in self._fitting[belief]]
        return {key: keys.count(key) / len(keys) for key in sorted(set(keys))}


def _fits(known: _Known, key: int) -> bool:
    """Return whether a key agrees with the knowledge of its dial."""
    return known == key if isinstance(known, int) else key not in known


def _learn(belief: _Belief, dial: int, known: _Known) -> _Belief:
    """Return the belief with new knowledge of one dial."""
    return (*belief[:dial], known, *belief[dial + 1 :])
