"""What an engine sees of the weights that it reads: what the learner's receipt has, and no more."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from mage_async.errors import UnreadableWeights
from mage_async.inference.receipts.receipt import Precision, Receipt
from mage_async.inference.receipts.spots import joined, row_of, spots_of
from mage_async.inference.receipts.tensor_sums import sample_digest, tensor_digest

LENGTH_BYTES = 8
"""Of the number before a safetensors head, which says how long that is."""


class Observed:
    """Looks at tensors as they pass.

    Args:
        published: the learner's receipt; None: it has made none, and nothing is looked at.
        file: where the tensors lie; None of those that are sent.
    """

    def __init__(self, published: Receipt | None, file: Path | None) -> None:
        self._published, self._file = published, file
        self._digests: dict[str, str] = {}
        self._rows: dict[str, torch.Tensor] = {}

    def passing(
        self, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, each looked at as it passes."""
        for name, tensor in named:
            if self._published:
                self._look_at(name, tensor, self._published)
            yield name, tensor

    def receipt(self, version: int, precision: Precision, logprobs: tuple[float, ...]) -> Receipt:
        """The engine's own receipt.

        Raises:
            UnreadableWeights: the file cannot be read.
        """
        lengths = [len(row) for row in self._rows.values()]
        is_sampled = self._published and self._published.sample and self._file
        return Receipt(
            version=version,
            precision=precision,
            tensors=self._digests,
            sample=sample_digest(_body(self._file), version) if is_sampled else "",
            spots=spots_of([*self._rows], lengths, joined(self._rows.values())) if lengths else {},
            logprobs=logprobs,
        )

    def _look_at(self, name: str, tensor: torch.Tensor, published: Receipt) -> None:
        if published.tensors:
            self._digests[name] = tensor_digest(name, tensor)
        if published.spots:
            self._rows[name] = row_of(tensor, published.version)


def _body(file: Path) -> np.ndarray:
    """The bytes behind the head of a safetensors file, mapped: uint8 [bytes]"""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        return np.asarray(np.memmap(file, np.uint8, "r", LENGTH_BYTES + length))
    except (OSError, ValueError) as error:
        raise UnreadableWeights(f"{file}: cannot be read as safetensors: {error}") from error
