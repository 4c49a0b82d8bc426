"""How ranks find one another, and how rank 0's orders reach them.

Orders go by a pipe a follower; tensors by torch.distributed: gloo between processor cores, over the
loopback interface, and NCCL between GPUs (which was never run).
"""

import os
import socket
import struct
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
from torch import distributed
from torch.distributed import TCPStore

from mage_async.config.schema import Config
from mage_async.learning.ranks.orders import Order

_LENGTH = struct.Struct("<Q")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_HOST = "127.0.0.1"


def store_of_rank_0() -> TCPStore:
    """The store by which ranks learn of one another's addresses; it ends with its process, however
    that ends, and leaves no file.
    """
    return TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)


def store_at(port: int) -> TCPStore:
    """Rank 0's store, as a follower reaches it."""
    return TCPStore(_HOST, port, is_master=False, wait_for_workers=False)


def join(store: TCPStore, number: int, config: Config) -> None:
    """Become one rank of a learner; waits for the others."""
    count, kind = config.learner.ranks, device_type(config)
    os.environ.setdefault(_INTERFACE, _loopback())
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
