"""OpenEnv: our client and our server speak with each other; a session ends when it should."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments import catalogue
from mage_async.environments.loaders.openenv import form_of, observed
from mage_async.errors import CallFault, ConfigError, EnvironmentFault
from mage_async.trajectory import Task
from mage_services.environments.call_runner import CallRunner
from tests.environments.loaders.playing import Played, play_waiting, rehearsed
from tests.environments.loaders.serving import served

aiohttp = pytest.importorskip("aiohttp")
MOVES = ("rock", "paper", "scissors", "rock", "rock", "rock", "rock", "rock", "rock")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of rock–paper–scissors with room for two sessions of two seconds."""
    with served("rps", "--sessions", "2", "--idle", "1") as found:
        yield found


def played(address: str, *actions: str, times: int = 1) -> list[Played]:
    """Episodes of one seed, one after the other."""
    environment = catalogue.load(f"openenv:{address}")

    async def play() -> list[Played]:
        async with CallRunner(EnvironmentConfig(step_deadline_s=10.0)) as workers:
            return [await play_waiting(environment, "3", actions, workers) for _ in range(times)]

    return asyncio.run(play())


def talk(address: str, *requests: str | dict) -> list[dict]:
    """What the server answers to raw messages of one session."""

    async def talked() -> list[dict]:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{address}/ws") as socket:
            answers = []
            for request in requests:
                text = request if isinstance(request, str) else json.dumps(request)
                await socket.send_str(text)
                answers.append(await socket.receive_json())
            return answers

    return asyncio.run(talked())


def test_an_episode_over_the_network_is_the_episode_here(address: str) -> None:
    rps = catalogue.load("rps")
    member, seat = rps.members("train")[3], rps.seats()[3 % len(rps.seats())]
    own = rps.begin(Task("rps", member, 3, seat), 0)
    here = Played([own.observation])
    for move in MOVES:
        if own.legal_actions():
            here.add(own.act(move))
    first, again = played(address, *MOVES, times=2)
    assert first == again == here
    assert first.is_done
    refused = played(address, "lizard")[0]
    assert refused.is_valid == [False]
    assert "these can: rock, paper, scissors" in refused.said[1]


def test_a_remote_environment_is_rehearsed(address: str) -> None:
    assert "4 × reset took" in rehearsed(f"openenv:{address}")[1]


def test_a_server_that_is_full_says_so_by_name(address: str) -> None:
    async def third() -> None:
        environment = catalogue.load(f"openenv:{address}")
        async with (
            CallRunner(EnvironmentConfig(step_deadline_s=10.0)) as workers,
            aiohttp.ClientSession(f"{address}/") as http,
            http.ws_connect("ws"),
            http.ws_connect("ws"),
        ):
            await play_waiting(environment, "3", (), workers)

    with pytest.raises(CallFault, match=r"raised CapacityReached: Server at capacity: 2/2"):
        asyncio.run(third())
    assert played(address, "rock")[0].rewards  # those that held the places have left


def test_a_page_of_another_site_opens_no_session(address: str) -> None:
    async def status(origin: str) -> int:
        async with aiohttp.ClientSession() as http:
            try:
                async with http.ws_connect(f"{address}/ws", origin=origin):
                    return 101
            except aiohttp.WSServerHandshakeError as refused:
                return refused.status

    assert asyncio.run(status("http://evil.example")) == 403
    assert asyncio.run(status("null")) == 403
    assert asyncio.run(status(address)) == 101


def test_an_idle_session_is_closed_and_its_place_is_free(address: str) -> None:
    async def idle() -> tuple[dict, Any]:
        async with (
            aiohttp.ClientSession(f"{address}/") as http,
            http.ws_connect("ws") as first,
            http.ws_connect("ws") as second,
        ):
            await second.receive_json()
            return await first.receive_json(), await first.receive()

    said, closed = asyncio.run(idle())
    message = "closed after 1 s without a request"
    assert said == {"type": "error", "data": {"message": message, "code": "SESSION_ERROR"}}
    assert closed.type is aiohttp.WSMsgType.CLOSE
    assert talk(address, {"type": "state"})[0]["type"] == "state"


async def begun_then(address: str, pause: Callable[[], Awaitable[None]]) -> None:
    """Begin an episode, wait for something else, then step."""
    environment = catalogue.load(f"openenv:{address}")
    async with CallRunner(EnvironmentConfig(step_deadline_s=10.0)) as workers:
        play = environment.begin(Task("late", "3", 0), 0)
        while (call := play.next_call()) is not None:
            call.take(await workers.perform(call))
        await pause()
        play.act("rock")
        try:
            await workers.perform(play.next_call())
        finally:
            await workers.perform(play.closing())


def test_a_session_that_ended_costs_the_one_who_steps_in_it(address: str) -> None:
    with pytest.raises(CallFault, match=r"step\('rock'\) raised SessionClosed: closed after 1 s"):
        asyncio.run(begun_then(address, partial(asyncio.sleep, 1.5)))


def test_a_server_that_ended_costs_the_one_who_steps_in_it() -> None:
    with ExitStack() as serving:
        address = serving.enter_context(served("rps"))

        async def end() -> None:
            serving.close()

        with pytest.raises(CallFault, match=r"SessionClosed: http.* has closed the session"):
            asyncio.run(begun_then(address, end))


def test_what_cannot_be_read_is_answered_and_the_session_goes_on(address: str) -> None:
    answers = talk(
        address,
        "{",
        "[" * 5000,
        "[]",
        {"type": "dance"},
        {"type": "reset", "data": {"seed": -1}},
        {"type": "reset", "data": {"task": "nobody"}},
        {"type": "reset", "data": 3},
        {"type": "step", "data": {"action": "rock"}},
        {"type": "step", "data": {"move": "rock"}},
        {"type": "reset", "data": {"seed": 3, "split": "heldout", "episode_id": "mine"}},
        {"type": "step", "data": {"action": "rock"}},
        {"type": "state"},
    )
    codes = [answer["data"].get("code") for answer in answers[:9]]
    assert codes == [
        *["INVALID_JSON"] * 2,
        "VALIDATION_ERROR",
        "UNKNOWN_TYPE",
        *["VALIDATION_ERROR"] * 3,
        "EXECUTION_ERROR",
        "VALIDATION_ERROR",
    ]
    assert answers[9]["data"]["observation"]["legal_actions"] == ["rock", "paper", "scissors"]
    assert answers[10]["data"]["done"] is False
    assert answers[11]["data"] == {"episode_id": "mine", "step_count": 1}


def test_a_failing_environment_costs_its_session_alone(tmp_path, monkeypatch) -> None:
    source = """
class Own:
    "Rules."
    def reset(self, seed, task): return f"task {task}"
    def step(self, action): return action, float(len(action)), 1 / (action != "zero") > 2
"""
    (tmp_path / "own_served.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with served("own_served:Own") as address:
        assert played(address, "ab")[0].rewards == [2.0]
        with pytest.raises(CallFault, match=r"EnvironmentFault: EXECUTION_ERROR: own.* Zero"):
            played(address, "zero")
        assert played(address, "abc")[0].said == ["task 3", "abc"]


def test_the_form_of_an_action_follows_the_schema() -> None:
    def form(**fields: Any) -> Any:
        return form_of({"action": {"properties": {"metadata": {}, **fields}}})

    text, number = form(message={"type": "string"}), form(guess={"type": "integer"})
    assert (text.read("hello"), text.instruction()) == ({"message": "hello"}, "")
    assert (number.read("7"), number.read("x")) == ({"guess": 7}, None)
    assert number.instruction() == "Answer with the guess: integer."
    both = form(what={"type": "string"}, where={"type": "integer"})
    assert both.read('{"what": "dig"}') == {"what": "dig"}
    assert both.read("dig") is None
    assert both.read('{"what": ' + "[" * 5000) is None
    share = form(share={"type": "number"})
    assert share.read("-1e3") == {"share": -1000.0}
    assert [share.read(each) for each in ("nan", "-inf", "1e999", "half")] == [None] * 4
    assert [both.read(f'{{"where": {each}}}') for each in ("NaN", "Infinity", "1e999")] == [
        None
    ] * 3
    assert both.instruction().startswith('Answer with a JSON object: {"what"')
    with pytest.raises(EnvironmentFault, match="have no fields that a text could fill"):
        form()


def test_an_answer_is_read() -> None:
    fields = {"echoed": "hi", "length": 2, "none": None, "metadata": {"is_secret": True}}
    seen = observed({"type": "observation", "data": {"observation": fields, "reward": None}})
    assert (seen.text, seen.reward, seen.is_done) == ("echoed: hi\nlength: 2", 0.0, False)
    refused = observed({"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no"}})
    assert not refused.is_valid


@pytest.mark.parametrize(
    ("given", "listed", "said"),
    [
        (["a", "b"], ("a", "b"), "it"),
        (None, (), "it"),
        ([0, 2], (), "text: it\nlegal_actions: [0, 2]"),
    ],
)
def test_only_a_list_of_texts_says_which_actions_are_legal(
    given: object, listed: tuple[str, ...], said: str
) -> None:
    fields = {"text": "it", "legal_actions": given}
    seen = observed({"type": "observation", "data": {"observation": fields}})
    assert (seen.legal_actions, seen.text) == (listed, said)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="write it as openenv:http://HOST:PORT"):
        catalogue.load("openenv:localhost:8000")
    with pytest.raises(
        ConfigError, match=r"reset\(\) raised SessionClosed: Cannot connect .* start"
    ):
        rehearsed("openenv:http://127.0.0.1:9")
