"""Compute the error of log-probs whose sums are truncated, as a Hopper GPU's tensor cores do it.

    python -m bench.kernels.truncated_sums     1 minute, any machine

Tensor cores add products to an fp32 accumulator, here 16 at a time, and drop the bits that do not
fit, while a CPU rounds to the nearest number. So every logit is drawn towards zero, the more the
wider the hidden states are, and log-probs have a mean error. The program computes the logits of
`bench.kernels.accuracy` both ways, and prints the largest and the mean error of log-probs against
fp64. The exit status is 1 if a mean error of truncated sums is not at least 5 times that of rounded
ones.
"""

import sys
from collections.abc import Callable

import numpy as np
import torch

from bench.kernels.accuracy import LARGEST_LOGIT, TEMPERATURES, VOCABULARY, WIDTHS
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from tests.helpers.random_heads import random_head

TOKENS, PRODUCTS = 64, 16
"""Number of tokens, and of products that are added to the accumulator at once."""
Rounding = Callable[[np.ndarray], np.ndarray]
"""Turns float64 into float32."""


def rounded(values: np.ndarray) -> np.ndarray:
    """Round to the nearest float32."""
    return values.astype(np.float32)


def truncated(values: np.ndarray) -> np.ndarray:
    """Round to float32 towards zero."""
    nearest = values.astype(np.float32)
    is_beyond = np.abs(nearest.astype(np.float64)) > np.abs(values)
    return np.where(is_beyond, np.nextafter(nearest, np.float32(0)), nearest)


def logits(hidden: np.ndarray, head: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Multiply hidden states [T, D] and LM head [V, D], both float64, with an fp32 accumulator."""
    sums = np.zeros((len(hidden), len(head)), np.float32)
    for first in range(0, hidden.shape[1], PRODUCTS):
        part = slice(first, first + PRODUCTS)
        sums = rounding(sums + hidden[:, part] @ head[:, part].T)
    return sums.astype(np.float64)


def errors(width: int, temperature: float) -> dict[str, dict[str, float]]:
    """Return the largest and the mean error of log-probs, in nats, by the rounding of sums."""
    data = random_head(
        TOKENS,
        VOCABULARY,
        width,
        device="cpu",
        largest_logit=LARGEST_LOGIT,
        inverse_temperature=1 / temperature,
        dtype=torch.bfloat16,
    )
    hidden, head = data.hidden.double().numpy(), data.head.double().numpy()

    def logprobs(values: np.ndarray) -> np.ndarray:
        """Return the log-prob of each row's token: float64 [T]."""
        every = torch.from_numpy(values / temperature).log_softmax(1)
        return every.gather(1, data.tokens[:, None])[:, 0].numpy()

    true = logprobs(hidden @ head.T)
    found = {}
    for rounding in (truncated, rounded):
        wrong = logprobs(logits(hidden, head, rounding)) - true
        figures = {"largest": np.abs(wrong).max(), "mean": np.abs(wrong.mean())}
        found[rounding.__name__] = {name: float(f"{each:.2e}") for name, each in figures.items()}
    return found


def main() -> int:
    """Print and write the errors; return the exit status."""
    option_parser(__doc__).parse_args()
    found = {
        f"D={width} temperature={temperature:g}": errors(width, temperature)
        for width in WIDTHS
        for temperature in TEMPERATURES
    }
    for name, figures in found.items():
        print(f"{name:28}", *(f"{rule}: {one}" for rule, one in figures.items()), sep="  ")
    write_baseline("truncated_sums", {"errors_nats": found})
    is_explained = all(
        each["truncated"]["mean"] >= 5 * each["rounded"]["mean"] for each in found.values()
    )
    print("ok" if is_explained else "MISSED")
    return 0 if is_explained else 1


if __name__ == "__main__":
    sys.exit(main())
