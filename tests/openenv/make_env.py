"""Builds an environment with the real OpenEnv package, its server and its client.

    python tests/openenv/make_env.py [DIR]        then: pytest -m slow tests/openenv

DIR is `.openenv_env` at the repository's root unless it is given. The package is installed without
its own list of dependencies, which has gradio and others that server and client do not import.
"""

import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".openenv_env"
PACKAGE = "openenv==0.10.0"
IMPORTED = (
    *("fastapi>=0.116", "fastmcp>=3,<4", "httpx", "pyyaml", "requests"),
    *("uvicorn", "websockets>=15"),
)


def main() -> None:
    """Make the environment, unless it stands already."""
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ENVIRONMENT
    stamp, wanted = target / "made_from", " ".join((PACKAGE, *IMPORTED, sys.version))
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{target} is up to date")
        return
    venv.create(target, clear=True, with_pip=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *IMPORTED], check=True)
    subprocess.run([*pip, "--no-deps", PACKAGE], check=True)
    stamp.write_text(wanted)  # the last step: half an environment has no stamp
    print(f"{target} was made")


if __name__ == "__main__":
    main()
