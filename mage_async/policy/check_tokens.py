"""The learner's log-probs of the check tokens, by the model that it trains, adapters and all.

Not every version is scored: on a CPU one forward of each side costs nearly half as much as the rest
of a publication. What log-probs see and digests do not, adapters that are not merged or a matrix
that an engine puts in another's place, is wrong in every version once it is wrong: the first
versions of a run or of a learner's life show it, or else the next sixteenth.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from mage_async.inference.receipts.receipt import check_tokens, of_both_roles
from mage_async.learning.forward import ModelInputs, Row, token_logprobs
from mage_async.learning.layout import Layout
from mage_async.learning.roles import has_roles

SCORED_EVERY = 16
"""Versions; before the first of these, powers of two are scored too."""


def is_scored(version: int) -> bool:
    """Whether a version's check tokens are scored: 0, 1, 2, 4, 8, 16, 32, 48 and so on."""
    return version % SCORED_EVERY == 0 or version in (1, 2, 4, 8)


@torch.no_grad()
def check_logprobs(model: PreTrainedModel) -> torch.Tensor:
    """Log-probs of the check tokens after the first, in nats: float32 [tokens - 1], on the
    model's device, where nothing waits for them.
    """
    tokens = check_tokens(model.config.vocab_size)
    laid = of_both_roles(tokens) if has_roles(model) else tokens
    row = Row.of(Layout.of([laid], shares_opening=False), model.device)
    sources = torch.arange(len(tokens) - 1, device=model.device)
    targets = torch.from_numpy(tokens[1:].astype(np.int64)).to(model.device)
    logprobs, _ = token_logprobs(model, ModelInputs(row, sources, targets), 1.0)
    return logprobs.float()
