"""Environments of other libraries, played by a list of actions."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from mage_async.assembly import check, environment_of
from mage_async.config import config_file
from mage_async.environments.calls import settled
from mage_async.environments.environment import Environment
from mage_async.environments.reset_step import ResetStep
from mage_async.environments.reset_step_play import ResetStepPlay
from mage_async.trajectory import Task
from mage_services.actor.rehearsing import rehearse


@dataclass
class Played:
    """One episode, or the beginning of one."""

    said: list[str]
    rewards: list[float] = field(default_factory=list)
    is_valid: list[bool] = field(default_factory=list)
    is_done: bool = False


def begin(environment: Environment, member: str) -> ResetStepPlay:
    play = environment.begin(Task(environment.facts.name, member, 0), 0)
    assert isinstance(play, ResetStepPlay)
    settled(play)
    return play


def play(environment: Environment, member: str, actions: Iterable[str]) -> Played:
    """Play by a list of actions, until it or the episode ends."""
    own = begin(environment, member)
    played = Played([own.observation])
    for action in actions:
        answered = own.act(action)
        outcome = settled(own) or answered
        played.said.append(outcome.observation)
        played.rewards.append(outcome.reward)
        played.is_valid.append(outcome.is_valid)
        played.is_done = outcome.is_done
        if own.is_done:
            break
    return played


def rehearsed(name: str, *assignments: str) -> list[str]:
    """What is said before a run of an environment starts; its configuration is checked."""
    given = ["policy.kind=pretrained", "policy.source=none", *assignments]
    config = config_file.load(config_file.find(None), [f"environment.name={name}", *given])
    check(config)
    said: list[str] = []
    environment = environment_of(config)
    assert isinstance(environment, ResetStep)
    asyncio.run(rehearse(config, name, environment, said.append))
    return said
