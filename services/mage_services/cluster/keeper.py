"""Run one process of a run inside a Ray actor (`Keeper`), and send it files (`ServedFiles`).

A keeper starts the process as a supervisor would (`SupervisedProcess`), passes its status events on
to the supervisor, and brings it files. Ray places the keeper where the resources of the process are
reserved (its *bundle*), and so chooses the node and the GPUs that the process sees. A keeper ends
with its node, and the process with its keeper. If the run's directory is on another machine, the
process works in a temporary folder of the keeper's; `ServedFiles` sends it the files through Ray's
object store.
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mage_async.results.run_directory import RunDirectory
from mage_services.cluster.connection import own_node
from mage_services.processes.child_process import end_of_log
from mage_services.processes.process import EXIT_FAILED, CopiedFile
from mage_services.processes.supervised_process import ProcessSpec, SupervisedProcess

KEPT_WEIGHTS = 4
"""Number of versions of the weights kept on a node's disk: the engine's, its next one, and those of
past policies that will soon play as opponents."""
ACTOR_KEYS = ("learner.key", "actor.key_secret")
"""Files of keys that an actor reads."""
ENDED = "ended"
"""Name of the last event of a process; it carries an `End`."""


@dataclass(frozen=True, slots=True)
class End:
    """Describe how a process ended."""

    code: int
    failure_line: str
    was_silent: bool
    printed: str
    """The end of its log, if the log is not in the run's directory."""


class Keeper:
    """Keep one process of a run, as a Ray actor.

    Args:
        root: the run's directory, on the run's machine.
        keys: the directory of its keys, on the run's machine.
        source: Ray handle of a `ServedFiles`; None: this node is the run's machine.
    """

    def __init__(self, root: Path, keys: Path, source: Any | None) -> None:
        self._root, self._keys, self._source = root, keys, source
        self._child: SupervisedProcess | None = None
        self._early_signal = 0
        """Number of the signal that came before the process was started; 0 for none."""
        self._weights: list[Path] = []

    async def node(self) -> str:
        """Return the node's name; the first call returns once Ray has placed the keeper."""
        return own_node().name

    async def live(self, spec: ProcessSpec, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """Start the process, and yield its status events until it ends; the last event, `ENDED`,
        has its `End`. A request for a file is answered here, and not yielded.

        If the process's files cannot be written to this node, it has not started, and `ENDED` is
        the only event.

        Raises:
            RayError: a file cannot be brought, for another reason than an `OSError`. The process is
                killed.
        """
        with ExitStack() as held:
            try:
                folder = Path(held.enter_context(TemporaryDirectory(prefix="mage-node-")))
                if self._source is not None:
                    spec = await self._spec_in(spec, folder)
                self._child = child = await SupervisedProcess.start(spec)
            except OSError as fault:
                end = End(EXIT_FAILED, f"{spec.name} could not be started: {fault}", False, "")
                yield {"event": ENDED, "end": end}
                return
            try:
                if self._early_signal:
                    await self.signal(self._early_signal)
                async for event in child.events(silence_s):
                    if event["event"] == "wants":
                        child.send(await self._answer(Path(event["path"]), folder))
                    else:
                        yield event
                code = await child.wait()
            finally:
                # After an error of Ray's, as when a file does not fit into its object store, nobody
                # watches the process.
                if child.is_running:
                    child.kill()
            printed = end_of_log(spec.log) if self._source is not None else ""
            end = End(code, child.failure_line(code), child.was_silent, printed)
        yield {"event": ENDED, "end": end}

    async def signal(self, number: int) -> None:
        """Send SIGTERM or SIGKILL to the process, or as soon as it has been started."""
        if self._child is None:
            self._early_signal = number
        else:
            self._child.terminate() if number == signal.SIGTERM else self._child.kill()

    async def ended(self) -> int:
        """Wait for the end of the process and return its exit code; `EXIT_FAILED` if the process
        was never started.
        """
        return EXIT_FAILED if self._child is None else await self._child.wait()

    async def _spec_in(self, spec: ProcessSpec, folder: Path) -> ProcessSpec:
        """Bring the keys into a folder of this node, and return the spec of the process with that
        folder as its run's directory.
        """
        run = RunDirectory(folder)
        run.logs.mkdir()
        for name in ACTOR_KEYS:
            source = self._keys / name
            if reason := await self._bring(source, folder / "keys" / name):
                raise OSError(f"{source} cannot be brought to this node: {reason}")
        arguments = (str(folder), *spec.arguments[1:], "--keys", str(folder / "keys"), "--remote")
        return replace(spec, arguments=arguments, log=run.log_of(spec.name))

    async def _answer(self, requested: Path, folder: Path) -> CopiedFile:
        """Bring a file that the process requests, and return the answer for it.

        Args:
            requested: a path below the process's own folder, or the path of announced weights.
        """
        if requested.is_relative_to(folder):
            source, target = self._root / requested.relative_to(folder), requested
        else:
            source, target = requested, folder / "weights" / requested.name
        try:
            reason = await self._bring(source, target)
        except OSError as fault:  # such as a full disk of this node
            reason = f"it cannot be written there: {fault.strerror}"
        if reason:
            return CopiedFile(str(requested), reason=reason)
        self._keep(target)
        return CopiedFile(str(requested), local=str(target))

    async def _bring(self, source: Path, target: Path) -> str:
        """Copy a file or a folder from the run's machine; return why that failed, or ""."""
        assert self._source is not None
        parts = await self._source.read.remote(source)
        if isinstance(parts, str):
            return parts
        for name, content in parts:
            await asyncio.to_thread(_write, target / name, await content)
        return ""

    def _keep(self, file: Path) -> None:
        """Remember a file of weights that was brought, and delete all of them but the last
        `KEPT_WEIGHTS`. Files of other kinds stay.
        """
        if file.parent.name != "weights":
            return
        self._weights = [*(each for each in self._weights if each != file), file]
        for old in self._weights[:-KEPT_WEIGHTS]:
            old.unlink(missing_ok=True)
        self._weights = self._weights[-KEPT_WEIGHTS:]


def _write(file: Path, content: Any) -> None:
    """Write a file with mode 0600; it gets its name once it is whole."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(memoryview(content))
    part.replace(file)


KEPT_ANSWERS = 2
"""Number of answers whose objects stay in Ray's store: all nodes request a version of the weights
while it is new.
"""
Answer = list[tuple[str, Any]] | str
"""Result of `ServedFiles.read`."""
_Stamp = tuple[Path, int]
"""Path of a file and time of its last change, in ns: a file that was written again is read again.
"""


class ServedFiles:
    """Send files of the run to keepers on other nodes, as a Ray actor on the learner's node.

    A file is put into Ray's object store, which copies it to a node once for all its processes.
    """

    def __init__(self) -> None:
        self._answers: dict[_Stamp, Answer] = {}

    def read(self, path: Path) -> Answer:
        """Return the content of a file, or of each file of a folder.

        Returns:
            Pairs of a name below `path` ("" for a file) and a Ray reference to an array of bytes;
            or the reason for a failure.
        """
        try:
            stamp = path, path.stat().st_mtime_ns
            if stamp not in self._answers:
                files = sorted(path.iterdir()) if path.is_dir() else [path]
                names = (file.relative_to(path).name for file in files)
                parts = zip(names, files, strict=True)
                answer = [(name, _put(file)) for name, file in parts if file.is_file()]
                self._answers = dict([*self._answers.items(), (stamp, answer)][-KEPT_ANSWERS:])
            return self._answers[stamp]
        except OSError as fault:
            return fault.strerror or "it cannot be read"

    def address(self, port: int) -> str:
        """Return an address for the learner on this node.

        Args:
            port: Port of the learner; 0 chooses one that is free now.
        """
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{port or probe.getsockname()[1]}"


def _put(file: Path) -> Any:
    """Put the bytes of a file into Ray's object store; return a reference to them."""
    import numpy as np
    import ray

    return ray.put(np.fromfile(file, np.uint8))
