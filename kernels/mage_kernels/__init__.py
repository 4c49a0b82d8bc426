"""Compute the parts of RL that need kernels, each specified in plain PyTorch."""

from mage_kernels.chunked import planned_chunks
from mage_kernels.dispatch import advantage_report, backend_report
from mage_kernels.group_advantage import Cells, at_tokens, minus_baseline, over_rms
from mage_kernels.head import (
    PolicyLoss,
    keeps_logits,
    linear_logprob,
    linear_policy_loss,
    restricted_logprob,
)
from mage_kernels.surrogate import Surrogate, TokenData

__all__ = [
    "Cells",
    "PolicyLoss",
    "Surrogate",
    "TokenData",
    "advantage_report",
    "at_tokens",
    "backend_report",
    "keeps_logits",
    "linear_logprob",
    "linear_policy_loss",
    "minus_baseline",
    "over_rms",
    "planned_chunks",
    "restricted_logprob",
]
