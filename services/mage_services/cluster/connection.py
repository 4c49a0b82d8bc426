"""Connect this process to a Ray cluster, and list the cluster's nodes."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mage_async.errors import ConfigError, first_line

CONNECT_S = 3.0
"""Seconds that a connection to an address of the cluster may take."""


@dataclass(frozen=True, slots=True)
class Node:
    """Describe a living node of the cluster: its address, cores and GPUs."""

    id: str
    """Ray's id of the node, in hex."""
    address: str
    """IP address."""
    cores: float
    """Number of CPU cores that `ray start` announced."""
    gpus: float
    """Number of GPUs that `ray start` announced."""

    @property
    def name(self) -> str:
        """Name of the node in messages. The start of the id distinguishes nodes of one machine."""
        return f"{self.address} ({self.id[:6]})"


def check_address(address: str) -> None:
    """Refuse an address of a cluster at which nothing listens; "auto" is not checked.

    Raises:
        ConfigError: nothing answers, or Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ConfigError('--cluster needs Ray: pip install "mage_async[cluster]"')
    if address.startswith("ray://"):
        raise ConfigError(
            f"--cluster {address}: a run cannot be started through Ray's client: start it on a "
            "node of the cluster, with `--cluster auto` or HOST:PORT of the head node"
        )
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
                pass
        except (OSError, ValueError) as fault:
            raise _no_cluster(address, fault) from fault


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Connect as a driver of a cluster. Ray actors started within the context end with it.

    Args:
        address: "auto" for the cluster of this machine, or HOST:PORT of its head node.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or this machine is no node of it.
    """
    check_address(address)  # Ray itself would retry a refused connection for more than ten minutes
    import ray

    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    # Ray raises AssertionError for some failures of the connection.
    except (OSError, ValueError, RuntimeError, AssertionError) as fault:
        raise _no_cluster(address, fault) from fault
    try:
        yield
    finally:
        ray.shutdown()


def _no_cluster(address: str, fault: BaseException) -> ConfigError:
    """Return the error for an address at which there is no cluster."""
    return ConfigError(
        f"--cluster {address}: no Ray cluster answers there, or this machine is not one of its "
        f"nodes ({first_line(fault)}): run `ray start --head` here, or `ray start "
        "--address HOST:6379` with the address of the head node"
    )


def nodes() -> list[Node]:
    """Return the living nodes, sorted by address."""
    import ray

    found = list[Node]()
    for facts in ray.nodes():
        if facts["Alive"]:
            has = facts["Resources"]
            cores, gpus = has.get("CPU", 0.0), has.get("GPU", 0.0)
            found.append(Node(facts["NodeID"], facts["NodeManagerAddress"], cores, gpus))
    return sorted(found, key=lambda node: (node.address, node.id))


def own_node() -> Node:
    """Return the node that this process runs on."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return next(node for node in nodes() if node.id == own)


def on(node: Node) -> Any:
    """Return Ray's scheduling strategy for this node and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.id, soft=False)
