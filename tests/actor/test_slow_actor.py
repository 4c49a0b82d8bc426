"""A slow actor among fast ones: real coordinator, ledger, actors and wire in one process; engines
without a model draw each turn with the version that they hold at its end.
"""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from mage_async.admission.ledger import Ledger
from mage_async.admission.policies import POLICIES
from mage_async.completion import Sampling
from mage_async.environments.catalogue import load
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.protocol.messages import Hello, Publication
from mage_async.tasks.task_stream import TaskStream
from mage_async.trajectory import Group
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.prompts import prompts_for
from mage_async.trials.trial_config import TrialConfig
from mage_services.actor.actor import Actor, receiving
from mage_services.actor.rollout import Stage
from mage_services.learner.coordinator import Coordinator
from mage_services.weights.weight_store import WeightStore
from tests.helpers.completions import policy_per_token
from tests.helpers.coordinator_site import coordinator_config
from tests.helpers.memory_channels import MemoryJournal, MemoryLearnerChannel, MemoryWeights
from tests.helpers.scripted_engine import Pace, ScriptedEngine, UniformWords

BOUND, BATCH, TRIALS, STEPS = 2, 3, 2, 25
PACES: tuple[Pace, ...] = (lambda trial: 0.0, lambda trial: 0.0, lambda trial: 0.01)
"""Seconds a turn of each actor; a trial has twelve turns."""


def _stage(directory: Path, pace: Pace) -> Stage:
    environment = load("rps")
    save_tokenizer(build_tokenizer(environment.facts.words), directory)
    chat, parser = load_chat(directory), ActionParser("both")
    words = prompts_for(environment, 3, rules=False)
    rules = TrialConfig(3, Sampling(), 1, parser, words, keeps_history=True, reflects=False)
    answers = UniformWords(chat, parser, ("rock", "paper", "scissors"))
    return Stage(environment, rules, chat, ScriptedEngine(answers, pace))


def _publication(version: int) -> Publication:
    return Publication(version=version, path="no-weights", digest="none")


async def _inbox(channel: MemoryLearnerChannel, coordinator: Coordinator) -> None:
    while True:
        coordinator.take(*await channel.receive())


async def _act(channel: MemoryLearnerChannel, stage: Stage, name: str) -> None:
    hello = Hello(role="actor", name=name, build="test", config_digest="test", group_quota=3)
    peer = channel.connect(hello)
    async with receiving(peer) as messages:
        await Actor(peer, stage, name).run(await messages.get(), messages)


async def _learn(coordinator: Coordinator) -> list[list[Group]]:
    """Train every step in no time; the batches in order."""
    batches = []
    coordinator.open(_publication(0))
    for version in range(1, STEPS + 1):
        while (groups := coordinator.ledger.take_batch()) is None:
            coordinator.arrived.clear()
            await coordinator.arrived.wait()
        batches.append(groups)
        coordinator.trained(version)
        coordinator.publish(_publication(version))
    return batches


async def _train(rule: str, directory: Path) -> tuple[Coordinator, list[list[Group]]]:
    channel = MemoryLearnerChannel()
    stages = [_stage(directory, pace) for pace in PACES]
    ledger = Ledger(BATCH, BOUND, TRIALS, policy=POLICIES[rule])
    rules = coordinator_config(60.0, steps=STEPS)
    tasks = TaskStream(stages[0].environment, 0)
    weights = WeightStore(MemoryWeights())
    coordinator = Coordinator(
        channel, ledger, MemoryJournal(), tasks, rules, time.monotonic, weights
    )
    async with asyncio.TaskGroup() as group:
        inbox = group.create_task(_inbox(channel, coordinator))
        for number, stage in enumerate(stages):
            group.create_task(_act(channel, stage, f"actor-{number}"))
        batches = await _learn(coordinator)
        coordinator.dismiss("enough")
        inbox.cancel()
    return coordinator, batches


def _staleness(batches: list[list[Group]]) -> int:
    """The largest of any token trained, in steps."""
    ages = [
        version - policy_per_token(segment.versions, len(segment.tokens))[segment.is_sampled]
        for version, batch in enumerate(batches)
        for group in batch
        for trial in group.trials
        for segment in trial.segments
    ]
    return int(np.concatenate(ages).max())


@pytest.mark.parametrize("rule", ["slots", "strict"])
def test_a_slow_actor_never_breaks_the_bound(rule: str, tmp_path: Path) -> None:
    coordinator, batches = asyncio.run(_train(rule, tmp_path))
    assert _staleness(batches) <= BOUND
    assert all(version - group.version <= BOUND for version, b in enumerate(batches) for group in b)
    counts = coordinator.ledger.counts().groups
    assert counts.granted == counts.trained + counts.in_flight


def test_the_same_slow_actor_breaks_it_where_only_the_mean_is_bounded(tmp_path: Path) -> None:
    _, batches = asyncio.run(_train("count", tmp_path))
    late = [version - g.version for version, batch in enumerate(batches) for g in batch]
    assert max(late) > BOUND


def test_drop_holds_the_bound_by_dropping_groups(tmp_path: Path) -> None:
    coordinator, batches = asyncio.run(_train("drop", tmp_path))
    assert _staleness(batches) <= BOUND
    assert coordinator.ledger.counts().groups.dropped > 0
