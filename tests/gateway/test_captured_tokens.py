"""Random conversations with a real model: the trial has the engine's own tokens, each once."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mage_async.algorithm import InProcessRun
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.inference.chat_files import load_chat
from mage_async.learning.packing import training_sequences
from mage_async.policy.prepare import prepare_policy
from mage_async.trajectory import Group, Kind, Task, Trial
from mage_services.actor.rollout import play_trial
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.environments.call_runner import CallRunner
from tests.helpers.agent_site import Drawn, asked, post, said, stage_of, tasks_of

CHANGES = [
    "policy.kind=tiny",
    "environment.name=rps",
    "warm_start=none",
    "transcript.max_action_tokens=12",
    "engine.max_tokens=2048",
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
WORDS = st.sampled_from(["rock", "paper", "<|user|>", "episode 2", ""])
STEP = st.tuples(
    st.sampled_from(["go on", "again", "branch", "other", "two", "regex", "json", "tools"]),
    st.sampled_from(["chat/completions", "messages", "responses"]),
    WORDS,
    st.booleans(),
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    folder = tmp_path_factory.mktemp("tiny") / "policy"
    config = config_file.load(config_file.find(None), CHANGES)
    prepare_policy(config, folder, "a test", lambda progress: None)
    return config, folder


async def conversation(url: str, steps: list[tuple[str, str, str, bool]]) -> None:
    """Make calls of all kinds; answers are sent back as a client would."""
    talk = said("rock")
    for kind, path, words, is_streamed in steps:
        if kind == "go on":
            answer = await asked(url, talk)
            talk = [*talk, answer, {"role": "user", "content": words}]
        elif kind == "branch":
            await asyncio.gather(*(asked(url, [*talk[:-1], *said(each)]) for each in "ab"))
        elif kind == "other":
            body = {"messages": said(words or "x"), "input": words or "x", "stream": is_streamed}
            await post(url, path, body)
        elif kind == "two":
            await post(url, "chat/completions", {"messages": talk, "n": 2, "stop": [" rock", "e"]})
        elif kind == "regex":
            await asked(url, talk, regex=" (rock|paper){1,2}")
        elif kind == "json":
            schema = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            await asked(url, talk, response_format=form)
        elif kind == "tools":
            await asked(url, talk, tools=TOOLS, tool_choice="required")
        else:
            await asked(url, talk)


def capture(policy: tuple[Config, Path], steps: list[Any], *changes: str) -> tuple[Trial, Drawn]:
    """The trial of a conversation, and what the engine drew."""
    config, folder = policy
    chat = load_chat(folder)

    async def run(self: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
        await asked(url, said("first"))
        await conversation(url, steps)
        return 1.0

    environment = tasks_of(run, max_turns=200)

    async def main() -> tuple[Trial, Drawn]:
        async with EmbeddedEngine(folder, config.engine) as embedded, CallRunner(60) as workers:
            engine = Drawn(embedded)
            stage = stage_of(environment, chat, engine, *CHANGES[3:], *changes)
            run_ = stage.begin(Task("own", "3", 7), 0, "3.0")
            return await play_trial(run_, engine, workers), engine

    return asyncio.run(main())


def check(trial: Trial, drawn: Drawn) -> None:
    """Each completion stands in the trial once, behind its own prompt, and nothing else is
    trained on.
    """
    left = list(drawn.completions)
    num_sampled = 0
    for turn in trial.turns:
        segment = trial.segments[turn.segment]
        prompt, tokens = segment.tokens[: turn.start], segment.tokens[turn.start : turn.stop]
        place = next(
            n
            for n, (asked_, completion) in enumerate(left)
            if np.array_equal(asked_.tokens, prompt)
            and np.array_equal(completion.tokens[: len(tokens)], tokens)
        )
        _, completion = left.pop(place)
        own = slice(turn.start, turn.stop)
        logprobs = completion.logprobs[: len(tokens)]
        assert segment.logprobs[own].tobytes() == logprobs.tobytes()
        is_sampled = completion.is_sampled()[: len(tokens)]
        assert np.array_equal(segment.is_sampled[own], is_sampled)
        num_sampled += int(is_sampled.sum())
    assert not left
    assert trial.num_sampled() == num_sampled
    assert trial.num_extension_faults == 0


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(STEP, min_size=1, max_size=6))
def test_captured_tokens_are_those_that_the_engine_drew(
    policy: tuple[Config, Path], steps: list[Any]
) -> None:
    check(*capture(policy, steps))


NOTES = ("trial.memory=notes", "transcript.max_reflection_tokens=12", "transcript.rules=false")


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(STEP, min_size=1, max_size=6), st.integers(0, 3))
def test_with_notes_too_and_no_context_outgrows_its_room(
    policy: tuple[Config, Path], steps: list[Any], more: int
) -> None:
    room = 240 + 200 * more
    trial, drawn = capture(policy, steps, *NOTES, f"trial.room={room}")
    check(trial, drawn)
    assert all(
        len(asked_.tokens) + asked_.sampling.max_tokens <= room for asked_, _ in drawn.completions
    )


def test_captured_logprobs_are_the_learners_at_equal_version(policy: tuple[Config, Path]) -> None:
    config, folder = policy
    kinds = ("go on", "go on", "two", "regex", "json", "tools", "branch", "go on")
    trial, _ = capture(policy, [(kind, "chat/completions", "paper", False) for kind in kinds])
    run = InProcessRun(config, folder)
    sequences = training_sequences([Group(0, 0, (trial,))], config, "cpu")
    found = run._trainer.parity(sequences)
    assert any(segment.allowed is not None for segment in trial.segments)
    # Without a second trained token: each sampled token is in one sequence.
    assert found["equal_version_tokens"] == trial.num_sampled() > 50
    assert found["logprob_mismatch_max"] < 1e-4


def test_log_probs_of_a_program_with_notes_are_the_learners(policy: tuple[Config, Path]) -> None:
    config, folder = policy
    steps = [("go on", "chat/completions", "paper", False)] * 8
    trial, _ = capture(policy, steps, *NOTES, "trial.room=120")
    assert sum(turn.kind is Kind.NOTES for turn in trial.turns) > 2
    found = InProcessRun(config, folder)._trainer.parity(
        training_sequences([Group(0, 0, (trial,))], config, "cpu")
    )
    assert found["equal_version_tokens"] == trial.num_sampled()
    assert found["logprob_mismatch_max"] < 1e-4
