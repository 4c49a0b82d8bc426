"""Pay an explorer for information, and let an exploiter use it: MetaCURE (arXiv 2006.08170).

**Information bonus** (section 4 of the paper). An exploration policy gets, in addition to the
environment's reward, the information of a transition about the task:
log p(transition | task, context) - log p(transition | context). By Bayes' rule that is the change
of the log-probability of the true task. For turn t of episode k, where *member* is the hidden
opponent or task variant, it is

    i[k,t] = log q(member | observations up to this turn) - log q(member | those before it)

in nats, whose sum over a trial is the information at its end. q is the environment's exact filter
(`Environment.belief`) with its train members as prior, or it is learned, as MetaCURE does, with
counts n of what followed an action in a state:

    p(o | s, a)         = n[s, a, o] / n[s, a]                  over all trials of the batch
    p(o | s, a, member) = (n[member, s, a, o] + p(o | s, a)) / (n[member, s, a] + 1)
                                                                over the other trials of the member
    q(member | trial so far) ~ product of p(o | s, a, member) over its turns

with the members of the batch as prior. Counts of a member leave out the trial whose bonus is
computed, because the trial would identify itself. p(o | s, a) includes that trial: it is the same
for all members, and would otherwise be 0 / 0 if no other trial has the action a in s. The authors'
ten configurations pay the explorer its own reward in full, and the bonus with the weight 0.2 (eight
of them), 0.1 (one) or 3 (one).

The bonus is paid in every episode but the last, which is to be won and not to be learned from. The
bonus stays in the episode that earned it, whatever `credit.kind` does with other rewards:

    G[k,t] += weight * sum_{u>=t} turn_discount^(u-t) i[k,u]

An observation before the first action of an episode, such as a card, earns no bonus.

**Two policies.** The explorer plays all episodes but the last, the exploiter the last one; each is
a low-rank adapter of its own (`mage_async/learning/lora.py`), and no loss of one reaches the
other.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product, zip_longest
from typing import ClassVar, Literal

from mage_async.config.section import NonNegative, Section, Share
from mage_async.environments.environment import Belief, Environment, Play
from mage_async.environments.user_calls import make_pending_calls
from mage_async.errors import ConfigError
from mage_async.methods.method import Method, check_two_adapters, overriding
from mage_async.trajectory import Kind, Trial


class Settings(Section):
    """Rewards for information and a policy of two roles (MetaCURE, arXiv 2006.08170); see
    `docs/methods/metacure.md`."""

    information_bonus: NonNegative = 0.2
    """Reward per nat that a turn gains about the hidden member, in all episodes but the last. 0: no
    bonus."""
    inference: Literal["exact", "learned"] = "exact"
    """How the hidden member is inferred. "exact": by the environment's Bayes filter, which it must
    have. "learned": from counts, over the trials of a batch, of the observations that follow an
    action in a state."""
    separate_roles: bool = False
    """Episodes before the last are played by an explorer and the last by an exploiter, each a
    low-rank adapter of its own; needs `policy.lora`."""
    exploration_share: Share = 1.0
    """Share of the environment's return that turns before the last episode are credited with."""


class MetaCure(Method):
    """Pay for information, scale the return before the last episode, and train an explorer and an
    exploiter; each can be used without the others.
    """

    Settings = Settings
    presets: ClassVar = {
        "information_bonus": {"methods.metacure.information_bonus": 0.2},
        "metacure": {
            "methods.metacure.information_bonus": 0.2,
            "methods.metacure.separate_roles": True,
            "methods.metacure.exploration_share": 1.0,
            "policy.lora.rank": 16,
            "credit.kind": "single_episode",
            "advantage.scale": ["episode"],
        },
    }

    def check(self) -> None:
        """Refuse a bonus without an exact filter, trials that may end before their last episode,
        and roles with keys that need one policy.
        """
        settings = self.settings
        needs_last = settings.separate_roles or settings.exploration_share < 1.0
        if needs_last and self.config.trial.episode_budget:
            raise ConfigError(
                "methods.metacure: trial.episode_budget ends a trial before its last episode, the "
                "only one that the exploiter plays and that counts in full: set it to 0, or set "
                "methods.metacure.separate_roles = false and methods.metacure.exploration_share = 1"
            )
        if settings.exploration_share < 1.0 and self.config.trial.stop_on_success:
            raise ConfigError(
                "methods.metacure.exploration_share: a trial that ends with an early success would "
                "have no last episode, and its reward would not count in full: set "
                "trial.stop_on_success = false, or methods.metacure.exploration_share = 1"
            )
        if settings.information_bonus:
            self._check_bonus()
        if settings.separate_roles:
            check_two_adapters("methods.metacure.separate_roles", self.config)
        for key, off in (("separate_roles", "false"), ("information_bonus", "0")):
            if getattr(settings, key) and self.config.trial.episodes == 1:
                raise ConfigError(
                    f"methods.metacure.{key}: a trial of one episode has nothing before its last: "
                    f"set trial.episodes to at least 2, or set methods.metacure.{key} = {off}"
                )

    @property
    def rewards_need_environment(self) -> bool:
        """Whether an exact filter computes the bonus, for which the actions are played again."""
        settings = self.settings
        return bool(settings.information_bonus > 0 and settings.inference == "exact")

    def turn_rewards(self, trials: Sequence[Trial]) -> list[list[float]] | None:
        """Return the information bonus."""
        weight = self.settings.information_bonus
        if not weight:
            return None
        if self.settings.inference == "learned":
            return bonuses(trials, learned_gains(trials), weight)
        gains = [information_gain(trial, self.environment) for trial in trials]
        return bonuses(trials, gains, weight)

    def early_share(self) -> float:
        """Return `exploration_share`."""
        return float(self.settings.exploration_share)

    def roles(self) -> tuple[str, str] | None:
        """Return an explorer and an exploiter, where they are separate."""
        return ("explore", "exploit") if self.settings.separate_roles else None

    def _check_bonus(self) -> None:
        """Refuse a bonus that cannot be computed, or together with self-play."""
        name, weight = self.environment.facts.name, self.settings.information_bonus
        is_exact = self.settings.inference == "exact"
        if is_exact and filter_of(self.environment) is None:
            raise ConfigError(
                f"methods.metacure.information_bonus = {weight:g} needs an environment that knows "
                f"what its observations say of its members, and {name!r} does not: set it to 0, "
                'set methods.metacure.inference = "learned", or give the environment a `belief`'
            )
        if is_exact and self.config.population.rivals:
            raise ConfigError(
                "methods.metacure.information_bonus: the environment's filter can infer its own "
                "members, but no version of the policy as the opponent: set population.rivals = 0 "
                "or methods.metacure.information_bonus = 0"
            )
        if is_exact and self.config.trial.repeats == "fresh":
            raise ConfigError(
                "methods.metacure.information_bonus: to compute it, the actions of a trial are "
                'played again, and with trial.repeats = "fresh" the environment would answer them '
                'differently: set trial.repeats = "same", or methods.metacure.inference = "learned"'
            )
        # Methods with a share of self-play, in which the opponent is no member of the environment.
        if others := overriding(self.config, "self_play_share"):
            raise ConfigError(
                "methods.metacure.information_bonus is for one agent against the environment: set "
                f"it to 0, or leave methods.{others[0]} out"
            )


def filter_of(environment: Environment) -> Belief | None:
    """Return the environment's filter over its train members; None if it has no filter."""
    belief = getattr(environment, "belief", None)  # a user's class may lack the method
    return None if belief is None else belief("train")


def information_gain(trial: Trial, environment: Environment) -> list[float]:
    """Return the nats that each turn gained about the trial's member; 0 for turns that are remarks.

    The actions are played again: the same task with the same seed gives the same observations.
    """
    belief = filter_of(environment)
    assert belief is not None
    gains, plays, before = [], list[Play](), 0.0
    for turn in trial.turns:
        if turn.kind is not Kind.ACT:
            gains.append(0.0)
            continue
        if turn.episode == len(plays):
            plays.append(environment.begin(trial.task, turn.episode))
            make_pending_calls(plays[-1])
            # Includes the observation that begins the episode, so that it earns no bonus.
            before = math.log(belief(plays)[trial.task.member])
        plays[-1].act(turn.action)
        make_pending_calls(plays[-1])
        after = math.log(belief(plays)[trial.task.member])
        gains.append(after - before)
        before = after
    return gains


def learned_gains(trials: Sequence[Trial]) -> list[list[float]]:
    """Return the nats that each turn of each trial gained about its member, by counts over the
    batch (the equations of this module's docstring); 0 for turns that are remarks.
    """
    seen = [_outcomes(trial) for trial in trials]
    members = list(dict.fromkeys(trial.task.member for trial in trials))
    # How often an outcome followed a state and an action, by member; None is any member, or any
    # outcome.
    counts: Counter[tuple[str | None, StateAction, Outcome | None]] = Counter()
    for trial, outcomes in zip(trials, seen, strict=True):
        for pair, outcome in filter(None, outcomes):
            for whose, what in product((trial.task.member, None), (outcome, None)):
                counts[whose, pair, what] += 1

    def gains_of(
        trial: Trial, outcomes: Sequence[tuple[StateAction, Outcome] | None]
    ) -> list[float]:
        own: Counter[tuple[StateAction, Outcome | None]] = Counter()
        for pair, outcome in filter(None, outcomes):
            own.update([(pair, outcome), (pair, None)])
        logs = dict.fromkeys(members, 0.0)
        gains: list[float] = []
        before = -math.log(len(members))
        for each in outcomes:
            if each is None:
                gains.append(0.0)
                continue
            pair, outcome = each
            base = counts[None, pair, outcome] / counts[None, pair, None]  # p(o | s, a)
            for member in members:
                # n[member, s, a, o] and n[member, s, a], without the turns of this trial.
                is_own = member == trial.task.member
                hits = counts[member, pair, outcome] - is_own * own[pair, outcome]
                tries = counts[member, pair, None] - is_own * own[pair, None]
                logs[member] += math.log((hits + base) / (tries + 1))
            most = max(logs.values())
            total = most + math.log(sum(math.exp(log - most) for log in logs.values()))
            after = logs[trial.task.member] - total
            gains.append(after - before)
            before = after
        return gains

    return [gains_of(trial, outcomes) for trial, outcomes in zip(trials, seen, strict=True)]


StateAction = tuple[str, str]
"""A state, `Turn.anchor`, and an action."""
Outcome = tuple[float, tuple[int, ...]]
"""The reward, and the tokens of the prompt that follows."""


def _outcomes(trial: Trial) -> list[tuple[StateAction, Outcome] | None]:
    """Return state, action and outcome of each turn of a trial; None for turns that are remarks."""
    found: list[tuple[StateAction, Outcome] | None] = []
    for turn, after in zip_longest(trial.turns, trial.turns[1:]):
        if turn.kind is not Kind.ACT:
            found.append(None)
            continue
        stop = after.start if after is not None and after.segment == turn.segment else None
        tokens = trial.segments[turn.segment].tokens[turn.stop : stop]
        found.append(((turn.anchor, turn.action), (turn.reward, tuple(tokens.tolist()))))
    return found


def bonuses(
    trials: Sequence[Trial], gains: Sequence[Sequence[float]], weight: float
) -> list[list[float]]:
    """Return the bonus of each turn of each trial, in units of reward.

    Args:
        gains: nats of each turn of each trial.
        weight: reward per nat.
    """
    return [
        [
            weight * gain if turn.episode + 1 < trial.num_episodes else 0.0
            for turn, gain in zip(trial.turns, own, strict=True)
        ]
        for trial, own in zip(trials, gains, strict=True)
    ]
