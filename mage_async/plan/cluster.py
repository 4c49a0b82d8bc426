"""Many GPUs for one run: how many for the learner and for engines, so that neither waits long.

A step of the learner lasts as long as its slower half, computing or its links, which overlap. A
step of the engines is every sampled token drawn and every other token read once: a forward draws a
token for each context that it holds, and takes as long as reading weights, keys and values out of
the GPU's memory. Rates are those of data sheets or given; none was measured.
"""

from collections import Counter
from dataclasses import dataclass

from mage_async.config.schema import Embedded
from mage_async.errors import ConfigError
from mage_async.plan.devices import GB
from mage_async.plan.loads import Load
from mage_async.plan.plan import Plan
from mage_async.plan.ranks import Blocks, Traffic, compute_s, parts_of, traffic_of


@dataclass(frozen=True, slots=True)
class Cluster:
    """A plan on many GPUs of one kind; an engine takes `engine.gpus_per_actor` of them."""

    plan: Plan
    blocks: Blocks
    ranks: int
    engines: int
    link_gb_s: float
    """10^9 bytes that a GPU sends in a second, while it receives as many."""
    tflops: float
    engine_s: float
    """Seconds in which one engine plays a step."""

    def parts(self) -> Counter[str]:
        """Bytes of a rank by part."""
        return parts_of(self.plan, self.blocks, self.ranks)

    def traffic(self) -> Traffic:
        """Bytes between the learner's ranks in a step, of each."""
        return traffic_of(self.plan, self.blocks, self.ranks)

    def compute_s(self) -> float:
        """Seconds that a rank computes in a step."""
        return compute_s(self.plan, self.ranks, self.tflops)

    def links_s(self) -> float:
        """Seconds that a rank's link is busy in a step."""
        traffic = self.traffic()
        return (traffic.gathered + traffic.reduced) / (self.link_gb_s * GB)

    def publication_s(self) -> float:
        """Seconds until one engine has received a version."""
        return self.plan.update.publication_bytes / (self.link_gb_s * GB)

    def learner_s(self) -> float:
        """Seconds of a step of the learner; the publication before it goes on beside it."""
        return max(self.compute_s(), self.links_s(), self.publication_s())

    def engines_s(self) -> float:
        """Seconds in which the engines play a step."""
        return self.engine_s / self.engines

    def step_s(self) -> float:
        """Seconds a step takes at least."""
        return max(self.learner_s(), self.engines_s())

    def needed_engines(self) -> int:
        """Engines that keep this learner busy."""
        return max(1, -int(-self.engine_s // self.learner_s()))

    def spare(self) -> float:
        """Share of a rank's or an engine's memory that is left, of the fuller; below 0 the run
        does not fit.
        """
        fuller = max(self.parts().total(), engine_load(self.plan).parts.total())
        return 1 - fuller / self.plan.device.memory_bytes


def cluster_of(
    plan: Plan,
    blocks: Blocks,
    gpus: int,
    *,
    ranks: int = 0,
    link_gb_s: float = 0.0,
    tflops: float = 0.0,
) -> Cluster:
    """Divide GPUs between learner and engines.

    Args:
        blocks: of the policy as the learner trains it.
        ranks: of the learner; 0: as many as make a step shortest, of those that have room.
        link_gb_s: 10^9 bytes a second and direction; 0: what the data sheet says of one host.
        tflops: as of `Plan.step_s`.

    Raises:
        ConfigError: the run has no GPU, a rate is not known, or no division has room.
    """
    config, device = plan.config, plan.device
    if config.learner.device == "cpu" or isinstance(config.engine, Embedded):
        raise ConfigError(
            f'--gpus plans a learner and engines on GPUs, got learner.device = "'
            f'{config.learner.device}" and engine.kind = "{config.engine.kind}": take a '
            "configuration such as gpu8"
        )
    link_gb_s = link_gb_s or device.link_gb_s
    if not (link_gb_s and device.read_gb_s and (tflops or plan.tflops())):
        raise ConfigError(
            f"the rates of {device.name} are not known: set hardware.gpu to a GPU whose data sheet "
            "`mage plan` has"
        )
    each = config.engine.num_gpus
    most = gpus - each
    if ranks > most or most < 1:
        raise ConfigError(
            f"--gpus {gpus} leaves no GPU for engines beside {max(1, ranks)} ranks of the learner, "
            f"where an engine takes {each}: give more of them"
        )
    play_s = engine_s(plan, tflops)
    asked = [ranks] if ranks else range(1, most + 1)
    found = [Cluster(plan, blocks, n, (gpus - n) // each, link_gb_s, tflops, play_s) for n in asked]
    fitting = [each for each in found if each.spare() >= 0]
    if not fitting:
        least = min(found, key=lambda each: each.parts().total())
        raise ConfigError(
            f"each of {least.ranks} ranks would need {least.parts().total() / GB:.3g} GB, each "
            f"GPU of an engine {engine_load(plan).parts.total() / GB:.3g}, and a GPU has "
            f"{device.memory_bytes / GB:.3g}: lower learner.tokens_per_pass or "
            "engine.server.max_total_tokens, or give more GPUs"
        )
    return min(fitting, key=lambda each: (each.step_s(), each.ranks))


def engine_load(plan: Plan) -> Load:
    """What the fullest GPU of an engine holds: the first, where it has several."""
    return plan.loads[-plan.config.engine.num_gpus]


def engine_s(plan: Plan, tflops: float = 0.0) -> float:
    """Seconds in which one engine plays a step, its caches as full as they may be; its GPUs read
    and compute their parts at once, and what they tell each other is not counted.
    """
    load, batch = engine_load(plan), plan.batch
    room = min(load.kv_tokens // batch.tokens, plan.config.engine.max_contexts)
    contexts = max(1, min(room, batch.num_segments))
    weights = load.parts["weights"]
    read = weights + contexts * load.kv_token_bytes * batch.tokens / 2  # half full on average
    drawn = batch.num_segments * batch.sampled / contexts * read / (plan.device.read_gb_s * GB)
    rate = (tflops or plan.device.tflops_16) * 1e12 * plan.config.engine.num_gpus
    prompts = batch.num_segments * (batch.tokens - batch.sampled)
    return drawn + prompts * 2 * plan.num_weights / rate
