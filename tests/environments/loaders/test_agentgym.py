"""AgentGym: our client and our server speak with each other; what goes wrong is one sentence."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments import catalogue
from mage_async.environments.environment import Environment
from mage_async.environments.loaders.agentgym import Reader, handle_of, reset_body
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault, ConfigError, EnvironmentFault
from mage_async.trajectory import Task
from mage_services.environments.call_runner import CallRunner
from mage_services.serving.agentgym_server import AgentGymServer
from mage_services.serving.session import Limits
from tests.environments.loaders.playing import Played, play_waiting, rehearsed
from tests.environments.loaders.serving import served

AGENTGYM = ("--protocol", "agentgym")


@pytest.fixture(scope="module")
def sokoban() -> Iterator[str]:
    """A server of Sokoban with room for two sessions."""
    with served("sokoban", *AGENTGYM, "--sessions", "2") as found:
        yield found


def here(environment: Environment, item: int) -> tuple[list[str], Played]:
    """What a script does in an episode of a data item in this process, and what it sees."""
    members = (*environment.members("train"), *environment.members("heldout"))
    own = environment.begin(Task(environment.facts.name, members[item], item), 0)
    script, actions, played = environment.script(random.Random(5)), [], Played([own.observation])
    assert script is not None
    while not played.is_done:
        actions.append(script.choose(own))
        played.add(own.act(actions[-1]))
    return actions, played


def there(address: str, item: int, actions: Sequence[str], deadline_s: float = 20.0) -> Played:
    """The same over the network."""
    environment = catalogue.load(f"agentgym:{address}", tasks=2048)

    async def play() -> Played:
        async with CallRunner(EnvironmentConfig(step_deadline_s=deadline_s)) as workers:
            return await play_waiting(environment, str(item), actions, workers)

    return asyncio.run(play())


def asked(address: str, *requests: tuple[str, Any]) -> list[tuple[int, Any]]:
    """What the server answers to raw requests, with its status."""

    async def talked() -> list[tuple[int, Any]]:
        answers = []
        async with aiohttp.ClientSession() as http:
            for path, fields in requests:
                body = {"data": fields} if isinstance(fields, bytes) else {"json": fields}
                send = http.get if path.startswith("observation") else http.post
                async with send(f"{address}/{path}", **body) as answer:
                    answers.append((answer.status, await answer.json(content_type=None)))
        return answers

    return asyncio.run(talked())


@pytest.mark.parametrize("name", ["sokoban", "shop"])
def test_an_episode_over_the_network_is_the_episode_here(name: str) -> None:
    environment, returns = catalogue.load(name), []
    num_train = len(environment.members("train"))
    with served(name, *AGENTGYM) as address:
        for item in (0, 7, num_train + 3):
            actions, own = here(environment, item)
            played = there(address, item, actions)
            assert played.said == [f"{environment.rules()}\n{own.said[0]}", *own.said[1:]]
            assert played.rewards == pytest.approx(own.rewards, abs=1e-9)
            assert (played.is_valid, played.is_done) == (own.is_valid, True)
            returns.append(sum(own.rewards))
    assert any(returns), "the script has earned nothing, so equal returns say nothing"


def test_a_remote_environment_is_rehearsed_and_frees_its_places(sokoban: str) -> None:
    for _ in range(2):  # four sessions each, of the two that the server has room for
        assert "4 × reset took" in rehearsed(f"agentgym:{sokoban}")[1]


def test_listed_actions_refuse_others_without_a_step(sokoban: str) -> None:
    refused = there(sokoban, 3, ["pull"])
    assert refused.is_valid == [False]
    assert "these can: up, down, left, right" in refused.said[1]


def test_a_server_that_is_full_says_so_by_name(sokoban: str) -> None:
    first, second = (number["id"] for _, number in asked(sokoban, ("create", {}), ("create", {})))
    with pytest.raises(
        CallFault, match=r"raised CapacityReached: \S+/create has no room: .*all 2 "
    ):
        there(sokoban, 3, [])
    closings = [("close", {"id": number}) for number in (first, second, second, [])]
    assert asked(sokoban, *closings) == [(200, True), (200, True), (200, False), (200, False)]


def test_what_cannot_be_read_is_answered_and_the_session_goes_on(sokoban: str) -> None:
    ((_, created),) = asked(sokoban, ("create", None))
    number = created["id"]
    answers = asked(
        sokoban,
        ("step", b"{"),
        ("step", b"[" * 5000),
        ("observation?id=%C2%B2", None),
        ("step", []),
        ("step", {"action": "up"}),
        ("step", {"id": 10_000, "action": "up"}),
        ("reset", {"id": number, "data_idx": -1}),
        ("step", {"id": number, "action": "up"}),
        ("reset", {"id": number, "data_idx": 5}),
        ("step", {"id": number, "move": "up"}),
        ("step", {"id": number, "action": "up"}),
        ("close", {"id": number}),
    )
    is_error = ["error" in said if isinstance(said, dict) else None for _, said in answers]
    assert is_error == [*[True] * 8, False, True, False, None]
    assert answers[8][1]["task_description"] == catalogue.load("sokoban").rules()
    assert answers[10][1]["score"] == answers[10][1]["reward"] == pytest.approx(-0.1)


def test_a_session_without_a_request_is_closed_and_its_place_is_free() -> None:
    with served("rps", *AGENTGYM, "--sessions", "1", "--idle", "1") as address:

        async def idle() -> list[dict]:
            async with aiohttp.ClientSession(f"{address}/") as http:

                async def post(path: str, **fields: Any) -> dict:
                    async with http.post(path, json=fields) as answer:
                        return await answer.json()

                number = (await post("create"))["id"]
                await asyncio.sleep(1.5)
                return [await post("create"), await post("reset", id=number)]

        created, gone = asyncio.run(idle())
    assert created == {"id": 1}
    assert gone["error"] == "there is no environment 0: it was closed, or was idle"


def test_a_truth_value_names_no_session() -> None:
    with served("sokoban", *AGENTGYM) as address:
        _, second = asked(address, ("create", {}), ("create", {}))
        assert second == (200, {"id": 1})  # to Python, true is equal to 1
        closed, reset = asked(address, ("close", {"id": True}), ("reset", {"id": True}))
        assert closed == (200, False)
        assert reset[1]["error"].startswith("there is no environment True")
        assert asked(address, ("close", {"id": 1})) == [(200, True)]


def test_a_page_of_another_site_is_refused(sokoban: str) -> None:
    async def status(origin: str) -> int:
        headers = {"Origin": origin}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{sokoban}/", headers=headers) as answer,
        ):
            return answer.status

    assert asyncio.run(status("http://evil.example")) == 403
    assert asyncio.run(status(sokoban)) == 200


@pytest.mark.parametrize("is_waiting", [True, False], ids=["before its turn", "in its call"])
def test_a_session_that_is_closed_during_a_reset_begins_no_episode(is_waiting: bool) -> None:
    called, goes_on, is_over = (threading.Event() for _ in range(3))

    class Slow:
        """Rules."""

        def reset(self, seed: int, task: int) -> str:
            called.set()
            goes_on.wait(20)
            return "begun"

        def step(self, action: str) -> tuple[str, float, bool]:
            return "over", 0.0, True

        def close(self) -> None:
            is_over.set()

    async def main() -> dict[str, Any]:
        async with CallRunner(EnvironmentConfig(step_deadline_s=20.0)) as workers:
            server = AgentGymServer(ResetStep(Slow, {}), Limits(1, 20.0), workers)
            async with TestClient(TestServer(server.application)) as client:
                await client.post("/create")
                opened = server._open[0]
                turn = opened.turn if is_waiting else nullcontext()
                async with turn:
                    first = opened.closes
                    reset = asyncio.create_task(client.post("/reset", json={"id": 0}))
                    while opened.closes is first:  # noqa: ASYNC110 - until the request has come
                        await asyncio.sleep(0.01)
                    assert is_waiting or await asyncio.to_thread(called.wait, 20)
                    assert await (await client.post("/close", json={"id": 0})).json() is True
                goes_on.set()
                return await (await reset).json()

    error = asyncio.run(main())["error"]
    assert "was closed" in error
    assert called.is_set() == is_over.is_set() == (not is_waiting)


async def begun_then(address: str, pause: Callable[[], Awaitable[None]]) -> None:
    """Begin an episode, let something happen, then step."""
    environment = catalogue.load(f"agentgym:{address}")
    async with CallRunner(EnvironmentConfig(step_deadline_s=20.0)) as workers:
        play = environment.begin(Task("late", "3", 0), 0)
        while (call := play.next_call()) is not None:
            call.take(await workers.perform(call))
        await pause()
        play.act("up")
        try:
            await workers.perform(play.next_call())
        finally:
            with suppress(CallFault):  # nobody is there to close it
                await workers.perform(play.closing())


def test_a_server_that_ended_is_one_sentence_with_environment_and_turn() -> None:
    with ExitStack() as serving:
        address = serving.enter_context(served("sokoban", *AGENTGYM))

        async def end() -> None:
            serving.close()

        said = (
            rf"^agentgym:{address}, task 3, seed 0, episode 1, turn 1: step\('up'\) raised \w+: .+"
        )
        with pytest.raises(CallFault, match=said):
            asyncio.run(begun_then(address, end))


SLOW = """
import time
class Slow:
    "Rules."
    def reset(self, seed, task): return "begun"
    def step(self, action):
        if action == "fail": raise ValueError("broken")
        if action == "sleep": time.sleep(3)
        return action, 1.0, False
"""


def test_a_slow_server_and_a_failing_one_are_one_sentence(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    with served("own_slow:Slow", *AGENTGYM) as address:
        assert there(address, 3, ["a"]).said == ["Rules.\nbegun", "a"]
        late = r"^agentgym:\S+, task 3, .*turn 1: step\('sleep'\) took longer than environment.step"
        with pytest.raises(CallFault, match=late):
            there(address, 3, ["sleep"], deadline_s=1.0)
        broken = r"turn 2: step\('fail'\) raised EnvironmentFault: the server's .* ValueError: bro"
        with pytest.raises(CallFault, match=broken):
            there(address, 3, ["a", "fail"])


@pytest.fixture
def made_up() -> Callable[..., Played]:
    """A server of made-up answers, by path: a status and a body."""

    async def play(answers: dict[str, tuple[int, str]], *actions: str) -> Played:
        async def answered(request: Any) -> Any:
            status, body = answers.get(request.path, (404, "no such page"))
            return web.Response(status=status, text=body)

        application = web.Application()
        application.router.add_post("/{path}", answered)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        environment = catalogue.load(f"agentgym:http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            async with CallRunner(EnvironmentConfig(step_deadline_s=10.0)) as workers:
                return await play_waiting(environment, "3", actions, workers)
        finally:
            await runner.cleanup()

    return lambda answers, *actions: asyncio.run(play(answers, *actions))


def test_a_server_of_bare_numbers_and_texts_is_played(made_up) -> None:
    """As WebShop's, whose observation is a `state`, and which knows no `close`."""
    step = '{"state": "bought", "reward": 0.5, "done": true, "info": null}'
    answers = {"/create": (200, "12"), "/reset": (200, '["a shop", null]'), "/step": (200, step)}
    played = made_up(answers, "click[buy now]")
    assert (played.said, played.rewards, played.is_done) == (["a shop", "bought"], [0.5], True)


@pytest.mark.parametrize(
    ("create", "said"),
    [
        ((404, "<html>"), r"reset\(\) raised EnvironmentFault: http\S+/create answered 404 Not F"),
        ((200, "<html>"), r"the answer of .*/create is no JSON: '<html>'"),
        ((200, '{"error": "no game"}'), r"the answer to `create` names no environment: .*no game"),
    ],
)
def test_a_server_of_something_else_is_one_sentence(made_up, create, said: str) -> None:
    with pytest.raises(CallFault, match=said):
        made_up({"/create": create})


def test_a_task_is_sent_under_every_name_that_servers_ask_for() -> None:
    assert handle_of({"id": 4, "observation": "hi"}) == {"id": 4}
    assert handle_of(7) == handle_of({"env_idx": 7}) == {"env_idx": 7}
    named = reset_body({"id": 4}, 9)
    assert (named["id"], named["data_idx"]) == (4, 9)
    bare = reset_body({"env_idx": 7}, 9)
    assert (bare["env_idx"], bare["id"], bare["session_id"], bare["item_id"]) == (7, 9, 9, 9)


def test_a_reward_is_what_the_score_has_grown_by() -> None:
    reader = Reader()
    assert (
        reader.read_reset(
            {"task_description": "Boil water.", "observation": "A kitchen.", "score": 2}
        ).text
        == "Boil water.\nA kitchen."
    )
    given = [{"observation": "", "reward": 5, "score": score} for score in (2, 2.1, 2.3)]
    assert [reader.read_step(each).reward for each in given] == [0.0, 0.1, 0.2]
    assert reader.read_step({"observation": "", "reward": 1.5}).reward == 1.5
    with pytest.raises(EnvironmentFault, match=r"without an observation: {'reward': 1}"):
        reader.read_step({"reward": 1})


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="write it as agentgym:http://HOST:PORT"):
        catalogue.load("agentgym:localhost:36001")
    with pytest.raises(ConfigError, match="`tasks` must be"):
        catalogue.load("agentgym:http://127.0.0.1:9", tasks=1)
    with pytest.raises(ConfigError, match=r"reset\(\) raised ClientConnectorError: Cannot connect"):
        rehearsed("agentgym:http://127.0.0.1:9")
