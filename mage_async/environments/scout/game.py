"""Scout: exploring costs reward now, and can pay in a later episode only.

A lock of three dials with one of four keys each; the code stays for the whole trial. An episode
visits each dial once, so that what is learned about a dial helps in later episodes alone. Nothing
is drawn by chance.
"""

import itertools
import math
import random
from collections.abc import Sequence
from functools import partial

from mage_async.environments.environment import Belief, Chance, Environment, Facts, Play, Split
from mage_async.environments.scout.play import (
    ACTIONS,
    DIALS,
    KEYS,
    NUM_DIALS,
    SCOUT,
    ScoutPlay,
    ScoutScript,
)
from mage_async.environments.scout.values import Code, Payoffs, cumulative_weights, solve
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

_CODES = tuple(itertools.product(range(len(KEYS)), repeat=NUM_DIALS))
_HELDOUT = tuple(code for code in _CODES if (code[0] + code[1] - code[2]) % len(KEYS) == 0)
_SPLITS: dict[Split, tuple[Code, ...]] = {
    # A Latin square: every key, and every pair on two dials, is equally frequent in both.
    "train": tuple(code for code in _CODES if code not in _HELDOUT),
    "heldout": _HELDOUT,
}
_ONE_DIAL = tuple((key,) for key in range(len(KEYS)))
_NAMES = {code: "-".join(KEYS[key] for key in code) for code in _CODES}
_BY_NAME = {name: code for code, name in _NAMES.items()}

_RULES = """A lock has three dials: alpha, beta and gamma.
Each is opened by one hidden key: red, green, blue or gold.
An episode visits each dial once. At a dial, name a key, or say scout or pass.
The right key earns 1, a wrong key {wrong:g}. Pass earns {safe:g} and tells nothing.
Scout earns {cost:g} and tells the dial's key. Anything else is invalid and earns {cost:g}.
The keys stay the same in all episodes."""


class Scout(Environment):
    """The lock; its code is what a trial has to find out.

    Args:
        safe: reward of passing.
        cost: price of scouting, and of an invalid action.
        wrong: price of a wrong key.

    Raises:
        ConfigError: a payoff is not a finite number, or a price is negative.
    """

    def __init__(self, safe: float = 0.3, cost: float = 2.0, wrong: float = 1.0) -> None:
        _check_number("safe", safe)
        _check_price("cost", cost)
        _check_price("wrong", wrong)
        self.payoffs = Payoffs(safe, cost, wrong)
        self.facts = Facts(
            name="scout",
            num_seats=1,
            max_turns=NUM_DIALS,
            min_return=NUM_DIALS * min(-cost, -wrong, safe),
            max_return=NUM_DIALS * max(1.0, safe),
            units=NUM_DIALS,
            has_chance=False,
            words=(*ACTIONS, *DIALS, "cost", "win", "lose", "ok", "invalid"),
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """48 codes to train on, 16 held out, such as `red-blue-gold`."""
        return tuple(_NAMES[code] for code in _SPLITS[split])

    def family(self, member: str) -> str:
        """All codes are of one kind."""
        return "code"

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words, with the payoffs."""
        payoffs = self.payoffs
        return _RULES.format(wrong=-payoffs.wrong, safe=payoffs.safe, cost=-payoffs.cost)

    def begin(self, task: Task, episode: int) -> ScoutPlay:
        """Start at the first dial."""
        return ScoutPlay(_code(task.member), self.payoffs, Chance(task.seed, episode))

    def script(self, source: random.Random) -> "ScoutScript":
        """A style that does not depend on the episode, but uses a key it has seen."""
        scouts = source.choice((0.0, 0.3, 0.6))
        return ScoutScript(source, scouts, source.choice((0.0, 0.2)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Codes of the split that differ on every dial."""
        code = _code(member)
        return tuple(
            _NAMES[other]
            for other in _SPLITS[split]
            if all(mine != theirs for mine, theirs in zip(code, other, strict=True))
        )

    def belief(self, split: Split) -> Belief:
        """The codes that nothing has contradicted, all equally probable."""
        return partial(_consistent, _SPLITS[split])

    def is_probe(self, action: str) -> bool:
        """Scouting only buys information."""
        return action == SCOUT

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Exact values per dial and episode.

        `random` draws from the legal actions, `always_pass` passes. `without_memory` plays the
        best single episode again and again; `best_final` maximises the last episode,
        `best_final_without_scouting` does so by guessing alone; `best_sum` maximises the sum.
        These know the 48 codes of `train`; of a held-out code they only know that it is one of
        all 64, so that its dials are independent and one stands for all.
        """
        payoffs, last = self.payoffs, (0.0,) * (num_episodes - 1) + (1.0,)
        return {
            "random": (self._uniform_value(),) * num_episodes,
            "always_pass": (payoffs.safe,) * num_episodes,
            "without_memory": self._best(split, (1.0,)) * num_episodes,
            "best_final": self._best(split, last),
            "best_final_without_scouting": self._best(split, last, may_scout=False),
            "best_sum": self._best(split, cumulative_weights(num_episodes, 1.0)),
        }

    def _best(
        self, split: Split, weights: tuple[float, ...], *, may_scout: bool = True
    ) -> tuple[float, ...]:
        codes = _SPLITS[split] if split == "train" else _ONE_DIAL
        return solve(codes, weights, self.payoffs, may_scout=may_scout).returns

    def _uniform_value(self) -> float:
        wrong_keys = len(KEYS) - 1
        payoffs = self.payoffs
        return (1 - wrong_keys * payoffs.wrong - payoffs.cost + payoffs.safe) / len(ACTIONS)


def _consistent(codes: Sequence[Code], plays: Sequence[Play]) -> dict[str, float]:
    left = [code for code in codes if all(_agrees(code, play) for play in plays)]
    return {_NAMES[code]: float(code in left) / len(left) for code in codes}


def _agrees(code: Code, play: Play) -> bool:
    """Whether a code may have answered as an episode did."""
    assert isinstance(play, ScoutPlay)
    keys = [KEYS[number] for number in code]
    found = all(keys[dial] == key for dial, key in play.known.items())
    return found and all(keys[dial] != key for dial, key in play.missed.items())


def _code(member: str) -> Code:
    if member not in _BY_NAME:
        raise EnvironmentFault(
            f"scout: no code is called {member!r}, as is e.g. {_NAMES[_CODES[0]]!r}"
        )
    return _BY_NAME[member]


def _check_number(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ConfigError(f"scout: `{name}` must be a finite number, got {value!r}")


def _check_price(name: str, value: float) -> None:
    _check_number(name, value)
    if value < 0:
        raise ConfigError(f"scout: `{name}` is a price and must be at least 0, got {value!r}")
