"""The learner's log-probs of the check tokens, by the model that it trains, adapters and all."""

import numpy as np
import torch
from transformers import PreTrainedModel

from mage_async.inference.receipts.receipt import check_tokens
from mage_async.learning.forward import ModelInputs, Row, token_logprobs
from mage_async.learning.layout import Layout


@torch.no_grad()
def check_logprobs(model: PreTrainedModel) -> torch.Tensor:
    """Log-probs of the check tokens after the first, in nats: float32 [tokens - 1], on the
    model's device, where nothing waits for them.
    """
    tokens = check_tokens(model.config.vocab_size)
    row = Row.of(Layout.of([tokens], shares_opening=False), model.device)
    sources = torch.arange(len(tokens) - 1, device=model.device)
    targets = torch.from_numpy(tokens[1:].astype(np.int64)).to(model.device)
    logprobs, _ = token_logprobs(model, ModelInputs(row, sources, targets), 1.0)
    return logprobs.float()
