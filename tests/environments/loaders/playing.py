"""Environments of other libraries, played by a list of actions."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from mage_async.assembly import check, environment_of
from mage_async.config import config_file
from mage_async.environments.environment import Environment, Outcome
from mage_async.environments.user_calls import make_pending_calls
from mage_async.environments.user_class import ResetStep, ResetStepPlay
from mage_async.trajectory import Task
from mage_services.actor.rehearsal_runner import rehearse
from mage_services.environments.call_runner import CallRunner


@dataclass
class Played:
    """One episode, or the beginning of one."""

    said: list[str]
    rewards: list[float] = field(default_factory=list)
    is_valid: list[bool] = field(default_factory=list)
    is_done: bool = False

    def add(self, outcome: Outcome) -> None:
        self.said.append(outcome.observation)
        self.rewards.append(outcome.reward)
        self.is_valid.append(outcome.is_valid)
        self.is_done = outcome.is_done


def begin(environment: Environment, member: str) -> ResetStepPlay:
    play = environment.begin(Task(environment.facts.name, member, 0), 0)
    assert isinstance(play, ResetStepPlay)
    make_pending_calls(play)
    return play


def play(environment: Environment, member: str, actions: Iterable[str]) -> Played:
    """Play by a list of actions, until it or the episode ends."""
    own = begin(environment, member)
    played = Played([own.observation])
    for action in actions:
        answered = own.act(action)
        played.add(make_pending_calls(own) or answered)
        if own.is_done:
            break
    return played


async def play_waiting(
    environment: Environment, member: str, actions: Iterable[str], workers: CallRunner
) -> Played:
    """As `play`, where calls have to wait; the episode is closed at its end."""

    async def settle() -> Outcome | None:
        outcome = None
        while (call := own.next_call()) is not None:
            outcome = call.take(await workers.perform(call))
        return outcome

    own = environment.begin(Task(environment.facts.name, member, 0), 0)
    assert isinstance(own, ResetStepPlay)
    try:
        await settle()
        played = Played([own.observation])
        for action in actions:
            answered = own.act(action)
            played.add(await settle() or answered)
            if own.is_done:
                break
    finally:
        if (closing := own.closing()) is not None:
            await workers.perform(closing)
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
