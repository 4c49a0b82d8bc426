"""What a step did, as metrics: sums over its tokens, ages, and how far two log-probs are apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mage_async.admission.staleness import TokenAges, staleness_metrics
from mage_async.learning.corrections.surrogate import Surrogate
from mage_async.learning.passes import Pass

SUMS = ("loss", "entropy", "clipped_share", "mean_weight", "masked_share", "reference_k3")
"""What is summed over the tokens of a pass, in this order; a metric is the mean over all tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPass:
    """A pass whose gradient was added."""

    begun: Pass
    sums: torch.Tensor
    """float32 [SUMS], on the learner's device"""
    made: Surrogate
    """What the correction did, without a gradient."""
    pairs: torch.Tensor | None = None
    """float32 [3]: pairs with an expert, the sum of their losses, and how many prefer the expert"""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One optimizer update."""

    passes: Sequence[TrainedPass]
    grad_norm: torch.Tensor
    """[], on the learner's device: before clipping"""

    def sums(self) -> np.ndarray:
        """Over tokens, as SUMS says, and the gradient's norm: float32 [SUMS + 1]."""
        tokens = np.sum([each.sums.cpu().numpy() for each in self.passes], axis=0)
        return np.append(tokens, np.float32(self.grad_norm.item()))


def step_metrics(updates: Sequence[Update], version: int, max_staleness: int) -> dict[str, float]:
    """Metrics by name of a step that began with weights of a version."""
    trained = [each for update in updates for each in update.passes]
    passes = [each.begun for each in trained]
    num_tokens = sum(len(each.packed.targets) for each in passes)
    *sums, norms = np.sum([update.sums() for update in updates], axis=0)
    metrics = {name: float(one / max(1, num_tokens)) for name, one in zip(SUMS, sums, strict=True)}
    metrics["grad_norm"] = float(norms / len(updates))
    metrics["zero_advantage_share"] = _zero_share(passes)
    ages = _ages(passes, [each.made for each in trained])
    metrics |= mismatch(passes, version) | staleness_metrics(ages, max_staleness)
    return metrics | _expert_metrics([each.pairs for each in trained if each.pairs is not None])


def mismatch(passes: Sequence[Pass], version: int) -> dict[str, float]:
    """How far the engine's log-probs are from the learner's: over all tokens, and over those of
    equal weights and keys.
    """
    keys = np.concatenate([each.packed.sampled.kv_versions for each in passes])
    drawn = np.concatenate([each.packed.sampled.policy_versions for each in passes])
    gap = np.abs(_log_ratios(passes))
    is_equal = (drawn == version) & (keys == version)
    metrics = {
        "logprob_gap_mean": float(gap.mean()),
        "equal_version_tokens": float(is_equal.sum()),
    }
    if is_equal.any():
        metrics["logprob_mismatch_mean"] = float(gap[is_equal].mean())
        metrics["logprob_mismatch_max"] = float(gap[is_equal].max())
    return metrics


def _expert_metrics(counted: Sequence[torch.Tensor]) -> dict[str, float]:
    """Of pairs with an expert, where there are any."""
    num_pairs, losses, preferred = np.sum([each.cpu().numpy() for each in counted] or [[0] * 3], 0)
    if not num_pairs:
        return {}
    return {
        "expert_loss": float(losses / num_pairs),
        "expert_preferred_share": float(preferred / num_pairs),
    }


def _zero_share(passes: Sequence[Pass]) -> float:
    """Share of tokens whose advantage is 0."""
    return float((torch.cat([each.advantages for each in passes]) == 0).float().mean())


def _log_ratios(passes: Sequence[Pass]) -> np.ndarray:
    """Proximal minus behaviour log-prob: float32 [N]."""
    return torch.cat([each.start.proximal - each.behaviour for each in passes]).cpu().numpy()


def _ages(passes: Sequence[Pass], made: Sequence[Surrogate]) -> TokenAges:
    return TokenAges(
        torch.cat([each.staleness for each in passes]).cpu().numpy(),
        np.concatenate([each.packed.sampled.episodes for each in passes]),
        _log_ratios(passes),
        torch.cat([surrogate.is_clipped for surrogate in made]).cpu().numpy(),
        torch.cat([surrogate.is_masked for surrogate in made]).cpu().numpy(),
        np.concatenate([each.packed.sampled.provenances for each in passes]),
    )
