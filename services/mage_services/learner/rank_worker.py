"""Run a rank of the learner other than rank 0: execute the orders of rank 0 until rank 0 ends.

Rank 0 starts the process by `python -m mage_services.learner.rank_worker RUN PORT NUMBER` and
sends the orders. The process writes its output where the learner does.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed

from mage_async.config import config_file
from mage_async.errors import MageError
from mage_async.learning.rank_orders import (
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
from mage_async.learning.ranked_trainer import RankedTrainer
from mage_async.results.run_directory import RunDirectory
from mage_services.learner.rank_processes import (
    MAX_ORDER_BYTES,
    Ready,
    device_type,
    join,
    on_own_device,
    rank_store,
)
from mage_services.learner.rank_writers import JoinedRank
from mage_services.learner.trainer_thread import COPY, Training
from mage_services.processes.child_process import BlockingChannel, channel_to_parent
from mage_services.processes.process import EXIT_DETERMINISTIC, EXIT_FAILED

if TYPE_CHECKING:
    from concurrent.futures import Future


class RankWorker:
    """Execute the orders of rank 0 on this rank's shards of the policy.

    Args:
        port: port of rank 0's store, through which ranks find one another.
        number: number of this rank, from 1.
        rank_0: channel to rank 0.
    """

    def __init__(
        self, run: RunDirectory, port: int, number: int, rank_0: BlockingChannel[Order]
    ) -> None:
        self._run, self._port, self._number, self._rank_0 = run, port, number, rank_0
        self._training: Training | None = None
        self._joined: JoinedRank | None = None

    def execute(self, order: Order) -> None:
        """Execute one order, at the same time as rank 0 and all other ranks."""
        if isinstance(order, Begin):
            self._training = self._begin(order)
            return
        assert self._training is not None, "the first order is to begin"
        trainer, files = self._training.trainer, self._training.sharded
        assert isinstance(trainer, RankedTrainer)
        assert files is not None
        # All ranks execute an order together. Rank 0 alone uses the results, and completes a
        # checkpoint that all have written; on this rank nothing remains to be done (`lambda:
        # None`).
        match order:
            case Adopt():
                self._training.adopt(
                    on_own_device(config_file.from_tables(order.tables), self._number)
                )
            case Step():
                with self._training.limited_memory():
                    trainer.follow_step(order)
            case Forward():
                trainer.join_forwards(order.num_forwards)
            case Digest():
                files.digests()
            case Publish():
                self._training.num_published += 1
                with self._training.limited_memory(COPY):
                    files.publish(order).add_done_callback(self._end_if_failed)
            case Save():
                with self._training.limited_memory(COPY):
                    files.save(order, lambda: None).add_done_callback(self._end_if_failed)

    def _begin(self, order: Begin) -> Training:
        """Load the policy; before the first time, join the other ranks."""
        config = config_file.from_tables(order.tables)
        if self._joined is None:
            self._rank_0.send(Ready())
            join(rank_store(self._port, is_rank_0=False), self._number, config)
            count, kind = config.learner.ranks, device_type(config)
            # Orders are sent by rank 0 alone: here they are dropped.
            self._joined = JoinedRank.of(Ranks(self._number, count, kind, lambda orders: None))
        checkpoint = Path(order.checkpoint) if order.checkpoint else None
        return Training.of(self._run, on_own_device(config, self._number), checkpoint, self._joined)

    def _end_if_failed(self, written: "Future[None]") -> None:
        """End this rank, and so all ranks, if a file could not be written."""
        if error := written.exception():
            _print_error(self._number, error)
            os._exit(EXIT_FAILED)


def _print_error(number: int, error: BaseException) -> None:
    print(f"rank {number}: {error}", file=sys.stderr, flush=True)


def main(run: RunDirectory, port: int, number: int) -> int:
    """Execute orders until there are no more; returns the exit code."""
    rank_0: BlockingChannel[Order] = channel_to_parent(Order, MAX_ORDER_BYTES)
    worker = RankWorker(run, port, number, rank_0)
    try:
        for order in rank_0.messages():
            worker.execute(order)
    except MageError as error:
        _print_error(number, error)
        return EXIT_DETERMINISTIC if error.is_deterministic else EXIT_FAILED
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides what they mean
        signal.signal(each, signal.SIG_IGN)
    sys.exit(main(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
