"""Pages of the documentation, carried out as a reader does who copies and pastes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
STEP = re.compile(FENCED.pattern + r"|((?:^ {4}\S[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
SAVED = re.compile(r"`(\w+\.py)`")


def python_blocks(page: Path) -> list[str]:
    """Return the Python code of a page, block by block."""
    return FENCED.findall(page.read_text(encoding="utf-8"))


def steps_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield what a page tells its reader to do: a file's name and text, or "" and shell commands.

    The name of a file is the last one in the sentence before it; code without one is the reader's
    to read, not to run.
    """
    text = page.read_text(encoding="utf-8")
    for found in STEP.finditer(text):
        code, commands = found.groups()
        if commands:
            yield "", re.sub(r"^ {4}", "", commands, flags=re.MULTILINE)
            continue
        before = text[: found.start()].rstrip().rsplit("\n\n", 1)[-1]
        if names := SAVED.findall(before):
            yield names[-1], code


def carry_out(
    page: Path,
    folder: Path,
    timeout_s: float = 600,
    *,
    python: str | Path = sys.executable,
    replaced: Mapping[str, str] | None = None,
) -> str:
    """Do in a folder, in one shell, what a page says; return what its commands printed.

    `mage` is that of this Python over this checkout.

    Args:
        python: what the page calls `python`.
        replaced: what a reader fills in, by what stands there.
    """
    commands = folder / "commands"
    commands.mkdir()
    for name, line in (("mage", f"{sys.executable} -m mage_async.launch"), ("python", python)):
        (commands / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (commands / name).chmod(0o755)
    lines = ["set -e"]
    for name, text in steps_of(page):
        for old, new in (replaced or {}).items():
            text = text.replace(old, new)
        if name:
            (folder / name).write_text(text)
        else:
            lines.append(text)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("", "services", "kernels")),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONUNBUFFERED": "1",
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
