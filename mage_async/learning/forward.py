"""One forward over packed sequences, up to the log-probs of the sampled tokens."""

from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mage_async.learning.adapters import has_wide_adapters
from mage_async.learning.attention import Boundaries
from mage_async.learning.layout import Layout
from mage_async.learning.packing import Packed
from mage_async.learning.roles import give_roles
from mage_async.learning.token_loss import HeadInputs
from mage_kernels import backend_report, linear_logprob

__all__ = [
    "ModelInputs",
    "Row",
    "backend_report",
    "body",
    "checkpoint_activations",
    "head_inputs",
    "hidden_states",
    "layers_of",
    "token_logprobs",
]

SHARDED = "sharded_body"
"""The method by which a model that is sharded over ranks does what `body` does."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Packed sequences on the learner's device."""

    tokens: torch.Tensor
    """int64 [1, T]"""
    positions: torch.Tensor
    """int64 [1, T]"""
    boundaries: Boundaries
    exploits: torch.Tensor | None = None
    """bool [T]: which tokens are the exploiter's; None: none of them"""

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Self:
        """Copy a row to a device."""
        tokens, positions, lengths = (
            torch.from_numpy(values).to(device)
            for values in (layout.tokens, layout.positions, layout.lengths)
        )
        boundaries = Boundaries.of(lengths, layout.opening)
        exploits = torch.from_numpy(layout.exploits).to(device) if layout.exploits.any() else None
        return cls(tokens[None], positions[None], boundaries, exploits)


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """A `Packed` on the learner's device: the row, and where its sampled tokens come from."""

    row: Row
    sources: torch.Tensor
    """int64 [N]"""
    targets: torch.Tensor
    """int64 [N]"""
    sharpness: torch.Tensor | None = None
    """float32 [N]: the temperature of actions over the token's own; None: 1 everywhere"""

    @property
    def exploits(self) -> torch.Tensor | None:
        """Which sampled tokens are the exploiter's: bool [N]; None: none of them."""
        return None if self.row.exploits is None else self.row.exploits[self.sources]

    @classmethod
    def of(cls, packed: Packed, device: torch.device, sharpness: np.ndarray | None = None) -> Self:
        """Copy what a forward needs to a device."""

        def put(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        row = Row.of(packed.layout, device)
        own = None if sharpness is None else put(sharpness.astype(np.float32))
        return cls(row, put(packed.sources), put(packed.targets), own)


def token_logprobs(
    model: PreTrainedModel, given: ModelInputs, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of each sampled token, in nats, after temperature: two float32 [N]."""
    inputs = head_inputs(model, given, temperature)
    return linear_logprob(inputs.hidden, inputs.head, inputs.targets, inputs.inverse_temperature)


def head_inputs(model: PreTrainedModel, given: ModelInputs, temperature: float) -> HeadInputs:
    """The transformer's forward, up to where log-probs are made.

    Args:
        temperature: of tokens whose `sharpness` is 1.
    """
    hidden = hidden_states(model, given.row)[given.sources]
    if given.sharpness is not None:  # logits are linear in the states: each token has its own
        hidden = hidden * given.sharpness[:, None].to(hidden.dtype)
    head = model.get_output_embeddings().weight
    return HeadInputs(hidden, head, given.targets, 1.0 / temperature)


def checkpoint_activations(model: PreTrainedModel, *, is_on: bool) -> None:
    """Whether each layer keeps its input alone and computes the rest again in the backward pass.

    Layers are told one by one: the model's own method has two names among transformers' versions.
    """
    for layer in layers_of(model):
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = is_on


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """A model's layers, which are computed again, or sharded over ranks, one by one."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


def hidden_states(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """The last layer's output, before the head: [T, D]."""
    return getattr(model, SHARDED, partial(body, model))(row)[0]


def body(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """The same of a model that lies in one place: [1, T, D]."""
    give_roles(model, row.exploits)
    with torch.autocast(row.tokens.device.type, model.dtype, enabled=has_wide_adapters(model)):
        out = model.base_model(
            input_ids=row.tokens,
            position_ids=row.positions,
            boundaries=row.boundaries,
            use_cache=False,
        )
    return out.last_hidden_state
