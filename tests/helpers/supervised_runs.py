"""Runs of real processes under a supervisor.

Their learner, actors and evaluator are scripts of a few lines that stand in the way of the real
modules: `mage_services` has no `__init__.py`, so the first folder on the path that has a
`learner.py` wins.
"""

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from mage_async.config import config_file
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.supervisor import Supervisor

T = TypeVar("T")
PATIENCE_S = 60.0
"""For a loaded machine; nothing here takes two seconds on an idle one."""

STAND_IN = """
import asyncio, atexit, json, os, signal, subprocess, sys, time
from pathlib import Path
from mage_async.errors import DeterministicFailure, RunError
from mage_services.processes.process import run_process

root, name = Path(sys.argv[1]), sys.argv[3]

async def main(status):
    lives = root / f"{name}.lives"
    number = len(lives.read_text().splitlines()) if lives.exists() else 0
    with lives.open("a") as out:
        out.write(" ".join(sys.argv[4:]) + "\\n")
    plan = (root / f"{name}.plan").read_text().split(",")
    what = plan[min(number, len(plan) - 1)]
    helper = subprocess.Popen(["sleep", "3600"]) if what == "helped" else None
    status.send("ready", pid=os.getpid(), helper=helper and helper.pid)
    match what:
        case "impossible":
            raise DeterministicFailure("the gate is shut")
        case "progresses":
            status.send("played")
            raise RunError("the disk is full")
        case "says":
            for line in (root / f"{name}.says").read_text().splitlines():
                status.send(**json.loads(line))
        case "fails":
            raise RunError("the disk is full")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "plays and dies":
            status.send("played")
            os.kill(os.getpid(), signal.SIGKILL)
        case "vanishes":
            os._exit(0)
        case "ends slowly":
            atexit.register(time.sleep, 3600)
        case "forks":
            if os.fork() == 0:
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL)
        case "prints":
            print("a line of more than ten bytes", flush=True)
            await asyncio.sleep(0.5)
        case "lives" | "helped":
            await asyncio.Event().wait()
        case "blocks":
            time.sleep(3600)
        case "deaf":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            status.send("deaf")
            await asyncio.Event().wait()

run_process(main)
"""

OUTER = """
import json, sys
from pathlib import Path
import uvloop
from mage_async.config import config_file
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.supervisor import Supervisor, until_signalled
from mage_services.terminal.plain_lines import make_view

class View:
    def event(self, process, event):
        print(json.dumps([process, event]), flush=True)

    def line(self, text):
        pass

root = Path(sys.argv[1])
supervisor = Supervisor(
    RunDirectory(root), config_file.load(config_file.find(None), []), 2, "ipc://none", View()
)
print(json.dumps(["ended by", uvloop.run(until_signalled(supervisor))]), flush=True)
"""


@dataclass
class Recorder:
    """A view that remembers."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    on_event: Callable[[str, dict[str, Any]], None] = lambda process, event: None

    def event(self, process: str, event: dict[str, Any]) -> None:
        self.events.append((process, event))
        self.on_event(process, event)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def close(self, summary: dict[str, Any] | None) -> None:
        raise AssertionError(summary)

    def restarts(self) -> list[str]:
        return [
            e["text"] for p, e in self.events if p == "supervisor" and e["event"] == "restarting"
        ]


class Site:
    """A run directory whose processes live as a test plans."""

    def __init__(self, root: Path) -> None:
        self.run = RunDirectory(root)
        self.run.logs.mkdir(parents=True)
        self.view = Recorder()

    def plan(self, name: str, *lives: str) -> None:
        """What a process does in each of its lives; the last goes for all later ones."""
        (self.run.root / f"{name}.plan").write_text(",".join(lives))

    def says(self, name: str, *events: dict[str, Any]) -> None:
        """What a process sends, in the life that is planned for that, before it ends well."""
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (self.run.root / f"{name}.says").write_text(lines)

    def lives(self, name: str) -> list[str]:
        """The arguments after its name of each life that a process had."""
        return (self.run.root / f"{name}.lives").read_text().splitlines()

    def supervisor(
        self, num_actors: int = 1, max_restarts: int = 3, silence_s: float = 60.0
    ) -> Supervisor:
        assignments = [
            f"supervision.max_restarts={max_restarts}",
            f"supervision.silence_s={silence_s}",
        ]
        config = config_file.load(config_file.find(None), assignments)
        return Supervisor(self.run, config, num_actors, "ipc://none", self.view)

    def supervise(self, **options: Any) -> None:
        patiently(self.supervisor(**options).supervise())


def patiently(main: Coroutine[Any, Any, T]) -> T:
    """Run a supervisor as its process would; one that hangs fails its test."""

    async def whole() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return uvloop.run(whole())


@dataclass
class Outer:
    """A supervisor in a process of its own."""

    process: subprocess.Popen[str]
    pids: dict[str, int] = field(default_factory=dict)

    def said(self) -> Any:
        """The next line."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def wait_until_ready(self, num_processes: int, last: str = "ready") -> None:
        """Return when each process has said its last word before it waits."""
        while num_processes:
            process, event = self.said()
            if event["event"] == "ready":
                self.pids[process] = event["pid"]
                if event["helper"]:
                    self.pids["helper"] = event["helper"]
            num_processes -= event["event"] == last


def descriptors(pids: dict[str, int]) -> dict[int, str]:
    """Descriptors of living processes, so that a test can wait for their ends."""
    return {os.pidfd_open(pid): name for name, pid in pids.items()}


def living_after(watched: dict[int, str], seconds: float) -> set[str]:
    """Which of them have not ended by then; returns as soon as all have."""
    due, left = time.monotonic() + seconds, dict(watched)
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    while left and (remaining := due - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(remaining * 1000):
            poll.unregister(descriptor)
            del left[descriptor]
    for descriptor in watched:
        os.close(descriptor)
    return set(left.values())


def living_members(groups: set[int]) -> list[str]:
    """Processes of some process groups; not those that only wait to be reaped."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            name, _, rest = file.read_text().rpartition(")")
            state, _, group, *_ = rest.split()
            if int(group) in groups and state not in "ZX":
                found.append(name)
    return found


def descriptors_of(pid: int) -> set[str]:
    """What a process has open; not what it closes while we look."""
    found, folder = set(), f"/proc/{pid}/fd"
    for descriptor in os.listdir(folder):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"{folder}/{descriptor}"))
    return found


def resume(run: RunDirectory, *more: str) -> list[str]:
    start = [sys.executable, "-m", "mage_async.launch", "--resume", "--actors", "1"]
    return [*start, "--run-dir", str(run.root), *more]
