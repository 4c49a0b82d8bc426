"""Ray's nodes on this machine, for tests of runs on a cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Nodes:
    """A running cluster."""

    address: str
    process: "subprocess.Popen[str]"

    def kill(self, name: str) -> None:
        """Kill a node, as a power cut does, by the name that a run has for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"


@pytest.fixture
def nodes_of() -> Iterator[Callable[[list[dict[str, Any]]], Nodes]]:
    """Start nodes, the first of which is the head."""
    started: list[subprocess.Popen[str]] = []

    def start(described: list[dict[str, Any]]) -> Nodes:
        command = [sys.executable, "-m", "bench.scale.ray_nodes", json.dumps(described)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "no Ray cluster could be started"
        return Nodes(address, process)

    yield start
    for process in started:
        process.communicate(timeout=120)  # the end of its input ends the nodes
