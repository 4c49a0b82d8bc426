"""Measure asynchrony: how stale the tokens of a step are, and how often long trials are trained.

`staleness_metrics` describes the tokens of one step. Every metric is weighted by tokens, because
long trials are both staler and larger, and a mean over groups hides most of the effect. Metrics are
also given by episode, because the first episode is the oldest and, in meta-RL, explores.

`TrialDurations` measures whether an admission policy trains long trials less often than short ones.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from mage_async.policy_version import PROVENANCES

OLDEST_AGE = 8
"""Staleness in steps from which on all tokens are reported together."""


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


def k3(log_ratios: np.ndarray) -> float:
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
        "k3_mean": k3(tokens.log_ratios),
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


BINS_PER_DOUBLING = 64
"""Number of bins in which a duration doubles, so that a bin is about one percent wide. Counts by
bin take bounded memory, however long a run is.
"""
SHORTEST_S = 1e-6
"""Seconds below which a duration counts as this one, because log2(0) is not finite."""
NUM_REMEMBERED = 4096
"""Least number of groups, granted before the oldest group in flight, whose trials are remembered. A
trial of a still older group that arrives late may not be counted.
"""


@dataclass(slots=True)
class DurationHistogram:
    """Count durations in logarithmic bins, and sum them up."""

    counts: Counter[int] = field(default_factory=Counter)
    """Number of durations in each bin."""
    seconds: float = 0.0
    """Sum of all durations."""

    def add(self, durations_s: Iterable[float]) -> None:
        """Count durations in seconds."""
        for duration_s in durations_s:
            self.counts[round(BINS_PER_DOUBLING * math.log2(max(duration_s, SHORTEST_S)))] += 1
            self.seconds += duration_s

    def __add__(self, other: "DurationHistogram") -> "DurationHistogram":
        return DurationHistogram(self.counts + other.counts, self.seconds + other.seconds)


def length_bias(started: DurationHistogram, trained: DurationHistogram) -> float:
    """Return how much more often than others the longest tenth of the started trials is trained.

    That is the longest tenth's share of the trained trials over its share of the started ones: 1 is
    unbiased, 0 means that no long trial is trained. The tenth is rounded up to whole bins.
    """
    if not started.counts or not trained.counts:
        return 1.0
    total, num_longest, num_trained = started.counts.total(), 0, 0
    for index in sorted(started.counts, reverse=True):
        num_longest += started.counts[index]
        num_trained += trained.counts[index]
        if 10 * num_longest >= total:
            break
    return (num_trained / trained.counts.total()) / (num_longest / total)


@dataclass(slots=True)
class TrialDurations:
    """Collect the durations of the trials of one learner process, trained and not trained.

    A trial counts from its arrival on, even if its group was dropped before. Trials that have not
    arrived do not count.
    """

    _untrained_durations: dict[int, dict[int, float]] = field(default_factory=dict)
    """Duration in seconds by grant and trial index, for groups that were not trained so far."""
    _trained_durations: DurationHistogram = field(default_factory=DurationHistogram)
    _dropped_durations: DurationHistogram = field(default_factory=DurationHistogram)
    """Durations of the trials of dropped groups that are no longer remembered."""
    _trained_grants: set[int] = field(default_factory=set)
    """Grants of groups that were trained. A trial of theirs that arrives again must not count
    again.
    """
    _oldest_remembered: int = 0
    """Number of the oldest group that is remembered; late trials of older ones do not count."""

    def arrived(self, grant: int, index: int, duration_s: float) -> None:
        """Count a trial once, however often it arrives."""
        if grant >= self._oldest_remembered and grant not in self._trained_grants:
            self._untrained_durations.setdefault(grant, {}).setdefault(index, duration_s)

    def trained(self, grants: Collection[int]) -> None:
        """Count the trials of these groups as trained."""
        self._trained_grants.update(grants)
        for grant in grants:
            self._trained_durations.add(self._untrained_durations.pop(grant, {}).values())

    def forget_before(self, oldest_in_flight: int) -> None:
        """Forget the groups that ended long before the oldest group in flight was granted."""
        first = oldest_in_flight - NUM_REMEMBERED
        if first < self._oldest_remembered + NUM_REMEMBERED:
            return  # a scan of all remembered groups is worth it only once many can be forgotten
        self._oldest_remembered = first
        self._trained_grants = {grant for grant in self._trained_grants if grant >= first}
        for grant in [grant for grant in self._untrained_durations if grant < first]:
            self._dropped_durations.add(self._untrained_durations.pop(grant).values())

    def length_bias(self, in_flight: Collection[int]) -> float:
        """Return `length_bias` over the trials of all groups that are not in flight."""
        return length_bias(self._trained_durations + self._lost(in_flight), self._trained_durations)

    def wasted_share(self, in_flight: Collection[int]) -> float:
        """Return the share of playing time that went into trials which were never trained."""
        lost = self._lost(in_flight).seconds
        return lost / max(1e-9, lost + self._trained_durations.seconds)

    def _lost(self, in_flight: Collection[int]) -> DurationHistogram:
        """Return the durations of all trials that were never trained, except those of groups in
        flight.
        """
        lost = DurationHistogram()
        for grant, durations in self._untrained_durations.items():
            if grant not in in_flight:
                lost.add(durations.values())
        return lost + self._dropped_durations
