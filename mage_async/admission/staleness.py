"""How stale the tokens of a step are, and what that does to them.

Every figure is weighted by tokens, because long trials are both the staler and the larger ones and
an average over groups hides most of the effect. Every figure is given by episode, because the first
episode is the oldest and, in meta-RL, the exploration.

Shapes: `N` sampled tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mage_async.policy_version import PROVENANCES

OLDEST_AGE = 8
"""Ages from here on are reported together."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenAges:
    """The tokens of one step, after it."""

    staleness: np.ndarray
    """int32 [N]: version being trained minus version that drew the token"""
    episodes: np.ndarray
    """int32 [N]"""
    log_ratios: np.ndarray
    """float32 [N]: proximal minus behaviour log-prob, in nats"""
    is_clipped: np.ndarray
    """bool [N]"""
    is_masked: np.ndarray
    """bool [N]"""
    provenances: np.ndarray
    """int32 [N]: how the version is known, a place in `PROVENANCES`"""

    def of(self, chosen: np.ndarray) -> "TokenAges":
        """Some of them; `chosen` is bool [N]."""
        return TokenAges(
            self.staleness[chosen],
            self.episodes[chosen],
            self.log_ratios[chosen],
            self.is_clipped[chosen],
            self.is_masked[chosen],
            self.provenances[chosen],
        )


def staleness_metrics(tokens: TokenAges, max_staleness: int) -> dict[str, float]:
    """Metrics of a step, of each of its episodes and of each age, by name; none without tokens."""
    if not len(tokens.staleness):
        return {}
    metrics = {"staleness_max": float(tokens.staleness.max())} | _ages(tokens, max_staleness)
    metrics |= _distances(tokens) | _by_provenance(tokens)
    for episode in np.unique(tokens.episodes):
        part = tokens.of(tokens.episodes == episode)
        found = _ages(part, max_staleness) | _distances(part) | _treatment(part)
        found |= _histogram(part)
        metrics |= _suffixed(found, f"episode_{episode + 1}")
    ages = np.minimum(tokens.staleness, OLDEST_AGE)
    for age in np.unique(ages):
        part = tokens.of(ages == age)
        share = {"token_share": len(part.staleness) / len(ages)}
        metrics |= _suffixed(share | _distances(part) | _treatment(part), f"age_{age}")
    return metrics


def k3(log_ratios: np.ndarray) -> float:
    """The mean of `r - log r - 1`: an estimate, never negative, of the divergence from the policy
    that drew the tokens to the one with the log-ratios `log r` (Schulman 2020).
    """
    wide = log_ratios.astype(np.float64)
    return float(np.mean(np.expm1(wide) - wide))


def effective_share(log_ratios: np.ndarray) -> float:
    """Effective sample size over sample size, `(sum r)^2 / (n sum r^2)`: 1 where all ratios are
    equal, 1 / n where one outweighs the others.
    """
    wide = log_ratios.astype(np.float64)
    ratios = np.exp(wide - wide.max())
    return float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))


def length_bias(started: Sequence[float], trained: Sequence[float]) -> float:
    """The share of the longest tenth of started trials among the trained ones, over their share
    among the started ones: 1 is unbiased, 0 never trains on them.

    Args:
        started: lengths of all trials that were begun, in any unit.
        trained: of those, the ones that were trained.
    """
    if not len(started) or not len(trained):
        return 1.0
    edge = np.quantile(started, 0.9)
    share = np.mean(np.asarray(started) >= edge)
    return float(np.mean(np.asarray(trained) >= edge) / share)


def _ages(tokens: TokenAges, max_staleness: int) -> dict[str, float]:
    return {
        "staleness_mean": float(tokens.staleness.mean()),
        "over_bound_share": float((tokens.staleness > max_staleness).mean()),
    }


def _histogram(tokens: TokenAges) -> dict[str, float]:
    """The share of each age among some tokens."""
    ages, counts = np.unique(np.minimum(tokens.staleness, OLDEST_AGE), return_counts=True)
    shares = zip(ages, counts / counts.sum(), strict=True)
    return {f"token_share_age_{age}": float(share) for age, share in shares}


def _by_provenance(tokens: TokenAges) -> dict[str, float]:
    """Mean staleness by how the version is known: what only a reply says is no measured age."""
    means = {}
    for place, name in enumerate(PROVENANCES):
        known = tokens.provenances == place
        if known.any():
            means[f"{name}_staleness_mean"] = float(tokens.staleness[known].mean())
    return means


def _distances(tokens: TokenAges) -> dict[str, float]:
    return {
        "k3_mean": k3(tokens.log_ratios),
        "effective_share": effective_share(tokens.log_ratios),
    }


def _treatment(tokens: TokenAges) -> dict[str, float]:
    return {
        "clipped_share": float(tokens.is_clipped.mean()),
        "masked_share": float(tokens.is_masked.mean()),
    }


def _suffixed(metrics: dict[str, float], suffix: str) -> dict[str, float]:
    return {f"{name}_{suffix}": value for name, value in metrics.items()}
