"""Ray's actor that looks at one node before a run is started there; what it finds is plain data."""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mage_services.processes.startup import build_digest

LIBRARIES = ("torch", "transformers", "pyzmq", "msgpack", "safetensors", "ray")
CONNECT_S = 3.0
BLOCK_BYTES, MOST_BLOCKS = 1 << 16, 64
"""Of a large file so many blocks are read, evenly spread: training changes every tensor."""


class Probe:
    """See the module. A node that is asked to listen does so as long as its probe lives."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def now(self) -> float:
        """The node's clock, in seconds since 1970."""
        return time.time()

    def facts(self, source: str) -> dict[str, Any]:
        """Fields of `NodeFacts` that do not depend on other nodes.

        Args:
            source: `policy.source`; "" where the policy is built anew.
        """
        digest, _ = model_digest(source)
        free = shutil.disk_usage(tempfile.gettempdir()).free
        return {
            "versions": _versions(),
            "free_bytes": free,
            "gpus": _num_gpus(),
            "model": digest,
        }

    def listen(self, host: str, port: int) -> tuple[int, str]:
        """Listen as the learner will; the port, and why it cannot be had, or ""."""
        listener = socket.socket()
        try:
            listener.bind((host, port))
        except OSError as fault:
            return port, fault.strerror or str(fault)
        listener.listen()
        self._listener = listener
        return listener.getsockname()[1], ""

    def reaches(self, host: str, port: int) -> str:
        """Connect to an address; why that failed, or ""."""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S):
                return ""
        except OSError as fault:
            return fault.strerror or str(fault)


def model_digest(source: str) -> tuple[str, int]:
    """A digest of the model that a `policy.source` names on this machine, and its bytes; "" where
    there is none. Large files are read in part: this takes seconds, for whatever size.
    """
    folder = _folder_of(source) if source else None
    if folder is None:
        return "", 0
    state, num_bytes = blake2b(digest_size=6), 0
    for file in sorted(each for each in folder.iterdir() if each.is_file()):
        size = file.stat().st_size
        num_bytes += size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for start in range(0, size, max(BLOCK_BYTES, size // MOST_BLOCKS)):
                opened.seek(start)
                state.update(opened.read(BLOCK_BYTES))
    return state.hexdigest(), num_bytes


def _folder_of(source: str) -> Path | None:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _versions() -> dict[str, str]:
    found = {"Python": sys.version.split()[0], "mage_async": build_digest()}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = version(library)
    return found


def _num_gpus() -> int:
    """As NVIDIA's driver lists them. Never run on a GPU."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return len(listed.stdout.splitlines())
