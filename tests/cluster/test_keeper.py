"""A keeper starts the process of a supervisor, relays what it says, and brings what it asks for."""

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mage_services.cluster import keeper as keeper_module
from mage_services.cluster.keeper import ENDED, End, Keeper, ServedFiles
from mage_services.processes.process import EXIT_FAILED
from mage_services.processes.supervised_process import ProcessSpec

PROCESS = """
import sys
from pathlib import Path
from mage_services.processes.process import run_process
from mage_services.processes.process import RunFiles

async def main(status):
    files = RunFiles(status, "--remote" in sys.argv)
    for name in Path(sys.argv[2]).read_text().split():
        file = await files.bring(Path(name.replace("OWN", sys.argv[1])))
        status.send("read", text=file.read_text(), is_own=str(file).startswith(sys.argv[1]))
    print("as printed")

run_process(main)
"""


class Here:
    """Ray's handle of a `ServedFiles`, without Ray: what is in the store is there already."""

    def __init__(self) -> None:
        self._files = ServedFiles()
        self.read = self

    async def remote(self, path: Path) -> Any:
        answer = self._files.read(path)
        return answer if isinstance(answer, str) else [(n, _done(data)) for n, data in answer]


async def _done(data: np.ndarray) -> np.ndarray:
    return data


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory, with keys, weights and a script that is a process of the run."""
    monkeypatch.setattr(keeper_module, "_put", lambda file: np.fromfile(file, np.uint8))
    for folder in ("keys", "weights", "logs", "policy"):
        (tmp_path / folder).mkdir()
    (tmp_path / "config.toml").write_text("the configuration")
    for name in ("learner.key", "actor.key_secret", "learner.key_secret"):
        (tmp_path / "keys" / name).write_text(name)
    (tmp_path / "asked_for.py").write_text(PROCESS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return tmp_path


def live(root: Path, source: Here | None, *wanted: str) -> tuple[list[dict[str, Any]], End]:
    """One life of a process that asks for files; what it said, and its end."""
    (root / "list").write_text(" ".join(wanted))
    spec = ProcessSpec(
        "actor-0", "asked_for", (str(root), str(root / "list")), root / "logs/own.log", threads=1
    )

    async def whole() -> list[dict[str, Any]]:
        keeper = Keeper(root, root / "keys", source)
        return [event async for event in keeper.live(spec, 60.0)]

    *events, last = asyncio.run(whole())
    assert last["event"] == ENDED
    return [event for event in events if event["event"] not in ("beat", "finished")], last["end"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_before_the_process_starts_ends_it_once_it_has(root: Path, number: int) -> None:
    spec = ProcessSpec("actor-0", "asked_for", (str(root), "-"), root / "logs/own.log", threads=1)

    class Signalled(Here):
        """Send the signal while the keys are still copied."""

        async def remote(self, path: Path) -> Any:
            await keeper.signal(number)
            return await super().remote(path)

    keeper = Keeper(root, root / "keys", Signalled())

    async def whole() -> list[dict[str, Any]]:
        return [event async for event in keeper.live(spec, 60.0)]

    assert asyncio.run(whole())[-1]["end"].code == -number


def test_on_the_node_of_the_run_nothing_is_copied(root: Path) -> None:
    policy = root / "policy" / "tokenizer.json"
    policy.write_text("words")
    events, end = live(root, None, str(policy))
    assert events == [{"event": "read", "text": "words", "is_own": True, "at": events[0]["at"]}]
    assert (end.code, end.printed) == (0, "")
    assert (root / "logs" / "own.log").read_text() == "as printed\n"


def test_elsewhere_files_are_brought_into_a_folder_that_ends_with_the_process(root: Path) -> None:
    (root / "weights" / "v000001.safetensors").write_text("one")
    events, end = live(
        root, Here(), str(root / "weights" / "v000001.safetensors"), "OWN/config.toml"
    )
    assert [event["text"] for event in events] == ["one", "the configuration"]
    assert all(event["is_own"] for event in events)
    assert end.code == 0
    assert end.printed == "as printed\n"
    assert not (root / "logs" / "own.log").exists()


def test_weights_that_are_gone_end_the_process_with_a_sentence(root: Path) -> None:
    _, end = live(root, Here(), str(root / "weights" / "v000009.safetensors"))
    assert end.code != 0
    assert "v000009.safetensors cannot be brought to this machine: No such file" in end.failure_line


def test_weights_that_a_full_disk_does_not_take_end_the_process_with_a_sentence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = keeper_module._write

    def full(file: Path, content: Any) -> None:
        if file.parent.name == "weights":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write(file, content)

    monkeypatch.setattr(keeper_module, "_write", full)
    weights = root / "weights" / "v000001.safetensors"
    weights.write_text("one")
    _, end = live(root, Here(), str(weights))
    assert end.code != 0
    assert (
        "v000001.safetensors cannot be brought to this machine: it cannot be written there: No "
        "space left on device"
    ) in end.failure_line


def test_an_error_of_rays_ends_the_process_that_waits_for_a_file(root: Path) -> None:
    class Full(Here):
        """A store with room for the keys alone."""

        async def remote(self, path: Path) -> Any:
            if path.parent.name == "weights":
                raise RuntimeError("the object store is full")
            return await super().remote(path)

    (root / "list").write_text(str(root / "weights" / "v000001.safetensors"))
    arguments = str(root), str(root / "list")
    spec = ProcessSpec("actor-0", "asked_for", arguments, root / "logs/own.log", threads=1)
    keeper = Keeper(root, root / "keys", Full())

    async def whole() -> int:
        with pytest.raises(RuntimeError, match="the object store is full"):
            async for _ in keeper.live(spec, 60.0):
                pass
        async with asyncio.timeout(30.0):
            return await keeper.ended()

    assert asyncio.run(whole()) == -signal.SIGKILL


def test_a_process_whose_keys_cannot_be_brought_fails_with_the_reason(root: Path) -> None:
    for key in (root / "keys").iterdir():
        key.unlink()
    spec = ProcessSpec("actor-0", "asked_for", (str(root), "-"), root / "logs/own.log", threads=1)
    keeper = Keeper(root, root / "keys", Here())

    async def whole() -> tuple[list[dict[str, Any]], int]:
        return [event async for event in keeper.live(spec, 60.0)], await keeper.ended()

    [last], code = asyncio.run(whole())
    assert last["event"] == ENDED
    assert last["end"].code == code == EXIT_FAILED
    assert last["end"].failure_line.startswith("actor-0 could not be started: ")
    assert last["end"].failure_line.endswith(
        "cannot be brought to this node: No such file or directory"
    )


def test_the_learners_secret_key_stays_on_its_node(root: Path) -> None:
    keeper = Keeper(root, root / "keys", Here())
    spec = ProcessSpec("actor-0", "asked_for", (str(root),), root / "own.log", threads=1)
    folder = root / "node"
    folder.mkdir()
    settled = asyncio.run(keeper._spec_in(spec, folder))
    assert {file.name for file in (folder / "keys").iterdir()} == {
        "learner.key",
        "actor.key_secret",
    }
    assert {file.stat().st_mode & 0o777 for file in (folder / "keys").iterdir()} == {0o600}
    assert settled.arguments == (str(folder), "--keys", str(folder / "keys"), "--remote")
    assert settled.log == folder / "logs" / "actor-0.log"


def test_a_version_is_put_into_the_store_once_and_old_ones_leave_a_nodes_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[Path] = []

    def put(file: Path) -> Any:
        puts.append(file)
        return np.fromfile(file, np.uint8)

    monkeypatch.setattr(keeper_module, "_put", put)
    names = [f"v{version:06d}.safetensors" for version in range(7)]
    for name in names:
        (root / "weights" / name).write_text(name)
    keeper, folder = Keeper(root, root / "keys", Here()), root / "node"

    async def bring_all() -> None:
        for name in names:
            for _ in range(2):
                await keeper._answer(root / "weights" / name, folder)

    asyncio.run(bring_all())
    assert [file.name for file in puts] == names
    assert sorted(file.name for file in (folder / "weights").iterdir()) == names[-4:]
