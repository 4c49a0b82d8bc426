"""Rollouts of verifiers itself, in a process of its own: its loop calls the policy."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mage_async.environments import catalogue
from mage_async.environments.agent import AgentTasks
from mage_async.errors import CallFault, ConfigError
from mage_async.trajectory import Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.rehearsal_runner import rehearse_all
from mage_services.verifiers import process
from tests.helpers.agent_site import config_of, played, scripted, small_chat
from tests.other_libraries.make_envs import VERIFIERS

HERE, PYTHON = Path(__file__).parent, VERIFIERS / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason="run tests/other_libraries/make_envs.py first"),
]
GUESSES = ("10", "5", "15", "3", "8", "13", "18")


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatFormat:
    """The taskset lies in the current folder."""
    monkeypatch.chdir(HERE)
    return small_chat(tmp_path)


def rollouts(
    chat: ChatFormat, tasks: tuple[str, ...], *words: str, **options: Any
) -> list[Trial | BaseException]:
    """Trials of one process of verifiers, in which each conversation says the words in order."""
    given = {"python": str(PYTHON), "size": 20} | options
    environment = catalogue.load("verifiers:number_taskset", **given)
    assert isinstance(environment, AgentTasks)
    engine = scripted(chat, *words, by_context=True)
    return played(environment, chat, engine, "trial.memory=none", tasks=tasks, deadline_s=120.0)


def test_returns_are_those_of_the_packages_own_loop_however_many_play_at_once(
    chat: ChatFormat,
) -> None:
    tasks = [1, 3, 4, 7]
    given = json.dumps({"tasks": tasks, "guesses": GUESSES})
    command = [str(PYTHON), str(HERE / "verifiers_own_loop.py"), given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    own = json.loads(done.stdout)
    ours = rollouts(chat, tuple(map(str, tasks)), *GUESSES)
    assert any(each["reward"] for each in own)
    for trial, theirs in zip(ours, own, strict=True):
        assert isinstance(trial, Trial), trial
        assert trial.episode_rewards() == [theirs["reward"]] * 2
        assert len(trial.segments) == 2, "a rollout is one conversation"
        text = chat.decode(trial.segments[0].tokens.tolist())
        assert [part.split("<|assistant|>")[0].strip() for part in text.split("<|user|>")[1:]] == (
            theirs["said"][: len(trial.turns) // 2]
        )


def test_a_failing_rollout_costs_itself_and_a_dead_process_is_started_again(
    chat: ChatFormat,
) -> None:
    (failed,) = rollouts(chat, ("3",), "raise")
    assert isinstance(failed, CallFault)
    assert "no number" in str(failed)
    (died,) = rollouts(chat, ("3",), "exit")
    assert "EnvironmentFault: the process of verifiers has ended" in str(died)


def test_a_process_ends_when_it_is_idle(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_S", 0.0)
    (trial,) = rollouts(chat, ("3",), *GUESSES)  # a process of its own for each episode
    assert isinstance(trial, Trial), trial


def test_a_taskset_is_configured(chat: ChatFormat) -> None:
    (trial,) = rollouts(chat, ("3",), *GUESSES, environment={"taskset": {"highest": 4}})
    assert isinstance(trial, Trial), trial
    text = chat.decode(trial.segments[0].tokens.tolist())
    assert text.startswith("<|system|> Be brief.<|user|> Guess a number from 1 to 4.")


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("number_taskset", 21, "number_taskset has 20 tasks: lower `size`"),
        ("no_taskset", 20, "no_taskset: ModuleNotFoundError: taskset 'no_taskset' not found"),
    ],
)
def test_a_taskset_that_cannot_be_played_is_refused_before_the_run(
    chat: ChatFormat, name: str, size: int, message: str
) -> None:
    given = [f"environment.options.python={PYTHON}", f"environment.options.size={size}"]
    config = config_of(f"environment.name=verifiers:{name}", *given)
    with pytest.raises(ConfigError, match=message):
        rehearse_all(config, print)
