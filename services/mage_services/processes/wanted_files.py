"""Files of a run, for a process that may be on another machine than the run's directory.

Such a process asks for a file on the pipe of its status lines; its keeper on that machine
(`mage_services/cluster/keeper.py`) brings the file and answers on the standard input. Where the
run's directory is on this machine, every file is where it is said to be, and nothing is asked.
"""

import asyncio
import json
import sys
from pathlib import Path

from mage_async.errors import RunError
from mage_services.processes.process import Status


class WantedFiles:
    """See the module.

    Args:
        asks: whether the run's directory is on another machine.
    """

    def __init__(self, status: Status, asks: bool = False) -> None:
        self._status, self._asks = status, asks
        self._answers: asyncio.StreamReader | None = None
        self._turn = asyncio.Lock()

    async def bring(self, path: Path) -> Path:
        """Where a file or a folder of the run lies on this machine; waits until it does.

        Cancellation leaves an answer that the next question passes over.

        Raises:
            RunError: the run has no such file any more.
        """
        if not self._asks:
            return path
        async with self._turn:
            self._answers = self._answers or await _standard_input()
            self._status.send("wants", path=str(path))
            async for line in self._answers:
                answer = json.loads(line)
                if answer["path"] == str(path):
                    return _brought(answer)
        raise RunError(f"{path} was not brought: the keeper of this process has ended")


def _brought(answer: dict[str, str]) -> Path:
    """Raises: RunError: the file was not brought."""
    if "reason" in answer:
        raise RunError(f"{answer['path']} cannot be brought to this machine: {answer['reason']}")
    return Path(answer["local"])


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    return reader
