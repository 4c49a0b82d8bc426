"""Log-prob and entropy from logits that exist already, for models with a head of their own.

Shapes: `T` tokens, `V` vocabulary.
"""

from torch import Tensor

from mage_kernels.chunked import CHUNK_BYTES
from mage_kernels.chunked_rows import ChunkedRows
from mage_kernels.dispatch import is_fused


def token_logprob_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    inverse_temperature: float | Tensor = 1.0,
    *,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy `[T]`, in nats, from logits `[T, V]`; both differentiable.

    With `overwrite_logits` the backward pass writes the gradient over the logits, which saves a
    `[T, V]` tensor; nothing may read the logits afterwards, and `backward()` works once.
    """
    if is_fused(logits):
        from mage_kernels.fused.row_softmax import FusedRows

        return FusedRows.apply(logits, tokens, inverse_temperature, overwrite_logits)
    return ChunkedRows.apply(logits, tokens, inverse_temperature, overwrite_logits, CHUNK_BYTES)


def token_logprob(
    logits: Tensor, tokens: Tensor, inverse_temperature: float | Tensor = 1.0
) -> Tensor:
    """Log-prob of each token, `[T]`, from logits `[T, V]`."""
    return token_logprob_and_entropy(logits, tokens, inverse_temperature)[0]


def token_entropy(logits: Tensor, inverse_temperature: float | Tensor = 1.0) -> Tensor:
    """Entropy of each row, `[T]`, from logits `[T, V]`."""
    tokens = logits.new_zeros(len(logits)).long()
    return token_logprob_and_entropy(logits, tokens, inverse_temperature)[1]
