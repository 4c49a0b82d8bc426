"""Our client against the OpenEnv package's server, and its client against ours."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments import catalogue
from mage_async.errors import CallFault
from mage_async.trajectory import Task
from mage_services.environments.call_runner import CallRunner
from tests.environments.loaders.playing import Played, play_waiting, rehearsed
from tests.environments.loaders.serving import served
from tests.helpers.pages import ROOT, python_blocks
from tests.other_libraries.make_envs import OPENENV

HERE, PYTHON = Path(__file__).parent, OPENENV / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="run tests/other_libraries/make_envs.py first"),
]
GUESSES = (10, 5, 15, 3, 8, 13, 18, 1, 2, 4, 6, 7, 9, 11, 12, 14, 16, 17, 19, 20)


@pytest.fixture(scope="module")
def package_address() -> Iterator[str]:
    """The package's own server."""
    command = [str(PYTHON), str(HERE / "openenv_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.terminate()


def by_package(address: str, reset: dict[str, Any], actions: list[dict[str, Any]]) -> dict:
    """What the package's own client sees."""
    given = json.dumps({"reset": reset, "actions": actions})
    command = [str(PYTHON), str(HERE / "openenv_client.py"), address, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_us(address: str, member: str, *actions: str) -> Played:
    """What our client sees."""
    environment = catalogue.load(f"openenv:{address}")

    async def play() -> Played:
        async with CallRunner(EnvironmentConfig(step_deadline_s=20.0)) as workers:
            return await play_waiting(environment, member, actions, workers)

    return asyncio.run(play())


@pytest.mark.parametrize("seed", [0, 3, 11])
def test_our_client_sees_what_the_packages_own_client_sees(package_address: str, seed: int) -> None:
    own = by_package(package_address, {"seed": seed}, [{"number": each} for each in GUESSES])
    ours = by_us(package_address, str(seed), *map(str, GUESSES))
    assert ours.said == [
        "guess\nAnswer with the number: integer.",
        *(seen["hint"] for seen, _, _ in own["seen"][1:]),
    ]
    assert ours.rewards == [reward for _, reward, _ in own["seen"][1:]]
    assert ours.is_done
    assert own["seen"][-1][2]


def test_what_the_packages_server_refuses_is_the_agents_mistake(package_address: str) -> None:
    played = by_us(package_address, "3", "21", "seven", "10")
    assert played.is_valid == [False, False, True]
    assert played.said[1:3] == ["This is no valid action.", "Answer with the number: integer."]


def test_the_packages_server_is_rehearsed_and_frees_its_places(package_address: str) -> None:
    for _ in range(2):  # four sessions each, of the two it has room for
        assert "4 × reset took" in rehearsed(f"openenv:{package_address}")[1]


def test_the_packages_server_that_is_full_says_so_by_name(package_address: str) -> None:
    environment = catalogue.load(f"openenv:{package_address}")

    async def three() -> list[Any]:
        async with CallRunner(EnvironmentConfig(step_deadline_s=20.0)) as workers:
            plays = [environment.begin(Task("", str(task), 0), 0) for task in range(3)]
            calls = [workers.perform(play.next_call()) for play in plays]
            seen = await asyncio.gather(*calls, return_exceptions=True)
            for play in plays:
                await workers.perform(play.closing())
            return seen

    (fault,) = (each for each in asyncio.run(three()) if isinstance(each, CallFault))
    assert "raised CapacityReached: Server at capacity: 2/2 sessions active" in str(fault)


def test_the_lines_of_the_documents_play_with_the_packages_client() -> None:
    (lines,) = python_blocks(ROOT / "docs" / "environments_of_others.md")
    with served("rps") as address:
        program = "import asyncio\nfrom openenv.core.generic_client import GenericEnvClient\n"
        body = indent(lines.replace("http://127.0.0.1:8000", address), "    ")
        program += f"async def play():\n{body}    print(seen.done)\nasyncio.run(play())\n"
        command = [str(PYTHON), "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "False\n", done.stderr


def test_the_packages_client_sees_what_is_played_here() -> None:
    environment, moves = catalogue.load("rps"), ("rock", "paper", "scissors", "lizard") * 5
    member = environment.members("heldout")[3]
    own, here = environment.begin(Task("rps", member, 3), 0), []
    for move in moves:
        if own.legal_actions():
            outcome = own.act(move)
            here.append([outcome.observation, outcome.reward, outcome.is_done])
    with served("rps") as address:
        reset = {"seed": 3, "task": member, "episode_id": "mine"}
        theirs = by_package(address, reset, [{"action": move} for move in moves])
    assert [[seen["text"], reward, done] for seen, reward, done in theirs["seen"][1:]] == here
    assert theirs["state"] == {"episode_id": "mine", "step_count": len(here)}
