"""A model whose weights lie on several ranks, by FSDP2: a layer is whole only while it computes.

Gradients are summed over ranks, not averaged: a loss is divided by the tokens of all ranks already.
In a model of 16 bits they are summed in float32.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from mage_async.learning.forward import SHARDED, body, layers_of


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a model, in place, over the ranks of a mesh, onto its devices.

    What lies outside of the layers, such as embedding and head, stays whole from a forward of
    `hidden_states` to the end of the backward: the loss reads the head behind the forward.
    """
    sums = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(model.dtype, torch.float32))
    for layer in layers_of(model):
        _sum_gradients(fully_shard(layer, mesh=mesh, mp_policy=sums))
    _sum_gradients(fully_shard(model, mesh=mesh, mp_policy=sums, reshard_after_forward=False))
    setattr(model, SHARDED, MethodType(body, model))
    register_fsdp_forward_method(model, SHARDED)


def whole(value: Any) -> Any:
    """A sharded tensor made whole, by all ranks together; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def own_part(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """A tensor's shard on this rank, and how many of its elements lie before that. What is not
    sharded is rank 0's.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor if distributed.get_rank() == 0 else tensor.new_empty(0)
    assert tensor.placements == (Shard(0),)
    mesh, length = tensor.device_mesh, len(tensor)
    first = min(length, mesh.get_local_rank() * -(-length // mesh.size()))
    return first * (tensor.numel() // max(1, length)), tensor.to_local()


def sharded_as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's share of a tensor that every rank has whole, laid as another of its shape."""
    assert isinstance(like, DTensor)
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def sharded_moments(state: Mapping[str, Any], trained: list[torch.Tensor]) -> dict[str, Any]:
    """The state of one process as this rank has it."""
    moments = {
        number: {
            key: sharded_as(value, trained[number]) if _is_moment(value, trained[number]) else value
            for key, value in own.items()
        }
        for number, own in state["state"].items()
    }
    return {**state, "state": moments}


def _sum_gradients(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _is_moment(value: Any, weight: torch.Tensor) -> bool:
    """Or else it is the count of updates."""
    return isinstance(value, torch.Tensor) and value.shape == weight.shape
