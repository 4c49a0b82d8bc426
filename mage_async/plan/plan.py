"""Plan a run: compute the memory of each process and the operations of a step, and refuse a run
whose GPU is too small.

`mage plan` prints the plan; `mage train` checks it before a launch on a GPU. Sizes follow from the
shapes of the model. `PROCESS_BYTES` and `GRAPH_BYTES` are assumptions; `ENGINE_BYTES` and
`LEARNER_BYTES` were measured.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mage_async.config.schema import GPU, Config, Embedded, Pretrained
from mage_async.errors import ConfigError
from mage_async.plan.does_it_fit import (
    ENGINE_BYTES,
    LEARNER_BYTES,
    engine_weight_bytes,
    versions_at_once,
)
from mage_async.plan.model_shape import Shape, shape_of
from mage_async.plan.update_memory import Batch, Update, update_of
from mage_async.policy.model_files import check_divisible

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Device:
    """Describe the memory and speed of a GPU, or of this machine if nothing runs on a GPU."""

    name: str
    memory_bytes: int
    tflops_16: float = 0.0
    """Peak rate of dense 16-bit arithmetic, in 10^12 operations a second; 0 if unknown."""
    tflops_32: float = 0.0
    """Peak rate of float32 arithmetic without TF32, in 10^12 operations a second."""
    has_bfloat16: bool = True

    def tflops(self, dtype: str, *, is_rounded: bool = False) -> float:
        """Return the peak rate in a type, in 10^12 operations a second.

        Args:
            is_rounded: Whether float32 is rounded to TF32 if the GPU has that. GPUs with bfloat16
                have TF32 too, at half of the 16-bit rate.
        """
        if dtype != "float32":
            return self.tflops_16
        has_tf32 = is_rounded and self.has_bfloat16
        return max(self.tflops_32, self.tflops_16 / 2) if has_tf32 else self.tflops_32


GPUS = {
    device.name: device
    for device in (
        Device("t4", 16 * GB, 65, 8.1, has_bfloat16=False),
        Device("v100", 32 * GB, 125, 15.7, has_bfloat16=False),
        Device("l4", 24 * GB, 121, 30.3),
        Device("rtx4090", 24 * GB, 165, 82.6),
        Device("l40s", 48 * GB, 362, 91.6),
        Device("a100_40", 40 * GB, 312, 19.5),
        Device("a100_80", 80 * GB, 312, 19.5),
        Device("h100", 80 * GB, 989, 67),
        Device("h200", 141 * GB, 989, 67),
        Device("b200", 180 * GB, 2250, 80),
    )
}
"""GPUs by name, from NVIDIA's data sheets; nothing here was measured. Memory is given in units of
10^9 bytes, which is less than the driver shows.
"""


def device_of(name: GPU, memory_gb: float = 0.0) -> Device:
    """Return the named GPU; `memory_gb` replaces its memory, or describes a GPU without a name.

    Raises:
        ConfigError: neither is given.
    """
    if not name and not memory_gb:
        raise ConfigError(
            f"the GPU is not known: set hardware.gpu to one of {', '.join(GPUS)}, or give "
            "`mage plan` --memory-gb"
        )
    known = GPUS[name] if name else Device("GPU", 0)
    return replace(known, memory_bytes=round(memory_gb * GB) or known.memory_bytes)


def device_for(config: Config, *, machine_bytes: int, memory_gb: float = 0.0) -> Device:
    """Return the device on which a configuration's learner computes.

    Args:
        machine_bytes: memory of this machine.
        memory_gb: memory in 10^9 bytes to plan with; 0: the device's own.

    Raises:
        ConfigError: the learner computes on a GPU that is neither here nor named.
    """
    if config.learner.device == "cpu":
        return Device(CPU, round(memory_gb * GB) or machine_bytes)
    named = config.hardware.gpu
    if memory_gb:
        return device_of(named, memory_gb)
    return _own_gpu(config) or device_of(named)


def _own_gpu(config: Config) -> Device | None:
    """Return the GPU of this machine on which the learner is to compute; None if the machine has
    not all GPUs of the learner.
    """
    if not torch.cuda.is_available() or _gpus_of_learner(config)[-1] >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(torch.device(config.learner.device))
    # PyTorch does not report peak rates: they are those of the data sheet, if the GPU is named.
    named = GPUS.get(config.hardware.gpu, Device("", 0))
    has_bfloat16 = found.major >= 8  # compute capability 8.0: Ampere and later
    return replace(
        named, name=found.name, memory_bytes=found.total_memory, has_bfloat16=has_bfloat16
    )


def _gpus_of_learner(config: Config) -> range:
    """Return the GPUs on which a learner's ranks compute, which have consecutive numbers."""
    first = int(config.learner.device.partition(":")[2] or 0)  # "cuda" is GPU 0
    return range(first, first + config.learner.ranks)


def check_dtype(dtype: str, device: Device) -> None:
    """Refuse a `policy.dtype` that a GPU cannot compute in.

    Raises:
        ConfigError: the message names the key.
    """
    if dtype == "bfloat16" and not device.has_bfloat16:
        raise ConfigError(
            f'policy.dtype = "bfloat16", which {device.name} does not compute in: set it to '
            '"float32", or take another GPU'
        )


PROCESS_BYTES = GB
"""Assumed bytes of a process on a GPU in addition to its tensors: the CUDA context, workspaces of
libraries, fragmentation.
"""
GRAPH_BYTES = 2 * GB
"""Assumed bytes of an SGLang server outside of its pool: CUDA graphs and activations."""
HEAP_BYTES = GB
"""Largest number of bytes of heap that the learner of a pretrained policy keeps between forward
passes. The supervisor sets this limit for glibc's allocator.
"""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2}
"""Bytes of a number, by the name of its type."""
CPU = "this machine"
"""Place of processes whose tensors are in the memory of this machine."""
SHARDED = {"weights", "masters", "gradients", "optimizer", "reference policy", "publication"}
"""Parts of the learner that are divided over its ranks."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Count the bytes that one process holds in the memory of one place."""

    process: str
    place: str
    """`GPU N`, or the constant `CPU`."""
    parts: Counter[str]
    """Bytes by part."""
    kv_tokens: int = 0
    """Number of tokens whose keys and values an engine keeps."""
    kv_token_bytes: int = 0
    """Bytes of the keys and values of one token."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the memory and the operations that a configuration needs, and the device that has to
    provide them.
    """

    config: Config
    device: Device
    batch: Batch
    update: Update
    processes: list[ProcessMemory]
    """Memory of the learner (one entry for each of its ranks), of the actors' engines (one for each
    of their GPUs), and of the evaluator's engine, in this order.
    """
    machine_bytes: int = 0
    """Memory of this machine if the learner computes on a GPU; 0 if it is not known, as when a run
    on another machine is planned."""

    def flops(self) -> float:
        """Return the floating-point operations of one step of the learner."""
        return self.update.token_flops * self.batch.num_segments * self.batch.tokens

    def step_s(self, tflops: float = 0.0) -> float:
        """Return the least seconds that a step takes, or 0.0 if no rate is known.

        Args:
            tflops: Measured rate in 10^12 operations a second, of a GPU or of this machine; 0 for
                the rate of the data sheet.
        """
        rate = (tflops or self.tflops()) * self.num_gpus()
        return self.flops() / (rate * 1e12) if rate else 0.0

    def num_gpus(self) -> int:
        """Return the number of GPUs that compute a step; 1 if the learner computes on cores."""
        learner = self.config.learner
        return 1 if learner.device == "cpu" else learner.ranks

    def tflops(self) -> float:
        """Return the data sheet's 10^12 operations a second in the learner's type, or 0.0."""
        is_rounded = self.config.learner.matmul_precision != "highest"
        return self.device.tflops(self.config.policy.dtype, is_rounded=is_rounded)

    def needed(self) -> Counter[str]:
        """Return the bytes needed in each place."""
        sums: Counter[str] = Counter()
        for each in self.processes:
            sums[each.place] += each.parts.total()
        return sums

    def memory_of(self, place: str) -> int:
        """Return the bytes of memory of a place; 0 if they are not known."""
        is_of_learner = (place == CPU) == (self.config.learner.device == "cpu")
        if is_of_learner:
            return self.device.memory_bytes
        return self.machine_bytes if place == CPU else 0

    def used_shares(self) -> dict[str, float]:
        """Return the share of its memory that each place needs, if its memory is known."""
        return {
            place: needed / memory
            for place, needed in self.needed().items()
            if (memory := self.memory_of(place))
        }

    def spare(self) -> float:
        """Return the free share of the fullest memory; negative if the run does not fit."""
        return 1 - max(self.used_shares().values())

    def check(self) -> None:
        """Refuse a run whose GPU, or machine, is too small.

        Raises:
            ConfigError: the run does not fit, and the error has the place that is filled most, its
                largest part, and the key to change; or an engine cannot cache a context.
        """
        shares = self.used_shares()
        place = max(shares, key=lambda each: shares[each])
        if shares[place] > 1:
            raise ConfigError(
                f"{place} would need {_gb(self.needed()[place])} GB and has "
                f"{_gb(self.memory_of(place))}: {self._largest_part(place)}"
            )
        longest = self.config.engine.max_tokens
        for each in self.processes:
            if each.kv_token_bytes and each.kv_tokens < longest:
                cure = (
                    "raise engine.server.mem_fraction_static, a share of the memory that is free "
                    "when SGLang starts, or engine.server.max_total_tokens"
                )
                taken = max(
                    other.kv_tokens for other in self.processes if other.place == each.place
                )
                if taken > longest:
                    cure = (
                        f"another engine of {each.place} takes {taken:,}, so set "
                        f"engine.server.max_total_tokens, the most that each caches, to {longest} "
                        "or a little more"
                    )
                raise ConfigError(
                    f"the {each.process} on {each.place} can cache {each.kv_tokens:,} tokens, "
                    f"fewer than engine.max_tokens = {longest}: {cure}"
                )

    def _largest_part(self, place: str) -> str:
        """Return a clause that names the largest part in a place that a key can make smaller, and
        this key.
        """
        advised = [
            (size, f"{part} of the {each.process} are {_gb(size)} GB of it; {advice}")
            for each in self.processes
            if each.place == place
            for part, size in each.parts.items()
            if (advice := self._advice(part, each))
        ]
        excess = self.needed()[place] - self.memory_of(place)
        if sum(size for size, _ in advised) > excess:
            return max(advised, key=lambda entry: entry[0])[1]
        # It would not fit even without the parts that a key makes smaller.
        if place == CPU:
            return "no key makes it fit: take a machine with more memory, or a smaller policy"
        return (
            "no key makes it fit: take a larger GPU or a smaller policy, or divide the model over "
            "more GPUs (learner.ranks, engine.gpus_per_actor)"
        )

    def _advice(self, part: str, process: ProcessMemory) -> str:
        """Return how to make a part smaller; empty if no key does."""
        learner, policy = self.config.learner, self.config.policy
        longest, budget = self.config.engine.max_tokens, learner.max_tokens_per_microbatch
        is_sent = self.config.transport.weights.is_sent
        if not process.process.startswith("learner"):
            if part == "process" and process.place == CPU:
                return "take fewer --actors"
            # NCCL sends no weights from a GPU to itself.
            of_learner = {
                each.place for each in self.processes if each.process.startswith("learner")
            }
            if part == "new weights" and not is_sent and process.place not in of_learner:
                return 'set transport.weights = "nccl"'
            if part != "keys and values":
                return ""
            if self.config.engine.kind == "embedded":
                return "lower engine.max_contexts"
            return f"set engine.server.max_total_tokens to less than {process.kv_tokens}"
        if part == "activations" and not learner.activation_checkpointing:
            return "set learner.activation_checkpointing = true"
        if part in ("activations", "head"):
            if not 0 < budget <= longest:
                return f"set learner.max_tokens_per_microbatch = {longest}"
            keys = f"engine.max_tokens = {longest} and, with it, learner.max_tokens_per_microbatch"
            return f"lower {keys}"
        if learner.ranks > 1:  # several ranks have neither adapters nor an 8-bit optimizer
            is_divided = part in SHARDED and process.place != CPU
            return "raise learner.ranks, for which there must be GPUs" if is_divided else ""
        if part in ("optimizer", "gradients", "reference policy") and policy.lora is None:
            may_shrink = part == "optimizer" and learner.optimizer_state != "8bit"
            other = ', or learner.optimizer_state = "8bit"' if may_shrink else ""
            return f"set policy.lora.rank = 16{other}"
        if part == "publication" and is_sent:  # of which two versions are kept
            return 'set transport.weights = "tensor"'
        is_float32_on_gpu = policy.dtype == "float32" and process.place != CPU
        if part in ("weights", "publication") and is_float32_on_gpu:
            return 'set policy.dtype = "bfloat16"'
        return ""


def plan_of(
    config: Config,
    device: Device,
    num_actors: int,
    *,
    context_tokens: int = 0,
    machine_bytes: int = 0,
) -> Plan:
    """Plan a configuration.

    Args:
        device: Hardware of each GPU that the configuration names, or of this machine.
        context_tokens: Mean number of tokens of a context; 0 for `engine.max_tokens`, the largest.
        machine_bytes: See `Plan`.

    Raises:
        PolicyError: the policy's shape is unknown, or it cannot be trained as configured.
        ConfigError: the device lacks the policy's type, or `context_tokens` is out of range.
    """
    longest = config.engine.max_tokens
    if context_tokens and not 2 <= context_tokens <= longest:
        raise ConfigError(
            f"a context has from 2 to engine.max_tokens = {longest} tokens, got {context_tokens}"
        )
    if config.learner.device != "cpu":
        check_dtype(config.policy.dtype, device)
    shape, batch = shape_of(config), Batch.of(config, context_tokens)
    update = update_of(config, shape, batch)
    processes = processes_of(config, shape, update, device, num_actors)
    return Plan(config, device, batch, update, processes, machine_bytes)


def processes_of(
    config: Config, shape: Shape, update: Update, device: Device, num_actors: int
) -> list[ProcessMemory]:
    """List the memory of the learner's ranks, of the actors' engines and of the evaluator's engine.

    Raises:
        PolicyError: the model cannot be divided over the GPUs of an engine.
    """
    engine = config.engine
    processes = _learner(config, shape, update)
    check_divisible(shape.config.to_dict(), engine.num_gpus, "policy")
    names = {number: f"engine of actor-{number}" for number in range(num_actors)}
    # `devices_of` gives the evaluator, whose number is -1, the last entry of `engine.devices`.
    for number, name in (names | {-1: "engine of the evaluator"}).items():
        if isinstance(engine, Embedded):
            meets_rivals = number >= 0 and config.population.rivals > 0
            processes.append(_embedded(config, shape, name, meets_rivals=meets_rivals))
            continue
        gpus = engine.devices_of(number) or range(engine.num_gpus)
        for gpu in gpus:
            others = [each for each in processes if each.place == f"GPU {gpu}"]
            processes.append(_sglang(config, shape, device, name, gpu, gpu == gpus[0], others))
    return processes


def _learner(config: Config, shape: Shape, update: Update) -> list[ProcessMemory]:
    """Plan the learner: one process, or one for each rank, on GPUs of consecutive numbers."""
    ranks, device_key = config.learner.ranks, config.learner.device
    # With "nccl" the last published version stays on the GPU until the next one is announced, and
    # older versions are moved to host memory. A learner on cores has all of them in host memory.
    is_kept = config.transport.weights.is_sent and ranks == 1
    num_versions = (3 if device_key == "cpu" else 2) if is_kept else 1
    parts = update.parts | Counter({"publication": num_versions * update.publication_bytes})
    if device_key == "cpu":
        parts["process"] = LEARNER_BYTES
        parts["heap"] = HEAP_BYTES * isinstance(config.policy, Pretrained)
    else:
        parts["process"] = PROCESS_BYTES
    if ranks > 1:
        for part in parts.keys() & SHARDED:
            parts[part] = -(-parts[part] // ranks)  # rounded up
        parts["gathered"] = _gathered(config, shape)
        if device_key == "cpu":  # ranks on GPUs copy a checkpoint to host memory
            parts["checkpoint"] = sum(parts[part] for part in ("weights", "masters", "optimizer"))
    names = ["learner"] if ranks == 1 else [f"learner's rank {rank}" for rank in range(ranks)]
    return [
        ProcessMemory(name, CPU if device_key == "cpu" else f"GPU {gpu}", parts.copy())
        for gpu, name in zip(_gpus_of_learner(config), names, strict=True)
    ]


def _gathered(config: Config, shape: Shape) -> int:
    """Return the bytes of the weights that a rank holds whole while it computes, and of their
    gradients in float32.

    Whole at once are the embedding, the LM head, and two layers: one that computes, and the next
    one, which is being gathered.
    """
    layers = shape.num_layer_weights
    whole: int = shape.num_weights - layers + 2 * layers // shape.config.num_hidden_layers
    return (ITEMSIZE[config.policy.dtype] + ITEMSIZE["float32"]) * whole


def _embedded(config: Config, shape: Shape, name: str, *, meets_rivals: bool) -> ProcessMemory:
    """Plan an embedded engine, which computes on CPU cores.

    Args:
        meets_rivals: Whether past versions of the policy play in it as opponents. With
            `policy.lora` it then holds the layers twice: merged with the adapters for the current
            version, and unmerged, shared by all past versions and their adapters.
    """
    token = shape.kv_token_bytes(ITEMSIZE["float32"])
    tokens = config.engine.max_contexts * config.engine.max_tokens
    engine = config.engine
    assert isinstance(engine, Embedded)
    weights = engine_weight_bytes(engine, shape.num_weights, shape.num_in_matrices)
    parts = Counter({"weights": weights, "keys and values": tokens * token})
    if meets_rivals and config.policy.lora is not None:
        layers = shape.num_layer_weights, shape.num_in_matrices
        parts["base of rivals"] = engine_weight_bytes(engine, *layers)
    parts["process"] = ENGINE_BYTES
    return ProcessMemory(name, CPU, parts, tokens, token)


def _sglang(
    config: Config,
    shape: Shape,
    device: Device,
    name: str,
    gpu: int,
    is_first: bool,
    others: list[ProcessMemory],
) -> ProcessMemory:
    """Plan one GPU of an SGLang engine.

    Args:
        is_first: Whether it is the first of the GPUs that share the model.
        others: Memory of the processes on this GPU that have been planned already.
    """
    server: dict[str, Any] = getattr(config.engine, "server", {})
    itemsize = ITEMSIZE.get(server.get("dtype", config.policy.dtype), 2)
    gpus = config.engine.num_gpus
    whole, token = shape.num_weights * itemsize, shape.kv_token_bytes(itemsize, gpus)
    weights = whole // gpus
    # The keys of `engine.server` size the KV cache by tokens, or set which share of the memory that
    # is free when SGLang starts its weights and its cache may fill. SGLang sizes its cache after it
    # has loaded its weights, by the memory that is free then. If several engines of a GPU start at
    # the same time, each cache is smaller by the memory that the others have taken meanwhile.
    share = float(server.get("mem_fraction_static", 0.85))
    of_learner = sum(each.parts.total() for each in others if each.process.startswith("learner"))
    of_engines = sum(each.parts.total() for each in others) - of_learner
    static_bytes = round(share * (device.memory_bytes - of_learner)) - of_engines
    most_tokens = max(0, static_bytes - weights) // token
    tokens = min(most_tokens, int(server.get("max_total_tokens", most_tokens)))
    sizes = whole, weights, shape.num_in_embedding * itemsize
    new_weights = config.transport.weights.new_weight_bytes(*sizes, is_first=is_first)
    parts = Counter(
        {"weights": weights, "new weights": new_weights, "keys and values": tokens * token}
    )
    # The parts have different names, so `|`, the maximum of each count, joins them.
    parts |= Counter({"process": PROCESS_BYTES, "graphs": GRAPH_BYTES})
    return ProcessMemory(name, f"GPU {gpu}", parts, tokens, token)


def check_gpu(config: Config, num_actors: int, *, machine_bytes: int) -> None:
    """Check that the learner fits the GPU on which it is to compute.

    Args:
        machine_bytes: memory of this machine.

    Raises:
        ConfigError: the learner does not fit, or there is no such GPU here; the error has the key
            to change.
    """
    own = _own_gpu(config)
    if own or config.hardware.gpu:
        device = own or device_of(config.hardware.gpu)
        plan_of(config, device, num_actors, machine_bytes=machine_bytes).check()
    if own is None:
        found, last = torch.cuda.device_count(), _gpus_of_learner(config)[-1]
        needs, cure = "", 'set learner.device = "cpu", or start the run where there is one'
        if found:
            needs = f" with learner.ranks = {config.learner.ranks} needs GPU {last}"
            cure = "GPUs are counted from 0: name one of these, or take fewer ranks"
        raise ConfigError(
            f'learner.device = "{config.learner.device}"{needs}, but PyTorch finds '
            f"{found or 'no'} GPU{'s' * (found > 1)} here: {cure}"
        )


def plan_lines(plan: Plan, tflops: float = 0.0) -> Iterator[str]:
    """Yield the lines of a plan: memory by process and part, operations, seconds, caches.

    Args:
        tflops: See `Plan.step_s`.
    """
    for process in plan.processes:
        yield f"{process.process} on {process.place}, GB:"
        for part, size in process.parts.most_common():
            yield f"  {part:<18}{_gb(size):>8}"
        yield f"  {'together':<18}{_gb(process.parts.total()):>8}"
    for place, size in plan.needed().items():
        memory = plan.memory_of(place)
        name = CPU if place == CPU else plan.device.name
        yield f"{place}: {_gb(size)}" + (f" of {_gb(memory)} GB of {name}" if memory else " GB")
    batch = plan.batch
    is_largest = batch.tokens == plan.config.engine.max_tokens
    kind = "the longest that the engine holds" if is_largest else "as given"
    num_tokens = sum(batch.micro_batch_lengths(plan.config))
    yield (
        f"contexts of {batch.tokens:,} tokens ({kind}), at most {batch.sampled:,} of them sampled: "
        f"{num_tokens:,} tokens a micro-batch, {batch.num_segments} "
        f"contexts a step in {plan.config.learner.minibatches} minibatches"
    )
    yield f"a step computes {plan.flops() / 1e12:,.1f} TFLOP"
    if seconds := plan.step_s(tflops):
        rate = tflops or plan.tflops()
        source = "given" if tflops else f"the most that {plan.device.name}'s data sheet says"
        of_each = f" of each of {plan.num_gpus()} GPUs" if plan.num_gpus() > 1 else ""
        yield f"a step takes at least {seconds:,.1f} s at {rate:g} TFLOP/s{of_each}, {source}"
    else:
        yield "seconds of a step: unknown; give --tflops, a rate measured on this machine"
    size, most = plan.update.publication_bytes, versions_at_once(plan.config)
    folder = "/dev/shm" if plan.config.transport.weights.kind == "tensor" else "the run's disk"
    yield f"a publication has {_gb(size)} GB" + (
        ""
        if plan.config.transport.weights.is_sent
        else f"; {most} versions at once need {_gb(most * size)} GB of {folder}"
    )
    engine = plan.processes[-1]
    yield (
        f"an engine caches {engine.kv_tokens:,} tokens of {engine.kv_token_bytes:,} bytes: "
        f"{engine.kv_tokens // batch.tokens:,} contexts of that length at once"
    )
    yield (
        f"assumed, not measured: {_gb(PROCESS_BYTES)} GB for a process on a GPU, and "
        f"{_gb(GRAPH_BYTES)} GB for an SGLang's graphs; measured: {_gb(ENGINE_BYTES)} GB for an "
        f"engine's process on cores, and {_gb(LEARNER_BYTES)} GB for the learner's; all else "
        "follows from shapes"
    )


def _gb(size: int) -> str:
    """Return bytes as text, in units of 10^9."""
    amount = size / GB
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
