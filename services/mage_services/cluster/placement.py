"""The placement of a run's processes on a Ray cluster: what each reserves, and how it is started.

There are two placement groups. The learner (all its ranks on one host) and the evaluator are placed
on the node of this process, because both write to the run's directory. Actors are placed on as few
nodes as possible, because each node receives every version of the weights. When a node is lost, Ray
reserves its part of a group elsewhere, and a restarted process is placed there.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
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
    """A process on a node of the cluster, with the interface of a local child (`RunningProcess`).

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
        """Whether its keeper killed it for its silence."""
        return self._end is not None and self._end.was_silent

    async def events(self, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """As `SupervisedProcess.events`. Cancellation leaves the process running."""
        from ray.exceptions import RayError

        loop = asyncio.get_running_loop()
        life = self._keeper.live.options(num_returns="streaming").remote(self.spec, silence_s)
        try:
            async for each in life:
                event = await each
                if event["event"] == ENDED:
                    self._end = event["end"]
                else:
                    yield event | {"at": loop.time()}
        except RayError as fault:
            self._loss = _sentence_of(fault)
        if self._end is not None and self._end.printed:
            with self.spec.log.open("a") as log:
                log.write(self._end.printed)

    async def wait(self) -> int:
        """As `SupervisedProcess.wait`; `LOST_NODE_CODE` if the node was lost."""
        from ray.exceptions import RayError

        if self._end is not None:
            return self._end.code
        try:
            return await self._keeper.ended.remote()
        except RayError as fault:
            self._loss = self._loss or _sentence_of(fault)
            return LOST_NODE_CODE

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._keeper.signal.remote(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._keeper.signal.remote(signal.SIGKILL)

    def epitaph(self, code: int) -> str:
        """Return one line: which process failed and why."""
        if self._end is not None:
            return f"{self._end.epitaph} (on {self.node})"
        return f"{self.spec.name} was lost on {self.node}: {self._loss}"


def _sentence_of(fault: Exception) -> str:
    """Return the last line of an error of Ray's that has text; the first lines name Ray's parts."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(fault).__name__


PLACEMENT_TIMEOUT_S = 600.0
"""How long to wait for nodes with room, which an autoscaling cluster may have to start."""
NOTICE_S = 10.0
"""How long to wait before people are informed of the wait."""
MAX_PLACINGS = 5
Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bundles:
    """The resources that each process reserves, by Ray's names: CPU and GPU."""

    learner: Bundle
    actor: Bundle

    @staticmethod
    def of(config: Config, has_gpus: bool) -> "Bundles":
        """Reserve a core for each thread, and a GPU for each rank and each GPU of an engine."""
        on_gpus = has_gpus and config.engine.kind == "sglang"
        trains_on_gpus = config.learner.device.startswith("cuda")
        return Bundles(
            _bundle(config.learner.threads, config.learner.ranks if trains_on_gpus else 0),
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
    """Starts processes of a run on nodes; the supervisor calls `start`.

    Args:
        say: shows a sentence to people.
    """

    run: RunDirectory
    config: Config
    num_actors: int
    keys: Path
    say: Callable[[str], None]
    address: str = ""
    """The learner's address."""
    _groups: dict[bool, Any] = field(default_factory=dict)
    """Ray's placement groups: of actors (`True`), and of the learner and evaluator (`False`)."""
    _bundles: Bundles | None = None
    _source: Any = None

    def reserve(self) -> None:
        """Reserve room for all processes; wait for nodes that have it.

        Raises:
            RunError: no nodes had room within `PLACEMENT_TIMEOUT_S`.
        """
        import ray
        from ray.util.placement_group import placement_group

        self._bundles = bundles = Bundles.of(self.config, any(node.gpus for node in nodes()))
        engine = bundles.actor
        near = [bundles.learner, engine]
        selector = [{"ray.io/node-id": own_node().id}] * len(near)
        self._groups = {
            False: placement_group(near, "STRICT_PACK", bundle_label_selector=selector),
            True: placement_group([engine] * self.num_actors, "PACK"),
        }
        self._await_room(False, "the learner and the evaluator", near)
        self._source = self._made(ServedFiles, False, 0, {"CPU": 0})
        self.address = ray.get(self._source.address.remote(port_of(self.config)))
        self._await_room(True, f"{self.num_actors} actors", [engine] * self.num_actors)

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
        keys = () if is_actor else ("--keys", str(self.keys))
        kept = replace(spec, arguments=(*spec.arguments, *keys), devices=())
        return KeptChild(kept, node, keeper)

    def _keeper(self, name: str, is_actor: bool) -> Any:
        assert self._bundles is not None
        number = int(name.removeprefix("actor-")) if is_actor else int(name != "learner")
        needs = self._bundles.learner if name == "learner" else self._bundles.actor
        source = self._source if is_actor else None
        return self._made(Keeper, is_actor, number, needs, self.run.root, self.keys, source)

    async def _placed(self, name: str, keeper: Any) -> str:
        """Return the node of a keeper, or "" if the keeper died before it was placed.

        That happens when Ray places it on a node that was lost unnoticed. Cancellation leaves the
        keeper.
        """
        from ray.exceptions import RayActorError

        placing = asyncio.ensure_future(keeper.node.remote())
        done, _ = await asyncio.wait([placing], timeout=NOTICE_S)
        if not done:
            self.say(f"{name} waits for a node of the cluster that has room")
        try:
            return await placing
        except RayActorError:
            return ""

    def _await_room(self, is_actors: bool, whose: str, bundles: list[Bundle]) -> None:
        group, needs = self._groups[is_actors], _in_words(bundles)
        if group.wait(NOTICE_S):
            return
        self.say(f"{whose} wait for nodes with room for {needs}")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            raise RunError(
                f"the cluster has had no room for {whose} within {PLACEMENT_TIMEOUT_S:g} s, which "
                f"is {needs}: add nodes, end other work, or start fewer --actors"
            )

    def _made(
        self, kind: type, is_actor: bool, number: int, needs: Bundle, *args: Any, **options: Any
    ) -> Any:
        """Start a Ray actor in a bundle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(
            self._groups[is_actor], placement_group_bundle_index=number
        )
        cores, gpus = needs["CPU"], needs.get("GPU", 0)
        options |= {"num_cpus": cores, "num_gpus": gpus, "scheduling_strategy": where}
        return ray.remote(kind).options(**options).remote(*args)


def _bundle(cores: int, gpus: int) -> Bundle:
    return {"CPU": cores, "GPU": gpus} if gpus else {"CPU": cores}


def _in_words(bundles: list[Bundle]) -> str:
    cores, gpus = (sum(each.get(kind, 0) for each in bundles) for kind in ("CPU", "GPU"))
    return f"{cores:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")


def port_of(config: Config) -> int:
    """Return the port of `transport.address`, or 0. (The host is always the learner's node.)"""
    address = config.transport.address
    return int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
