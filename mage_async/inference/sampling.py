"""Sampling tokens: a uniform number from the seed, through the inverse distribution function.

A completion does not depend on the rest of the batch, except through the last bits of the logits
where the arithmetic is not exact. Log-probs are computed after temperature and before top-k and
top-p, from the same logits as the sample.

Shapes: `W` rows, `V` vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mage_async.inference.arithmetic import ARITHMETICS, Arithmetic


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParameters:
    """Sampling parameters of each row."""

    temperature: np.ndarray
    """float32 [W]; 0 takes the most probable token, with its log-prob at temperature 1."""
    top_p: np.ndarray
    """float32 [W], in (0, 1]."""
    top_k: np.ndarray
    """int64 [W]; 0: no limit."""


def uniforms(seeds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for token `numbers[r]` of the completion with `seeds[r]`: float64
    [W].

    Applies the finalizer of SplitMix64 twice, so neighbouring seeds and numbers are unrelated.

    Args:
        seeds: uint64 [W]
        numbers: int64 [W]
    """
    mixed = _mix(_mix(seeds) + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)) * 2.0**-53


@torch.inference_mode()
def draw(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    chances: np.ndarray,
    arithmetic: Arithmetic = ARITHMETICS["float32"],
) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token for each row.

    Args:
        logits: float32 [W, V]
        chances: float64 [W], in [0, 1), as from `uniforms`.

    Returns:
        Tokens, int64 [W], and their log-probs in nats, float32 [W].
    """
    is_greedy = parameters.temperature == 0
    divisor = torch.from_numpy(np.where(is_greedy, np.float32(1), parameters.temperature))
    logprobs = arithmetic.log_softmax(logits / divisor[:, None])
    kept = logprobs.exp()
    if parameters.top_k.any():
        kept = _top_k(kept, torch.from_numpy(parameters.top_k))
    if (parameters.top_p < 1).any():
        kept = _top_p(kept, torch.from_numpy(parameters.top_p))
    tokens = _invert(kept, torch.from_numpy(chances))
    if is_greedy.any():
        tokens = torch.where(torch.from_numpy(is_greedy), logits.argmax(1), tokens)
    return tokens.numpy(), logprobs.gather(1, tokens[:, None])[:, 0].numpy()


def _mix(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _invert(kept: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative weight exceeds `chances` of the total: int64 [W]."""
    cumulated = kept.cumsum(1, dtype=torch.float64)
    totals = cumulated[:, -1:].contiguous()
    tokens = torch.searchsorted(cumulated, chances[:, None] * totals, right=True)[:, 0]
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
    is_within |= (top_p >= 1)[:, None]
    is_within[:, 0] = True
    return weights * torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, is_within)
