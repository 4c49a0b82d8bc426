"""An exploration bonus: what a turn was worth for finding out the hidden member.

MetaCURE (arXiv 2006.08170, section 4) pays an exploration policy, beside the environment's reward,
what a transition says about the task: log p(transition | task, context) - log p(transition |
context). By Bayes that is the change of the log-probability of the true task,

    i[k,t] = log q(member | all that was shown up to this turn) - log q(member | all before it)

in nats, and summed over a trial what is known at its end. MetaCURE learns both densities and takes
the difference of their prediction errors; here q is the environment's exact filter
(`Environment.belief`) with its train members as prior. Its weight there is 0.1.

The bonus is paid in every episode but the last, which is to be won and not to be learned from. It
stays in the episode that earned it, whatever the credit does with rewards:

    G[k,t] += weight * sum_{u>=t} turn_discount^(u-t) i[k,u]

What an episode shows before the first action, such as a card, earns no bonus.
"""

import math
from collections.abc import Sequence

from mage_async.config.sections.credit import Credit
from mage_async.environments.calls import settled
from mage_async.environments.environment import Belief, Environment, Play
from mage_async.errors import ConfigError
from mage_async.trajectory import Kind, Trial


def check(rules: Credit, environment: Environment) -> None:
    """Refuse a bonus where the environment has no exact filter.

    Raises:
        ConfigError: the environment has no Bayes filter.
    """
    if rules.information_bonus and filter_of(environment) is None:
        raise ConfigError(
            f"credit.information_bonus = {rules.information_bonus:g} needs an environment that "
            f"knows what its observations say of its members, and {environment.facts.name!r} does "
            "not: set it to 0, or give the environment a `belief`"
        )


def filter_of(environment: Environment) -> Belief | None:
    """The environment's filter over its train members; also of a class that has no such method."""
    found = getattr(environment, "belief", None)
    return None if found is None else found("train")


def information_gain(trial: Trial, environment: Environment) -> list[float]:
    """Nats that each turn gained about the trial's member, in order; 0 for remarks.

    The actions are played again: same task, same luck, same answers.
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
            settled(plays[-1])
            before = math.log(belief(plays)[trial.task.member])
        plays[-1].act(turn.action)
        settled(plays[-1])
        after = math.log(belief(plays)[trial.task.member])
        gains.append(after - before)
        before = after
    return gains


def bonuses(trials: Sequence[Trial], environment: Environment, weight: float) -> list[list[float]]:
    """What each turn of each trial is paid beside its reward, in units of reward."""
    return [
        [
            weight * gain if turn.episode + 1 < trial.num_episodes else 0.0
            for turn, gain in zip(trial.turns, information_gain(trial, environment), strict=True)
        ]
        for trial in trials
    ]
