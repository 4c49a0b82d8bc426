"""What a rank tells rank 0 of the passes it trained, as one flat tensor.

Rank 0 has dealt the sequences, so it can lay out the passes of every rank itself; what it lacks is
what only a forward can say of their tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mage_async.learning.corrections.surrogate import Surrogate
from mage_async.learning.passes import Pass, Start
from mage_async.learning.step_metrics import SUMS, TrainedPass

COLUMNS = 6
"""Numbers a token: log-prob, bonus, loss, weight, whether it is clipped, whether it is masked."""


def report_of(trained: Sequence[TrainedPass]) -> torch.Tensor:
    """Everything of some passes, on their device: float32 [size]."""
    parts = [part for each in trained for part in (*_columns(each), each.sums)]
    return torch.cat([part.detach().float() for part in parts]) if parts else torch.zeros(0)


def size_of(laid: Sequence[Pass]) -> int:
    """How many numbers a report on passes has."""
    return sum(COLUMNS * len(each.packed.targets) + len(SUMS) for each in laid)


def read_report(report: torch.Tensor, laid: Sequence[Pass]) -> list[TrainedPass]:
    """The passes that a report, float32 [size], is about."""
    trained = []
    for each in laid:
        num_tokens = len(each.packed.targets)
        own, sums, report = report.split(
            [COLUMNS * num_tokens, len(SUMS), len(report) - size_of([each])]
        )
        proximal, explores, losses, weights, is_clipped, is_masked = own.split(num_tokens)
        made = Surrogate(losses, weights, is_clipped.bool(), is_masked.bool())
        begun = replace(each, beginning=Start(proximal, explores))
        trained.append(TrainedPass(begun, sums, made))
    return trained


def _columns(each: TrainedPass) -> tuple[torch.Tensor, ...]:
    start, made = each.begun.start, each.made
    return start.proximal, start.explores, *(
        made.losses, made.weights, made.is_clipped, made.is_masked,
    )  # fmt: skip
