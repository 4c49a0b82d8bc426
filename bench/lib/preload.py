"""Small libraries in C that programs load before libc, to change what a system call does."""

import subprocess
from pathlib import Path


def preloaded(folder: Path, name: str, source: str) -> dict[str, str]:
    """Compile C source in a folder; the environment of a process that loads the library.

    Raises: OSError, subprocess.CalledProcessError: there is no working C compiler (`cc`).
    """
    code, library = folder / f"{name}.c", folder / f"{name}.so"
    code.write_text(source)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(code)]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}
