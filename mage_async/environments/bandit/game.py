"""A contextual bandit: an arm pays for a context, nearly always the same one.

A round shows one of a few contexts. One arm of each pays with probability `1 - noise`, the others
with probability `noise`; which one stays the same for the whole trial.
"""

import itertools
import math
import random

from mage_async.environments.bandit.play import (
    ARMS,
    CONTEXTS,
    INVALID,
    LOSE,
    OVER,
    WIN,
    BanditPlay,
    BanditScript,
    Code,
)
from mage_async.environments.bandit.values import best_returns
from mage_async.environments.environment import Chance, Environment, Facts, Split
from mage_async.environments.options import check_whole
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

_RULES = """Each round shows one of {contexts}. Pull an arm: {arms}.
For each of them one arm pays 1 in {right:.0%} of rounds, the others in {wrong:.0%}.
It stays the same in all episodes. An episode has {rounds} rounds."""


class Bandit(Environment):
    """The bandit; which arm pays for which context is what a trial has to find out.

    Args:
        contexts: how many there are.
        arms: how many there are; one code in so many is held out.
        rounds: of an episode, at most 20: exact values take longer with every round.
        noise: share of rounds in which an arm does the opposite.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self, contexts: int = 4, arms: int = 3, rounds: int = 8, noise: float = 0.1
    ) -> None:
        check_whole("bandit", "contexts", contexts, 2, len(CONTEXTS))
        check_whole("bandit", "arms", arms, 2, len(ARMS))
        check_whole("bandit", "rounds", rounds, 1, 20)
        _check_noise(noise)
        self._contexts, self._arms, self._rounds, self._noise = contexts, arms, rounds, noise
        codes = tuple(itertools.product(range(arms), repeat=contexts))
        self._splits: dict[Split, tuple[Code, ...]] = {
            # arms of any context but one are equally frequent in both, and so are their pairs
            "train": tuple(code for code in codes if sum(code) % arms),
            "heldout": tuple(code for code in codes if not sum(code) % arms),
        }
        self._codes = {"-".join(ARMS[arm] for arm in code): code for code in codes}
        self._names = {code: name for name, code in self._codes.items()}
        self.facts = Facts(
            name="bandit",
            num_seats=1,
            max_turns=rounds,
            min_return=0.0,
            max_return=float(rounds),
            units=rounds,
            has_chance=True,
            words=(*ARMS[:arms], *CONTEXTS[:contexts], WIN, LOSE, OVER, INVALID),
            wins_above=rounds / 2,
            loses_below=rounds / 2,
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Codes, such as `red-blue-blue-green`: the arm of each context."""
        return tuple(self._names[code] for code in self._splits[split])

    def family(self, member: str) -> str:
        """All codes are of one kind."""
        return "code"

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES.format(
            contexts=", ".join(CONTEXTS[: self._contexts]),
            arms=", ".join(ARMS[: self._arms]),
            right=1 - self._noise,
            wrong=self._noise,
            rounds=self._rounds,
        )

    def begin(self, task: Task, episode: int) -> BanditPlay:
        """Start with a context."""
        code, chance = self._code(task.member), Chance(task.seed, episode)
        return BanditPlay(code, self._arms, self._rounds, self._noise, chance)

    def script(self, source: random.Random) -> BanditScript:
        """Its care is drawn for the trial; it remembers more often than not."""
        care, remembers = source.choice((0.3, 0.6, 0.9)), source.random() < 0.75
        return BanditScript(source, self._arms, self._noise, care, remembers)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Codes of the split with another arm for each context, or for most."""
        code = self._code(member)
        same = {
            other: sum(one == two for one, two in zip(code, other, strict=True))
            for other in self._splits[split]
            if other != code
        }
        least = min(same.values())
        return tuple(self._names[other] for other, num in same.items() if num == least)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Exact returns per round and episode, of players that take all codes for equally likely.

        `random` pulls any arm. `without_memory` plays the best single episode again and again,
        `with_memory` the best trial for its last episode; `known` knows the code.
        """
        noise, arms, once = self._noise, self._arms, (0.0,) * (num_episodes - 1)
        return {
            "random": ((1 - noise + (arms - 1) * noise) / arms,) * num_episodes,
            "without_memory": self._best((1.0,)) * num_episodes,
            "with_memory": self._best((*once, 1.0)),
            "known": (1 - noise,) * num_episodes,
        }

    def _best(self, weights: tuple[float, ...]) -> tuple[float, ...]:
        return best_returns(self._arms, self._contexts, self._rounds, self._noise, weights)

    def _code(self, member: str) -> Code:
        if member not in self._codes:
            example = next(iter(self._codes))
            raise EnvironmentFault(f"bandit: no code is called {member!r}, as is e.g. {example!r}")
        return self._codes[member]


def _check_noise(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value < 0.5:
        raise ConfigError(f"bandit: `noise` must be above 0 and below 0.5, got {value!r}")
