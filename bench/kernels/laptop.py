"""Measure the LM head on a CPU: the quickstart's shape, and a vocabulary of 32,000 tokens."""

from functools import partial
from typing import Any

import torch

from bench.kernels.heads import Case, make_data, single_pass, step
from bench.kernels.implementations import plain
from bench.kernels.losses import measure_loss
from bench.kernels.timing import timings
from mage_kernels import linear_logprob

SHAPES = ((4000, 64, 320), (2048, 256, 32_000))
"""(tokens, width, vocabulary)."""


def measure_laptop(shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Measure forward and backward in fp32 of our log-probs, of our single-pass loss and of plain
    torch; then the learner's loss.
    """
    case = Case.flat(*shape)
    # The small shape takes milliseconds, the large one seconds.
    repeats = rounds * 3 if case.vocabulary < 1000 else max(3, rounds // 3)
    data = make_data(case, "cpu", torch.float32)
    ways = {
        "torch, plain": partial(step, plain, data),
        "ours, linear_logprob": partial(step, ours, data),
        "ours, single pass": partial(single_pass, data),
    }
    print(case.name())
    times = timings(ways, device="cpu", rounds=repeats)
    for name, timing in times.items():
        print(timing.line(name))
    found = {name: timing.figures() for name, timing in times.items()}
    return found | measure_loss(case, "cpu", repeats)


def ours(hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor, _: torch.Tensor):
    """Compute log-probs by our kernel, without a mask."""
    return linear_logprob(hidden, head, tokens)
