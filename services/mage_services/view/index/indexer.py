"""The process that builds indexes, so that no page waits for it.

The server names runs whose files have grown; after every slice of work the process says which run
was read, and why no more of it can be.
"""

from collections import deque
from pathlib import Path

from mage_async.errors import MageError
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.line_process import ServerLines
from mage_services.processes.priority import WATCHER, give_way
from mage_services.view.index.builder import IndexBuilder


def main() -> None:
    """Build until the server ends."""
    give_way(WATCHER)
    builders: dict[str, IndexBuilder] = {}
    waiting: deque[str] = deque()
    server = ServerLines()
    while not server.has_ended:
        for message in server.read(waits=not waiting):
            if message["run"] not in waiting:
                waiting.append(message["run"])
        if waiting:
            root = waiting.popleft()
            has_more, fault = _slice(root, builders)
            server.say({"run": root, "fault": fault})
            if has_more:
                waiting.append(root)


def _slice(root: str, builders: dict[str, IndexBuilder]) -> tuple[bool, str]:
    """Do a slice for a run; whether there is more to read, and why no more of it can be."""
    try:
        if root not in builders:
            builders[root] = IndexBuilder(RunDirectory(Path(root)))
        return builders[root].work(), ""
    except MageError as error:
        if root in builders:
            builders.pop(root).close()
        return False, str(error)


if __name__ == "__main__":
    main()
