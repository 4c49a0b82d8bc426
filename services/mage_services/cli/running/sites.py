"""Where the processes of a run are started: on this machine, or on the nodes of a Ray cluster."""

import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mage_async.config.schema import Config
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.child import Running, Spec
from mage_services.processes.supervisor import start_here
from mage_services.transport.authentication import actor_keys, keys_in, learner_keys, make_keys
from mage_services.transport.sockets import check_address, ipc_address


@dataclass(frozen=True, slots=True)
class Site:
    """What a supervisor needs to know of where its processes live."""

    address: str
    """Where the learner is reached."""
    start: Callable[[Spec], Awaitable[Running]]


def site_of(
    run: RunDirectory, config: Config, num_actors: int, cluster: str, say: Callable[[str], None]
) -> AbstractContextManager[Site]:
    """The place of a run's processes; what it needs lasts as long as the context.

    Args:
        cluster: the address of a Ray cluster; "" is this machine.

    Raises:
        ConfigError: an address, keys or a cluster that cannot be used.
        RunError: no socket can be made, or the cluster has no room.
    """
    return _on_cluster(run, config, num_actors, cluster, say) if cluster else _here(run, config)


@contextmanager
def _here(run: RunDirectory, config: Config) -> Iterator[Site]:
    address, keys = config.transport.address, config.transport.keys
    is_ours = address == "ipc"
    _check_keys(keys)
    if is_ours:
        address = ipc_address(run.root)
    check_address(address, has_keys=bool(keys))
    try:
        yield Site(address, start_here)
    finally:
        if is_ours:
            shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


@contextmanager
def _on_cluster(
    run: RunDirectory, config: Config, num_actors: int, cluster: str, say: Callable[[str], None]
) -> Iterator[Site]:
    """Keys are made in the run's directory where the configuration names none."""
    from mage_services.cluster.connection import joined
    from mage_services.cluster.placement import Placement, check

    check(config)
    keys = Path(config.transport.keys or run.root / "keys")
    if not config.transport.keys and not keys.exists():
        make_keys(keys)
    _check_keys(str(keys))
    with joined(cluster):
        placement = Placement(run, config, num_actors, keys.resolve(), say)
        placement.reserve()
        yield Site(placement.address, placement.start)


def _check_keys(keys: str) -> None:
    """Say what is wrong with keys before any process starts."""
    keys_in(learner_keys, keys)
    keys_in(actor_keys, keys)
