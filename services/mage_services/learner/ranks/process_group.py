"""How ranks find one another, and how rank 0's orders reach them.

Orders go by a pipe a follower; tensors by torch.distributed: gloo between processor cores, over the
loopback interface, and NCCL between GPUs (which was never run).
"""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from torch import distributed

from mage_async.config.schema import Config
from mage_async.learning.ranks.orders import Order

_LENGTH = struct.Struct("<Q")
_INTERFACE = "GLOO_SOCKET_IFNAME"
STORE = "store"
"""The file, in a folder of the gang's own, by which ranks learn of one another's addresses."""


def join(folder: Path, number: int, config: Config) -> None:
    """Become one rank of a learner; waits for the others."""
    count, kind = config.learner.ranks, device_type(config)
    os.environ.setdefault(_INTERFACE, _loopback())
    store = distributed.FileStore(str(folder / STORE), count)
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=number, world_size=count)


def device_type(config: Config) -> str:
    """Of every rank: "cpu" or "cuda"."""
    return config.learner.device.partition(":")[0]


def on_own_device(config: Config, number: int) -> Config:
    """A configuration as a rank computes by it: rank 0 has the GPU that it names, and each other
    rank one more.
    """
    kind, _, first = config.learner.device.partition(":")
    if kind == "cpu":
        return config
    learner = msgspec.structs.replace(config.learner, device=f"{kind}:{int(first or 0) + number}")
    return msgspec.structs.replace(config, learner=learner)


def write_order(pipe: BinaryIO, order: Order) -> None:
    """Send an order; waits while the pipe is full."""
    body = msgspec.msgpack.encode(order)
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def read_orders(pipe: BinaryIO) -> Iterator[Order]:
    """Orders until rank 0 has ended, be it within one."""
    decoder = msgspec.msgpack.Decoder(Order)
    while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if len(body := pipe.read(length)) < length:
            return
        yield decoder.decode(body)


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
