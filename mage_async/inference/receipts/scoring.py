"""The receipt that an embedded engine makes of weights it has loaded."""

from collections.abc import Iterable
from pathlib import Path

import torch

from mage_async.inference.architecture import Architecture
from mage_async.inference.arithmetic import Arithmetic, BFloat16
from mage_async.inference.model import Model
from mage_async.inference.receipts.observed import Observed
from mage_async.inference.receipts.receipt import (
    CHECK_TOKENS,
    Receipt,
    check_tokens,
    of_both_roles,
    precision_of,
)
from mage_async.inference.weights import Weights, as_weights


def receipted(
    version: int,
    named: Iterable[tuple[str, torch.Tensor]],
    architecture: Architecture,
    path: Path,
    arithmetic: Arithmetic,
    *,
    is_sent: bool,
    published: Receipt | None,
) -> tuple[Weights, Receipt]:
    """Arrange a model's tensors as `as_weights` does, and make a receipt of what the learner's
    receipt has.

    Args:
        path: where weights are read, or the manifest of those that are sent.

    Raises:
        PolicyError: they are another model's.
    """
    observed = Observed(published, None if is_sent else path)
    passing = observed.passing(named)
    weights = as_weights(passing, architecture, str(path), arithmetic, copies=is_sent)
    scores = published is not None and published.logprobs
    logprobs = _logprobs(weights, architecture, arithmetic) if scores else ()
    is_rounded = isinstance(arithmetic, BFloat16)
    precision = precision_of(torch.bfloat16 if is_rounded else torch.float32)
    return weights, observed.receipt(version, precision, logprobs)


def _logprobs(
    weights: Weights, architecture: Architecture, arithmetic: Arithmetic
) -> tuple[float, ...]:
    model = Model(architecture, weights, lanes=1, max_tokens=CHECK_TOKENS, arithmetic=arithmetic)
    tokens = check_tokens(architecture.vocabulary)
    return tuple(model.score(of_both_roles(tokens) if weights.exploiting else tokens).tolist())
