"""Restrict sampling to the tokens that a request allows, inside SGLang's scheduler.

SGLang's own grammars need a tokenizer in the server, and this server has none: it takes and returns
token ids. So the request carries the allowed tokens, and a logit processor removes all others
before SGLang samples and before it computes log-probs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

PARAMETER = "allowed"
"""Name of the request's parameter that holds its allowed tokens, as the bytes of int32."""


class AllowedTokens(CustomLogitProcessor):
    """Give every token that is not allowed the probability 0."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: Sequence[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """Return the logits with -inf for every token that is not allowed: [requests, vocabulary].

        Args:
            logits: [requests, vocabulary]
            custom_param_list: `custom_params` of each request, with its allowed tokens.
        """
        masked = torch.full_like(logits, -torch.inf)
        for row, parameters in enumerate(custom_param_list or ()):
            tokens = np.frombuffer(parameters[PARAMETER], np.int32).astype(np.int64)
            allowed = torch.from_numpy(tokens).to(logits.device)
            masked[row, allowed] = logits[row, allowed]
        return masked
