"""Our client against AgentGym's own TextCraft server, and its own clients against our server.

AgentGym is not on PyPI (`agentenv` there is another package), so this needs a checkout of it:

    AGENTGYM=CHECKOUT AGENTGYM_PYTHON=PYTHON pytest -m slow tests/other_libraries -k agentgym

PYTHON has fastapi, uvicorn, gymnasium, requests, openai, torch and transformers.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments import catalogue
from mage_async.trajectory import Task
from mage_services.environments.call_runner import CallRunner
from tests.environments.loaders.playing import play_waiting, rehearsed
from tests.environments.loaders.serving import served

CHECKOUT, PYTHON = os.environ.get("AGENTGYM", ""), os.environ.get("AGENTGYM_PYTHON", "python3")
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="AGENTGYM names no checkout of AgentGym"),
]
SERVER = """
import socket, uvicorn
from agentenv_textcraft import app
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="critical")).run([listening])
"""


@pytest.fixture
def textcraft() -> Iterator[str]:
    """AgentGym's own server; it finds its recipes from the folder it is started in."""
    folder, command = Path(CHECKOUT) / "agentenv-textcraft", [PYTHON, "-c", SERVER]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


def test_our_client_plays_textcraft_and_it_repeats(textcraft: str) -> None:
    environment = catalogue.load(f"agentgym:{textcraft}")
    actions = ("craft nothing", "get 1 jungle logs", "craft 4 jungle planks using 1 jungle logs")

    async def play():
        async with CallRunner(EnvironmentConfig(step_deadline_s=20.0)) as workers:
            return await play_waiting(environment, "7", actions, workers)

    played = asyncio.run(play())
    assert played.said[0].endswith("Goal: craft jungle planks.")
    assert played.said[1:3] == ["Could not execute craft nothing", "Got 1 jungle logs"]
    assert (played.rewards, played.is_done) == ([0.0, 0.0, 1.0], True)
    assert "4 × reset took" in rehearsed(f"agentgym:{textcraft}")[1]


def test_clients_of_agentgym_see_what_is_played_here() -> None:
    sokoban, item, actions = catalogue.load("sokoban"), 3, ("up", "left", "right")
    own = sokoban.begin(Task("sokoban", sokoban.members("train")[item], item), 0)
    outcomes = [own.act(action) for action in actions]
    scores = accumulate(outcome.reward for outcome in outcomes)
    expected = [
        [outcome.observation, pytest.approx(score), outcome.is_done]
        for outcome, score in zip(outcomes, scores, strict=True)
    ]
    with served("sokoban", "--protocol", "agentgym") as address:
        script = str(HERE / "agentgym_client.py")
        path = f"{Path(CHECKOUT) / 'agentenv'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [PYTHON, script, address, str(item), *actions],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["BabyAIEnvClient"]["first"] == own.observation
    assert found["SciworldEnvClient"]["first"] == f"{sokoban.rules()}\n{own.observation}"
    for seen in found.values():
        assert seen["steps"] == expected
        assert seen["closed"] is True
