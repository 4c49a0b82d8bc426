"""Agents of others, unmodified, in a Python of their own: they call the policy as any model."""

import json
import socket
from pathlib import Path

import pytest

from mage_async.environments.catalogue import load
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_async.trajectory import Trial
from mage_async.trials.chat_format import ChatFormat
from tests.helpers.agent_site import played, scripted, small_chat
from tests.helpers.pages import ROOT, carry_out, python_blocks
from tests.helpers.random_models import save_text_model
from tests.other_libraries.make_envs import AGENTS

PYTHON = AGENTS / "bin" / "python"
PROGRAM = Path(__file__).with_name("agent_harnesses.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason="run tests/other_libraries/make_envs.py first"),
]
PACKAGES = {
    "openai_agents": "agents",
    "smolagents": "smolagents",
    "langgraph": "langgraph",
    "coding_agent": "minisweagent",
}
"""Packages by the pages of their harnesses."""
STEPS = 3
SETTINGS = (
    "policy.dtype=float32",
    "engine.arithmetic=float32",  # in which log-probs of engine and learner can be compared
    "trial.episodes=2",
    "admission.groups_per_step=2",
    "evaluation.every=0",
    "evaluation.final_trials=1",
)
"""Smaller than the defaults of a pretrained model."""


def call(name: str, **arguments: str) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return small_chat(tmp_path)


# smolagents writes the calls of its tools into its history as text, so that none of its calls goes
# on behind the answer to the one before.
@pytest.mark.parametrize(
    ("harness", "last", "segments"),
    [
        ("smolagents", call("final_answer", answer="open"), [0, 1, 2, 3, 4, 5]),
        ("openai_chat", "It is open.", [0, 0, 0, 1, 1, 1]),
        ("openai_responses", "It is open.", [0, 0, 0, 1, 1, 1]),
        ("anthropic", "It is open.", [0, 0, 0, 1, 1, 1]),
    ],
)
def test_a_harness_plays_two_episodes_with_tools(
    chat: ChatFormat, harness: str, last: str, segments: list[int]
) -> None:
    line = f"{PYTHON} {PROGRAM} {harness} {{task}}"
    environment = load("agent:command", command=line, size=10)
    words = (call("open_door", word="rock"), call("open_door", word="paper"), last)
    engine = scripted(chat, *words)
    changes = ("trial.memory=none", "transcript.max_action_tokens=200", "engine.max_tokens=65536")
    (trial,) = played(environment, chat, engine, *changes, tasks=("4",), deadline_s=120.0)
    assert isinstance(trial, Trial), trial
    assert trial.episode_rewards() == [1.0, 1.0]
    assert [turn.segment for turn in trial.turns] == segments
    text = chat.decode(trial.segments[0].tokens.tolist())
    assert "open_door" in text.split("<|user|>")[0], "the tools are offered"
    assert trial.num_extension_faults == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    return save_text_model(tmp_path_factory.mktemp("text") / "model", texts, room=8192)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("page", "package"), PACKAGES.items())
def test_three_steps_are_trained_as_the_page_of_a_harness_says(
    page: str, package: str, model: Path, tmp_path: Path
) -> None:
    if not list(AGENTS.glob(f"lib/*/site-packages/{package}")):
        pytest.skip(f"{package} is not installed: run tests/other_libraries/make_envs.py again")
    (tmp_path / "agent_server.py").write_text(python_blocks(ROOT / "docs" / "agents.md")[1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    more = [f"policy.source={model}", *SETTINGS]
    replaced = {
        "policy.source=DIR": f"{' --set '.join(more)} --run-dir run",
        "9000": port,
        "python -m pip install": "true",
    }
    file = ROOT / "docs" / "agents" / f"{page}.md"
    printed = carry_out(file, tmp_path, timeout_s=1700, python=PYTHON, replaced=replaced)
    print(printed)
    run = RunDirectory(tmp_path / "run")
    lines = list(read_lines(run.metrics))
    assert len(lines) == STEPS
    assert any(max(line["return_by_episode"]) > 0 for line in lines), "an agent reached its goal"
    assert any(line["zero_advantage_share"] < 1 for line in lines), "rewards differ in a group"
    assert json.loads(run.summary.read_text())["logprob_mismatch"]["max_abs"] < 1e-3
