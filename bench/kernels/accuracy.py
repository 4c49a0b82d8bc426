"""Measure errors of log-probs, entropies and gradients against fp64, over widths and
temperatures."""

from typing import Any

import torch

from mage_kernels import linear_logprob
from tests.helpers.random_heads import random_gradients, random_head, relative_error, run, truth

# Hidden sizes, and sampling temperatures.
WIDTHS = (1024, 2560, 4096)
TEMPERATURES = (0.6, 1.0, 2.0)
TOKENS, VOCABULARY, LARGEST_LOGIT = 256, 5003, 32.0
"""Sizes of the LM head's inputs. 5,003 fills no whole number of a kernel's tiles."""
# Largest allowed errors: absolute in nats, or for gradients relative to their norm.
BOUNDS = {
    "logprob_max": 2e-4,
    "logprob_rms": 2e-5,
    "logprob_mean": 5e-6,
    "entropy_max": 5e-4,
    "d_hidden": 6e-3,
    "d_head": 6e-3,
}
# Tensor cores truncate their sums: `bench.kernels.truncated_sums` computes the errors of log-probs
# that follow, at most 3.8e-4 and in the mean 2.2e-4.
GPU_BOUNDS = BOUNDS | {"logprob_max": 5e-4, "logprob_rms": 3e-4, "logprob_mean": 3e-4}


def measure_accuracy(device: str) -> dict[str, Any]:
    """Return the largest of each error over all widths and temperatures, for bf16 inputs and logits
    up to 32."""
    worst = dict.fromkeys(BOUNDS, 0.0)
    for width in WIDTHS:
        for temperature in TEMPERATURES:
            found = errors(width, 1 / temperature, device)
            worst = {name: max(worst[name], found[name]) for name in worst}
    print(f"errors against fp64: {TOKENS} tokens, V = {VOCABULARY}, bf16, |logit| <= 32")
    for name, bound in (GPU_BOUNDS if device == "cuda" else BOUNDS).items():
        print(f"  {name:14} {worst[name]:.1e}   bound {bound:.0e}")
    return {name: float(f"{value:.2e}") for name, value in worst.items()}


def errors(width: int, inverse_temperature: float, device: str) -> dict[str, float]:
    """Return the errors of one LM head, by name."""
    arguments = random_head(
        TOKENS,
        VOCABULARY,
        width,
        device=device,
        largest_logit=LARGEST_LOGIT,
        inverse_temperature=inverse_temperature,
        dtype=torch.bfloat16,
    )
    gradients = random_gradients(TOKENS, device)
    ours, true = run(arguments, gradients, linear_logprob), truth(arguments, gradients)
    wrong = ours.logprob.double() - true.logprob
    return {
        "logprob_max": float(wrong.abs().max()),
        "logprob_rms": float(wrong.square().mean().sqrt()),
        "logprob_mean": float(wrong.mean().abs()),
        "entropy_max": float((ours.entropy.double() - true.entropy).abs().max()),
        "d_hidden": relative_error(ours.d_hidden, true.d_hidden),
        "d_head": relative_error(ours.d_head, true.d_head),
    }
