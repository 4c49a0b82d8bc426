"""Place the processes of a run on a Ray cluster: reserve what each needs, and start it there.

Each process has a *bundle*: the CPU cores and GPUs that Ray reserves for it on one node. Two of
Ray's placement groups hold the bundles. The group of the learner (all its ranks on one host) and
the evaluator lies on the node of this process, because both write to the run's directory. The group
of the actors spans as few nodes as possible, because each node receives every version of the
weights. When a node is lost, Ray reserves its bundles elsewhere, and the restarted processes are
placed there.

A process is not a Ray actor itself. A Ray actor, its *keeper* (`keeper.py`), occupies the bundle
that is reserved for the process, starts the process as a child there, and relays its events.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mage_async.config.schema import Config
from mage_async.errors import ConfigError, RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.cluster.connection import nodes, own_node
from mage_services.cluster.keeper import ENDED, End, Keeper, ServedFiles
from mage_services.processes.supervised_process import ProcessSpec, RunningProcess

LOST_NODE_CODE = -signal.SIGKILL
"""Exit code of a process whose node was lost: the supervisor restarts it as a killed child."""


class KeptChild:
    """Run a process on a node of the cluster, with the interface of a local child
    (`RunningProcess`).

    Args:
        keeper: Ray handle of a `Keeper` that has been placed.
    """

    def __init__(self, spec: ProcessSpec, node: str, keeper: Any) -> None:
        self.spec, self.node = spec, node
        self._keeper = keeper
        self._end: End | None = None
        self._loss = ""

    @property
    def was_silent(self) -> bool:
        """Whether the keeper killed the process because it was silent."""
        return self._end is not None and self._end.was_silent

    async def events(self, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """Start the process, and yield its status events until it ends.

        Cancellation leaves the process running.
        """
        from ray.exceptions import RayError

        loop = asyncio.get_running_loop()
        life = self._keeper.live.options(num_returns="streaming").remote(self.spec, silence_s)
        try:
            async for each in life:
                event = await each
                if event["event"] == ENDED:
                    self._end = event["end"]
                else:
                    # The event's own time is by the clock of the keeper's node.
                    yield event | {"at": loop.time()}
        except RayError as fault:
            self._loss = _sentence_of(fault)
        # On another machine the process could not write to the run's log itself.
        if self._end is not None and self._end.printed:
            with self.spec.log.open("a") as log:
                log.write(self._end.printed)

    async def wait(self) -> int:
        """Return the exit code of the process; `LOST_NODE_CODE` if the node was lost, or Ray failed
        otherwise.
        """
        import ray
        from ray.exceptions import RayError

        if self._end is not None:
            return self._end.code
        if self._loss:
            ray.kill(self._keeper)  # and its process with it, whose events nobody receives any more
            return LOST_NODE_CODE
        try:
            code: int = await self._keeper.ended.remote()
            return code
        except RayError as fault:
            self._loss = _sentence_of(fault)
            return LOST_NODE_CODE

    def terminate(self) -> None:
        """Send the process SIGTERM."""
        self._keeper.signal.remote(signal.SIGTERM)

    def kill(self) -> None:
        """Send the process SIGKILL."""
        self._keeper.signal.remote(signal.SIGKILL)

    def failure_line(self, code: int) -> str:
        """Return one line: which process failed and why."""
        if self._end is not None:
            return f"{self._end.failure_line} (on {self.node})"
        return f"{self.spec.name} was lost on {self.node}: {self._loss}"


def _sentence_of(fault: Exception) -> str:
    """Return the last line of an error of Ray's that has text; the first lines name Ray's parts."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(fault).__name__


PLACEMENT_TIMEOUT_S = 600.0
"""Seconds to wait for nodes with enough free resources, which an autoscaling cluster may have to
start.
"""
NOTICE_S = 10.0
"""Seconds of waiting after which the user is informed."""
MAX_PLACINGS = 5
"""Number of attempts to place the keeper of a process, in case it dies before it is placed."""
Bundle = dict[str, float]
"""Amount of each resource, by Ray's name of the resource."""


def bundles_of(config: Config, has_gpus: bool) -> tuple[Bundle, Bundle]:
    """Return the bundle of the learner, and that of each actor and of the evaluator: a core for
    each thread (of each rank of the learner), and a GPU for each rank or for each GPU of an engine.
    """
    learner = config.learner
    on_gpus = has_gpus and config.engine.kind == "sglang"
    trains_on_gpus = learner.device.startswith("cuda")
    return (
        _bundle(learner.threads * learner.ranks, learner.ranks if trains_on_gpus else 0),
        _bundle(config.engine.threads, config.engine.num_gpus if on_gpus else 0),
    )


def check(config: Config) -> None:
    """Refuse a configuration that cannot run on a cluster.

    Raises:
        ConfigError: the sentence says which key to change.
    """
    if not config.transport.weights.is_on_disk:
        raise ConfigError(
            f'transport.weights = "{config.transport.weights.kind}" reaches only engines of the '
            'learner\'s host: with --cluster set transport.weights = "disk"'
        )
    if config.engine.devices or config.learner.device not in ("cpu", "cuda", "cuda:0"):
        raise ConfigError(
            "with --cluster Ray gives each process its GPUs: set engine.devices = [] and "
            'learner.device = "cuda:0" or "cpu"'
        )


@dataclass(slots=True)
class Placement:
    """Start processes of a run on nodes; the supervisor calls `start`.

    Args:
        keys: directory of the run's keys.
        say: shows a sentence to the user.
    """

    run: RunDirectory
    config: Config
    num_actors: int
    keys: Path
    say: Callable[[str], None]
    address: str = ""
    """The learner's address; set by `reserve`."""
    _run_group: Any = None
    """Ray's placement group of the learner and the evaluator, on the node of this process."""
    _actor_group: Any = None
    """Ray's placement group of the actors."""
    _bundles: tuple[Bundle, Bundle] = ({}, {})
    """Result of `bundles_of`; set by `reserve`."""
    _served_files: Any = None
    """Ray handle of `ServedFiles`, on the node of this process."""

    def reserve(self) -> None:
        """Reserve a bundle for each process; wait until nodes have the resources.

        Raises:
            RunError: the nodes did not have them within `PLACEMENT_TIMEOUT_S`.
        """
        import ray
        from ray.util.placement_group import placement_group

        has_gpus = any(node.gpus for node in nodes())
        self._bundles = learner, actor = bundles_of(self.config, has_gpus)
        own, actors = [learner, actor], [actor] * self.num_actors
        selector = [{"ray.io/node-id": own_node().id}] * len(own)
        self._run_group = placement_group(own, "STRICT_PACK", bundle_label_selector=selector)
        self._actor_group = placement_group(actors, "PACK")
        # Other nodes do not help this group: its selector names this one.
        self._wait_for_room(
            self._run_group,
            "the learner and the evaluator",
            own,
            "this node",
            "end its other work, lower learner.threads, engine.threads or learner.ranks, or start "
            "the run on a node that has room",
        )
        # In the learner's bundle, but without a core of its own, which the learner needs.
        self._served_files = _create(ServedFiles, self._run_group, 0, {"CPU": 0})
        self.address = ray.get(self._served_files.address.remote(port_of(self.config)))
        whose = f"{self.num_actors} actor" + "s" * (self.num_actors > 1)
        advice = "add nodes, end other work, or start fewer --actors"
        self._wait_for_room(self._actor_group, whose, actors, "the cluster", advice)

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a process in its bundle; wait while the bundle has no node, as after a loss.

        Cancellation leaves no process behind.

        Raises:
            RunError: its keeper died `MAX_PLACINGS` times before it was placed.
        """
        is_actor = spec.name.startswith("actor-")
        for _ in range(MAX_PLACINGS):
            keeper = self._keeper(spec.name, is_actor)
            if node := await self._placed(spec.name, keeper):
                break
        else:
            raise RunError(
                f"{spec.name} could not be placed: its keeper died {MAX_PLACINGS} times; ask `mage "
                "doctor --cluster`"
            )
        # The keeper of an actor passes the keys itself, which it may have to copy to its node.
        keys = () if is_actor else ("--keys", str(self.keys))
        # Without `devices`: Ray lets a keeper and its child see the GPUs of their bundle alone.
        kept = replace(spec, arguments=(*spec.arguments, *keys), devices=())
        return KeptChild(kept, node, keeper)

    def _keeper(self, name: str, is_actor: bool) -> Any:
        """Start the keeper of a process in the bundle that was reserved for the process."""
        folders, (learner, actor) = (self.run.root, self.keys), self._bundles
        if is_actor:
            number = int(name.removeprefix("actor-"))
            return _create(Keeper, self._actor_group, number, actor, *folders, self._served_files)
        number, needs = (0, learner) if name == "learner" else (1, actor)
        # None instead of served files: this node has the run's directory.
        return _create(Keeper, self._run_group, number, needs, *folders, None)

    async def _placed(self, name: str, keeper: Any) -> str:
        """Return the node of a keeper, or "" if the keeper died before it was placed, which happens
        when Ray has not yet noticed that the chosen node is lost. Cancellation leaves the keeper,
        which ends with its last handle and has started no process.
        """
        from ray.exceptions import RayActorError

        placing = asyncio.ensure_future(keeper.node.remote())
        done, _ = await asyncio.wait([placing], timeout=NOTICE_S)
        if not done:
            self.say(f"{name} waits for a node of the cluster that has room")
        try:
            node: str = await placing
            return node
        except RayActorError:
            return ""

    def _wait_for_room(
        self, group: Any, whose: str, bundles: list[Bundle], where: str, advice: str
    ) -> None:
        """Wait until Ray has reserved the bundles of a placement group; inform the user if that
        takes long.

        Args:
            whose: The processes of the group, for sentences.
            where: The place that needs room for them, for sentences.
            advice: A remedy if there is no room, for sentences.

        Raises:
            RunError: the reservation takes longer than `PLACEMENT_TIMEOUT_S`.
        """
        if group.wait(NOTICE_S):
            return
        needs = _in_words(bundles)
        self.say(f"waiting until {where} has room for {whose}: {needs}")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            raise RunError(
                f"{where} has had no room for {whose} ({needs}) within "
                f"{PLACEMENT_TIMEOUT_S:g} s: {advice}"
            )


def _create(kind: type, group: Any, bundle: int, needs: Bundle, *args: Any) -> Any:
    """Start a Ray actor in a bundle of a placement group; return its handle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = {
        "num_cpus": needs["CPU"],
        "num_gpus": needs.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    }
    return ray.remote(kind).options(**options).remote(*args)


def _bundle(cores: int, gpus: int) -> Bundle:
    return {"CPU": cores, "GPU": gpus} if gpus else {"CPU": cores}


def total(bundles: list[Bundle]) -> tuple[float, float]:
    """Return the CPU cores and the GPUs of all bundles."""
    cores, gpus = (sum(each.get(kind, 0) for each in bundles) for kind in ("CPU", "GPU"))
    return cores, gpus


def _in_words(bundles: list[Bundle]) -> str:
    cores, gpus = total(bundles)
    return f"{cores:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")


def port_of(config: Config) -> int:
    """Return the port of `transport.address`, or 0. (The host is always the learner's node.)"""
    address = config.transport.address
    return int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
