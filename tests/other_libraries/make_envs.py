"""Builds environments with the real packages of OpenEnv, verifiers and agents, kept apart from our
own.

    python tests/other_libraries/make_envs.py        then: pytest -m slow tests/other_libraries

They stand at the repository's root. OpenEnv is installed without its own list of dependencies,
which has gradio and others that its server and its client do not import.
"""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPENENV, VERIFIERS = ROOT / ".openenv_env", ROOT / ".verifiers_env"
AGENTS = ROOT / ".agents_env"
INSTALLED = {
    OPENENV: [
        ["fastapi>=0.116", "fastmcp>=3,<4", "httpx", "pyyaml", "requests", "uvicorn", "websockets"],
        ["--no-deps", "openenv==0.10.0"],
    ],
    VERIFIERS: [["verifiers==0.4.0"]],
    AGENTS: [
        ["anthropic", "openai", "openai-agents", "smolagents"],
        ["langgraph", "langchain-openai", "mini-swe-agent"],
    ],
}


def make(target: Path, steps: list[list[str]]) -> None:
    """Make an environment, unless it stands already."""
    stamp, wanted = target / "made_from", f"{steps} {sys.version}"
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{target} is up to date")
        return
    venv.create(target, clear=True, with_pip=True)
    for step in steps:
        command = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", *step]
        subprocess.run(command, check=True)
    stamp.write_text(wanted)  # the last step: half an environment has no stamp
    print(f"{target} was made")


if __name__ == "__main__":
    for target, steps in INSTALLED.items():
        make(target, steps)
