"""The weights of one version, copied out of the model, to be published while the next step trains.

All tensors lie in one buffer without gaps, so the same bytes are a safetensors file, a piece of
shared memory, or buckets to be sent to an engine; nothing is laid out twice.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mage_async.learning.adapters import base_tensors, merged_tensors
from mage_async.policy.beside_training import on_host

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    """`start` and `end` are offsets in the buffer, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All weights of one version; the model may change from here on."""

    version: int
    places: tuple[Place, ...]
    """Places of all tensors, in the order of the buffer, without a gap."""
    data: torch.Tensor
    """uint8 [bytes], on the model's device"""
    made: torch.cuda.Event | None = None
    """Happens when `data` holds the weights; None where the model is not on a GPU."""

    @staticmethod
    @torch.no_grad()
    def of(model: "PreTrainedModel", version: int) -> "Snapshot":
        """Copy a model's weights, its adapters merged; a head that is tied to the embedding is left
        out.
        """
        tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
        tensors = {name: one for name, one in base_tensors(model).items() if name != tied}
        places = tuple(_places(tensors))
        data = torch.empty(places[-1].end, dtype=torch.uint8, device=model.device)
        by_name = {place.name: place for place in places}
        for name, tensor in merged_tensors(model):
            if name != tied:
                place = by_name[name]
                view = data[place.start : place.end].view(place.dtype)
                view.copy_(tensor.reshape(-1))
        made = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        return Snapshot(version, places, data, made)

    def write(self, file: Path) -> None:
        """Write it as a safetensors file, whole or not at all, readable by every user.

        In a folder of shared memory that is one copy and no disk. On a GPU, training goes on.
        """
        working = file.with_name(f".{file.name}.part")
        data = on_host(self.data, self.made)
        tensors = {
            place.name: data[place.start : place.end].view(place.dtype).reshape(place.shape)
            for place in self.places
        }
        save_file(tensors, working, {"format": "pt", "version": str(self.version)})
        os.chmod(working, 0o644)
        os.replace(working, file)


def read_snapshot(file: Path) -> tuple[tuple[Place, ...], torch.Tensor]:
    """The tensors of a file that `Snapshot.write` wrote, and its bytes; mapped, not copied.

    Returns:
        Places in the order of the buffer, and the buffer: uint8 [bytes]
    """
    places, start = list[Place](), 0
    with safe_open(file, "pt") as tensors:
        for name in tensors.offset_keys():
            tensor = tensors.get_tensor(name)
            end = start + tensor.numel() * tensor.element_size()
            places.append(Place(name, tensor.dtype, tuple(tensor.shape), start, end))
            start = end
    whole = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    return tuple(places), whole[len(whole) - start :]


def _places(tensors: dict[str, torch.Tensor]) -> Iterator[Place]:
    """Wide types first, so that every tensor begins at a multiple of its own element's size."""
    start = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        end = start + tensor.numel() * tensor.element_size()
        yield Place(name, tensor.dtype, tuple(tensor.shape), start, end)
        start = end
