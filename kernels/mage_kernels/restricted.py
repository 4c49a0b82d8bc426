"""Log-probs over allowed tokens alone: the LM head's rows of other tokens are never multiplied.

Shapes: `R` restricted tokens, `D` hidden, `V` vocabulary, `U` tokens that any of the sets holds.
"""

import torch
from torch import Tensor

from mage_kernels.reference import computing_dtype


def restricted_logprob(
    hidden: Tensor,
    head: Tensor,
    columns: Tensor,
    mask: Tensor,
    targets: Tensor,
    inverse_temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute log-prob and entropy, in nats, of tokens drawn from sets of allowed tokens.

    The distribution of row `r` is the softmax of `inverse_temperature * hidden[r] @ head[c]` over
    the tokens `c` of `columns` where `mask[r]` is True. Both results are differentiable.

    The cost is that of `U` rows of the LM head instead of `V`: for the actions of a game these are
    a few dozen of tens of thousands.

    Args:
        hidden: `[R, D]`.
        head: `[V, D]`.
        columns: int64 `[U]`, token ids.
        mask: bool `[R, U]`: the set of each row, which holds its target.
        targets: int64 `[R]`: index of each row's token in `columns`.
        inverse_temperature: one number, or `[R]`; above 0.

    Returns:
        Log-prob `[R]` and entropy `[R]`: fp32, or fp64 for fp64 inputs.
    """
    dtype = computing_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ head.index_select(0, columns).to(dtype).T
    if isinstance(inverse_temperature, Tensor):
        inverse_temperature = inverse_temperature.reshape(-1, 1)
    logits = (logits * inverse_temperature).masked_fill(~mask, float("-inf"))
    logprobs = torch.log_softmax(logits, 1)
    # 0 instead of -inf outside of the sets: 0 * -inf would be nan, in the backward pass too.
    inside = logprobs.masked_fill(~mask, 0.0)
    entropy = -(inside * logprobs.exp()).sum(1)
    return inside.gather(1, targets[:, None])[:, 0], entropy
