"""Ray's actor around one process of a run: starts it, relays its status lines, brings it files.

The process is the one that a supervisor starts on its own machine, by the same `Child`. A keeper is
scheduled into the bundle that was reserved for its process, so Ray has chosen the node, and the
GPUs that the process sees. A keeper ends with its node, and the process with its keeper.

A process whose run directory is on another machine lives in a folder of its keeper's. What it asks
for comes through Ray's object store, once a node, from `served_files.py`.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mage_async.results.run_directory import RunDirectory
from mage_services.cluster.connection import own_node
from mage_services.processes.child import Child, Spec

KEPT_WEIGHTS = 4
"""Versions on a node's disk: an engine's, its next one, and opponents that are about to be read."""
ACTOR_KEYS = ("learner.key", "actor.key_secret")
LOG_BYTES = 1 << 20
"""Of what a process printed, the end that the run keeps."""
ENDED = "ended"
"""The last event of a life; its fields are those of `End`."""


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended."""

    code: int
    epitaph: str
    was_silent: bool
    printed: str
    """The end of its log, where that is not in the run's directory."""


class Keeper:
    """See the module.

    Args:
        root: the run's directory, where that is.
        keys: the directory of its keys, where that is.
        source: Ray's handle of a `ServedFiles`; None: both are on this node.
    """

    def __init__(self, root: Path, keys: Path, source: Any | None) -> None:
        self._root, self._keys, self._source = root, keys, source
        self._child: Child | None = None
        self._weights: list[Path] = []

    async def node(self) -> str:
        """What people call the node. The first call returns when Ray has placed the keeper."""
        return own_node().name

    async def live(self, spec: Spec, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """One life of a process: its status lines, and at last its end.

        Raises:
            OSError: its files cannot be written to this node.
        """
        with TemporaryDirectory(prefix="mage-node-") as folder:
            if self._source is not None:
                spec = await self._settled(spec, Path(folder))
            self._child = child = await Child.start(spec, dict(os.environ))
            async for event in child.events(silence_s):
                if event["event"] == "wants":
                    child.answer(await self._answer(Path(event["path"]), Path(folder)))
                else:
                    yield event
            code = await child.wait()
            printed = _end_of(spec.log) if self._source is not None else ""
            end = End(code, child.epitaph(code), child.was_silent, printed)
        yield {"event": ENDED, "end": end}

    async def signal(self, number: int) -> None:
        """Ask the process to end, or end it; one that has not begun does not hear of it."""
        if self._child is not None:
            self._child.terminate() if number == signal.SIGTERM else self._child.kill()

    async def ended(self) -> int:
        """Wait for the end of the process; its exit code."""
        return 0 if self._child is None else await self._child.wait()

    async def _settled(self, spec: Spec, folder: Path) -> Spec:
        """The process as it starts in a folder of its own, which has the configuration and keys."""
        run = RunDirectory(folder)
        run.logs.mkdir()
        wanted = {run.config: self._root / run.config.name}
        wanted |= {folder / "keys" / name: self._keys / name for name in ACTOR_KEYS}
        for target, source in wanted.items():
            if reason := await self._bring(source, target):
                raise OSError(f"{source} cannot be brought to this node: {reason}")
        arguments = (str(folder), *spec.arguments[1:], "--keys", str(folder / "keys"), "--asks")
        return replace(spec, arguments=arguments, log=run.log_of(spec.name), asks=True)

    async def _answer(self, asked: Path, folder: Path) -> dict[str, str]:
        """Bring what the process asks for: of its own folder what is missing there, or weights by
        the path that the learner announces.
        """
        if asked.is_relative_to(folder):
            source, target = self._root / asked.relative_to(folder), asked
        else:
            source, target = asked, folder / "weights" / asked.name
        if reason := await self._bring(source, target):
            return {"path": str(asked), "reason": reason}
        self._keep(target)
        return {"path": str(asked), "local": str(target)}

    async def _bring(self, source: Path, target: Path) -> str:
        """Copy a file, or a folder of files, from the run's node; why not, or ""."""
        assert self._source is not None
        parts = await self._source.read.remote(source)
        if isinstance(parts, str):
            return parts
        for name, content in parts:
            await asyncio.to_thread(_write, target / name, await content)
        return ""

    def _keep(self, file: Path) -> None:
        """Remember weights, and remove those that were brought long before."""
        if file.parent.name != "weights":
            return
        self._weights = [*(each for each in self._weights if each != file), file]
        for old in self._weights[:-KEPT_WEIGHTS]:
            old.unlink(missing_ok=True)
        self._weights = self._weights[-KEPT_WEIGHTS:]


def _write(file: Path, content: Any) -> None:
    """Write a file for its owner only, under its name when it is whole."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(memoryview(content))
    part.replace(file)


def _end_of(log: Path) -> str:
    with log.open("rb") as printed:
        printed.seek(max(0, log.stat().st_size - LOG_BYTES))
        return printed.read().decode(errors="replace")
