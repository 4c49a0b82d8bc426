"""Kernels for the RL head of a language model, each specified in plain PyTorch."""

from mage_kernels.advantage import group_advantage
from mage_kernels.dispatch import backend_report
from mage_kernels.head import PolicyLoss, keeps_logits, linear_logprob, linear_policy_loss
from mage_kernels.surrogate import SUMS, Surrogate, TokenData
from mage_kernels.turns import TurnLayout, dense_keys

__all__ = [
    "SUMS",
    "PolicyLoss",
    "Surrogate",
    "TokenData",
    "TurnLayout",
    "backend_report",
    "dense_keys",
    "group_advantage",
    "keeps_logits",
    "linear_logprob",
    "linear_policy_loss",
]
