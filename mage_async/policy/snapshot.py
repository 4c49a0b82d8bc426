"""The weights of one version, copied out of the model, to be published while the next step trains.

All tensors lie in one buffer without gaps, so the same bytes are a safetensors file, a piece of
shared memory, or buckets to be sent to an engine; nothing is laid out twice. With the tensors goes
the learner's receipt (`mage_async/inference/receipts/`), by which an engine knows that what it has
loaded is what was published.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from mage_async.errors import UnreadableWeights
from mage_async.inference.receipts.receipt import (
    COPIED_SPOTS,
    MERGED_SPOTS,
    Receipt,
    precision_of,
    read_receipt,
)
from mage_async.inference.receipts.spots import joined, row_of, spots_of
from mage_async.inference.receipts.tensor_sums import sample_digest, tensor_digest
from mage_async.learning.adapters import (
    adapted_layers,
    base_tensors,
    exploiters_tensors,
    merged_rows,
    merged_tensors,
)
from mage_async.policy.beside_training import on_host
from mage_async.policy.places import Place, head_of, places_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All weights of one version; the model may change from here on."""

    version: int
    places: tuple[Place, ...]
    """Places of all tensors, in the order of the buffer, without a gap."""
    data: torch.Tensor
    """uint8 [bytes], on the model's device"""
    rows: torch.Tensor
    """float64 [elements], on the model's device: of each tensor the row that `row_of` chooses, not
    out of `data`, but out of the model"""
    made: torch.cuda.Event | None = None
    """Happens when `data` holds the weights; None where the model is not on a GPU."""
    logprobs: torch.Tensor | None = None
    """float32 [check tokens - 1]: the model's own, on its device; None: not scored"""
    is_merged: bool = False
    """Whether adapters were merged, which rounds."""

    @staticmethod
    @torch.no_grad()
    def of(
        model: "PreTrainedModel", version: int, logprobs: torch.Tensor | None = None
    ) -> "Snapshot":
        """Copy a model's weights, its adapters merged; a head that is tied to the embedding is left
        out.

        Args:
            logprobs: the check tokens', by this very model (`mage_async/policy/check_tokens.py`).
        """
        tensors, layers = published_tensors(model), adapted_layers(model)
        places = tuple(places_of(tensors))
        data = torch.empty(places[-1].end, dtype=torch.uint8, device=model.device)
        by_name = {place.name: place for place in places}
        for name, tensor in merged_tensors(model):
            if place := by_name.get(name):
                view = data[place.start : place.end].view(place.dtype)
                view.copy_(tensor.reshape(-1))
        rows = rows_of({place.name: tensors[place.name] for place in places}, layers, version)
        made = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        return Snapshot(version, places, data, rows, made, logprobs, bool(layers))

    def write(self, file: Path) -> None:
        """Write it as a safetensors file, whole or not at all, readable by every user.

        In a folder of shared memory that is one copy and no disk. On a GPU, training goes on.
        """
        working = part_of(file)
        host = replace(self, data=on_host(self.data, self.made))
        receipt = host.receipt().text()
        with working.open("wb") as out:
            out.write(head_of(self.places, version=str(self.version), receipt=receipt))
            out.write(host.data.numpy())
        os.chmod(working, 0o644)
        os.replace(working, file)

    def receipt(self) -> Receipt:
        """What an engine has to find. Of weights that stay on a GPU there are no digests: they are
        sent from there, and the host of an engine never sees them either.
        """
        data = None if self.data.is_cuda else self.data
        scored = [] if self.logprobs is None else self._brought(self.logprobs).tolist()
        receipt = receipt_of(self.version, self.places, data, scored)
        names = [place.name for place in self.places]
        lengths = [place.shape[-1] if place.shape else 1 for place in self.places]
        return msgspec.structs.replace(
            receipt,
            spots=spots_of(names, lengths, self._brought(self.rows)),
            spots_apart=MERGED_SPOTS[receipt.precision] if self.is_merged else COPIED_SPOTS,
        )

    def _brought(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor in the host's memory."""
        return on_host(tensor.view(torch.uint8), self.made).view(tensor.dtype)


def receipt_of(
    version: int,
    places: Sequence[Place],
    data: torch.Tensor | None,
    logprobs: Sequence[float],
) -> Receipt:
    """A receipt without spots.

    Args:
        data: uint8 [bytes], in the host's memory; None: it is not there, and has no digests.
        logprobs: of the check tokens, in nats; empty: not scored, and digested by a sample
    """
    dtypes = {place.dtype for place in places}
    named = placed(places, data) if data is not None and logprobs else ()
    is_sampled = data is not None and not logprobs
    return Receipt(
        version=version,
        precision=precision_of(min(dtypes, key=lambda dtype: dtype.itemsize)),
        tensors={name: tensor_digest(name, tensor) for name, tensor in named},
        sample=sample_digest(data.numpy(), version) if is_sampled else "",
        logprobs=tuple(value if math.isfinite(value) else None for value in logprobs),
    )


def rows_of(
    tensors: dict[str, torch.Tensor], layers: dict[str, nn.Module], version: int
) -> torch.Tensor:
    """Of each published tensor the row that a version's spot is of: float64 [elements].

    Args:
        layers: those with adapters.
    """
    return joined(merged_rows(tensors, layers, partial(row_of, version=version)).values())


def placed(places: Iterable[Place], data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a buffer, by name; not copied."""
    for place in places:
        yield place.name, data[place.start : place.end].view(place.dtype).reshape(place.shape)


def part_of(file: Path) -> Path:
    """Under which name a file is written, until it is whole."""
    return file.with_name(f".{file.name}.part")


def published_tensors(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """What is published of a model, before adapters are merged; a head that is tied to the
    embedding is left out.
    """
    tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
    everything = base_tensors(model) | exploiters_tensors(model)
    return {name: one for name, one in everything.items() if name != tied}


def published_receipt(file: Path) -> Receipt | None:
    """The learner's receipt in a file of published weights; None in a file without one: a model
    directory's, or an older run's.

    Raises:
        UnreadableWeights: the file, or what it has for a receipt, cannot be read.
    """
    try:
        with safe_open(file, "pt") as tensors:
            text = (tensors.metadata() or {}).get("receipt")
    except (OSError, SafetensorError) as error:
        raise UnreadableWeights(f"{file}: cannot be read as safetensors: {error}") from error
    return None if text is None else read_receipt(text, str(file))


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
