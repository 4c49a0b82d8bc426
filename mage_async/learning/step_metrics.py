"""Metrics of a step: means over its tokens, staleness, and the engine's log-prob error."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mage_async.admission.staleness_metrics import TokenAges, staleness_metrics
from mage_async.learning.corrections import Surrogate
from mage_async.learning.packing import MicroBatch

SUMS = ("loss", "entropy", "clipped_share", "mean_weight", "masked_share", "reference_k3")
"""Sums over the tokens of a micro-batch, in this order; a metric is the mean over all tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedMicroBatch:
    """A micro-batch whose gradient has been added, with the results that metrics need."""

    batch: MicroBatch
    sums: torch.Tensor
    """float32 [len(SUMS)], on the learner's device."""
    surrogate: Surrogate
    """Result of the correction, without gradient."""
    counted: Sequence[torch.Tensor] = ()
    """float32 [C] for each loss term of a method: the numbers that its metrics are made of."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One optimizer update."""

    micro_batches: Sequence[TrainedMicroBatch]
    grad_norm: torch.Tensor
    """[]: before clipping, on the learner's device."""


def step_metrics(updates: Sequence[Update], version: int, max_staleness: int) -> dict[str, float]:
    """Return metrics by name of a step that began with the weights of `version`."""
    trained = [each for update in updates for each in update.micro_batches]
    batches = [each.batch for each in trained]
    num_tokens = sum(each.num_tokens for each in batches)
    # Added within an update and then over updates, in float32: the order decides the bits.
    sums = np.sum(
        [np.sum([each.sums.cpu().numpy() for each in one.micro_batches], 0) for one in updates], 0
    )
    norms = sum(np.float32(update.grad_norm.item()) for update in updates)
    metrics = {name: float(one / max(1, num_tokens)) for name, one in zip(SUMS, sums, strict=True)}
    metrics["grad_norm"] = float(norms / len(updates))
    advantages = torch.cat([each.advantages for each in batches])
    metrics["zero_advantage_share"] = float((advantages == 0).float().mean())
    ages = TokenAges(
        torch.cat([each.staleness for each in batches]).cpu().numpy(),
        np.concatenate([each.sampled.episodes for each in batches]),
        _log_ratios(batches),
        torch.cat([each.surrogate.is_clipped for each in trained]).cpu().numpy(),
        torch.cat([each.surrogate.is_masked for each in trained]).cpu().numpy(),
        np.concatenate([each.sampled.provenances for each in batches]),
    )
    return metrics | mismatch(batches, version) | staleness_metrics(ages, max_staleness)


def mismatch(batches: Sequence[MicroBatch], version: int) -> dict[str, float]:
    """Measure the absolute difference between the engine's and the learner's log-probs, in nats.

    `logprob_gap` is over all tokens, so staleness is part of it. `logprob_mismatch` is over tokens
    that weights, and keys and values, of `version` sampled: there it is the engine's error alone.
    """
    keys = np.concatenate([each.sampled.kv_versions for each in batches])
    drawn = np.concatenate([each.sampled.policy_versions for each in batches])
    gap = np.abs(_log_ratios(batches))
    is_equal = (drawn == version) & (keys == version)
    metrics = {
        "logprob_gap_mean": float(gap.mean()),
        "equal_version_tokens": float(is_equal.sum()),
    }
    if is_equal.any():
        metrics["logprob_mismatch_mean"] = float(gap[is_equal].mean())
        metrics["logprob_mismatch_max"] = float(gap[is_equal].max())
    return metrics


def _log_ratios(batches: Sequence[MicroBatch]) -> np.ndarray:
    """Return proximal minus behaviour log-probs in nats: float32 [N]."""
    return torch.cat([each.proximal - each.behaviour for each in batches]).cpu().numpy()
