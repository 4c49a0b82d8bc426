"""Start the processes of a learner's other ranks, send them orders, and end them, from rank 0.

A rank is one process of a learner whose model is sharded over several processes. All ranks end
together. If rank 0 ends, the others lose their connection to it and end; on Linux they are also
killed with its process. If another rank ends, rank 0 ends too, and the supervisor starts the whole
learner again from its checkpoint.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec
from torch import distributed
from torch.distributed import TCPStore

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import DeterministicFailure, MageError, RunError
from mage_async.learning.rank_orders import Begin, Order, Ranks
from mage_async.results.run_directory import RunDirectory
from mage_services.learner.rank_writers import JoinedRank
from mage_services.processes.child_process import BlockingChild, end_in_words, module_command
from mage_services.processes.process import EXIT_DETERMINISTIC, first_failure, ticks

MODULE = "mage_services.learner.rank_worker"
"""The module that the processes of ranks 1, 2, … run."""
MAX_ORDER_BYTES = 2**32 - 1
"""Largest number of bytes of an order: the most that the 32-bit length of a frame can state. The
order to train a step is large, because it holds a rank's share of a whole batch."""
POLL_S = 1.0
"""Seconds between two checks whether a rank has ended."""
PATIENCE_S = 1.0
"""Seconds to wait for each rank's process to end, after a connection between ranks has failed."""
END_S = 20.0
"""Seconds that the ranks have to end by themselves, before they are killed."""


class Ready(msgspec.Struct, frozen=True):
    """Report that a rank has imported torch and is about to join the others."""


class RankProcesses(AbstractContextManager["RankProcesses"]):
    """Own the processes of ranks 1 to `learner.ranks` - 1; with one rank there are none.

    Use it as a context manager. If a rank has ended, the exit of the context raises an error that
    names the rank.
    """

    def __init__(self, run: RunDirectory, config: Config) -> None:
        """Start the processes, which import torch and then wait for the order to begin."""
        self.count = config.learner.ranks
        """Number of ranks, rank 0 included."""
        numbers = range(1, self.count)
        self._store: TCPStore | None = rank_store(0, is_rank_0=True) if numbers else None
        self._joined: JoinedRank | None = None
        port = self._store.port if self._store else 0
        self._workers = [
            BlockingChild[Ready](
                module_command(MODULE, str(run.root), str(port), str(number)),
                Ready,
                max_message_bytes=MAX_ORDER_BYTES,
            )
            for number in numbers
        ]

    def begin(self, config: Config, checkpoint: Path | None) -> JoinedRank | None:
        """Order every rank to load the policy; return the `JoinedRank` of this process, rank 0, or
        None if it is the only rank.
        """
        if self._store is None:
            return None
        order = Begin(config_file.as_tables(config), str(checkpoint or ""))
        self._send([order] * len(self._workers))
        # In a second call, which loads another checkpoint, the ranks have joined already.
        if not distributed.is_initialized():
            self._wait_until_ready()
            join(self._store, 0, config)
            self._joined = JoinedRank.of(Ranks(0, self.count, device_type(config), self._send))
        return self._joined

    async def watch(self) -> None:
        """Wait until a rank ends. If cancelled, the ranks go on.

        Raises:
            RunError: a rank has ended; the message says which one, and how.
        """
        if self._workers:
            async for _ in ticks(POLL_S):
                self._raise_if_ended()

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, *__: object
    ) -> None:
        try:
            if error is None:
                self._end()
            # If a rank has ended, torch raises a connection error that does not name the rank. It
            # is replaced by an error that does. A MageError names its own cause.
            elif isinstance(error, Exception) and not isinstance(first_failure(error), MageError):
                self._raise_if_ended(PATIENCE_S)
        finally:
            for worker in self._workers:
                worker.kill()

    def _send(self, orders: Sequence[Order]) -> None:
        """Send each other rank its order, by ascending rank."""
        for worker, order in zip(self._workers, orders, strict=True):
            worker.channel.send(order)

    def _wait_until_ready(self) -> None:
        """Wait until every worker is ready. Joining would wait for a long time if a worker has
        ended.
        """
        print(f"waiting for {len(self._workers)} ranks to load torch", file=sys.stderr)
        for number, worker in enumerate(self._workers, start=1):
            if worker.channel.receive() is None:
                raise _failure(number, worker.process.wait())

    def _raise_if_ended(self, patience_s: float = 0.0) -> None:
        """Raise a RunError if a rank has ended.

        Args:
            patience_s: Seconds to wait for each rank to end.
        """
        for number, worker in enumerate(self._workers, start=1):
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(patience_s)
            if worker.process.returncode is not None:
                raise _failure(number, worker.process.returncode)

    def _end(self) -> None:
        """Let the ranks end, by closing their channels, and wait for them."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for worker in self._workers:
            worker.channel.close()
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(END_S)


def _failure(number: int, code: int) -> RunError:
    """Return the error of a rank's end; it is deterministic if the rank's exit code says so."""
    kind = DeterministicFailure if code == EXIT_DETERMINISTIC else RunError
    return kind(f"rank {number} of the learner {end_in_words(code)}; all ranks end with it")


# How ranks find one another: a TCP store of rank 0, and torch.distributed. Orders of rank 0 go over
# the channel to each child process; tensors by torch.distributed: gloo between processor cores,
# over the loopback interface, and NCCL between GPUs (which was never run).

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface that gloo uses."""
_HOST = "127.0.0.1"
"""Address of rank 0: all ranks run on one machine."""


def rank_store(port: int, *, is_rank_0: bool) -> TCPStore:
    """Return rank 0's store of all ranks' addresses or, on another rank, a connection to it.

    torch.distributed needs a store, in which ranks find one another's addresses before they
    exchange tensors. (Engines that receive weights meet the learner in another store.) Rank 0's
    store ends with its process, however the process ends, and leaves no file.

    Args:
        port: port of rank 0's store; rank 0 passes 0, and takes a free one.
    """
    return TCPStore(_HOST, port, is_master=is_rank_0, wait_for_workers=False)


def join(store: TCPStore, number: int, config: Config) -> None:
    """Join the process group of the learner's ranks; waits for all of them.

    Raises:
        RunError: the machine has no loopback interface.
    """
    count, kind = config.learner.ranks, device_type(config)
    if _INTERFACE not in os.environ:
        names = [name for _, name in socket.if_nameindex()]
        loopback = next((name for name in names if name.startswith("lo")), None)
        if loopback is None:
            raise RunError(
                f"ranks exchange tensors over the loopback interface, and this machine lists only "
                f"{', '.join(names) or 'none'}: enable it, or name another one in {_INTERFACE}"
            )
        os.environ[_INTERFACE] = loopback
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=number, world_size=count)


def device_type(config: Config) -> str:
    """Return the device type of every rank: "cpu" or "cuda"."""
    return config.learner.device.partition(":")[0]


def on_own_device(config: Config, number: int) -> Config:
    """Return the configuration of a rank: rank n computes on the n-th GPU after rank 0's."""
    kind, _, first = config.learner.device.partition(":")
    if kind == "cpu":
        return config
    learner = msgspec.structs.replace(config.learner, device=f"{kind}:{int(first or 0) + number}")
    return msgspec.structs.replace(config, learner=learner)
