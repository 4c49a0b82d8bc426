"""Sample tokens by inverse transform sampling: the seed of a prompt gives a uniform number, and the
inverse of the cumulative distribution gives the token.

`turn_seed` of `mage_async/trials/trial_run.py` makes the seed. A completion depends on the rest of
the batch only through the last bits of the logits; with "exact" arithmetic (`arithmetic.py`) not at
all. Log-probs are computed after temperature and before top-k and top-p, from the same logits as
the sample.

Shapes: `W` rows, `V` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mage_async.inference.arithmetic import ARITHMETICS, Arithmetic


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParameters:
    """Hold the sampling parameters of each row."""

    temperature: np.ndarray
    """float32 [W]; 0 takes the most probable token, with its log-prob at temperature 1."""
    top_p: np.ndarray
    """float32 [W], in (0, 1]."""
    top_k: np.ndarray
    """int64 [W]; 0 for no limit."""

    def rows(self, rows: np.ndarray) -> "SamplingParameters":
        """Return the parameters of some rows, int64 [R]."""
        return SamplingParameters(self.temperature[rows], self.top_p[rows], self.top_k[rows])


def uniforms(seeds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the uniform number in [0, 1) that samples a token of each row: float64 [W].

    Applies the finalizer of SplitMix64 twice, so neighbouring seeds and numbers are unrelated.

    Args:
        seeds: Seed of each row's completion, uint64 [W].
        numbers: Index of the token in its completion, int64 [W].
    """
    # SplitMix64 adds this constant to its state for each number that it generates.
    mixed = _mix(_mix(seeds) + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    # The upper 53 bits fill the mantissa of a float64 in [0, 1).
    return (mixed >> np.uint64(11)) * 2.0**-53


@torch.inference_mode()
def draw(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    uniform: np.ndarray,
    arithmetic: Arithmetic = ARITHMETICS["float32"],
    allowed: Sequence[np.ndarray | None] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token for each row.

    Args:
        logits: float32 [W, V]
        parameters: Temperature, top-p and top-k of each row.
        uniform: Uniform numbers in [0, 1), float64 [W], as `uniforms` returns them.
        allowed: Tokens that each row samples from, int [at least 1] ascending; None for the whole
            vocabulary. Empty if no row is restricted. Log-probs, `top_p` and `top_k` are of the
            distribution over the allowed tokens alone.

    Returns:
        Tokens, int64 [W], and their log-probs in nats, float32 [W].
    """
    is_restricted = np.array([each is not None for each in allowed], bool)
    if is_restricted.any():
        return _draw_restricted(logits, parameters, uniform, arithmetic, allowed, is_restricted)
    is_greedy = parameters.temperature == 0
    divisor = torch.from_numpy(np.where(is_greedy, np.float32(1), parameters.temperature))
    logprobs = arithmetic.log_softmax(logits / divisor[:, None])
    kept = logprobs.exp()
    if parameters.top_k.any():
        kept = _top_k(kept, torch.from_numpy(parameters.top_k))
    if (parameters.top_p < 1).any():
        kept = _top_p(kept, torch.from_numpy(parameters.top_p))
    tokens = _invert(kept, torch.from_numpy(uniform))
    if is_greedy.any():
        tokens = torch.where(torch.from_numpy(is_greedy), logits.argmax(1), tokens)
    return tokens.numpy(), logprobs.gather(1, tokens[:, None])[:, 0].numpy()


def _draw_restricted(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    uniform: np.ndarray,
    arithmetic: Arithmetic,
    allowed: Sequence[np.ndarray | None],
    is_restricted: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample if some rows are restricted, bool [W]; see `draw`."""
    tokens, logprobs = np.zeros(len(logits), np.int64), np.zeros(len(logits), np.float32)
    free = np.flatnonzero(~is_restricted)
    if len(free):
        values = logits[torch.from_numpy(free)]
        tokens[free], logprobs[free] = draw(
            values, parameters.rows(free), uniform[free], arithmetic
        )
    lengths = np.array([0 if each is None else len(each) for each in allowed])
    # An exact sum depends on the number of its terms, so rows of different lengths are not padded.
    is_exact = arithmetic is ARITHMETICS["exact"]
    for length in np.unique(lengths[is_restricted]) if is_exact else (lengths.max(),):
        rows = np.flatnonzero(lengths == length if is_exact else is_restricted)
        # Each row of `columns` holds the allowed tokens, and then padding.
        is_token = np.arange(length) < lengths[rows, None]
        columns = np.zeros(is_token.shape, np.int64)
        sets = (allowed[row] for row in rows.tolist())
        columns[is_token] = np.concatenate([each for each in sets if each is not None])
        values = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]
        values = values.gather(1, torch.from_numpy(columns))
        if not is_token.all():
            values.masked_fill_(torch.from_numpy(~is_token), -torch.inf)
        indices, logprobs[rows] = draw(values, parameters.rows(rows), uniform[rows], arithmetic)
        tokens[rows] = columns[np.arange(len(rows)), indices]
    return tokens, logprobs


def _mix(words: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 to each word: uint64 [W]."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ (words >> np.uint64(31))
    return mixed


def _invert(kept: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative weight exceeds `uniform` of the total: int64 [W]."""
    cumulated = kept.cumsum(1, dtype=torch.float64)
    totals = cumulated[:, -1:].contiguous()
    tokens = torch.searchsorted(cumulated, uniform[:, None] * totals, right=True)[:, 0]
    # If a product rounds up to the total, take the last token with a weight.
    last_possible = torch.searchsorted(cumulated, totals)[:, 0]
    return torch.minimum(tokens, last_possible)


def _top_k(probabilities: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but each row's `top_k` most probable tokens; among equals, lower ids are kept."""
    order = probabilities.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.arange(order.shape[1]).expand_as(order)
    limits = torch.where(top_k > 0, top_k, order.shape[1])
    is_kept = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, ranks < limits[:, None])
    return probabilities * is_kept


def _top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the fewest tokens whose weights add up to `top_p` of each row's total."""
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    cumulated = ordered.cumsum(1, dtype=torch.float64)
    before = cumulated - ordered
    is_within = before < top_p[:, None].double() * cumulated[:, -1:]
    # Sums round, so a `top_p` of 1 could lose tokens of tiny weight.
    is_within |= (top_p >= 1)[:, None]
    is_within[:, 0] = True
    return weights * torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, is_within)
