"""Play a contextual bandit: in each context, one arm pays nearly always.

Rules: a round shows one of a few contexts, and the agent pulls an arm. One arm of each context pays
with probability `1 - noise`, the others with probability `noise`. The code, which lists the paying
arm of every context, is hidden; it stays the same for the whole trial.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from mage_async.environments.environment import Chance, Outcome, Split, check_whole, split_by
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

CONTEXTS = ("cat", "dog", "bird", "fish", "horse", "mouse")
ARMS = ("red", "green", "blue", "gold")
WIN, LOSE, OVER, INVALID = "win", "lose", "over", "invalid"
Code = tuple[int, ...]
"""Index of the paying arm, for each context."""
_RULES = """Each round shows one of {contexts}. Pull an arm: {arms}.
For each of them one arm pays 1 in {right:g}% of rounds, the others in {wrong:g}%.
It stays the same in all episodes. An episode has {rounds} rounds."""


class BanditPlay(SoloPlay):
    """Play rounds, each with a random context. The anchor, which is equal for equal states, is the
    context.
    """

    def __init__(
        self, code: Code, num_arms: int, rounds: int, noise: float, chance: Chance
    ) -> None:
        self._code, self._num_arms, self._num_rounds = code, num_arms, rounds
        self._noise, self.chance, self._round = noise, chance, 0
        self.context = self._draw_context()
        self.observation = CONTEXTS[self.context]
        self.pulls: list[tuple[int, int, bool]] = []
        """Pulls so far: index of the context, index of the arm, and whether the arm paid."""

    @property
    def anchor(self) -> str:
        """The context."""
        return CONTEXTS[self.context]

    def actions(self) -> Sequence[str]:
        """Return the arms."""
        return ARMS[: self._num_arms]

    def apply(self, action: str) -> Outcome:
        """Pull an arm; an invalid action earns and shows nothing."""
        is_valid = action in self.actions()
        result, pays = self._pull(action) if is_valid else (INVALID, False)
        self._round += 1
        is_done = self._round == self._num_rounds
        if not is_done:
            self.context = self._draw_context()
        following = OVER if is_done else CONTEXTS[self.context]
        return Outcome(f"{result} {following}", float(pays), is_valid, is_done)

    def _pull(self, action: str) -> tuple[str, bool]:
        """Pull an arm; return the text of the result, and whether the arm paid."""
        arm = ARMS.index(action)
        is_noisy = bool(self.chance.choose("noise", (1 - self._noise, self._noise)))
        pays = (arm == self._code[self.context]) != is_noisy
        self.pulls.append((self.context, arm, pays))
        return f"{CONTEXTS[self.context]} {action} {WIN if pays else LOSE}", pays

    def _draw_context(self) -> int:
        """Draw the index of a context, each with equal probability."""
        return self.chance.choose("context", (1,) * len(self._code))


@dataclass(slots=True)
class BanditScript(TrialScript[BanditPlay]):
    """Pull the context's most probable arm, or a random one."""

    num_arms: int
    noise: float
    care: float
    """Probability of pulling the most probable arm rather than a random one."""
    remembers: bool
    """Whether the script uses earlier episodes."""

    def action(self, play: BanditPlay) -> str:
        """Return the next arm."""
        if self.source.random() >= self.care:
            return self.source.choice(play.legal_actions())
        probabilities = posterior(self._belief(play), self.noise)
        best = [arm for arm, each in enumerate(probabilities) if each == max(probabilities)]
        return ARMS[self.source.choice(best)]

    def _belief(self, play: BanditPlay) -> "Belief":
        """Return the belief about the arms of the shown context."""
        plays = self.plays if self.remembers else [play]
        pulls = [pull for each in plays for pull in each.pulls if pull[0] == play.context]
        return tuple(
            sum(1 if pays else -1 for _, arm, pays in pulls if arm == number)
            for number in range(self.num_arms)
        )


class Bandit(Game[Code]):
    """Play the bandit; its task variant is a code, such as `red-blue-blue-green`.

    Args:
        contexts: Number of contexts.
        arms: Number of arms, A; a share 1/A of the codes is held out.
        rounds: Number of rounds of an episode, at most 20, because exact values take longer with
            every round.
        noise: Probability that an arm does the opposite of what the code says.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self, contexts: int = 4, arms: int = 3, rounds: int = 8, noise: float = 0.1
    ) -> None:
        check_whole("bandit", "contexts", contexts, 2, len(CONTEXTS))
        check_whole("bandit", "arms", arms, 2, len(ARMS))
        check_whole("bandit", "rounds", rounds, 1, 20)
        if not is_number(noise) or not 0 < noise < 0.5:
            raise ConfigError(f"bandit: `noise` must be above 0 and below 0.5, got {noise!r}")
        self._contexts, self._arms, self._num_rounds, self._noise = contexts, arms, rounds, noise
        codes: dict[str, Code] = {
            "-".join(ARMS[arm] for arm in code): code
            for code in itertools.product(range(arms), repeat=contexts)
        }
        # In both splits each arm pays equally often in each context. More generally, for any proper
        # subset of the contexts, all combinations of paying arms are equally frequent.
        splits = split_by(codes, lambda code: sum(code) % arms == 0)
        words = (*ARMS[:arms], *CONTEXTS[:contexts], WIN, LOSE, OVER, INVALID)
        returns = (0.0, float(rounds))
        # An episode is won if more than half of its rounds paid.
        threshold = rounds / 2
        facts = facts_of("bandit", rounds, words, returns, threshold, units=rounds, has_chance=True)
        super().__init__(facts, splits)

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _RULES.format(
            contexts=", ".join(CONTEXTS[: self._contexts]),
            arms=", ".join(ARMS[: self._arms]),
            right=100 * (1 - self._noise),
            wrong=100 * self._noise,
            rounds=self._num_rounds,
        )

    def begin(self, task: Task, episode: int) -> BanditPlay:
        """Start with a context."""
        code, chance = self.variant(task.member), Chance(task.seed, episode)
        return BanditPlay(code, self._arms, self._num_rounds, self._noise, chance)

    def script(self, source: random.Random) -> BanditScript:
        """Return a script whose care is drawn for the trial; three in four remember."""
        care, remembers = source.choice((0.3, 0.6, 0.9)), source.random() < 0.75
        return BanditScript(source, self._arms, self._noise, care, remembers)

    def overlap(self, one: Code, other: Code) -> int:
        """Return the number of contexts in which both codes have the same paying arm."""
        return num_equal(one, other)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return exact returns per round and episode, of players with a uniform prior over all
        codes.

        `random` pulls any arm. `without_memory` plays the best single episode again and again,
        `with_memory` plays the trial that is best for the last episode; `known` knows the code.
        """
        noise, arms, earlier = self._noise, self._arms, (0.0,) * (num_episodes - 1)
        return {
            "random": ((1 - noise + (arms - 1) * noise) / arms,) * num_episodes,
            "without_memory": self._best((1.0,)) * num_episodes,
            "with_memory": self._best((*earlier, 1.0)),
            "known": (1 - noise,) * num_episodes,
        }

    def _best(self, weights: tuple[float, ...]) -> tuple[float, ...]:
        """Return the best returns per round, with one weight for each episode's return."""
        return best_returns(self._arms, self._contexts, self._num_rounds, self._noise, weights)


# Exact values, by dynamic programming over beliefs. Contexts are independent of each other and
# drawn at random, so the value of a trial is the number of contexts times the value of one context.

Belief = tuple[int, ...]
"""For each arm of one context, the number of times that it paid minus the number of times that it
did not. With noise `n`, the odds of two arms are `((1 - n) / n) ** difference`.
"""
Returns = tuple[float, ...]
"""Expected return of each episode."""
_TIE = 1e-9
"""Weight of the return over the whole trial, so small that it decides only between plans of equal
value.
"""


def posterior(belief: Belief, noise: float) -> list[float]:
    """Return the probability of each arm to be the paying one."""
    most = max(belief)
    odds = [(noise / (1 - noise)) ** (most - each) for each in belief]
    return [each / sum(odds) for each in odds]


def best_returns(
    num_arms: int, num_contexts: int, rounds: int, noise: float, weights: tuple[float, ...]
) -> tuple[float, ...]:
    """Return the return per round of each episode under the best plan for weighted returns.

    Args:
        weights: Weight of each episode's return.
    """

    def worth(returns: Returns) -> float:
        """Return the quantity that the plan maximises."""
        weighted = sum(w * each for w, each in zip(weights, returns, strict=True))
        return weighted + _TIE * sum(returns)

    def pulled(belief: Belief, arm: int, episode: int) -> Returns:
        """Return the expected returns of this pull of `arm` and all later turns, in the shown
        context.
        """
        right = posterior(belief, noise)[arm]
        pays = right * (1 - noise) + (1 - right) * noise
        after = [later[_update(belief, arm, change)] for change in (1, -1)]
        returns = [pays * won + (1 - pays) * lost for won, lost in zip(*after, strict=True)]
        returns[episode] += pays
        return tuple(returns)

    def value(belief: Belief, episode: int) -> Returns:
        """Return the expected returns of this turn and all later ones, before its context is
        drawn.
        """
        best = max((pulled(belief, arm, episode) for arm in _distinct(belief)), key=worth)
        # The turn shows this context with probability 1 / num_contexts; otherwise nothing changes.
        pairs = zip(best, later[belief], strict=True)
        return tuple((one + (num_contexts - 1) * other) / num_contexts for one, other in pairs)

    # Go from the last turn back to the first. `later` has the values of the beliefs after a turn,
    # and `len(reachable) - 1` is the number of the turn, from 0.
    reachable = _reachable(num_arms, rounds * len(weights))
    later: dict[Belief, Returns] = dict.fromkeys(reachable.pop(), (0.0,) * len(weights))
    while reachable:
        episode = (len(reachable) - 1) // rounds
        later = {belief: value(belief, episode) for belief in reachable.pop()}
    return tuple(num_contexts * each / rounds for each in later[(0,) * num_arms])


def _reachable(num_arms: int, num_turns: int) -> list[set[Belief]]:
    """Return the possible beliefs before each turn, and after the last one."""
    reachable = [{(0,) * num_arms}]
    for _ in range(num_turns):
        new = {
            _update(belief, arm, change)
            for belief in reachable[-1]
            for arm in _distinct(belief)
            for change in (1, -1)
        }
        reachable.append(reachable[-1] | new)
    return reachable


def _distinct(belief: Belief) -> list[int]:
    """Return one arm for each distinct count, because arms with equal counts have equal values."""
    return [belief.index(each) for each in sorted(set(belief))]


def _update(belief: Belief, arm: int, change: int) -> Belief:
    """Return the belief after an arm has paid (`change` 1) or not (-1), in a standard form.

    Only differences between counts matter, and arms may be exchanged. So the smallest count is
    made 0, and the counts are sorted.
    """
    changed = [each + change * (number == arm) for number, each in enumerate(belief)]
    return tuple(sorted(each - min(changed) for each in changed))
