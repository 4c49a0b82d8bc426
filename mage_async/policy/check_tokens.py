"""The learner's log-probs of the check tokens, by the model that it trains, adapters and all.

Few versions are scored: on a CPU one forward of each side costs more than half as much as the rest
of a publication. What log-probs see, and neither digests nor spots, is of the programs and not of a
version's bytes, such as a matrix that an engine puts in another's place: it is wrong in every
version once it is wrong, and the first versions of a run or of a learner's life show it.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from mage_async.inference.receipts.receipt import check_tokens, of_both_roles
from mage_async.learning.forward import ModelInputs, Row, token_logprobs
from mage_async.learning.layout import Layout
from mage_async.learning.roles import has_roles

SCORED_EVERY = 16
"""Versions, where engines have no spots."""
SCORED_EVERY_WITH_SPOTS = 256


def is_scored(version: int, *, has_spots: bool) -> bool:
    """Whether a version's check tokens are scored: 0, 1, 16 and every 256th, or every 16th where
    engines have no spots of the tensors that they draw with.
    """
    every = SCORED_EVERY_WITH_SPOTS if has_spots else SCORED_EVERY
    return version % every == 0 or version in (1, SCORED_EVERY)


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
