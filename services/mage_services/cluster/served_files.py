"""Ray's actor beside the learner that hands files of the run to keepers on other nodes.

A file is put into Ray's object store, from where Ray brings it to a node once, for however many
processes of that node. The two things asked for last stay there: while a version is new, every node
asks for it.
"""

import socket
from pathlib import Path
from typing import Any

KEPT = 2
"""Answers whose objects stay in the store: the policy or the version before, and the newest."""
Answer = list[tuple[str, Any]] | str
_Stamp = tuple[Path, int]


class ServedFiles:
    """See the module."""

    def __init__(self) -> None:
        self._answers: dict[_Stamp, Answer] = {}

    def read(self, path: Path) -> Answer:
        """The content of a file, or of each file of a folder, as references to arrays of bytes.

        Returns:
            Pairs of a name below `path`, "" for a file, and a reference; or why there is none.
        """
        try:
            stamp = path, path.stat().st_mtime_ns
            if stamp not in self._answers:
                files = sorted(path.iterdir()) if path.is_dir() else [path]
                answer = [(_name(file, path), _put(file)) for file in files if file.is_file()]
                self._answers = dict([*self._answers.items(), (stamp, answer)][-KEPT:])
            return self._answers[stamp]
        except OSError as fault:
            return fault.strerror or "it cannot be read"

    def address(self, port: int) -> str:
        """Where the learner is reached that runs on this node.

        Args:
            port: 0 takes one that is free now.
        """
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{port or probe.getsockname()[1]}"


def _name(file: Path, path: Path) -> str:
    return "" if file == path else file.name


def _put(file: Path) -> Any:
    import numpy as np
    import ray

    return ray.put(np.fromfile(file, np.uint8))
