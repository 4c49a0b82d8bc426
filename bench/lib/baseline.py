"""Write a benchmark's figures to a JSON file, with the commit, machine and versions they belong
to."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""Root of this checkout."""
FOLDER = ROOT / "bench" / "baselines"
# Packages whose versions stand in every baseline.
PACKAGES = ("torch", "transformers", "triton", "numpy", "pyzmq", "msgspec", "open_spiel", "sglang")


def write_baseline(name: str, figures: dict[str, Any]) -> Path:
    """Write `bench/baselines/<name>_<machine>.json`, print its path, and return it."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{name}_{machine()}.json"
    file.write_text(json.dumps(provenance() | figures, indent=1) + "\n")
    print(f"written to {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
    return file


def verdict(missed: Sequence[str]) -> int:
    """Print which bounds were missed, as the last line of a benchmark, and return its exit status:
    1 if any was.
    """
    print(f"missed: {'; '.join(missed)}" if missed else "no bound is missed")
    return 1 if missed else 0


def machine() -> str:
    """Return a short name of this machine: its GPU, such as "h100", or its number of CPUs:
    "cpu2"."""
    # A benchmark that has not imported torch computes nothing on a GPU.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name(0).removeprefix("NVIDIA ").split()[0].lower()
    return f"cpu{os.cpu_count()}"


def provenance() -> dict[str, Any]:
    """Return git commit, machine and versions of packages."""
    return {
        "git": _git("rev-parse", "HEAD"),
        "git_is_clean": _git("status", "--porcelain", "--untracked-files=no") == "",
        "machine": {
            "processor": _processor(),
            "num_processors": os.cpu_count(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()} | _versions(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
