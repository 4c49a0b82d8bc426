"""Log-prob and entropy of logits that exist already, in plain PyTorch, a chunk of rows at a time.

Shapes: `T` tokens, `V` vocabulary, `R` rows of a chunk.
"""

import torch
from torch import Tensor

from mage_kernels.chunked import Softmax, chunks, logits_gradient, rows_of
from mage_kernels.reference import column, computing_dtype

ONCE = "backward() ran before and overwrote the logits: it works once with overwrite_logits"


def softmax_of_rows(logits: Tensor, tokens: Tensor, inverse_temperature: float | Tensor) -> Softmax:
    """Distribution of each row `[R, V]`; a logit of -inf has probability 0 and adds nothing."""
    dtype = computing_dtype(logits.dtype)
    logprobs = (logits.to(dtype) * column(inverse_temperature, dtype)).log_softmax(-1)
    probs = logprobs.exp()
    finite = logprobs.masked_fill(probs == 0, 0.0)
    logprob = logprobs.gather(1, tokens[:, None]).squeeze(1)
    return Softmax(probs, finite, logprob, -torch.linalg.vecdot(probs, finite))


class ChunkedRows(torch.autograd.Function):
    """`reference.token_logprob_and_entropy`, a chunk of rows at a time. Differentiable once."""

    @staticmethod
    def forward(ctx, logits, tokens, inverse_temperature, overwrite_logits, chunk_bytes):
        dtype = computing_dtype(logits.dtype)
        logprob, entropy = (logits.new_empty(len(logits), dtype=dtype) for _ in range(2))
        ctx.chunks = list(chunks(len(logits), logits.shape[1], dtype.itemsize, chunk_bytes))
        for rows in ctx.chunks:
            softmax = softmax_of_rows(
                logits[rows], tokens[rows], rows_of(inverse_temperature, rows)
            )
            logprob[rows], entropy[rows] = softmax.logprob, softmax.entropy
        ctx.save_for_backward(logits, tokens)
        ctx.inverse_temperature = inverse_temperature
        ctx.overwrites, ctx.is_overwritten = overwrite_logits, False
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprob, d_entropy):
        if d_logprob is None and d_entropy is None:
            return (None,) * 5
        if ctx.is_overwritten:
            raise RuntimeError(ONCE)
        logits, tokens = ctx.saved_tensors
        gradient = logits.detach() if ctx.overwrites else torch.empty_like(logits)
        ctx.is_overwritten = ctx.overwrites
        for rows in ctx.chunks:
            inverse_temperature = rows_of(ctx.inverse_temperature, rows)
            part = logits_gradient(
                softmax_of_rows(logits[rows], tokens[rows], inverse_temperature),
                tokens[rows],
                None if d_logprob is None else d_logprob[rows],
                None if d_entropy is None else d_entropy[rows],
            )
            gradient[rows] = part.mul_(column(inverse_temperature, part.dtype))
        return gradient, None, None, None, None
