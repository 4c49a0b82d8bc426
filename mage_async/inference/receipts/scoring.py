"""The receipt that an embedded engine makes of weights it has loaded."""

from collections.abc import Iterable

import torch

from mage_async.inference.architecture import Architecture
from mage_async.inference.arithmetic import Arithmetic, BFloat16
from mage_async.inference.model import Model
from mage_async.inference.receipts.receipt import (
    CHECK_TOKENS,
    Receipt,
    check_tokens,
    of_both_roles,
    precision_of,
)
from mage_async.inference.receipts.tensor_sums import digested
from mage_async.inference.weights import Weights, as_weights


def receipted(
    version: int,
    named: Iterable[tuple[str, torch.Tensor]],
    architecture: Architecture,
    where: str,
    arithmetic: Arithmetic,
    *,
    copies: bool,
    scores: bool,
) -> tuple[Weights, Receipt]:
    """Arrange a model's tensors as `as_weights` does, and score the check tokens with them, where
    the learner has done so.

    Raises:
        PolicyError: they are another model's.
    """
    digests: dict[str, str] = {}
    named = digested(named, digests)
    weights = as_weights(named, architecture, where, arithmetic, copies=copies)
    logprobs = _logprobs(weights, architecture, arithmetic) if scores else ()
    is_rounded = isinstance(arithmetic, BFloat16)
    precision = precision_of(torch.bfloat16 if is_rounded else torch.float32)
    return weights, Receipt(
        version=version, precision=precision, tensors=digests, logprobs=logprobs
    )


def _logprobs(
    weights: Weights, architecture: Architecture, arithmetic: Arithmetic
) -> tuple[float, ...]:
    model = Model(architecture, weights, lanes=1, max_tokens=CHECK_TOKENS, arithmetic=arithmetic)
    tokens = check_tokens(architecture.vocabulary)
    return tuple(model.score(of_both_roles(tokens) if weights.exploiting else tokens).tolist())
