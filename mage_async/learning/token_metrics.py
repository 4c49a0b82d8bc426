"""Measure the tokens of a step: their means and staleness, which of them the correction clipped or
masked, and the difference between the log-probs of the engine and of the learner.

Every metric is weighted by tokens, because long trials are both staler and larger, and a mean over
groups hides most of the effect. Metrics are also given by episode, because the first episode is the
oldest and, in meta-RL, explores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from mage_async.learning.corrections import Surrogate
from mage_async.learning.packing import MicroBatch
from mage_async.policy_version import OLDEST_AGE, PROVENANCES

SUMS = ("loss", "entropy", "clipped_share", "mean_weight", "masked_share", "reference_k3")
"""Sums over the tokens of a micro-batch, in this order; a metric is the mean over all tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedMicroBatch:
    """Hold a micro-batch whose gradient has been added, with the results that metrics need."""

    batch: MicroBatch
    sums: torch.Tensor
    """float32 [len(SUMS)], on the learner's device."""
    surrogate: Surrogate
    """Result of the correction, without gradient."""
    counted: Sequence[torch.Tensor] = ()
    """A float32 vector for each loss term of a method: the numbers that its metrics are made of."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Hold the results of one optimizer update."""

    micro_batches: Sequence[TrainedMicroBatch]
    grad_norm: torch.Tensor
    """[]: before clipping, on the learner's device."""


def token_metrics(
    updates: Sequence[Update], computed: Sequence[Update], version: int, max_staleness: int
) -> dict[str, float]:
    """Return metrics by name of a step that began with the weights of `version`.

    Args:
        computed: Those of `updates` whose proximal log-probs come from a forward pass, and are not
            interpolated from the engine's. Only their tokens are compared with the engine's.
    """
    trained = [each for update in updates for each in update.micro_batches]
    batches = [each.batch for each in trained]
    num_tokens = sum(each.num_tokens for each in batches)
    # Summed within each update and then over updates, in float32: another order would change the
    # last bits of the metrics.
    sums = np.sum(
        [np.sum([each.sums.cpu().numpy() for each in one.micro_batches], 0) for one in updates], 0
    )
    norms = [np.float32(update.grad_norm.item()) for update in updates]
    metrics = {name: float(one / max(1, num_tokens)) for name, one in zip(SUMS, sums, strict=True)}
    metrics["grad_norm"] = float(sum(norms) / len(updates))
    metrics["skipped_updates"] = float(np.count_nonzero(~np.isfinite(norms)))
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
    compared = [each.batch for update in computed for each in update.micro_batches]
    return metrics | mismatch(compared, version) | staleness_metrics(ages, max_staleness)


def mismatch(batches: Sequence[MicroBatch], version: int) -> dict[str, float]:
    """Measure the absolute difference between the engine's and the learner's log-probs, in nats.

    `logprob_gap` is over all tokens, so staleness is part of it. `logprob_mismatch` is over tokens
    sampled with weights and a KV cache of `version`, so it is the engine's error alone.
    """
    kv_versions = np.concatenate([each.sampled.kv_versions for each in batches])
    versions = np.concatenate([each.sampled.policy_versions for each in batches])
    gap = np.abs(_log_ratios(batches))
    is_equal = (versions == version) & (kv_versions == version)
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
    tokens = (each.correction_inputs() for each in batches)
    return torch.cat([each.proximal - each.behaviour for each in tokens]).cpu().numpy()


@dataclass(frozen=True, slots=True, eq=False)
class TokenAges:
    """Hold the N sampled tokens that one step has trained on, as columns."""

    staleness: np.ndarray
    """int32 [N]: version the step began with minus version that sampled the token, in steps."""
    episodes: np.ndarray
    """int32 [N]: number of the token's episode, from 0."""
    log_ratios: np.ndarray
    """float32 [N]: proximal minus behaviour log-prob, in nats."""
    is_clipped: np.ndarray
    """bool [N]: whether the correction clipped the token's importance ratio."""
    is_masked: np.ndarray
    """bool [N]: whether the correction excluded the token."""
    provenances: np.ndarray
    """int32 [N]: how the token's version is known, as an index into `PROVENANCES`."""

    def where(self, chosen: np.ndarray) -> "TokenAges":
        """Return the tokens for which `chosen`, bool [N], is true."""
        return TokenAges(*(getattr(self, column.name)[chosen] for column in fields(self)))


def staleness_metrics(tokens: TokenAges, max_staleness: int) -> dict[str, float]:
    """Return metrics by name: of the step, of each episode and of each age.

    The dict is empty if there are no tokens.

    Args:
        max_staleness: bound on the staleness of a token, in steps.
    """
    if not len(tokens.staleness):
        return {}
    metrics = {"staleness_max": float(tokens.staleness.max())} | _ages(tokens, max_staleness)
    metrics |= _distances(tokens) | _by_provenance(tokens)
    for episode in np.unique(tokens.episodes):
        part = tokens.where(tokens.episodes == episode)
        found = _ages(part, max_staleness) | _distances(part) | _treatment(part)
        found |= _histogram(part)
        metrics |= _suffixed(found, f"episode_{episode + 1}")
    ages = np.minimum(tokens.staleness, OLDEST_AGE)
    for age in np.unique(ages):
        part = tokens.where(ages == age)
        share = {"token_share": len(part.staleness) / len(ages)}
        metrics |= _suffixed(share | _distances(part) | _treatment(part), f"age_{age}")
    return metrics


def mean_k3(log_ratios: np.ndarray) -> float:
    """Return the mean of `r - log r - 1`, where `log_ratios` holds `log r`.

    It estimates KL(p || q), where p sampled the tokens and `r = q / p`; it is never negative
    (Schulman, "Approximating KL Divergence", 2020).
    """
    wide = log_ratios.astype(np.float64)
    return float(np.mean(np.expm1(wide) - wide))


def effective_share(log_ratios: np.ndarray) -> float:
    """Return the effective sample size over the sample size, `(sum r)^2 / (n sum r^2)`.

    It is 1 if all ratios are equal, and 1 / n if one ratio outweighs all others.
    """
    wide = log_ratios.astype(np.float64)
    # A common factor of all ratios cancels; subtracting the maximum keeps exp from overflowing.
    ratios = np.exp(wide - wide.max())
    return float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))


def _ages(tokens: TokenAges, max_staleness: int) -> dict[str, float]:
    """Return the mean staleness, and the share of tokens over the bound."""
    return {
        "staleness_mean": float(tokens.staleness.mean()),
        "over_bound_share": float((tokens.staleness > max_staleness).mean()),
    }


def _histogram(tokens: TokenAges) -> dict[str, float]:
    """Return the share of each age among the tokens."""
    ages, counts = np.unique(np.minimum(tokens.staleness, OLDEST_AGE), return_counts=True)
    shares = zip(ages, counts / counts.sum(), strict=True)
    return {f"token_share_age_{age}": float(share) for age, share in shares}


def _by_provenance(tokens: TokenAges) -> dict[str, float]:
    """Return the mean staleness by provenance, which says how a token's version is known."""
    means = {}
    for index, name in enumerate(PROVENANCES):
        chosen = tokens.provenances == index
        if chosen.any():
            means[f"{name}_staleness_mean"] = float(tokens.staleness[chosen].mean())
    return means


def _distances(tokens: TokenAges) -> dict[str, float]:
    """Return how far the proximal policy is from the behaviour policy."""
    return {
        "k3_mean": mean_k3(tokens.log_ratios),
        "effective_share": effective_share(tokens.log_ratios),
    }


def _treatment(tokens: TokenAges) -> dict[str, float]:
    """Return the shares of tokens that the correction clipped and masked."""
    return {
        "clipped_share": float(tokens.is_clipped.mean()),
        "masked_share": float(tokens.is_masked.mean()),
    }


def _suffixed(metrics: dict[str, float], suffix: str) -> dict[str, float]:
    """Return metrics with a suffix added to each name."""
    return {f"{name}_{suffix}": value for name, value in metrics.items()}
