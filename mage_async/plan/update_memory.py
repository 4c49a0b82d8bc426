"""Measure the memory and the operations of an optimizer update without computing it: run the
learner's own code on tensors that have shapes and no values.

`Trace` intercepts every operation of torch that the learner calls, and counts the operations and
the bytes of living tensors. Tensors that depend on weights are FakeTensors, without values; indices
are real, because shapes depend on them. If the code reads a fake value, it gets the value that
needs the most memory: every row is selected, and a number is 1.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.inference.weight_fingerprint import AdapterBase
from mage_async.learning.lora import publishes_adapters
from mage_async.learning.packing import SampledTokens, TrainingSequence
from mage_async.learning.trainer import Trainer
from mage_async.plan.model_shape import Shape, meta_model
from mage_async.policy.load import needs_reference
from mage_async.policy.snapshot import Snapshot
from mage_kernels import planned_chunks

aten = torch.ops.aten


def _attention(query: torch.Tensor, key: torch.Tensor, products: int) -> int:
    """Return the number of operations of `products` matrix products of attention.

    A causal mask does not lower the number, as in torch's own table.

    Args:
        query: [S, N, L, D]
        key: [S, K, M, D]
    """
    *rows, size = query.shape
    return 2 * products * math.prod(rows) * key.shape[2] * size


ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, *_, **__: _attention(query, key, 2)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda _, query, key, *__, **___: _attention(query, key, 5)
    ),
}
"""Numbers of operations of attention on a CPU, which torch's own table lacks."""


@dataclass(slots=True)
class _LiveStorage:
    """Hold the bytes of a living tensor storage, and the part to which they count."""

    part: str
    size: int


class Trace(TorchDispatchMode):
    """Count operations and the bytes of all living tensors by part, while the mode is on.

    Args:
        vocabulary: Length of the vocabulary. A tensor with a dimension of this length counts as
            part of the LM head, unless `count` assigns it to another part.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.flops = 0
        self.peak: Counter[str] = Counter()
        """Bytes by part at the moment of the highest total."""
        self._vocabulary = vocabulary
        self._live: Counter[str] = Counter()
        """Bytes of living tensors, by part."""
        self._total = self._most = 0
        """Bytes of all living tensors, now and at most so far."""
        self._storages: weakref.WeakKeyDictionary[torch.UntypedStorage, _LiveStorage] = (
            weakref.WeakKeyDictionary()
        )

    def count(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Assign tensors to another part."""
        for tensor in tensors:
            entry = self._storages[tensor.untyped_storage()]
            self._live[entry.part] -= entry.size
            self._live[part] += entry.size
            entry.part = part

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation, and count it and its results."""
        if args and isinstance(args[0], FakeTensor):
            # Values of fake tensors are unknown: assume that every row is selected, and that a
            # number is not zero, so that no branch skips work.
            if func is aten.nonzero.default:
                assert args[0].ndim == 1, "the learner's masks select rows"
                return torch.arange(args[0].numel())[:, None]
            if func is aten._local_scalar_dense.default:
                return 1.0
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in ATTENTION:
            self.flops += ATTENTION[packet](*args)
        elif formula := flop_registry.get(packet):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        for each in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._track(each)
        return out

    def _track(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, if it is new, until it is freed."""
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        part = "head" if self._vocabulary in tensor.shape else "activations"
        self._storages[storage] = entry = _LiveStorage(part, storage.nbytes())
        weakref.finalize(storage, self._free, entry)
        self._live[part] += entry.size
        self._total += entry.size
        if self._total > self._most:
            self._most, self.peak = self._total, self._live.copy()

    def _free(self, entry: _LiveStorage) -> None:
        """Stop counting a storage."""
        self._live[entry.part] -= entry.size
        self._total -= entry.size


# Properties of torchao's 8-bit AdamW: the number of weights that share one scale, and the number of
# weights above which a tensor's moments have 8 bits. Training needs the library itself, planning
# does not.
BLOCK, MIN_WEIGHTS = 256, 4096


class PlannedEightBit(torch.optim.Optimizer):
    """Hold the state of torchao's 8-bit AdamW, without its arithmetic and its temporary tensors."""

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        super().__init__(trained, {"lr": 0.0})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Create the state of weights that have none; return None."""
        for weight in self.param_groups[0]["params"]:
            if not self.state[weight]:
                moments = {name: _moment(weight) for name in ("exp_avg", "exp_avg_sq")}
                self.state[weight].update(moments)


def _moment(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return a moment's tensors: codes, scales and a table of 256 values, or the moment itself."""
    if weight.numel() < MIN_WEIGHTS or weight.numel() % BLOCK:
        return [torch.zeros_like(weight)]
    codes = torch.zeros_like(weight, dtype=torch.uint8)
    numbers = (weight.numel() // BLOCK, 2**8)
    return [codes, *(weight.new_zeros(count, dtype=torch.float32) for count in numbers)]


@dataclass(frozen=True, slots=True)
class Batch:
    """Describe the trials of a step, as large as they may become."""

    num_segments: int
    """Number of segments (contexts) of all trials."""
    tokens: int
    """Number of tokens of a segment."""
    sampled: int
    """Number of tokens of a segment that the policy samples."""

    @staticmethod
    def of(config: Config, tokens: int = 0) -> "Batch":
        """Return the largest batch of a configuration.

        Args:
            tokens: Number of tokens of a segment; 0 for the longest context (`trial.room`, or
                `engine.max_tokens` if that is 0).
        """
        trial, transcript = config.trial, config.transcript
        max_turns = environment_of(config).facts.max_turns
        num_actions, num_remarks, _ = trial.context_bounds(max_turns)
        length = tokens or trial.room or config.engine.max_tokens
        trials = config.admission.groups_per_step * config.admission.trials_per_group
        segments = trials * (1 if trial.keeps_history else trial.episodes)
        if trial.compaction != "none":
            # At worst each turn begins a new context, which holds that turn, with a strategy before
            # it, and the notes after it.
            segments = trials * trial.most_turns(max_turns)
            num_actions = 1
            num_remarks = (trial.strategy != "none") + (trial.compaction == "notes")
        sampled = num_actions * transcript.max_action_tokens
        sampled += num_remarks * transcript.max_reflection_tokens
        return Batch(segments, length, max(1, min(sampled, length - 1)))

    def micro_batch_lengths(self, config: Config) -> list[int]:
        """Return the number of tokens of each segment of the largest micro-batch.

        A micro-batch has segments of `tokens` tokens. The rest of
        `learner.max_tokens_per_microbatch` is filled by a shorter segment, because the trials of a
        run may be shorter.
        """
        learner = config.learner
        minibatch = -(-self.num_segments // learner.minibatches)  # rounded up
        budget = learner.max_tokens_per_microbatch or minibatch * self.tokens
        whole = max(1, min(minibatch, budget // self.tokens))
        rest = budget - whole * self.tokens if whole < minibatch else 0
        return [self.tokens] * whole + [rest] * (rest > 1)


def random_segments(
    lengths: Sequence[int], batch: Batch, vocabulary: int
) -> list[TrainingSequence]:
    """Return segments of random tokens, each with one turn whose tokens are spread evenly.

    Args:
        lengths: Number of tokens of each segment. As large a share of them is sampled as in
            `batch`.
    """
    source = np.random.default_rng(0)
    segments = []
    for length in lengths:
        sampled = max(1, min(length - 1, batch.sampled * length // batch.tokens))
        # The values of the other five fields of `SampledTokens` change neither memory nor
        # operations.
        zeros = [np.zeros(sampled, np.int32) for _ in range(5)]
        logprobs = np.full(sampled, -np.log(vocabulary), np.float32)
        segments.append(
            TrainingSequence(
                source.integers(0, vocabulary, length).astype(np.int32),
                np.linspace(1, length - 1, sampled).astype(np.int64),
                SampledTokens(logprobs, *zeros),
                np.array([sampled]),
                torch.from_numpy(source.normal(size=1).astype(np.float32)),
            )
        )
    return segments


PLANNED_CHUNK_BYTES = 256 * 2**20
"""Number of bytes of logits that are computed at once. A learner on a GPU takes an eighth of the
free memory, within 64 MiB and 2 GiB.
"""


@dataclass(frozen=True, slots=True)
class Update:
    """Hold the memory and the operations of an update."""

    parts: Counter[str]
    """Bytes by part at the moment of the highest total."""
    token_flops: float
    """Number of operations per token of the micro-batch, the LM head included."""
    publication_bytes: int
    """Bytes of a published version, which the learner holds during the next update."""


def update_of(config: Config, shape: Shape, batch: Batch) -> Update:
    """Run one update of one micro-batch; a minibatch of more micro-batches needs no more memory.

    Raises:
        PolicyError: the policy has no layers for its adapters.
    """
    lengths = batch.micro_batch_lengths(config)
    segments = random_segments(lengths, batch, shape.config.vocab_size)
    # Bytes of logits computed at once; 0 leaves the choice to the kernels, as on a CPU.
    chunk = 0 if config.learner.device == "cpu" else PLANNED_CHUNK_BYTES
    trace, mode = Trace(shape.config.vocab_size), FakeTensorMode(allow_non_fake_inputs=True)
    with planned_chunks(chunk), trace:
        trainer = _trainer(config, shape, trace, mode)
        at_first = trace.flops
        batches = [trainer.with_proximal(each) for each in trainer.micro_batches(segments)]
        after_proximal = trace.flops
        trainer.update(batches, 1.0)
        parts, after_update = trace.peak, trace.flops
        # Operations on fake tensors make fake ones by themselves. `Snapshot` allocates a tensor,
        # which would be real outside of the mode.
        with mode:
            # Any base tells `Snapshot` to copy the adapters alone; its digest and its scale do not
            # change their size.
            base = AdapterBase("", config.policy.dtype, 1.0) if publishes_adapters(config) else None
            published = Snapshot.of(trainer.model, 0, base=base).data.nbytes
    proximal_flops, update_flops = after_proximal - at_first, after_update - after_proximal
    # Later minibatches repeat the forward of the proximal log-probs.
    flops = update_flops + config.learner.repeated_forwards * proximal_flops
    return Update(parts, flops / sum(lengths), published)


def _trainer(config: Config, shape: Shape, trace: Trace, mode: FakeTensorMode) -> Trainer:
    """Return the learner's trainer on fake tensors, and assign their bytes to parts."""
    learner = config.learner
    model = _fake_model(config, shape, mode, trace, "weights")
    # Planning needs no torchao: build the plain optimizer, and replace it by `PlannedEightBit`.
    full = msgspec.structs.replace(learner, optimizer_state="full")
    trainer = Trainer(model, msgspec.structs.replace(config, learner=full))
    if learner.optimizer_state == "8bit":
        trainer.optimizer = PlannedEightBit(trainer.masters.trained)
    trace.count(trainer.masters.tensors(), "masters")
    if needs_reference(config):
        reference = _fake_model(config, shape, mode, trace, "reference policy")
        trainer.reference = reference.requires_grad_(False).eval()
    # Make the optimizer's state, as a first update does, and count gradients when they appear.
    trained = trainer.masters.trained
    weights = (weight for weight in trainer.model.parameters() if weight.requires_grad)
    for weight, own in zip(weights, trained, strict=True):
        weight.register_post_accumulate_grad_hook(
            lambda _, own=own: trace.count([own.grad], "gradients")
        )
        own.grad = torch.zeros_like(own)
    trainer.optimizer.step()
    state = tree_leaves(trainer.state()["optimizer"]["state"])
    trace.count((each for each in state if isinstance(each, torch.Tensor)), "optimizer")
    return trainer


def _fake_model(
    config: Config, shape: Shape, mode: FakeTensorMode, trace: Trace, part: str
) -> PreTrainedModel:
    """Return the model that the learner trains, on fake CPU tensors that count to `part`."""
    model = meta_model(config, shape)
    with mode:
        model.to_empty(device="cpu").tie_weights()
    trace.count((*model.parameters(), *model.buffers()), part)
    return model
