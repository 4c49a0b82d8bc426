"""An actor between a learner in memory and an engine without a model; a test is the learner."""

import asyncio
import math
from collections.abc import Callable

import msgspec

from mage_async.completion import Sampling
from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments.catalogue import load
from mage_async.environments.environment import Environment
from mage_async.protocol.messages import (
    Acknowledge,
    EpisodeResult,
    Goodbye,
    GroupGrant,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Publication,
    TrialResult,
    Welcome,
)
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.prompts import prompts_for
from mage_async.trials.trial_config import TrialConfig
from mage_services.actor.actor import Actor, receiving
from mage_services.actor.rollout import Retries, Stage
from mage_services.environments.call_runner import CallRunner
from tests.helpers.memory_channels import MemoryLearnerChannel
from tests.helpers.scripted_engine import Answers, Pace, ScriptedEngine, UniformWords

PATIENCE_S = 60.0
"""For a loaded machine; nothing here takes a tenth of a second on an idle one."""
TRIALS = 2
FOREVER_S = 3600.0


MEMBER = load("rps").members("train")[0]


def grant(number: int, **changed: object) -> GroupGrant:
    """A group of a trial or two; it has all the time it needs."""
    plain = GroupGrant(
        grant=number,
        epoch=0,
        environment="rps",
        member=MEMBER,
        seat=0,
        seed=5,
        num_trials=TRIALS,
        num_episodes=3,
        version=0,
        deadline_s=FOREVER_S,
    )
    return msgspec.structs.replace(plain, **changed)


def welcome(version: int = 0) -> Welcome:
    return Welcome(version=version, weights_path="no-weights")


def publication(version: int) -> Publication:
    return Publication(version=version, path="no-weights", digest="none")


def acknowledge(result: TrialResult) -> Acknowledge:
    return Acknowledge(
        grant=result.grant, epoch=result.epoch, trial=result.trial.index, is_duplicate=False
    )


def slow(*grants: int) -> Pace:
    """Trials of these groups never end."""
    return lambda trial: FOREVER_S if int(trial.split(".")[0]) in grants else 0.0


class Site:
    """An actor that has been welcomed with version 0, and the learner's end of its channel."""

    def __init__(
        self,
        environment: Environment,
        chat: ChatFormat,
        pace: Pace,
        answers: Answers | None,
        step_deadline_s: float = math.inf,
        num_processes: int = 0,
        retries: int = 0,
    ) -> None:
        self.began = asyncio.get_running_loop().time()
        parser = ActionParser("both")
        moves = ("rock", "paper", "scissors")
        self.engine = ScriptedEngine(answers or UniformWords(chat, parser, moves), pace, version=0)
        words = prompts_for(environment, 3, rules=False)
        sampling = Sampling(max_tokens=8192)
        rules = TrialConfig(3, sampling, 1, parser, words, keeps_history=True, reflects=False)
        self.learner = MemoryLearnerChannel()
        hello = Hello(
            role="actor", name="actor-0", build="test", config_digest="test", group_quota=8
        )
        self._peer = self.learner.connect(hello)
        self.workers = CallRunner(
            EnvironmentConfig(step_deadline_s=step_deadline_s, workers=num_processes)
        )
        retrying = Retries(retries)
        self.stage = Stage(environment, rules, chat, self.engine, self.workers, retrying)
        self.actor = asyncio.ensure_future(self._act())

    async def _act(self) -> str:
        async with receiving(self._peer) as messages:
            return await Actor(self._peer, self.stage, "actor-0").run(welcome(), messages)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.learner.send(self._peer.peer, message)

    async def hear(self) -> Message:
        """The actor's next message but heartbeats, finished episodes and what it has loaded."""
        while True:
            _, message = await self.learner.receive()
            if not isinstance(message, EpisodeResult | Heartbeat | Hello | Loaded):
                return message

    async def beat(self) -> Heartbeat:
        """The actor's next heartbeat."""
        while True:
            _, message = await self.learner.receive()
            if isinstance(message, Heartbeat):
                return message

    async def loaded(self) -> int:
        """The version that the actor says it has loaded next."""
        while True:
            _, message = await self.learner.receive()
            if isinstance(message, Loaded):
                return message.version

    async def results(self, count: int) -> list[TrialResult]:
        """The next messages, all of them results."""
        heard = [await self.hear() for _ in range(count)]
        results = [message for message in heard if isinstance(message, TrialResult)]
        assert len(results) == count, heard
        return results

    async def goodbye(self) -> str:
        """End the actor; what its `run` returned."""
        self.say(Goodbye(reason="the run is complete"))
        return await self.actor


Run = Callable[..., None]


def groups_being_played() -> set[str]:
    return {t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("group ")}
