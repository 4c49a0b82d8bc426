"""Start a process of a run: receive its arguments and the resolved configuration.

`mage train` resolves the configuration once. A process receives the result as its first message and
decodes it by type: it reads no file, adds no default and applies no preset.
"""

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import mage_async
from mage_async.config import config_file
from mage_async.config.schema import Config, digest
from mage_async.errors import RunError
from mage_async.protocol.messages import Hello
from mage_async.results.run_directory import RunDirectory
from mage_async.user_modules import source_digest

if TYPE_CHECKING:
    from mage_services.processes.process import Status


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Carry the configuration: the first message to a process of a run."""

    tables: dict[str, Any]
    """The resolved configuration, as `config_file.as_tables` returns it."""


class CopiedFile(msgspec.Struct, frozen=True, tag=True):
    """Answer a process on another machine that requested a file of its run."""

    path: str
    """The requested path."""
    local: str = ""
    """Path of the copy on the machine of the process."""
    reason: str = ""
    """Why the file could not be copied; empty if it was."""


ToProcess = Begin | CopiedFile
"""The messages to a process of a run."""


@dataclass(frozen=True, slots=True)
class Startup:
    """Hold the arguments and the configuration of a process of a run."""

    run: RunDirectory
    config: Config
    config_digest: str
    """Digest of the configuration, which peers compare."""
    build: str
    """Version and digest of the program's sources, which peers compare."""
    name: str
    """Name of the process, such as "actor-0"."""
    address: str
    """Address at which the learner listens."""
    keys: str = ""
    """Directory of the keys on this machine; "" for none."""
    is_remote: bool = False
    """Whether the run's directory is on another machine, so that its files have to be copied."""

    def hello(self, role: Literal["actor", "evaluator"], group_quota: int = 0) -> Hello:
        """Return the first message of this process to the learner.

        Args:
            group_quota: Largest number of groups that an actor plays at a time.
        """
        return Hello(
            role=role,
            name=self.name,
            build=self.build,
            config_digest=self.config_digest,
            group_quota=group_quota,
        )


def read_startup(description: str, status: "Status") -> Startup:
    """Parse the command line of a process, and receive its configuration.

    The process exits if no supervisor sends one.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", default="")
    parser.add_argument("--keys", default="")
    parser.add_argument("--remote", action="store_true")
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
        given.keys or config.transport.keys,
        given.remote,
    )


def build_digest() -> str:
    """Return the version and the digest of the program's sources, which peers compare."""
    return f"{mage_async.__version__}+{source_digest()}"


class RunFiles:
    """Find files of a run, for a process that may be on another machine than the run's directory.

    On the machine of the run's directory every file is used where it lies. A process on another
    machine requests a file by a status event; its keeper, the Ray actor that started the process
    (`mage_services/cluster/keeper.py`), copies the file to that machine and answers.

    Args:
        is_remote: Whether the run's directory is on another machine.
    """

    def __init__(self, status: "Status", is_remote: bool = False) -> None:
        self._status, self._is_remote = status, is_remote
        self._requesting = asyncio.Lock()

    async def bring(self, path: Path) -> Path:
        """Return the path of a file or folder of the run on this machine; wait until it is copied.

        After a cancellation the answer still comes. A later call takes it as its own if it is for
        the same path, and ignores it otherwise.

        Raises:
            RunError: the run has no such file any more, or this process's keeper has ended.
        """
        if not self._is_remote:
            return path
        async with self._requesting:
            self._status.send("wants", path=str(path))
            while (channel := self._status.channel) is not None:
                answer = await channel.receive_async()
                if answer is None:
                    break
                if not isinstance(answer, CopiedFile) or answer.path != str(path):
                    continue
                if answer.reason:
                    raise RunError(f"{path} cannot be brought to this machine: {answer.reason}")
                return Path(answer.local)
        raise RunError(f"{path} was not brought: the keeper of this process has ended")
