"""Where the processes of a run lie on a cluster: what each reserves, and what starts it there.

Two placement groups. The learner (all its ranks are one gang on one host) and the evaluator lie on
the node of this process, for both write to the run's directory. Actors lie where there is room, on
as few nodes as can be: each node is sent every version of the weights. When a node is lost, Ray
reserves its part of a group elsewhere, and a process that is started again is placed there.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mage_async.config.schema import Config
from mage_async.errors import ConfigError, RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.cluster.connection import nodes, own_node
from mage_services.cluster.keeper import Keeper
from mage_services.cluster.kept_child import KeptChild
from mage_services.cluster.served_files import ServedFiles
from mage_services.processes.child import Running, Spec

PLACED_S = 600.0
"""For nodes to come that have room, as a cluster that grows by itself starts them."""
SAID_S = 10.0
MAX_PLACINGS = 5
Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bundles:
    """What processes reserve, by Ray's names: CPU and GPU."""

    learner: Bundle
    actor: Bundle

    @staticmethod
    def of(config: Config, has_gpus: bool) -> "Bundles":
        """A core a thread; a GPU a rank of the learner, and for each engine that needs one."""
        on_gpus = has_gpus and config.engine.kind == "sglang"
        trains_on_gpus = config.learner.device.startswith("cuda")
        return Bundles(
            _bundle(config.learner.threads, config.learner.ranks if trains_on_gpus else 0),
            _bundle(config.engine.threads, config.engine.num_gpus if on_gpus else 0),
        )


def check(config: Config) -> None:
    """Refuse what cannot be run on a cluster.

    Raises:
        ConfigError: the sentence says which key to change.
    """
    if config.transport.weights != "disk":
        raise ConfigError(
            f'transport.weights = "{config.transport.weights}" reaches engines of the learner\'s '
            'host alone: with --cluster set transport.weights = "disk"'
        )
    if config.engine.devices or config.learner.device not in ("cpu", "cuda", "cuda:0"):
        raise ConfigError(
            "with --cluster Ray gives each process its GPUs: set engine.devices = [] and "
            'learner.device = "cuda:0" or "cpu"'
        )


@dataclass(slots=True)
class Placement:
    """Starts processes of a run on nodes: `start` is what a supervisor is given.

    Args:
        say: is told what is waited for.
    """

    run: RunDirectory
    config: Config
    num_actors: int
    keys: Path
    say: Callable[[str], None]
    address: str = ""
    """Where the learner is reached."""
    _groups: dict[bool, Any] = field(default_factory=dict)
    """Ray's placement groups: of actors, and of the rest."""
    _bundles: Bundles | None = None
    _source: Any = None

    def reserve(self) -> None:
        """Reserve room for all processes; waits for nodes that have it.

        Raises:
            RunError: none came in time.
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

    async def start(self, spec: Spec) -> Running:
        """Start a process where room is reserved for it; waits while there is none, as after the
        loss of a node. Cancellation leaves nothing.

        Raises:
            RunError: its keeper died again and again before it was placed.
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
        """The node of a keeper; "" where it died before: Ray placed it on a node that was lost, and
        had not noticed. What is waited for is said. Cancellation leaves the keeper.
        """
        from ray.exceptions import RayActorError

        placing = asyncio.ensure_future(keeper.node.remote())
        done, _ = await asyncio.wait([placing], timeout=SAID_S)
        if not done:
            self.say(f"{name} waits for a node of the cluster that has room")
        try:
            return await placing
        except RayActorError:
            return ""

    def _await_room(self, is_actors: bool, whose: str, bundles: list[Bundle]) -> None:
        group, needs = self._groups[is_actors], _in_words(bundles)
        if group.wait(SAID_S):
            return
        self.say(f"{whose} wait for nodes with room for {needs}")
        if not group.wait(PLACED_S):
            raise RunError(
                f"the cluster has had no room for {whose} within {PLACED_S:g} s, which is "
                f"{needs}: add nodes, end other work, or start fewer --actors"
            )

    def _made(
        self, kind: type, is_actor: bool, number: int, needs: Bundle, *args: Any, **options: Any
    ) -> Any:
        """An actor of Ray's in a bundle."""
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
    """That of `transport.address`; 0 where it has none. The host is that of the learner's node."""
    address = config.transport.address
    return int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
