"""The weights of one version, copied out of the model, to be published while the next step trains.

All tensors lie in one buffer as a safetensors file has them, so the same bytes are a file, a piece
of shared memory, or buckets to be sent; nothing is laid out twice.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    """In bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All weights of one version; the model may change from here on."""

    version: int
    places: tuple[Place, ...]
    """In the order of the buffer, without a gap."""
    data: torch.Tensor
    """uint8 [bytes], on the model's device"""

    @staticmethod
    @torch.no_grad()
    def of(model: "PreTrainedModel", version: int) -> "Snapshot":
        """Copy a model's weights; a head that is tied to the embedding is left out."""
        tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
        tensors = {name: one for name, one in model.state_dict().items() if name != tied}
        places = tuple(_places(tensors))
        data = torch.empty(places[-1].end, dtype=torch.uint8, device=model.device)
        for place in places:
            view = data[place.start : place.end].view(place.dtype)
            view.copy_(tensors[place.name].reshape(-1))
        return Snapshot(version, places, data)

    def write(self, file: Path) -> None:
        """Write it as a safetensors file, whole or not at all, readable by every user.

        In a folder of shared memory that is one copy and no disk.
        """
        working = file.with_name(f".{file.name}.part")
        with working.open("wb") as out:
            out.write(self.header())
            out.write(memoryview(self.data.cpu().numpy()))
        os.chmod(working, 0o644)
        os.replace(working, file)

    def header(self) -> bytes:
        """What a safetensors file begins with: a length, then JSON, padded to a multiple of 8."""
        table: dict[str, Any] = {
            "__metadata__": {"format": "pt", "version": str(self.version)},
            **{
                place.name: {
                    "dtype": _DTYPES[place.dtype],
                    "shape": list(place.shape),
                    "data_offsets": [place.start, place.end],
                }
                for place in self.places
            },
        }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_snapshot(file: Path) -> tuple[tuple[Place, ...], torch.Tensor]:
    """The tensors of a file that `Snapshot.write` wrote, and its bytes; mapped, not copied.

    Returns:
        Places in the order of the buffer, and the buffer: uint8 [bytes]
    """
    whole = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    length = int.from_bytes(bytes(whole[:_LENGTH_BYTES].tolist()), "little")
    begin = _LENGTH_BYTES + length
    table = json.loads(bytes(whole[_LENGTH_BYTES:begin].numpy()))
    places = tuple(
        Place(name, _TYPES[row["dtype"]], tuple(row["shape"]), *row["data_offsets"])
        for name, row in table.items()
        if name != "__metadata__"
    )
    return places, whole[begin:]


def _places(tensors: dict[str, torch.Tensor]) -> Iterator[Place]:
    """Wide types first, so that every tensor begins at a multiple of its own element's size."""
    start = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        end = start + tensor.numel() * tensor.element_size()
        yield Place(name, tensor.dtype, tuple(tensor.shape), start, end)
        start = end
