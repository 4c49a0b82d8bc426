"""A shard of the vocabulary on Hopper: the kernels of the whole head, given a part of it.

Shapes: `T` tokens, `D` hidden, `S` rows of a shard.
"""

import torch
from torch import Tensor

from mage_kernels.fused.coefficients import LN2, Coefficients
from mage_kernels.fused.launching import per_row
from mage_kernels.fused.linear_logprob import backward_rows
from mage_kernels.fused.logit_partials import logit_partials
from mage_kernels.reference import combined_partials, logprob_and_entropy

CHUNK_ROWS = 4096


def fused_partials(
    hidden: Tensor, shard: Tensor, columns: Tensor, inverse_temperature: float | Tensor
) -> Tensor:
    """See `mage_kernels.shards.shard_partials`; `columns` are tokens minus `first_row`."""
    hidden, shard = hidden.contiguous(), shard.contiguous()
    scale = per_row(inverse_temperature, len(hidden), hidden.device)
    largest, total, weighted = logit_partials(hidden, shard, scale)  # [SPLITS, T], in log2
    parts = torch.stack([largest * LN2, total, weighted * LN2, torch.zeros_like(total)], 1)
    partials = combined_partials(parts)
    here = (columns >= 0) & (columns < len(shard))
    for rows in torch.arange(len(hidden), device=hidden.device).split(CHUNK_ROWS):
        picked = shard[columns[rows].where(here[rows], 0)].float()
        own = torch.linalg.vecdot(hidden[rows].float(), picked) * scale[rows]
        partials[3, rows] = own.where(here[rows], 0.0)
    return partials


def fused_gradients(
    hidden: Tensor,
    shard: Tensor,
    columns: Tensor,
    whole: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    inverse_temperature: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """See `mage_kernels.shards.shard_gradients`; the own element is written where it lies here."""
    hidden, shard = hidden.contiguous(), shard.contiguous()
    scale = per_row(inverse_temperature, len(hidden), hidden.device)
    logprob, entropy = logprob_and_entropy(whole)
    normaliser = whole[0] / LN2 + whole[1].log2()
    coefficients = Coefficients.of(logprob, entropy, normaliser, scale, d_logprob, d_entropy)
    rows = torch.arange(len(hidden), device=hidden.device)
    return backward_rows(hidden, shard, columns, coefficients, None, rows)
