"""What every process of a run is given when it starts: arguments, and the resolved configuration.

`mage train` resolves the configuration once. A process receives the result as its first message and
decodes it by type: it reads no file, adds no default and applies no preset.
"""

import argparse
import asyncio
from dataclasses import dataclass
from hashlib import blake2s
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import mage_async
from mage_async.config import config_file
from mage_async.config.schema import Config, digest
from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory

if TYPE_CHECKING:
    from mage_services.processes.process import Status

PACKAGES = ("mage_async", "mage_services", "mage_kernels")


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message to a process of a run."""

    tables: dict[str, Any]
    """The resolved configuration, as `config_file.as_tables` returns it."""


class BroughtFile(msgspec.Struct, frozen=True, tag=True):
    """The answer to a process that asked for a file of its run."""

    path: str
    """The file as it was asked for."""
    local: str = ""
    """Where it lies on the machine of the process."""
    reason: str = ""
    """Why it could not be brought; "" where it was."""


ToProcess = Begin | BroughtFile
"""What a process of a run receives."""


@dataclass(frozen=True, slots=True)
class Startup:
    """What a process of a run knows when it starts."""

    run: RunDirectory
    config: Config
    config_digest: str
    build: str
    name: str
    address: str
    """Where the learner is reached."""
    resume: bool
    keys: str = ""
    """Directory of the keys on this machine; "" for none."""
    asks: bool = False
    """Whether the run's directory is on another machine, so that its files are asked for."""


def read_startup(description: str, status: "Status") -> Startup:
    """Parse the command line of a process, and receive its configuration.

    The process exits where no supervisor sends one.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", default="")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--keys", default="")
    parser.add_argument("--asks", action="store_true")
    given = parser.parse_args()
    begin = status.channel.receive() if status.channel is not None else None
    if not isinstance(begin, Begin):
        parser.error("a supervisor has to start this process: use `mage train`")
    config = config_file.from_tables(begin.tables)
    return Startup(
        RunDirectory(given.run_dir),
        config,
        digest(config),
        build_digest(),
        given.name,
        given.address,
        given.resume,
        given.keys or config.transport.keys,
        given.asks,
    )


def build_digest() -> str:
    """Return the version and a digest of the sources of the three packages, which peers compare.

    The packages are located without importing them, because the kernels import torch. Of a package
    that lies in two checkouts on the path, the first is read, as imports do.
    """
    state = blake2s(mage_async.__version__.encode(), digest_size=6)
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None, f"{package} is not installed"
        folders = iter(spec.submodule_search_locations or ())
        for file in sorted(Path(next(folders)).rglob("*.py")):
            state.update(file.read_bytes())
    return f"{mage_async.__version__}+{state.hexdigest()}"


class RunFiles:
    """Files of a run, for a process that may be on another machine than the run's directory.

    Such a process asks for a file by a status event; its keeper on that machine
    (`mage_services/cluster/keeper.py`) copies the file there and answers. On the machine of the
    run's directory nothing is asked.

    Args:
        asks: whether the run's directory is on another machine.
    """

    def __init__(self, status: "Status", asks: bool = False) -> None:
        self._status, self._asks = status, asks
        self._turn = asyncio.Lock()

    async def bring(self, path: Path) -> Path:
        """Return where a file or a folder of the run lies on this machine; waits until it does.

        Cancellation leaves an answer that the next call passes over.

        Raises:
            RunError: the run has no such file any more.
        """
        if not self._asks:
            return path
        async with self._turn:
            self._status.send("wants", path=str(path))
            while (channel := self._status.channel) is not None:
                answer = await channel.receive_async()
                if answer is None:
                    break
                if isinstance(answer, BroughtFile) and answer.path == str(path):
                    return _local_path(answer)
        raise RunError(f"{path} was not brought: the keeper of this process has ended")


def _local_path(answer: BroughtFile) -> Path:
    """Raises: RunError: the file was not brought."""
    if answer.reason:
        raise RunError(f"{answer.path} cannot be brought to this machine: {answer.reason}")
    return Path(answer.local)
