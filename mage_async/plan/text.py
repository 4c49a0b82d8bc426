"""A plan in lines for people."""

from collections.abc import Iterator

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
    yield from _work(plan, tflops)
    yield from _caches(plan)
    yield (
        f"assumed, not measured: {_gb(PROCESS_BYTES)} GB for a process on a GPU, and "
        f"{_gb(GRAPH_BYTES)} GB for an SGLang's graphs; all else follows from shapes"
    )


def _memory(load: Load) -> Iterator[str]:
    yield f"{load.process} on {load.place}, GB:"
    for part, size in load.parts.most_common():
        yield f"  {part:<18}{_gb(size):>8}"
    yield f"  {'together':<18}{_gb(load.parts.total()):>8}"


def _work(plan: Plan, tflops: float) -> Iterator[str]:
    batch, rules = plan.batch, plan.config.learner
    one_pass = batch.of_one_pass(plan.config)
    yield (
        f"contexts of {batch.tokens:,} tokens, {batch.sampled:,} of them sampled, the most there "
        f"can be: {one_pass} a pass, {batch.num_segments} a step in {rules.minibatches} minibatches"
    )
    yield f"a step computes {plan.flops() / 1e12:,.1f} TFLOP"
    if seconds := plan.step_s(tflops):
        rate = tflops or plan.tflops()
        source = "given" if tflops else f"the most that {plan.device.name}'s data sheet says"
        yield f"a step takes at least {seconds:,.1f} s at {rate:g} TFLOP/s, {source}"
    else:
        yield "seconds a step: give --tflops, a rate that was measured on this machine"
    yield f"a publication has {_gb(plan.update.publication_bytes)} GB"


def _caches(plan: Plan) -> Iterator[str]:
    load = plan.loads[-1]
    contexts = load.kv_tokens // plan.batch.tokens
    yield (
        f"an engine caches {load.kv_tokens:,} tokens of {load.kv_token_bytes:,} bytes: "
        f"{contexts:,} contexts of that length at once"
    )


def _gb(size: int) -> str:
    return f"{size / GB:.3g}"
