"""The followers of a learner, as rank 0 sees them: started, told, watched and ended together.

A gang lives and dies as one. Followers end when the pipe of their orders ends, and on Linux with
their parent; a learner one of whose followers has ended ends itself, and is started again from its
checkpoint as any learner is.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import distributed

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import DeterministicFailure, MageError, RunError
from mage_async.learning.ranks.orders import Begin, Order, Ranks
from mage_async.results.run_directory import RunDirectory
from mage_services.learner.ranks.beside import Joined, joined
from mage_services.learner.ranks.process_group import (
    device_type,
    join,
    store_of_rank_0,
    write_order,
)
from mage_services.processes.parent_death_signal import PARENT
from mage_services.processes.process import EXIT_DETERMINISTIC, first_failure, ticks

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOK_S = 1.0
PATIENCE_S = 1.0
"""From the end of a follower's connection to that of its process."""
END_S = 20.0
"""For followers to end by themselves."""
MODULE = "mage_services.learner.ranks.follower"


class Gang:
    """Followers with the numbers 1 to `learner.ranks` - 1; of a learner of one rank there are none.
    Use it as a context: what ended it is then said by the follower that ended first.
    """

    def __init__(self, run: RunDirectory, config: Config) -> None:
        """Start the processes; they load torch, and wait for `begin`."""
        self.count = config.learner.ranks
        """Of all ranks."""
        numbers = range(1, self.count)
        self._store: TCPStore | None = store_of_rank_0() if numbers else None
        self._joined: Joined | None = None
        self._followers = [self._started(run, each) for each in numbers]

    def begin(self, config: Config, checkpoint: Path | None) -> Joined | None:
        """Have every follower load the policy; rank 0 among them, None where the learner is one
        process.
        """
        if self._store is None:
            return None
        self._tell([Begin(config_file.dump(config), str(checkpoint or ""))] * len(self._followers))
        if not distributed.is_initialized():
            self._hear_all()
            join(self._store, 0, config)
            self._joined = joined(Ranks(0, self.count, device_type(config), self._tell))
        return self._joined

    async def watch(self) -> None:
        """End with the first follower that does. Cancellation leaves them as they are.

        Raises:
            RunError: it says which follower ended, and how.
        """
        if self._followers:
            async for _ in ticks(LOOK_S):
                self._check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._end()
            elif isinstance(error, Exception) and not _is_told(error):
                self._check(PATIENCE_S)
        finally:
            self._kill()

    def _started(self, run: RunDirectory, number: int) -> "subprocess.Popen[bytes]":
        assert self._store is not None
        command = [sys.executable, "-m", MODULE, str(run.root), str(self._store.port), str(number)]
        variables = {PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        own = {key: value for key, value in os.environ.items() if key != "MAGE_STATUS_FD"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=own | variables)

    def _tell(self, orders: Sequence[Order]) -> None:
        for follower, order in zip(self._followers, orders, strict=True):
            write_order(follower.stdin, order)

    def _hear_all(self) -> None:
        """Wait for a word of every follower: joining would wait long for one that has ended."""
        for number, follower in enumerate(self._followers, start=1):
            if not follower.stdout.read(1):
                raise _failure(number, follower.wait())

    def _check(self, patience_s: float = 0.0) -> None:
        """Refuse to go on without a follower.

        Args:
            patience_s: how long to wait for the end of one whose connection has ended.
        """
        for number, follower in enumerate(self._followers, start=1):
            with suppress(subprocess.TimeoutExpired):
                follower.wait(patience_s)
            if follower.returncode is not None:
                raise _failure(number, follower.returncode)

    def _end(self) -> None:
        """Let followers end by themselves."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for follower in self._followers:
            follower.stdin.close()
        for follower in self._followers:
            with suppress(subprocess.TimeoutExpired):
                follower.wait(END_S)

    def _kill(self) -> None:
        """End what still runs."""
        for follower in self._followers:
            follower.kill()
            follower.wait()
            for pipe in (follower.stdin, follower.stdout):
                with suppress(BrokenPipeError):  # closing writes what is left
                    pipe.close()


def _failure(number: int, code: int) -> RunError:
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    kind = DeterministicFailure if code == EXIT_DETERMINISTIC else RunError
    return kind(f"rank {number} of the learner {how}; all ranks end with it")


def _is_told(error: Exception) -> bool:
    """Whether an error says by itself why the learner ends."""
    group = error if isinstance(error, ExceptionGroup) else ExceptionGroup("", [error])
    return isinstance(first_failure(group), MageError)
