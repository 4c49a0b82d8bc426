"""Programs by their names: functions of a module, commands, and servers."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mage_async.assembly import check_keys
from mage_async.environments.agent import AgentTasks
from mage_async.environments.catalogue import load
from mage_async.environments.rehearsal import compare_heldout
from mage_async.errors import CallFault, ConfigError, RunError
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.rehearsal_runner import rehearse_all
from mage_services.gateway import programs
from tests.helpers.agent_site import config_of, played, scripted, small_chat, stage_of
from tests.helpers.pages import ROOT, python_blocks

FUNCTION = """
import json, urllib.request

words = ("rock", "paper")

def members(split):
    return ("a", "b") if split == "train" else ("c", "d")

def said(text, base_url, api_key):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + api_key}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def run(task, episode, base_url, api_key):
    return 1.0 if said(task, base_url, api_key) == " rock" else 0.0
"""
COMMAND = """
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
import own_agent
print("playing", sys.argv[1])
print(own_agent.run(sys.argv[1], 0, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
"""


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatFormat:
    (tmp_path / "own_agent.py").write_text(FUNCTION)
    (tmp_path / "program.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_agent", raising=False)
    return small_chat(tmp_path)


def test_a_function_is_played_with_what_its_module_declares(chat: ChatFormat) -> None:
    environment = load("agent:own_agent:run", turns=3)
    assert isinstance(environment, AgentTasks)
    assert environment.members("heldout") == ("c", "d")
    assert environment.facts.words[:2] == ("rock", "paper")
    (trial,) = played(environment, chat, scripted(chat, " rock", " paper"), tasks=("b",))
    assert isinstance(trial, Trial), trial
    assert trial.episode_rewards() == [1.0, 0.0]


def test_the_reward_function_of_the_page_on_other_trainers_is_played(
    chat: ChatFormat, tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    (program,) = python_blocks(ROOT / "docs" / "other_trainers.md")
    (tmp_path / "sums.py").write_text(program)
    rows = ({"prompt": f"What is 3 + {n}?", "answer": f"{3 + n}"} for n in range(20))
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = load("agent:sums:run")
    assert environment.members("heldout") == ("18", "19")
    right, wrong = played(environment, chat, scripted(chat, " 7"), tasks=("4", "19"))
    assert isinstance(right, Trial), right
    assert isinstance(wrong, Trial), wrong
    assert (right.episode_rewards(), wrong.episode_rewards()) == ([1.0, 1.0], [0.0, 0.0])


def test_a_command_earns_the_number_on_its_last_line(chat: ChatFormat, tmp_path: Path) -> None:
    line = f"{sys.executable} {tmp_path / 'program.py'} {{task}}"
    environment = load("agent:command", command=line, size=10)
    (trial,) = played(environment, chat, scripted(chat, " rock"), tasks=("3",))
    assert isinstance(trial, Trial), trial
    assert trial.episode_rewards() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no luck')", "ended with exit code 1: no luck"),
        ("raise SystemExit(-1)", "ended with exit code 255"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("print('much')", "must be the reward, a number, got 'much'"),
        ("import time; time.sleep(60)", "took longer than environment.step_deadline_s = 3"),
    ],
)
def test_a_command_that_fails_is_a_fault_with_its_reason(
    chat: ChatFormat, code: str, why: str
) -> None:
    environment = load("agent:command", command=f'{sys.executable} -c "{code} # {{task}}"')
    (fault,) = played(environment, chat, scripted(chat, " rock"), deadline_s=3.0)
    assert isinstance(fault, CallFault)
    assert why in str(fault)


@pytest.mark.parametrize("start", [[], ["setsid"]], ids=["child", "daemon"])
def test_a_command_ends_with_its_own_process_and_only_the_end_of_its_output_is_kept(
    chat: ChatFormat, tmp_path: Path, start: list[str]
) -> None:
    (tmp_path / "left.py").write_text(
        COMMAND.replace("print(own", "print('x' * 10**7); result = (own")
        + f"import subprocess; subprocess.Popen({[*start, 'sleep', '6']}); print(result)"
    )
    line = f"{sys.executable} {tmp_path / 'left.py'} {{task}}"
    environment = load("agent:command", command=line, size=10)
    tracemalloc.start()
    (trial,) = played(environment, chat, scripted(chat, " rock"), deadline_s=5.0)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(trial, Trial), trial
    assert trial.episode_rewards() == [1.0, 1.0]
    assert most_bytes < 5_000_000


Play = Callable[[dict[str, Any]], tuple[int, bytes]]
"""The fields of a request to status and answer."""


@contextmanager
def server(play: Play, port: int = 0) -> Iterator[str]:
    """An agent that is a server; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = play(given)
            if not status:  # it dies in the middle of the episode
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        allow_reuse_address, block_on_close = True, False

    with Server(("127.0.0.1", port), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}/play"
        served.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def ask(given: dict[str, Any], text: str = "door") -> str:
    """What the policy says to a text."""
    import own_agent

    return own_agent.said(text, given["base_url"], given["api_key"])


def test_a_server_is_posted_each_episode_and_answers_with_the_reward(chat: ChatFormat) -> None:
    seen: list[dict[str, Any]] = []

    def play(given: dict[str, Any]) -> tuple[int, bytes]:
        seen.append(given)
        said = ask(given, f"door {given['memory']}".strip())
        return 200, json.dumps({"reward": float(said == " rock"), "steps": 1}).encode()

    with server(play) as url:
        environment = load("agent:url", url=url, size=10)
        asyncio.run(environment.make().check())
        engine = scripted(chat, " rock", " paper", " scissors")
        (trial,) = played(environment, chat, engine, "trial.memory=reflection", tasks=("3",))
    assert isinstance(trial, Trial), trial
    assert trial.episode_rewards() == [1.0, 0.0]
    assert [turn.kind for turn in trial.turns] == [Kind.ACT, Kind.REFLECT, Kind.ACT]
    assert [given["task"] for given in seen] == [3, 3]
    assert [given["episode"] for given in seen] == [0, 1]
    assert [given["memory"] for given in seen] == ["", "remark 1: paper"]
    text = chat.decode(trial.segments[1].tokens.tolist())
    assert text.count("remark 1: paper") == 1, "the program wrote it, so that the gateway does not"


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"no luck", "answered with status 500: no luck"),
        (307, b"", "answered with status 307"),
        (200, b"much", "must answer with JSON such as {\"reward\": 1.0}, got 'much'"),
        (200, b'{"score": 1}', "got '{\"score\": 1}'"),
        (200, b'{"reward": null}', "must return a finite reward, got None"),
        (503, b"full", "has no room for another episode (status 503): full"),
        (0, b"", "closed the connection before it had answered"),
    ],
)
def test_a_server_that_fails_is_a_fault_with_its_reason(
    chat: ChatFormat, status: int, body: bytes, why: str
) -> None:
    def play(given: dict[str, Any]) -> tuple[int, bytes]:
        ask(given)
        return status, body

    with server(play) as url:
        environment = load("agent:url", url=url)
        (fault,) = played(environment, chat, scripted(chat, " rock"))
    assert isinstance(fault, CallFault)
    assert why in str(fault)
    assert "task 3" in str(fault)


def test_a_server_that_is_slow_costs_its_trial_alone(chat: ChatFormat) -> None:
    def play(given: dict[str, Any]) -> tuple[int, bytes]:
        ask(given)
        if given["task"] == 3:
            time.sleep(6)
        return 200, b'{"reward": 1}'

    with server(play) as url:
        environment = load("agent:url", url=url)
        slow, good = played(
            environment, chat, scripted(chat, " rock"), tasks=("3", "4"), deadline_s=2.0
        )
    assert isinstance(slow, CallFault)
    assert "took longer than environment.step_deadline_s = 2" in str(slow)
    assert isinstance(good, Trial), good


def test_a_trial_is_played_again_when_its_server_is_back(chat: ChatFormat) -> None:
    seen: list[int] = []

    def play(given: dict[str, Any]) -> tuple[int, bytes]:
        seen.append(given["episode"])
        ask(given)
        return (500, b"no luck") if len(seen) == 2 else (200, b'{"reward": 1}')

    port = free_port()
    environment = load("agent:url", url=f"http://127.0.0.1:{port}")
    engine = scripted(chat, " rock")
    (fault,) = played(environment, chat, engine)
    assert "is the server of the agent running?" in str(fault)
    with server(play, port):
        (trial,) = played(environment, chat, engine, retries=1)
    assert isinstance(trial, Trial), trial
    assert seen == [0, 1, 0, 1], "the whole trial is played again"
    assert len(trial.turns) == 2


def test_a_run_does_not_begin_before_its_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "STARTING_S", 1.5)
    given = (
        "environment.name=agent:url",
        f"environment.options.url=http://127.0.0.1:{free_port()}",
    )
    with pytest.raises(ConfigError, match=r"no server accepts connections at .* start it"):
        rehearse_all(config_of(*given), print)
    assert capsys.readouterr().err.count("waiting 1.5 s for it") == 1


def test_the_server_of_the_page_on_agents_plays_episodes(chat: ChatFormat, tmp_path: Path) -> None:
    (tmp_path / "agent_server.py").write_text(python_blocks(ROOT / "docs" / "agents.md")[1])
    (tmp_path / "number_agent.py").write_text(
        "from own_agent import said\n"
        "def run(task, episode, base_url, api_key):\n"
        "    return task + (said('door', base_url, api_key) == ' rock')\n"
    )
    port = free_port()
    line = [sys.executable, "agent_server.py", "number_agent", str(port)]
    with subprocess.Popen(line, cwd=tmp_path) as process:
        try:
            environment = load("agent:url", url=f"http://127.0.0.1:{port}", size=100)
            asyncio.run(environment.make().check())
            tasks = tuple(map(str, range(32)))
            trials = played(environment, chat, scripted(chat, " rock"), tasks=tasks)
        finally:
            process.kill()
    assert [trial.episode_rewards() for trial in trials] == [[n + 1.0] * 2 for n in range(32)]


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("agent:own_agent:walk", {}, "own_agent has no such function"),
        ("agent:own_agent:members", {}, r"write the function as members\(task, episode"),
        ("agent:command", {}, "needs the option `command`"),
        ("agent:command", {"command": "python agent.py"}, "must have {task} in it"),
        ("agent:command", {"command": "no-such-command {task}"}, "no command 'no-such-command'"),
        ("agent:own_agent:run", {"command": "x"}, "has no `command`; `command` belongs to agent:c"),
        ("agent:url", {}, "needs the option `url`"),
        ("agent:url", {"url": "127.0.0.1:9000"}, "write `url` as http://HOST:PORT/PATH"),
        ("agent:url", {"url": "http://host:port"}, "write `url` as http://HOST:PORT/PATH"),
        ("agent:own_agent:run", {"size": 2}, "size"),
    ],
)
def test_a_program_that_cannot_be_played_is_refused(
    chat: ChatFormat, name: str, options: dict, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        load(name, **options)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("trial.memory=truncation", 'trial.memory = "truncation"'),
        ("trial.strategy=turn", 'trial.strategy = "turn"'),
        ("methods.scaling_inter.turns=[2, 4]", "a method that limits turns"),
        ("methods.metacure.separate_roles=true", "a method with two roles"),
        ("methods.stepagent.source=script", "a method with an adviser"),
        ("methods.sac_glam.hindsight=0", "methods.sac_glam"),
    ],
)
def test_keys_for_single_turns_are_refused(chat: ChatFormat, change: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"in which {re.escape(named)} has no effect"):
        check_keys(
            config_of(
                "environment.name=agent:own_agent:run",
                "learner.max_tokens_per_microbatch=0",
                change,
            )
        )


def test_a_python_of_verifiers_that_is_none_is_refused_before_a_run() -> None:
    given = ("environment.options.python=/no/python", "environment.options.size=20")
    config = config_of("environment.name=verifiers:gsm8k", *given)
    with pytest.raises(ConfigError, match="/no/python cannot be run: No such file"):
        rehearse_all(config, print)
    with pytest.raises(ConfigError, match="needs the option `python`"):
        load("verifiers:gsm8k")


def test_a_program_is_not_played_without_a_policy_that_is_served(chat: ChatFormat) -> None:
    environment = load("agent:own_agent:run")
    assert isinstance(environment, AgentTasks)
    run = stage_of(environment, chat, scripted(chat, " rock")).begin(Task("own", "a", 7), 0, "0")
    with pytest.raises(RunError, match='set warm_start = "none"'):
        run.next_call()
    with pytest.raises(ConfigError, match="need a policy"):
        next(compare_heldout(environment))
