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

    def sums(self) -> np.ndarray:
        """Add up `sums` over micro-batches and append the norm: float32 [len(SUMS) + 1]."""
        tokens = np.sum([each.sums.cpu().numpy() for each in self.micro_batches], axis=0)
        return np.append(tokens, np.float32(self.grad_norm.item()))


def step_metrics(updates: Sequence[Update], version: int, max_staleness: int) -> dict[str, float]:
    """Return metrics by name of a step that began with the weights of `version`."""
    trained = [each for update in updates for each in update.micro_batches]
    batches = [each.batch for each in trained]
    num_tokens = sum(each.num_tokens for each in batches)
    *sums, norms = np.sum([update.sums() for update in updates], axis=0)
    metrics = {name: float(one / max(1, num_tokens)) for name, one in zip(SUMS, sums, strict=True)}
    metrics["grad_norm"] = float(norms / len(updates))
    metrics["zero_advantage_share"] = _zero_share(batches)
    ages = _ages(batches, [each.surrogate for each in trained])
    metrics |= mismatch(batches, version) | staleness_metrics(ages, max_staleness)
    return metrics


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


def _zero_share(batches: Sequence[MicroBatch]) -> float:
    """Return the share of tokens whose advantage is 0."""
    return float((torch.cat([each.advantages for each in batches]) == 0).float().mean())


def _log_ratios(batches: Sequence[MicroBatch]) -> np.ndarray:
    """Return proximal minus behaviour log-probs in nats: float32 [N]."""
    return torch.cat([each.proximal - each.behaviour for each in batches]).cpu().numpy()


def _ages(batches: Sequence[MicroBatch], made: Sequence[Surrogate]) -> TokenAges:
    return TokenAges(
        torch.cat([each.staleness for each in batches]).cpu().numpy(),
        np.concatenate([each.sampled.episodes for each in batches]),
        _log_ratios(batches),
        torch.cat([surrogate.is_clipped for surrogate in made]).cpu().numpy(),
        torch.cat([surrogate.is_masked for surrogate in made]).cpu().numpy(),
        np.concatenate([each.sampled.provenances for each in batches]),
    )
