"""Make batches of synthetic trials, for benchmarks of a training step.

Their lengths and common beginning are about those of trials of `configs/smollm2_boxes.toml` with
SmolLM2's tokenizer: 356 tokens, of which the first 139 are the same in all trials."""

import numpy as np
import torch

from mage_async.learning.packing import SampledTokens, TrainingSequence

MEAN_TOKENS, SPREAD, OPENING = 340, 40, 136
"""Mean length of a trial in tokens, its largest deviation, and the length of the common opening."""


def batch(source: np.random.Generator, vocabulary: int, num_trials: int) -> list[TrainingSequence]:
    """Return sequences of random tokens with a common opening; of the rest, every fourth token is
    sampled."""
    opening = source.integers(0, vocabulary, OPENING)
    return [_trial(source, vocabulary, opening) for _ in range(num_trials)]


def _trial(source: np.random.Generator, vocabulary: int, opening: np.ndarray) -> TrainingSequence:
    length = int(source.integers(MEAN_TOKENS - SPREAD, MEAN_TOKENS + SPREAD + 1))
    own = source.integers(0, vocabulary, length - OPENING)
    places = np.arange(OPENING + 3, length, 4)
    count = len(places)
    # Versions, episodes, kinds and provenances of the tokens do not change the time of a step.
    zeros = [np.zeros(count, np.int32) for _ in range(5)]
    advantages = source.normal(size=count).astype(np.float32)
    return TrainingSequence(
        # A training sequence ends with its last sampled token.
        np.concatenate((opening, own)).astype(np.int32)[: int(places[-1]) + 1],
        places,
        SampledTokens(np.full(count, -np.log(vocabulary), np.float32), *zeros),
        np.ones(count, np.int64),  # each sampled token is a turn of its own
        torch.from_numpy(advantages),
    )
