"""Random conversations with a real model: the trial has the engine's own tokens, each once."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mage_async.algorithm import InProcessRun
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.inference.chat_files import load_chat
from mage_async.learning.packing import training_sequences
from mage_async.policy.initial_policy import prepare_policy
from mage_async.trajectory import Group, Kind, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.rollout import play_trial
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.environments.call_runner import CallRunner
from tests.helpers.agent_site import Drawn, stage_of
from tests.helpers.random_clients import SETTINGS, Found, Seen, Step, clients, steps_of

SOURCES = st.randoms(use_true_random=False)


class Policy(NamedTuple):
    """A tiny policy, and how it is played."""

    config: Config
    folder: Path
    chat: ChatFormat


class Played(NamedTuple):
    """The trial of a conversation, what the engine drew, and what the client saw."""

    trial: Trial
    drawn: list[tuple[Prompt, Completion]]
    seen: Seen


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("tiny") / "policy"
    config = config_file.load(config_file.find(None), list(SETTINGS))
    prepare_policy(config, folder, lambda progress: None)
    return Policy(config, folder, load_chat(folder))


def capture(policy: Policy, steps: Sequence[Step], *changes: str) -> Played:
    """Play a trial of two episodes, each with the calls of the steps."""
    seen = {3: Seen()}
    environment = clients(lambda task, episode: steps, seen)

    async def main() -> Played:
        async with EmbeddedEngine(policy.folder, policy.config.engine) as embedded:
            engine = Drawn(embedded)
            stage = stage_of(environment, policy.chat, engine, *SETTINGS[3:], *changes)
            async with CallRunner(EnvironmentConfig(step_deadline_s=60)) as workers:
                run = stage.begin(Task("own", "3", 7), 0, "3.0")
                return Played(await play_trial(run, engine, workers), engine.completions, seen[3])

    return asyncio.run(main())


def faults_of(policy: Policy, played: Played) -> dict[str, int]:
    """What differs between a trial, what is trained on, and what the engine drew."""
    sequences = training_sequences([Group(0, 0, (played.trial,))], policy.config, "cpu", version=0)
    found = Found()
    found.check(played.trial, played.drawn, sequences, played.seen, policy.chat)
    return {name: number for name, number in found.faults().items() if number}


FEW = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(SOURCES)
def test_captured_tokens_are_those_that_the_engine_drew(policy: Policy, source: Random) -> None:
    played = capture(policy, steps_of(source))
    assert not faults_of(policy, played)
    assert not played.seen.refused


NOTES = ("trial.memory=notes", "transcript.max_action_tokens=12")


@FEW
@given(SOURCES, st.integers(0, 3))
def test_with_notes_too_and_no_context_outgrows_its_room(
    policy: Policy, source: Random, more: int
) -> None:
    room = 480 + 200 * more
    played = capture(policy, steps_of(source), *NOTES, f"trial.room={room}")
    assert not faults_of(policy, played)
    assert all(len(asked.tokens) + asked.sampling.max_tokens <= room for asked, _ in played.drawn)


def goes_on(*kinds: str) -> list[Step]:
    """Steps of a client of chat completions."""
    return [Step(kind, "chat/completions", "paper", False, None) for kind in kinds]


def test_a_trial_with_another_token_or_log_prob_or_with_a_turn_too_many_is_found(
    policy: Policy,
) -> None:
    whole = capture(policy, goes_on("go on", "go on"))
    segment, turn = whole.trial.segments[0], whole.trial.turns[1]
    assert not faults_of(policy, whole)

    def faults(**changed: object) -> dict[str, int]:
        own = replace(segment, **changed)
        trial = replace(whole.trial, segments=(own, *whole.trial.segments[1:]))
        return faults_of(policy, whole._replace(trial=trial))

    def altered(values: np.ndarray, value: float) -> np.ndarray:
        values = values.copy()
        values[turn.start] = value
        return values

    other = (segment.tokens[turn.start] + 1) % 256
    assert faults(tokens=altered(segment.tokens, other))["unequal"] == 1
    assert faults(logprobs=altered(segment.logprobs, -0.5)) == {
        "unequal": 1,
        "untrained": 1,
        "trained_twice": 1,
    }
    assert faults(is_sampled=altered(segment.is_sampled, 0)) == {"unequal": 1, "untrained": 1}
    assert faults_of(policy, whole._replace(drawn=whole.drawn[1:]))["forged"] == 1
    twice = replace(whole.trial, segments=(*whole.trial.segments, segment))
    of_copy = replace(turn, segment=len(whole.trial.segments))
    twice = replace(twice, turns=(*whole.trial.turns, of_copy))
    found = faults_of(policy, whole._replace(trial=twice))
    assert found["trained_twice"] == turn.stop - turn.start


def test_captured_logprobs_are_the_learners_at_equal_version(policy: Policy) -> None:
    steps = goes_on("go on", "go on", "two", "regex", "json", "tools", "branch", "go on")
    trial = capture(policy, steps).trial
    run = InProcessRun(policy.config, policy.folder)
    sequences = training_sequences([Group(0, 0, (trial,))], policy.config, "cpu", version=0)
    found = run._trainer.parity(sequences)
    assert any(segment.allowed is not None for segment in trial.segments)
    # Without a second trained token: each sampled token is in one sequence.
    assert found["equal_version_tokens"] == trial.num_sampled() > 50
    assert found["logprob_mismatch_max"] < 1e-4


def test_log_probs_of_a_program_with_notes_are_the_learners(policy: Policy) -> None:
    trial = capture(policy, goes_on(*["go on"] * 8), *NOTES, "trial.room=120").trial
    assert sum(turn.kind is Kind.NOTES for turn in trial.turns) > 2
    found = InProcessRun(policy.config, policy.folder)._trainer.parity(
        training_sequences([Group(0, 0, (trial,))], policy.config, "cpu", version=0)
    )
    assert found["equal_version_tokens"] == trial.num_sampled()
    assert found["logprob_mismatch_max"] < 1e-4
