"""A follower: a rank of a learner other than 0. It does what rank 0 tells it, until rank 0 ends.

`python -m mage_services.learner.ranks.follower RUN PORT NUMBER`, under rank 0, with orders on its
standard input. What it prints goes where the learner's own words go.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed

from mage_async.config import config_file
from mage_async.errors import MageError
from mage_async.learning.ranks.orders import (
    Adopt,
    Begin,
    Digest,
    Forward,
    Order,
    Publish,
    Ranks,
    Save,
    Step,
)
from mage_async.learning.ranks.ranked_trainer import RankedTrainer
from mage_async.results.run_directory import RunDirectory
from mage_services.learner.ranks.beside import Joined, joined
from mage_services.learner.ranks.process_group import (
    device_type,
    join,
    on_own_device,
    read_orders,
    store_at,
)
from mage_services.learner.training import Training
from mage_services.processes.parent_death_signal import PARENT, die_with_parent
from mage_services.processes.process import EXIT_DETERMINISTIC, EXIT_FAILED

if TYPE_CHECKING:
    from concurrent.futures import Future


class Follower:
    """One rank, which loads the policy as rank 0 does."""

    def __init__(self, run: RunDirectory, port: int, number: int) -> None:
        self._run, self._port, self._number = run, port, number
        self._training: Training | None = None
        self._joined: Joined | None = None

    def follow(self, order: Order) -> None:
        """Do one thing together with rank 0."""
        if isinstance(order, Begin):
            self._training = self._begun(order)
            return
        assert self._training is not None, "the first order is to begin"
        trainer, files = self._training.trainer, self._training.sharded
        assert isinstance(trainer, RankedTrainer)
        assert files is not None
        match order:
            case Adopt():
                self._training.adopt(on_own_device(config_file.loads(order.config), self._number))
            case Step():
                trainer.follow_step(order)
            case Forward():
                trainer.lend(order.num_forwards)
            case Digest():
                files.digests(order.method)
            case Publish():
                files.publish(order).add_done_callback(self._end_if_failed)
            case Save():
                files.save(order, lambda: None).add_done_callback(self._end_if_failed)

    def _begun(self, order: Begin) -> Training:
        config = config_file.loads(order.config)
        if self._joined is None:
            _say_ready()
            join(store_at(self._port), self._number, config)
            count, kind = config.learner.ranks, device_type(config)
            self._joined = joined(Ranks(self._number, count, kind, lambda orders: None))
        checkpoint = Path(order.checkpoint) if order.checkpoint else None
        return Training.of(self._run, on_own_device(config, self._number), checkpoint, self._joined)

    def _end_if_failed(self, written: "Future[None]") -> None:
        """What is written beside the training has failed: all ranks end."""
        if error := written.exception():
            _say(self._number, error)
            os._exit(EXIT_FAILED)


def _say_ready() -> None:
    """Rank 0 waits for a byte; what is printed from here on goes where errors go."""
    os.write(1, b".")
    os.dup2(2, 1)


def _say(number: int, error: BaseException) -> None:
    print(f"rank {number}: {error}", file=sys.stderr, flush=True)


def main(run: RunDirectory, port: int, number: int) -> int:
    """Follow to the end of orders; the exit code."""
    follower = Follower(run, port, number)
    try:
        for order in read_orders(sys.stdin.buffer):
            follower.follow(order)
    except MageError as error:
        _say(number, error)
        return EXIT_DETERMINISTIC if error.is_deterministic else EXIT_FAILED
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT]))
    for each in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides what they mean
        signal.signal(each, signal.SIG_IGN)
    sys.exit(main(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
