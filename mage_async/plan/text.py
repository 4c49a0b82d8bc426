"""A plan in lines for people."""

from collections.abc import Iterator
from dataclasses import replace

from mage_async.plan.cluster import Cluster, engine_load
from mage_async.plan.devices import GB
from mage_async.plan.loads import GRAPH_BYTES, PROCESS_BYTES, Load
from mage_async.plan.plan import Plan


def as_lines(plan: Plan, tflops: float = 0.0) -> Iterator[str]:
    """Memory by process and part, operations, seconds, what is published.

    Args:
        tflops: as of `Plan.step_s`.
    """
    for load in plan.loads:
        yield from _memory(load)
    for place, size in plan.needed().items():
        yield f"{place}: {_gb(size)} of {_gb(plan.device.memory_bytes)} GB of {plan.device.name}"
    yield from _work(plan)
    yield from _seconds(plan, tflops)
    yield from _caches(plan)
    yield _assumed()


def _assumed() -> str:
    return (
        f"assumed, not measured: {_gb(PROCESS_BYTES)} GB for a process on a GPU, and "
        f"{_gb(GRAPH_BYTES)} GB for an SGLang's graphs; all else follows from shapes"
    )


def _memory(load: Load) -> Iterator[str]:
    yield f"{load.process} on {load.place}, GB:"
    for part, size in load.parts.most_common():
        yield f"  {part:<18}{_gb(size):>8}"
    yield f"  {'together':<18}{_gb(load.parts.total()):>8}"


def _work(plan: Plan) -> Iterator[str]:
    batch, rules = plan.batch, plan.config.learner
    one_pass = batch.of_one_pass(plan.config)
    yield (
        f"contexts of {batch.tokens:,} tokens, {batch.sampled:,} of them sampled, the most there "
        f"can be: {one_pass} a pass, {batch.num_segments} a step in {rules.minibatches} minibatches"
    )
    yield f"a step computes {plan.flops() / 1e12:,.1f} TFLOP"


def _seconds(plan: Plan, tflops: float) -> Iterator[str]:
    if seconds := plan.step_s(tflops):
        rate = tflops or plan.tflops()
        source = "given" if tflops else f"the most that {plan.device.name}'s data sheet says"
        yield f"a step takes at least {seconds:,.1f} s at {rate:g} TFLOP/s, {source}"
    else:
        yield "seconds a step: give --tflops, a rate that was measured on this machine"
    yield f"a publication has {_gb(plan.update.publication_bytes)} GB"


def cluster_lines(cluster: Cluster) -> Iterator[str]:
    """Many GPUs: memory of a rank, bytes on links, seconds, and which side waits for the other."""
    ranks, engines, traffic = cluster.ranks, cluster.engines, cluster.traffic()
    publication = cluster.plan.update.publication_bytes
    each = cluster.plan.config.engine.num_gpus
    shared = f", {each} for each of {engines}" if each > 1 else ""
    gpus = engines * each
    yield f"{ranks + gpus} GPUs: the learner on {ranks}, engines on {gpus}{shared}"
    yield from _memory(Load("each rank of the learner", "its own", cluster.parts()))
    first = "first GPU of each engine" if each > 1 else "each engine"
    yield from _memory(replace(engine_load(cluster.plan), process=first, place="its own"))
    yield f"a GPU: {_gb(cluster.plan.device.memory_bytes)} GB, {cluster.plan.device.name}"
    yield from _work(cluster.plan)
    yield from _caches(cluster.plan)
    yield (
        f"a step, each rank: gathers {_gb(traffic.gathered)} GB and sums {_gb(traffic.reduced)} GB "
        f"of gradients; a publication sends {_gb(publication)} GB to each engine, "
        f"{_gb(publication * engines)} in all"
    )
    yield (
        f"a step of the learner takes at least {cluster.learner_s():,.3g} s: computing "
        f"{cluster.compute_s():,.3g}, links {cluster.links_s():,.3g} and a publication "
        f"{cluster.publication_s():,.3g} beside one another, at {cluster.link_gb_s:g} GB/s"
    )
    yield f"engines play a step in at least {cluster.engines_s():,.3g} s"
    yield _who_waits(cluster)
    yield _assumed()


def _who_waits(cluster: Cluster) -> str:
    """In a sentence: whether the learner or the engines have too little to do."""
    learner_s, engines_s = cluster.learner_s(), cluster.engines_s()
    idle = 1 - min(learner_s, engines_s) / cluster.step_s()
    name = "the learner" if learner_s < engines_s else "engines"
    return (
        f"{name} would wait {idle:.0%} of the time; {cluster.needed_engines()} engines keep this "
        "learner busy"
    )


def _caches(plan: Plan) -> Iterator[str]:
    load = plan.loads[-1]
    contexts = load.kv_tokens // plan.batch.tokens
    yield (
        f"an engine caches {load.kv_tokens:,} tokens of {load.kv_token_bytes:,} bytes: "
        f"{contexts:,} contexts of that length at once"
    )


def _gb(size: int) -> str:
    return f"{size / GB:.3g}"
