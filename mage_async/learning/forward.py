"""Compute the forward of a token row: hidden states, LM head, log-probs of the sampled tokens.

Shapes: `T` tokens of the row, `N` sampled tokens, `D` hidden, `V` vocabulary. A policy may have two
*roles*, each with an adapter of its own (`TokenRow.is_second_role`).
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mage_async.learning.lora import give_roles, has_float32_adapters
from mage_async.learning.merged_layers import merged_layers
from mage_async.learning.packing import TokenRow
from mage_async.learning.token_loss import HeadInputs

SHARDED = "sharded_body"
"""Name of the method that runs `body` on a model that is sharded over ranks."""


def head_inputs(model: PreTrainedModel, row: TokenRow, temperature: float) -> HeadInputs:
    """Run the transformer and return the inputs of the log-probs.

    Args:
        temperature: sampling temperature of actions; a token with another one has a `sharpness`,
            this temperature divided by its own.
    """
    states, head = _states_and_head(model, row)
    # In float32: a model in bfloat16 would round the factor, if its hidden states were scaled.
    scales = 1.0 / temperature if row.sharpness is None else row.sharpness / temperature
    return HeadInputs(states[row.sources], head, row.targets, scales, row.restricted)


def checkpoint_activations(model: PreTrainedModel, *, is_on: bool) -> None:
    """Switch activation checkpointing: a layer keeps only its input for the backward pass.

    It is set on each layer, because the model's own method is called differently in different
    versions of transformers.
    """
    for layer in layers_of(model):
        recompute = partial(checkpoint, use_reentrant=False)
        # torch declares tensors and modules as the only attributes.
        layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]
        layer.gradient_checkpointing = is_on


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the transformer layers, the unit of checkpointing and of sharding."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


def hidden_states(model: PreTrainedModel, row: TokenRow) -> torch.Tensor:
    """Compute the input of the LM head: [T, D]."""
    return _states_and_head(model, row)[0]


def _states_and_head(model: PreTrainedModel, row: TokenRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the input of the LM head, [T, D], and return its weight of the same type, [V, D]."""
    # On a CPU, a faster implementation computes the layers of a model with adapters.
    merged = merged_layers(model)
    if merged is not None:
        return merged.hidden_states(row), merged.head
    # FSDP gathers a model's weights only in `forward` and in methods that are registered with it.
    states = getattr(model, SHARDED, partial(body, model))(row)[0]
    return states, model.get_output_embeddings().weight


def body(model: PreTrainedModel, row: TokenRow) -> torch.Tensor:
    """Compute the input of the LM head by transformers and peft: [1, T, D]. Weights of a sharded
    model have to be gathered (`SHARDED`).
    """
    give_roles(model, row.is_second_role)
    # float32 adapters in a 16-bit model: autocast gives all products the model's type.
    with torch.autocast(row.tokens.device.type, model.dtype, enabled=has_float32_adapters(model)):
        out = model.base_model(
            input_ids=row.tokens,
            position_ids=row.positions,
            # transformers passes it on to `attention.packed_attention`, which uses it in place of
            # a mask.
            boundaries=row.boundaries,
            use_cache=False,
        )
    states: torch.Tensor = out.last_hidden_state
    return states
