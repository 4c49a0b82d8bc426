"""A minibatch dealt to ranks, and a share of it as bytes."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from safetensors.torch import load, save

from mage_async.learning.packing import SampledTokens, Sequenced

_OF_TOKEN = [field.name for field in fields(SampledTokens)]
_OF_SEQUENCE = ["tokens", "places", "turn_lengths"]
_NAMES = [*_OF_TOKEN, *_OF_SEQUENCE, "advantages"]
LENGTHS = "/lengths"
"""Behind the name of a column, for how much of it each sequence has."""


def dealt(sequences: Sequence[Sequenced], count: int) -> list[list[Sequenced]]:
    """Whole sequences to `count` ranks, about as many tokens to each: the longest first, to the
    rank with the fewest. A rank keeps their order, and may get none.
    """
    owners, loads = [0] * len(sequences), [0] * count
    for place in sorted(range(len(sequences)), key=lambda each: -len(sequences[each].tokens)):
        owners[place] = min(range(count), key=loads.__getitem__)
        loads[owners[place]] += len(sequences[place].tokens)
    shares: list[list[Sequenced]] = [[] for _ in range(count)]
    for sequence, owner in zip(sequences, owners, strict=True):
        shares[owner].append(sequence)
    return shares


def packed(sequences: Sequence[Sequenced]) -> bytes:
    """Sequences as bytes; without the tokens of an expert, which no rank looks at."""
    columns = [_columns(each) for each in sequences]
    tensors = {}
    for name in _NAMES:
        parts = [each[name] for each in columns]
        tensors[name] = torch.cat(parts) if parts else torch.zeros(0)
        tensors[name + LENGTHS] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return save(tensors)


def unpacked(data: bytes, device: torch.device) -> list[Sequenced]:
    """What `packed` was given, with advantages on a device."""
    tensors = load(data)
    parts = [tensors[name].split(tensors[name + LENGTHS].tolist()) for name in _NAMES]
    return [
        _sequence(dict(zip(_NAMES, row, strict=True)), device) for row in zip(*parts, strict=True)
    ]


def _columns(sequence: Sequenced) -> dict[str, torch.Tensor]:
    arrays = [getattr(sequence.sampled, name) for name in _OF_TOKEN]
    arrays += [getattr(sequence, name) for name in _OF_SEQUENCE]
    tensors = [
        *map(torch.tensor, arrays),
        sequence.advantages.cpu(),
    ]  # some are of the wire: copied
    return dict(zip(_NAMES, tensors, strict=True))


def _sequence(row: dict[str, torch.Tensor], device: torch.device) -> Sequenced:
    sampled = SampledTokens(**{name: row[name].numpy() for name in _OF_TOKEN})
    tokens, places, turn_lengths = (row[name].numpy() for name in _OF_SEQUENCE)
    return Sequenced(tokens, places, sampled, turn_lengths, row["advantages"].to(device))
