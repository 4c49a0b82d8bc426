"""The head on a CPU: the quickstart's shape, and a vocabulary that does not fit at once."""

from functools import partial
from typing import Any

import torch

from bench.kernels.heads import Case, make_data, single_pass, step
from bench.kernels.implementations import plain
from bench.kernels.losses import measure_loss
from bench.kernels.timing import timings
from mage_kernels import linear_logprob

SHAPES = ((4000, 64, 320), (2048, 256, 32_000))
"""Tokens, width, vocabulary."""


def measure_laptop(shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Forward and backward in fp32 of ours, of the single pass, and of three plain lines; then the
    learner's loss.
    """
    case = Case.flat(*shape)
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
    """Without a mask, as the plain lines."""
    return linear_logprob(hidden, head, tokens)
