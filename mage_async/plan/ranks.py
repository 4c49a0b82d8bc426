"""A learner on several ranks: what each holds, sends and computes, as FSDP2 shards a model.

Weights, gradients and the optimizer's state lie in equal shards. A layer is whole while it
computes: gathered in the forward, again in the backward, where the sum of its gradients over ranks
leaves each rank its shard. What lies outside of the layers, embedding and head, is gathered once a
pass and stays whole to the end of the backward.
"""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from mage_async.config.schema import Config
from mage_async.learning.forward import layers_of
from mage_async.plan.made_up import Batch
from mage_async.plan.plan import Plan
from mage_async.policy.load import needs_reference

SHARDED = ("weights", "masters", "optimizer", "gradients", "reference policy", "publication")
"""Parts of a learner's memory that have a number for each weight."""
SUM_BYTES = 4
"""Gradients are summed over ranks in float32."""


@dataclass(frozen=True, slots=True)
class Block:
    """Weights that are gathered together."""

    num_bytes: int
    num_trained: int
    """Numbers with a gradient."""

    def whole_bytes(self) -> int:
        """Of the block and its gradients, on every rank that computes it."""
        return self.num_bytes + SUM_BYTES * self.num_trained


@dataclass(frozen=True, slots=True)
class Blocks:
    """A model as it is sharded."""

    root: Block
    """What lies outside of the layers."""
    layers: tuple[Block, ...]

    def whole_bytes(self) -> int:
        """The most that is whole at one moment: the root, and the largest layer."""
        return self.root.whole_bytes() + max(layer.whole_bytes() for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank receives and sends in a step."""

    gathered: int
    reduced: int


def blocks_of(model: nn.Module) -> Blocks:
    """The blocks of a model, which may lie on the meta device."""
    found = layers_of(model)
    inside = {id(weight) for layer in found for weight in layer.parameters()}
    outside = [weight for weight in model.parameters() if id(weight) not in inside]
    return Blocks(_block(outside), tuple(_block(list(layer.parameters())) for layer in found))


def _block(weights: list[nn.Parameter]) -> Block:
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return Block(sum(weight.numel() * weight.itemsize for weight in weights), trained)


def contexts_of(config: Config, batch: Batch, ranks: int) -> int:
    """Contexts of a minibatch that the fullest rank trains."""
    return -(-batch.num_segments // (config.learner.minibatches * ranks))


def parts_of(plan: Plan, blocks: Blocks, ranks: int) -> Counter[str]:
    """Bytes of one rank by part; those of a single rank are the plan's."""
    parts = plan.loads[0].parts
    if ranks == 1:
        return parts
    own = {part: -(-size // ranks) if part in SHARDED else size for part, size in parts.items()}
    return Counter(own) + Counter({"whole blocks": blocks.whole_bytes()})


def traffic_of(plan: Plan, blocks: Blocks, ranks: int) -> Traffic:
    """What a rank sends in a step, and receives: of all that is gathered and summed, the share of
    the other ranks.
    """
    rules = plan.config.learner
    per_pass = plan.batch.of_one_pass(plan.config)
    passes = -(-contexts_of(plan.config, plan.batch, ranks) // per_pass)
    forwards = passes * (2 * rules.minibatches - 1)  # log-probs at the beginning, but for the first
    updates = passes * rules.minibatches
    layers = sum(layer.num_bytes for layer in blocks.layers)
    if needs_reference(plan.config):  # as large as the policy, and one forward more
        forwards += passes * rules.minibatches
    trained = blocks.root.num_trained + sum(layer.num_trained for layer in blocks.layers)
    gathered = forwards * (blocks.root.num_bytes + layers) + updates * layers
    return Traffic(
        gathered=gathered * (ranks - 1) // ranks,
        reduced=updates * SUM_BYTES * trained * (ranks - 1) // ranks,
    )


def compute_s(plan: Plan, ranks: int, tflops: float) -> float:
    """Seconds that the fullest rank computes in a step; `tflops` as of `Plan.step_s`."""
    contexts = contexts_of(plan.config, plan.batch, ranks) * plan.config.learner.minibatches
    return plan.step_s(tflops) * contexts / plan.batch.num_segments
