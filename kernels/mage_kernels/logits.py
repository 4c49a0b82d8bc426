"""Log-prob and entropy from logits that exist already, for models with a head of their own.

Shapes: `T` tokens, `V` vocabulary.
"""

from torch import Tensor

from mage_kernels import reference
from mage_kernels.dispatch import is_fused


def token_logprob_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    inverse_temperature: float | Tensor = 1.0,
    *,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token `[T]` and entropy of each row `[T]`, in nats, reading the logits `[T,
    V]` once.

    With `overwrite_logits` the backward pass of the Triton form writes the gradient over the
    logits, which saves a `[T, V]` tensor; nothing may read the logits afterwards, and `backward()`
    works once.
    """
    if is_fused(logits):
        from mage_kernels.fused.row_softmax import FusedRows

        return FusedRows.apply(logits, tokens, inverse_temperature, overwrite_logits)
    return reference.token_logprob_and_entropy(logits, tokens, inverse_temperature)


def token_logprob(
    logits: Tensor, tokens: Tensor, inverse_temperature: float | Tensor = 1.0
) -> Tensor:
    """Log-prob of each token, `[T]`, from logits `[T, V]`."""
    return token_logprob_and_entropy(logits, tokens, inverse_temperature)[0]


def token_entropy(logits: Tensor, inverse_temperature: float | Tensor = 1.0) -> Tensor:
    """Entropy of each row, `[T]`, from logits `[T, V]`."""
    tokens = logits.new_zeros(len(logits)).long()
    return token_logprob_and_entropy(logits, tokens, inverse_temperature)[1]
