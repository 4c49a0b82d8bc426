"""What each process of a run holds, and on which GPU."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from mage_async.config.schema import Config, Embedded, Pretrained
from mage_async.plan.devices import GB, Device
from mage_async.plan.shapes import Shape
from mage_async.plan.update import Update
from mage_async.policy.tensor_parallel import check_divisible

PROCESS_BYTES = GB
"""Assumed, for a process on a GPU: its CUDA context, the libraries' workspaces, holes in memory."""
GRAPH_BYTES = 2 * GB
"""Assumed, for an SGLang: CUDA graphs and activations, outside of its pool."""
HEAP_BYTES = GB
"""What the supervisor lets the heap of a pretrained policy's learner keep between passes."""
BUCKET_BYTES = GB // 2
"""What an engine receives at once by NCCL."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2}
CPU = "this machine"


@dataclass(frozen=True, slots=True)
class Load:
    """What one process holds in one memory."""

    process: str
    place: str
    """A GPU by its number, or this machine."""
    parts: Counter[str]
    """Bytes by part."""
    kv_tokens: int = 0
    """Tokens whose keys and values an engine keeps."""
    kv_token_bytes: int = 0


def loads_of(
    config: Config, shape: Shape, update: Update, device: Device, num_actors: int
) -> list[Load]:
    """The learner, the actors' engines and the evaluator's, on each of their GPUs.

    Raises:
        PolicyError: the model cannot be shared over the GPUs of an engine.
    """
    engine, own = config.engine, [_learner(config, update)]
    check_divisible(shape.config.to_dict(), engine.num_gpus, "policy")
    names = {number: f"engine of actor-{number}" for number in range(num_actors)}
    for number, name in (names | {-1: "engine of the evaluator"}).items():
        if isinstance(engine, Embedded):
            own.append(_embedded(config, shape, name))
            continue
        places = engine.devices_of(number) or range(engine.num_gpus)
        own += [_sglang(config, shape, device, name, place, place == places[0]) for place in places]
    return own


def _learner(config: Config, update: Update) -> Load:
    on = config.learner.device
    parts = update.parts | Counter({"publication": update.publication_bytes})
    if on == "cpu":
        parts["heap"] = HEAP_BYTES * isinstance(config.policy, Pretrained)
        return Load("learner", CPU, parts)
    parts["process"] = PROCESS_BYTES
    return Load("learner", f"GPU {on.partition(':')[2] or 0}", parts)


def _embedded(config: Config, shape: Shape, name: str) -> Load:
    token = shape.kv_token_bytes(ITEMSIZE["float32"])
    tokens = config.engine.max_contexts * config.engine.max_tokens
    weights = ITEMSIZE["float32"] * shape.num_weights
    parts = Counter({"weights": weights, "keys and values": tokens * token})
    return Load(name, CPU, parts, tokens, token)


def _sglang(
    config: Config, shape: Shape, device: Device, name: str, number: int, is_first: bool
) -> Load:
    """One of an engine's GPUs, as the keys of `engine.server` size it: by tokens, or by a share of
    the memory. Weights that are handed over lie whole on the first.
    """
    server: dict[str, Any] = getattr(config.engine, "server", {})
    itemsize, gpus = (
        ITEMSIZE.get(server.get("dtype", config.policy.dtype), 2),
        config.engine.num_gpus,
    )
    whole, token = shape.num_weights * itemsize, shape.kv_token_bytes(itemsize, gpus)
    weights = whole // gpus
    share = float(server.get("mem_fraction_static", 0.85))
    room = max(0, round(share * device.memory_bytes) - weights) // token
    tokens = min(room, int(server.get("max_total_tokens", room)))
    kept = whole if is_first and config.transport.weights == "tensor" else weights
    handed = BUCKET_BYTES if config.transport.weights == "nccl" else kept
    parts = Counter({"weights": weights, "new weights": handed, "keys and values": tokens * token})
    parts |= Counter({"process": PROCESS_BYTES, "graphs": GRAPH_BYTES})
    return Load(name, f"GPU {number}", parts, tokens, token)
