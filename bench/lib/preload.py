"""Compile small C libraries that programs load before libc, to change a system call."""

import subprocess
from pathlib import Path


def preloaded(folder: Path, name: str, source: str) -> dict[str, str]:
    """Compile C source in a folder; return the environment variables that make a process load it.

    Raises:
        OSError, subprocess.CalledProcessError: there is no working C compiler (`cc`).
    """
    code, library = folder / f"{name}.c", folder / f"{name}.so"
    code.write_text(source)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(code)]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}
