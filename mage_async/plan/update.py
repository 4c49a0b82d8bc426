"""One optimizer update of the learner, run by its own code on tensors without values."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from mage_async.config.schema import Config
from mage_async.learning.trainer import Trainer
from mage_async.plan.eight_bit import PlannedEightBit
from mage_async.plan.made_up import Batch, made_up
from mage_async.plan.shapes import Shape, meta_model
from mage_async.plan.tracing import Trace
from mage_async.policy.load import needs_reference
from mage_async.policy.snapshot import Snapshot
from mage_kernels import planned_chunks

GPU_CHUNK_BYTES = 256 * 2**20
"""Logits at once on a GPU, where the learner takes an eighth of what is free: 64 MiB to 2 GiB."""


@dataclass(frozen=True, slots=True)
class Update:
    """What an update holds and computes."""

    parts: Counter[str]
    """Bytes by part at the moment when they are most together."""
    flops: float
    """Operations of a token of the batch, its share of the head included."""
    publication_bytes: int
    """Bytes of a version as it is published; the learner holds it beside the next update."""


def update_of(config: Config, shape: Shape, batch: Batch) -> Update:
    """Run one update of one pass; a minibatch of more passes needs no more memory.

    Raises:
        PolicyError: the policy has no layers for its adapters.
    """
    count = batch.of_one_pass(config)
    segments = made_up(count, batch, shape.config.vocab_size)
    chunk = 0 if config.learner.device == "cpu" else GPU_CHUNK_BYTES
    trace, mode = Trace(shape.config.vocab_size), FakeTensorMode(allow_non_fake_inputs=True)
    with planned_chunks(chunk), trace:
        trainer = _trainer(config, shape, trace, mode)
        before = trace.flops
        passes = [trainer.begun(each) for each in trainer.passes(segments)]
        begun, before = trace.flops - before, trace.flops
        trainer.update(passes, 1.0)
        parts, updated = trace.peak, trace.flops - before
        with mode:
            published = Snapshot.of(trainer.model, 0).data.nbytes
    repeated = 1 - 1 / config.learner.minibatches  # the first minibatch begins where it is trained
    return Update(parts, (updated + repeated * begun) / (count * batch.tokens), published)


def _trainer(config: Config, shape: Shape, trace: Trace, mode: FakeTensorMode) -> Trainer:
    rules = config.learner
    model = _fake(meta_model(config, shape), mode)
    trace.count(_tensors(model), "weights")
    full = msgspec.structs.replace(rules, optimizer_state="full")
    own = {"max_staleness": 1, "expert": config.expert}
    trainer = Trainer(model, full, config.sampling.temperature, 0, **own)
    if rules.optimizer_state == "8bit":
        trainer.optimizer = PlannedEightBit(trainer.masters.trained)
    trace.count(trainer.masters.tensors(), "masters")
    if needs_reference(config):
        reference = _fake(meta_model(config, shape), mode).requires_grad_(False).eval()
        trace.count(_tensors(reference), "reference policy")
        trainer.reference = reference
    _begin(trainer, trace)
    return trainer


def _begin(trainer: Trainer, trace: Trace) -> None:
    """Make the optimizer's state, as a first update does, and see gradients where they are made."""
    trained = trainer.masters.trained
    weights = (weight for weight in trainer.model.parameters() if weight.requires_grad)
    for weight, own in zip(weights, trained, strict=True):
        weight.register_post_accumulate_grad_hook(
            lambda _, own=own: trace.count([own.grad], "gradients")
        )
        own.grad = torch.zeros_like(own)
    trainer.optimizer.step()
    trace.count(_state(trainer), "optimizer")


def _fake(model: PreTrainedModel, mode: FakeTensorMode) -> PreTrainedModel:
    """Give a model of the meta device, in place, tensors of a CPU without values; what is tied
    stays so.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake_tensor(tensor, mode)
                    table[name] = made[id(tensor)]  # type: ignore[assignment]
    return model


def _fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_like(tensor, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return fake
    return nn.Parameter(fake, requires_grad=tensor.requires_grad)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _state(trainer: Trainer) -> Iterator[torch.Tensor]:
    leaves = tree_leaves(trainer.state()["optimizer"]["state"])
    return (each for each in leaves if isinstance(each, torch.Tensor))
