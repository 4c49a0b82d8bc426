"""StepAgent's implicit reward: at every turn an expert's action is preferred to the policy's.

DPO (Rafailov et al. 2023, arXiv 2305.18290) reads a policy as a reward: r(s, a) = beta log(p(a|s) /
ref(a|s)), where `ref` is the policy that training began with. StepAgent (arXiv 2411.03817) has the
expert's action e earn more than the policy's own a, step by step:

    loss = -log sigmoid(r(s, e) - r(s, a))

Here the two are compared at the first token that differs, with all before it in common. Both
log-probs are then of one softmax, whose normaliser cancels:

    gap = log p(e|s) - log p(a|s) = hidden . (head[e] - head[a]) / temperature

so a pair costs two rows of the head, and no forward of its own. For actions of one token that is
the whole action.

Shapes: `N` sampled tokens, `D` hidden.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch.nn import functional

from mage_async.learning.packing import Packed
from mage_async.learning.token_loss import HeadInputs
from mage_async.trajectory import Kind

_ROWS = 1024
"""Tokens whose logits of the whole vocabulary are held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPairs:
    """The pairs of a pass, at the sampled tokens."""

    experts: torch.Tensor
    """int64 [N]: the expert's token; where there is no pair, the sampled one"""
    weights: torch.Tensor
    """float32 [N]: tokens of the turn where there is a pair, as an advantage counts, or 0"""
    reference: torch.Tensor
    """float32 [N]: gaps in nats under the reference policy"""

    @classmethod
    def of(cls, packed: Packed, reference: HeadInputs, told: np.ndarray | None = None) -> Self:
        """The pairs of a pass, whose reference policy gave `reference` of it.

        Args:
            told: int64 [N], as `Packed.experts`, which it stands for: of a policy that is asked.
        """
        told = packed.experts if told is None else told
        is_pair = told >= 0
        experts, device = torch.from_numpy(told), reference.hidden.device
        weights = torch.from_numpy(is_pair * packed.turn_lengths[packed.turns]).float()
        experts = torch.where(torch.from_numpy(is_pair), experts, torch.from_numpy(packed.targets))
        experts, weights = experts.to(device), weights.to(device)
        return cls(experts, weights, gaps(reference, experts))

    def loss(self, inputs: HeadInputs, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the pairs' losses, each as often as its turn has tokens, and three numbers
        without a gradient: pairs, their losses, and how many prefer the expert's token by more than
        the reference does.
        """
        margins = beta * (gaps(inputs, self.experts) - self.reference)
        losses, is_pair = -functional.logsigmoid(margins), self.weights > 0
        numbers = (is_pair, is_pair * losses, is_pair & (margins > 0))
        counted = torch.stack([each.sum().detach().float() for each in numbers])
        return (self.weights * losses).sum(), counted


@torch.no_grad()
def likeliest(inputs: HeadInputs, packed: Packed) -> np.ndarray:
    """What an expert that is a policy would have drawn most likely, at the first token of each
    action at which that is not the sampled one: int64 [N], -1 elsewhere.

    Args:
        inputs: the expert's forward over the policy's own tokens.
    """
    rows = inputs.hidden.split(_ROWS)
    tokens = torch.cat([(each @ inputs.head.T).argmax(-1) for each in rows]).cpu().numpy()
    differs = np.flatnonzero((tokens != packed.targets) & (packed.sampled.kinds == Kind.ACT))
    _, first = np.unique(packed.turns[differs], return_index=True)
    experts = np.full(len(tokens), -1, np.int64)
    experts[differs[first]] = tokens[differs[first]]
    return experts


def gaps(inputs: HeadInputs, experts: torch.Tensor) -> torch.Tensor:
    """Log-prob of other tokens minus that of the sampled ones, in nats: float32 [N]."""
    other, own = (functional.embedding(each, inputs.head) for each in (experts, inputs.targets))
    apart = (inputs.hidden.float() * (other.float() - own.float())).sum(-1)
    return apart * inputs.inverse_temperature
