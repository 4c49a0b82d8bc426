"""M2PO's choice among the tokens of a minibatch whose parts lie on several ranks."""

import torch
from torch import distributed

from mage_async.learning.corrections.m2po import largest_set_under


def largest_set_of_all(values: torch.Tensor, bound: float) -> torch.Tensor:
    """`largest_set_under` of the values of all ranks, by all of them together: this rank's part,
    bool [N]; a rank may have none.
    """
    lengths = [int(each) for each in _gathered(torch.tensor([len(values)], device=values.device))]
    padded = values.new_zeros(max(1, *lengths))
    padded[: len(values)] = values
    rows = zip(_gathered(padded), lengths, strict=True)
    kept = largest_set_under(torch.cat([row[:length] for row, length in rows]), bound)
    return kept.split(lengths)[distributed.get_rank()]


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, tensor)
    return rows
