"""Train a model that is sharded over ranks: the same step as in one process, to rounding.

Rank 0 deals the sequences of every minibatch to the ranks; a rank's *share* is what it gets. All
ranks make the same number of micro-batches: a rank whose share fills fewer adds empty ones, which
add nothing to the gradient. Each token's loss is divided by the mean number of tokens of a
minibatch, over all ranks. The ranks sum their gradients, and clip the sum by its own norm.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load, save
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from mage_async.config.schema import Config
from mage_async.learning.corrections import M2po, Surrogate, largest_set_under
from mage_async.learning.forward import SHARDED, body, hidden_states, layers_of
from mage_async.learning.optimizer import MASTERS_KEY, learning_rate, set_rate
from mage_async.learning.packing import MicroBatch, SampledTokens, TokenRow, TrainingSequence
from mage_async.learning.rank_orders import Forward, Ranks, Step
from mage_async.learning.token_loss import CorrectedLoss
from mage_async.learning.token_metrics import SUMS, TrainedMicroBatch, Update
from mage_async.learning.trainer import Trainer
from mage_async.restriction import AllowedSets


class RankedTrainer(Trainer):
    """Train one rank's shards of a policy, together with the trainers of the other ranks.

    Rank 0 has the interface of `Trainer` and sends orders to the other ranks, for which
    `mage_services/learner/rank_worker.py` calls `follow_step` and `join_forwards`.
    """

    def __init__(self, model: PreTrainedModel, config: Config, ranks: Ranks) -> None:
        """Shard a model that every rank has loaded from the same files onto the host."""
        self._ranks = ranks
        self._mesh = init_device_mesh(ranks.device_type, (ranks.count,))
        shard(model, self._mesh)
        super().__init__(model, config)

    def describe(self) -> str:
        """Describe model, loss and kernels in one line for people."""
        return f"{super().describe()}; sharded over {self._ranks.count} ranks"

    def step(self, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
        """Train on a batch with all ranks and return metrics by name; the version grows by one."""
        chunks, num_ranks = self._chunks(sequences), self._ranks.count
        minibatches = [deal(chunk, num_ranks) for chunk in chunks]
        # For each minibatch, the number of micro-batches of the rank that needs most of them.
        counts = [max(len(self._split(share)) for share in shares) for shares in minibatches]
        # 1 / (mean number of sampled tokens of a minibatch).
        scale = len(chunks) / max(1, sum(len(each.places) for each in sequences))
        own, *others = zip(*minibatches, strict=True)  # by rank: its share of each minibatch
        self._ranks.send([Step([*map(to_bytes, shares)], counts, scale) for shares in others])
        # The micro-batches of the other ranks, to which their reports will be added.
        packed = [[self._pack(share) for share in shares] for shares in others]
        updates = self._train(own, counts, scale)
        for rank, batches in enumerate(packed, start=1):
            updates = self._with_report(updates, rank, batches)
        return self.end_step(updates)

    def refer_to(self, model: PreTrainedModel) -> None:
        """Use a frozen policy as the reference; it is sharded too."""
        shard(model, self._mesh)
        self.reference = model

    @contextmanager
    def read(self, num_forwards: int) -> Iterator[PreTrainedModel]:
        """Yield the model on rank 0 for `num_forwards` forwards, in which all ranks take part."""
        self._ranks.send_all(Forward(num_forwards))
        yield self.model
        _reshard(self.model)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state on every rank; it may have been saved by another number of ranks."""
        sharded = state | {"optimizer": sharded_moments(state["optimizer"], self.masters.trained)}
        masters = self.masters.tensors()
        # If the state has another number of float32 masters, the inherited method refuses it.
        if len(state.get(MASTERS_KEY, [])) == len(masters) > 0:
            pairs = zip(state[MASTERS_KEY], masters, strict=True)
            sharded[MASTERS_KEY] = [sharded_as(value, like) for value, like in pairs]
        super().restore(sharded)

    def join_forwards(self, num_forwards: int) -> None:
        """Take part in the forwards that rank 0 makes inside of `read`. Other ranks call this."""
        empty_forwards(self.model, num_forwards)
        _reshard(self.model)

    def follow_step(self, order: Step) -> None:
        """Train on this rank's share of a step, and report to rank 0. Other ranks call this."""
        shares = [from_bytes(each, self.model.device) for each in order.shares]
        updates = self._train(shares, order.num_micro_batches, order.scale)
        report = report_of([each for update in updates for each in update.micro_batches])
        if len(report):
            distributed.send(report, 0)
        self.version += 1

    def _corrected_loss(self) -> CorrectedLoss:
        # M2PO decides over a whole minibatch which tokens it masks, so all ranks decide together.
        correction = self._learner.correction
        if not isinstance(correction, M2po):
            return super()._corrected_loss()
        correct = partial(correction.surrogate, largest=largest_set_of_all)
        return CorrectedLoss(correct, self._learner.kl)

    def _train(
        self,
        shares: Sequence[Sequence[TrainingSequence]],
        num_micro_batches: Sequence[int],
        scale: float,
    ) -> list[Update]:
        """Train on this rank's share of each minibatch, which may be empty.

        Args:
            num_micro_batches: number of micro-batches of each minibatch; the same on all ranks.
            scale: factor of every token's loss; the same on all ranks.
        """
        minibatches = [self.micro_batches(share) for share in shares]
        sizes = zip(num_micro_batches, minibatches, strict=True)
        missing = [count - len(batches) for count, batches in sizes]
        if self.reference is not None and self._learner.kl:
            # The reference policy is sharded too, so every rank has to take part in each of its
            # forwards.
            empty_forwards(self.reference, sum(missing))
            _reshard(self.reference)
        # Proximal log-probs are those under the weights before the step. The first minibatch gets
        # them in its own training forward, because no update has changed the weights before it.
        for number in range(1, len(minibatches)):
            minibatches[number] = self.prepare_later(minibatches[number], number / len(minibatches))
            if self._learner.proximal == "computed":
                empty_forwards(self.model, missing[number])
        set_rate(self.optimizer, learning_rate(self._learner, self.version))
        return [
            self._share_update(batches, num_empty, scale)
            for batches, num_empty in zip(minibatches, missing, strict=True)
        ]

    def _share_update(self, batches: Sequence[MicroBatch], num_empty: int, scale: float) -> Update:
        """Make one optimizer update, to which this rank adds its micro-batches."""
        self.optimizer.zero_grad(set_to_none=True)
        trained = [self._backward(each, scale) for each in batches]
        # The empty micro-batches come last on every rank, so that the k-th call of
        # `largest_set_of_all` on each rank is for its k-th micro-batch.
        for _ in range(num_empty):
            self._empty_loss().backward()
        return Update(trained, self.apply_gradient())

    def _empty_loss(self) -> torch.Tensor:
        """Compute the loss of an empty micro-batch: 0."""
        loss = empty_loss(self.model)
        if isinstance(self._learner.correction, M2po):
            # All ranks must call this together. This rank has no values, so its result is empty,
            # and the bound 0 is never used.
            largest_set_of_all(torch.zeros(0, device=loss.device), 0.0)
        return loss

    def _with_report(
        self, updates: Sequence[Update], rank: int, packed: Sequence[Sequence[MicroBatch]]
    ) -> list[Update]:
        """Receive another rank's report, and return the updates with its micro-batches."""
        batches = list(chain.from_iterable(packed))
        report = torch.empty(report_size(batches), device=self.model.device)
        if len(report):
            distributed.recv(report, rank)
        theirs = iter(read_report(report, batches))
        return [
            Update([*update.micro_batches, *(next(theirs) for _ in share)], update.grad_norm)
            for update, share in zip(updates, packed, strict=True)
        ]


# Dealing a minibatch to ranks, and sending a share as bytes.
#
# A share is sent as a safetensors file in memory: for each field of a sequence one tensor with the
# values of all sequences, and one with the number of values of each sequence.

_SEQUENCE_FIELDS = ["tokens", "places", "turn_lengths"]
_ALLOWED_FIELDS = [f"allowed/{field.name}" for field in fields(AllowedSets)]
"""Fields of `AllowedSets`, which are empty for a sequence without restricted tokens."""
_FIELDS = [*SampledTokens._fields, *_SEQUENCE_FIELDS, *_ALLOWED_FIELDS, "advantages", "weights"]
LENGTHS = "/lengths"
"""Suffix of a field's name, for the number of elements of each sequence."""


def deal(sequences: Sequence[TrainingSequence], count: int) -> list[list[TrainingSequence]]:
    """Divide whole sequences among `count` ranks, about as many tokens to each.

    The longest sequences are dealt first, each to the rank with the fewest tokens so far. A rank
    keeps the order of its sequences, and may get none.
    """
    owners, num_tokens = [0] * len(sequences), [0] * count
    for place in sorted(range(len(sequences)), key=lambda each: -len(sequences[each].tokens)):
        owners[place] = min(range(count), key=num_tokens.__getitem__)
        num_tokens[owners[place]] += len(sequences[place].tokens)
    shares: list[list[TrainingSequence]] = [[] for _ in range(count)]
    for sequence, owner in zip(sequences, owners, strict=True):
        shares[owner].append(sequence)
    return shares


def to_bytes(sequences: Sequence[TrainingSequence]) -> bytes:
    """Encode sequences, without alternative actions, which training on ranks does not support."""
    columns = [_columns(each) for each in sequences]
    tensors = {}
    for name in _FIELDS:
        parts = [each[name] for each in columns]
        tensors[name] = torch.cat(parts) if parts else torch.zeros(0)
        tensors[name + LENGTHS] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return save(tensors)


def from_bytes(data: bytes, device: torch.device) -> list[TrainingSequence]:
    """Decode sequences that `to_bytes` encoded, with advantages on a device."""
    tensors = load(data)
    parts = [tensors[name].split(tensors[name + LENGTHS].tolist()) for name in _FIELDS]
    return [
        _sequence(dict(zip(_FIELDS, row, strict=True)), device) for row in zip(*parts, strict=True)
    ]


def _columns(sequence: TrainingSequence) -> dict[str, torch.Tensor]:
    """Return the tensors of a sequence by the names of `_FIELDS`."""
    arrays = [*sequence.sampled, *(getattr(sequence, name) for name in _SEQUENCE_FIELDS)]
    allowed = sequence.allowed
    arrays += (
        [np.zeros(0, np.int32)] * len(_ALLOWED_FIELDS)
        if allowed is None
        else [allowed.index, allowed.offsets, allowed.tokens]
    )
    # Copied, because some arrays are read-only views of a received message.
    weights = torch.zeros(0) if sequence.weights is None else sequence.weights.cpu()
    tensors = [*map(torch.tensor, arrays), sequence.advantages.cpu(), weights]
    return dict(zip(_FIELDS, tensors, strict=True))


def _sequence(row: dict[str, torch.Tensor], device: torch.device) -> TrainingSequence:
    """Make a sequence from its tensors; the inverse of `_columns`."""
    sampled = SampledTokens(*(row[name].numpy() for name in SampledTokens._fields))
    tokens, places, turn_lengths = (row[name].numpy() for name in _SEQUENCE_FIELDS)
    index, offsets, allowed = (row[name].numpy() for name in _ALLOWED_FIELDS)
    return TrainingSequence(
        tokens,
        places,
        sampled,
        turn_lengths,
        row["advantages"].to(device),
        allowed=AllowedSets(index, offsets, allowed) if len(offsets) else None,
        weights=row["weights"].to(device) if len(row["weights"]) else None,
    )


# Empty micro-batches.
#
# All ranks take part in every forward and backward pass, so a rank with fewer micro-batches than
# the others also computes some rows of a single token, whose loss is 0 and adds nothing to the
# gradient.


@torch.no_grad()
def empty_forwards(model: PreTrainedModel, count: int) -> None:
    """Take part in `count` forwards of other ranks, with a row of one token in each."""
    for _ in range(count):
        hidden_states(model, _short_row(model.device))


def empty_loss(model: PreTrainedModel) -> torch.Tensor:
    """Return a loss of 0 whose backward pass reaches every weight."""
    states = hidden_states(model, _short_row(model.device))
    head = model.get_output_embeddings().weight
    nothing: torch.Tensor = 0.0 * (states.float().sum() + head.float().sum())
    return nothing


def _short_row(device: torch.device) -> TokenRow:
    """Make a row of one token; which token does not matter."""
    return TokenRow.of([np.zeros(1, np.int32)], device)


def _reshard(model: PreTrainedModel) -> None:
    """Free the copies of other ranks' weights that a forward has gathered and left in memory."""
    cast("FSDPModule", model).reshard()


# The report of another rank to rank 0 after a step, as one flat tensor.
#
# Rank 0 dealt the sequences, so it can pack the micro-batches of every rank itself; it lacks only
# the results of their forwards.

COLUMNS = 6
"""Numbers per token: proximal log-prob, entropy mask, loss, weight, is clipped, is masked."""


def report_of(trained: Sequence[TrainedMicroBatch]) -> torch.Tensor:
    """Flatten the results of micro-batches: float32 [size], on their device."""
    parts = [part for each in trained for part in (*_results(each), each.sums)]
    return torch.cat([part.detach().float() for part in parts]) if parts else torch.zeros(0)


def report_size(batches: Sequence[MicroBatch]) -> int:
    """Return the number of elements of a report on micro-batches."""
    return sum(COLUMNS * each.num_tokens + len(SUMS) for each in batches)


def read_report(report: torch.Tensor, batches: Sequence[MicroBatch]) -> list[TrainedMicroBatch]:
    """Add the results in a report, float32 [size], to the micro-batches that it is about."""
    trained = []
    for each in batches:
        num_tokens = each.num_tokens
        per_token, sums, report = report.split(
            [COLUMNS * num_tokens, len(SUMS), len(report) - report_size([each])]
        )
        proximal, entropy_mask, losses, weights, is_clipped, is_masked = per_token.split(num_tokens)
        surrogate = Surrogate(losses, weights, is_clipped.bool(), is_masked.bool())
        batch = replace(each, proximal=proximal, entropy_mask=entropy_mask)
        trained.append(TrainedMicroBatch(batch, sums, surrogate))
    return trained


def _results(each: TrainedMicroBatch) -> tuple[torch.Tensor, ...]:
    """Return the `COLUMNS` results of a micro-batch's tokens, [N] each."""
    batch, surrogate = each.batch, each.surrogate
    assert batch.proximal is not None, "it was trained on"
    assert batch.entropy_mask is not None, "known together with `proximal`"
    per_token = batch.proximal, batch.entropy_mask, surrogate.losses, surrogate.weights
    return *per_token, surrogate.is_clipped, surrogate.is_masked


# M2PO's choice of the tokens to keep, among those of a minibatch that lie on several ranks.


def largest_set_of_all(values: torch.Tensor, bound: float) -> torch.Tensor:
    """Compute `largest_set_under` of the values of all ranks; return this rank's part: bool [N].

    All ranks must call it together; a rank may have no values.
    """
    lengths = [int(each) for each in _gathered(torch.tensor([len(values)], device=values.device))]
    padded = values.new_zeros(max(1, *lengths))
    padded[: len(values)] = values
    rows = zip(_gathered(padded), lengths, strict=True)
    kept = largest_set_under(torch.cat([row[:length] for row, length in rows]), bound)
    parts: tuple[torch.Tensor, ...] = kept.split(lengths)
    return parts[distributed.get_rank()]


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor of every rank, of equal shapes, by rank."""
    rows = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, tensor)
    return rows


# Sharding by FSDP2: a layer's weights are gathered only while it computes.
#
# Gradients are summed over ranks, not averaged, because each rank divides its loss by the tokens of
# all ranks. A 16-bit model's gradients are summed in float32.


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a model in place over the ranks of a mesh, and move it to their devices.

    The weights outside of layers, such as embedding and LM head, stay gathered from the forward of
    `hidden_states` to the end of the backward pass, because the loss reads the LM head in between.
    """
    sums = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(model.dtype, torch.float32))
    for layer in layers_of(model):
        _sum_gradients(fully_shard(layer, mesh=mesh, mp_policy=sums))
    _sum_gradients(fully_shard(model, mesh=mesh, mp_policy=sums, reshard_after_forward=False))
    # FSDP gathers the model's weights only in its `forward`, which no step calls, and in methods
    # that are registered.
    setattr(model, SHARDED, MethodType(body, model))
    register_fsdp_forward_method(model, SHARDED)


def own_part(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return this rank's shard of a tensor and the number of elements before it.

    An unsharded tensor belongs to rank 0 alone: other ranks get an empty one.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor if distributed.get_rank() == 0 else tensor.new_empty(0)
    assert tensor.placements == (Shard(0),)
    mesh, length = tensor.device_mesh, len(tensor)
    # A shard has length / ranks rows, rounded up (`-(-a // b)`); the last ones may have fewer.
    first = min(length, mesh.get_local_rank() * -(-length // mesh.size()))
    return first * (tensor.numel() // max(1, length)), tensor.to_local()


def sharded_as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a tensor that every rank has whole in the same way as `like`, of equal shape."""
    assert isinstance(like, DTensor)
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def sharded_moments(state: Mapping[str, Any], trained: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Shard the moments in an optimizer state of a single process.

    Args:
        state: result of the optimizer's `state_dict`, with whole tensors.
        trained: the sharded weights, in the order of the optimizer.
    """
    moments = {
        number: {
            key: sharded_as(value, trained[number]) if _is_moment(value, trained[number]) else value
            for key, value in of_weight.items()
        }
        for number, of_weight in state["state"].items()
    }
    return {**state, "state": moments}


def _sum_gradients(module: FSDPModule) -> None:
    """Make FSDP sum gradients over ranks, which by default it averages."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _is_moment(value: Any, weight: torch.Tensor) -> bool:
    """Return whether a value is a moment; otherwise it is the number of updates."""
    return isinstance(value, torch.Tensor) and value.shape == weight.shape
