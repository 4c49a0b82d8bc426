"""Compute the LM head in plain PyTorch with bounded memory, for CPUs and for GPUs on which the
Triton kernels are not used.

Rows are computed in chunks of at most `chunk_bytes` of logits. If all rows fit in one chunk of
CHUNK_BYTES, its probabilities are kept for the backward pass; otherwise they are computed again.

A GEMM with few rows may sum in another order (MKL's does below 8), so a chunk is padded to at least
`MIN_ROWS` rows: the log-prob of a token then does not depend on the other tokens.

Shapes: `T` tokens, `V` vocabulary, `D` hidden, `R` rows of a chunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mage_kernels.surrogate import Surrogate, TokenData, token_derivatives

CHUNK_BYTES = 64 * 2**20
"""Number of bytes of a chunk's logits on a CPU, and the largest number that is kept for the
backward pass.
"""
GPU_CHUNK_BYTES = 2**31
"""Largest number of bytes of a chunk's logits on a GPU, whose GEMMs need thousands of rows."""
CHUNKS_THAT_FIT = 8
"""A chunk's logits on a GPU take at most 1 / CHUNKS_THAT_FIT of the free memory. Computing a chunk
needs about four times the memory of its logits, so half of the free memory is used.
"""
MIN_ROWS = 64
"""Smallest number of rows of a GEMM over logits: with few rows, fewer than 8 with MKL, the order of
its sums may change.
"""
PLANNED: ContextVar[int] = ContextVar("PLANNED", default=0)
"""Number of bytes of a chunk's logits on the device that a run is planned for; 0: no run is
planned, and the number follows from the device of the tensors.
"""


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Softmax(NamedTuple):
    """Hold the distributions of a chunk's rows, as the backward pass needs them."""

    probs: Tensor  # [R, V]
    logprobs: Tensor  # [R, V]
    logprob: Tensor  # [R]
    entropy: Tensor  # [R]


def temperature_of_rows(
    inverse_temperature: float | Tensor, rows: slice | Tensor
) -> float | Tensor:
    """Return the inverse temperature of some rows, if each row has its own."""
    if isinstance(inverse_temperature, Tensor):
        return inverse_temperature[rows]
    return inverse_temperature


def apply_temperature(values: Tensor, inverse_temperature: float | Tensor) -> None:
    """Multiply each row of `values`, `[R, V]`, by its inverse temperature, in place."""
    if isinstance(inverse_temperature, Tensor):
        values.mul_(inverse_temperature[:, None])
    elif inverse_temperature != 1:
        values.mul_(inverse_temperature)


def softmax_of(
    hidden: Tensor, head: Tensor, tokens: Tensor, inverse_temperature: float | Tensor
) -> Softmax:
    """Compute the distribution of each row; probabilities that underflow add 0 to the entropy."""
    logits = matmul(padded(hidden), head.T)[: len(hidden)]
    apply_temperature(logits, inverse_temperature)
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    entropy = -torch.linalg.vecdot(probs, logprobs)
    return Softmax(probs, logprobs, logprobs.gather(1, tokens[:, None]).squeeze(1), entropy)


def logits_gradient(
    softmax: Softmax, tokens: Tensor, d_logprob: Tensor | None, d_entropy: Tensor | None
) -> Tensor:
    """Compute the gradient of the tempered logits, `[R, V]`.

    It is `d_logprob (onehot - p) - d_entropy p (log p + H)`. The sampled token's element is
    computed separately through expm1, because `1 - p` cancels if p is close to 1.
    """
    probs, logprobs, logprob, entropy = softmax
    sampled: Tensor | float = 0.0
    rest: Tensor | float = 0.0
    if d_logprob is not None:
        sampled, rest = -d_logprob * logprob.expm1(), -d_logprob
    if d_entropy is None:
        gradient = probs * torch.as_tensor(rest)[:, None]
    else:
        sampled = sampled - d_entropy * logprob.exp() * (logprob + entropy)
        factor = (logprobs * -d_entropy[:, None]).add_((rest - d_entropy * entropy)[:, None])
        gradient = factor.mul_(probs)
    return gradient.scatter_(1, tokens[:, None], torch.as_tensor(sampled)[:, None])


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply, accumulate and return in the computing dtype; a GPU reads 16-bit operands as is."""
    dtype = computing_dtype(left.dtype)
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def padded(matrix: Tensor) -> Tensor:
    """Pad a matrix with zero rows to at least `MIN_ROWS`."""
    missing = MIN_ROWS - len(matrix)
    return torch.nn.functional.pad(matrix, (0, 0, 0, missing)) if missing > 0 else matrix


def chunks(num_rows: int, step: int) -> Iterator[slice]:
    """Yield ranges of at most `step` rows."""
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


@contextmanager
def planned_chunks(chunk_bytes: int) -> Iterator[None]:
    """Set the bytes of a chunk's logits, to plan for a device that this machine does not have."""
    token = PLANNED.set(chunk_bytes)
    try:
        yield
    finally:
        PLANNED.reset(token)


def chunk_bytes_on(device: torch.device) -> int:
    """Return the bytes that a chunk's logits may have on a device, by its free memory."""
    if planned := PLANNED.get():
        return planned
    if device.type != "cuda" or not torch.cuda.is_available():
        return CHUNK_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return gpu_chunk_bytes(free + cached)


def gpu_chunk_bytes(free_bytes: int) -> int:
    """Return GPU_CHUNK_BYTES, or less if little memory is free, but at least CHUNK_BYTES."""
    return max(CHUNK_BYTES, min(GPU_CHUNK_BYTES, free_bytes // CHUNKS_THAT_FIT))


def rows_at_once(num_columns: int, itemsize: int, chunk_bytes: int) -> int:
    """Return the rows of a chunk with at most `chunk_bytes` of logits, at least MIN_ROWS."""
    return max(MIN_ROWS, chunk_bytes // (num_columns * itemsize))


class ChunkedLogprob(torch.autograd.Function):
    """Compute log-prob and entropy a chunk of rows at a time; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        tokens: Tensor,
        inverse_temperature: float | Tensor,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of each row, `[T]` each; keep the probabilities if all rows
        are one chunk of at most CHUNK_BYTES.
        """
        dtype = computing_dtype(hidden.dtype)
        logprob, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        ctx.kept = None
        ctx.step = rows_at_once(len(head), dtype.itemsize, chunk_bytes)
        is_kept = len(hidden) <= rows_at_once(len(head), dtype.itemsize, CHUNK_BYTES)
        # A GPU's GEMM reads 16-bit operands and sums in fp32. On a CPU the LM head is converted to
        # the computing dtype, once for all chunks.
        computing_head = head if head.is_cuda else head.to(dtype)
        for rows in chunks(len(hidden), ctx.step):
            scales = temperature_of_rows(inverse_temperature, rows)
            softmax = softmax_of(hidden[rows], computing_head, tokens[rows], scales)
            logprob[rows], entropy[rows] = softmax.logprob, softmax.entropy
            if len(softmax.logprob) == len(hidden) and is_kept and any(ctx.needs_input_grad):
                ctx.kept = softmax
        ctx.save_for_backward(hidden, head, tokens)
        ctx.inverse_temperature = inverse_temperature
        ctx.set_materialize_grads(False)  # a result that nobody uses has the gradient None, not 0
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, d_logprob: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states and LM head, chunk by chunk."""
        if d_logprob is None and d_entropy is None:
            return (None,) * 5  # one for each argument of `forward`
        hidden, head, tokens = ctx.saved_tensors
        active = rows_with_gradient(d_logprob, d_entropy)
        sink = GradientSink(hidden, head, is_frozen=not ctx.needs_input_grad[1])
        for part in chunks(len(hidden) if active is None else len(active), ctx.step):
            rows = part if active is None else active[part]
            scales = temperature_of_rows(ctx.inverse_temperature, rows)
            softmax = (
                softmax_of(hidden[rows], sink.head, tokens[rows], scales)
                if ctx.kept is None
                else Softmax(*(field[rows] for field in ctx.kept))
            )
            gradient = logits_gradient(
                softmax,
                tokens[rows],
                None if d_logprob is None else d_logprob[rows],
                None if d_entropy is None else d_entropy[rows],
            )
            sink.add(rows, gradient, scales)
        return *sink.gradients(), None, None, None


class GradientSink:
    """Sum up dX and dW over chunks, in the computing dtype; a frozen LM head has no dW."""

    def __init__(self, hidden: Tensor, head: Tensor, *, is_frozen: bool) -> None:
        self.is_frozen = is_frozen
        self.dtype = computing_dtype(hidden.dtype)
        self.hidden = hidden
        self.head_dtype = head.dtype
        self.head = head if head.is_cuda else head.to(self.dtype)
        self.d_hidden = torch.zeros_like(hidden)
        self.d_head: Tensor | None = None

    def add(
        self, rows: slice | Tensor, gradient: Tensor, inverse_temperature: float | Tensor
    ) -> None:
        """Add a chunk's gradient of the tempered logits, `[R, V]`, which is overwritten."""
        apply_temperature(gradient, inverse_temperature)
        gradient = gradient.to(self.head.dtype)
        d_hidden = matmul(padded(gradient), self.head)[: len(gradient)]
        self.d_hidden[rows] = d_hidden.to(self.d_hidden.dtype)
        if self.is_frozen:
            return
        d_head = matmul(gradient.T, self.hidden[rows])
        self.d_head = d_head if self.d_head is None else self.d_head.add_(d_head)

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Return dX `[T, D]` and dW `[V, D]` in the inputs' dtypes; None for a frozen LM head."""
        if self.is_frozen:
            return self.d_hidden, None
        if self.d_head is None:
            return self.d_hidden, torch.zeros_like(self.head, dtype=self.head_dtype)
        return self.d_hidden, self.d_head.to(self.head_dtype)


class SinglePassLoss(torch.autograd.Function):
    """Compute the backward pass of a loss whose forward has saved dX and dW: scale both by the
    loss's gradient. dW is None for a frozen LM head.
    """

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        scaled = (None if each is None else each * d_loss for each in ctx.saved_tensors)
        # Of the forward's arguments only the first two, hidden states and LM head, have gradients.
        return *scaled, *(None,) * (len(ctx.needs_input_grad) - 2)


class ChunkedPolicyLoss(SinglePassLoss):
    """Compute loss, log-probs and entropies; dX and dW in the same pass, with three GEMMs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        tokens: Tensor,
        data: TokenData,
        loss: Surrogate,
        inverse_temperature: float | Tensor,
        normaliser: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and log-prob and entropy of each row, `[T]` each."""
        dtype = computing_dtype(hidden.dtype)
        logprob, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        total = hidden.new_zeros((), dtype=dtype)
        sink = GradientSink(hidden, head, is_frozen=not ctx.needs_input_grad[1])
        step = rows_at_once(len(head), dtype.itemsize, chunk_bytes)
        for rows in chunks(len(hidden), step):
            scales = temperature_of_rows(inverse_temperature, rows)
            softmax = softmax_of(hidden[rows], sink.head, tokens[rows], scales)
            logprob[rows], entropy[rows] = softmax.logprob, softmax.entropy
            losses, d_logprob, d_entropy = token_derivatives(
                softmax.logprob, softmax.entropy, data.rows(rows), loss
            )
            total = total + losses.sum()
            if any(ctx.needs_input_grad):
                d_entropy = None if d_entropy is None else d_entropy / normaliser
                gradient = logits_gradient(softmax, tokens[rows], d_logprob / normaliser, d_entropy)
                sink.add(rows, gradient, scales)
        ctx.save_for_backward(*sink.gradients())
        ctx.mark_non_differentiable(logprob, entropy)
        ctx.set_materialize_grads(False)
        return total / normaliser, logprob, entropy


# Rows that need no computation: masked ones in the forward, those without a gradient in the
# backward pass. An index from a device tensor costs one synchronisation; a mask on the host costs
# none.


def masked_rows(mask: Tensor, device: torch.device) -> Tensor | None:
    """Return the indices of the mask's rows, ascending, on `device`; None if it selects all."""
    index = mask.nonzero().squeeze(1)
    return None if len(index) == len(mask) else index.to(device, non_blocking=True)


def rows_with_gradient(*gradients: Tensor | None) -> Tensor | None:
    """Return the indices of the rows in which any gradient, `[T]`, is not exactly 0; None if every
    row is one of them.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    active = present[0] != 0
    for gradient in present[1:]:
        active = active | (gradient != 0)
    index = active.nonzero().squeeze(1)
    return None if len(index) == len(active) else index


def scattered(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Put `values[i]` at row `index[i]` of `num_rows` rows, 0 elsewhere; differentiable."""
    return values.new_zeros(num_rows).index_copy(0, index, values)
