"""The head and a token-level loss on Hopper in one pass over chunks of tokens: three GEMMs.

A chunk's log-probs decide its loss and, since that depends on each token alone, its gradients at
once: the kept exp-scaled logits are turned into the logits' gradient in place, then two GEMMs give
dX and dW.

Adding to dW costs a read and a write of fp32 `[V, D]` per chunk (3 GB at D = 2560), so chunks are
large. No metric is read on the host and no row is looked for: the pass never waits for the device.

Shapes: `T` tokens, `V` vocabulary, `D` hidden, `R` rows of a chunk.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mage_kernels.fused.coefficients import Coefficients
from mage_kernels.fused.kept_gradient import kept_gradient
from mage_kernels.fused.kept_logits import KeptLogits
from mage_kernels.fused.launching import add_product, per_row, product, row_vectors
from mage_kernels.fused.linear_logprob import forward_rows
from mage_kernels.fused.own_gradient import own_gradient
from mage_kernels.fused.surrogate_gradient import surrogate_gradient
from mage_kernels.surrogate import SUMS, Surrogate, TokenData

CHUNK_ROWS = 4096
ROW_STEP = 128


def even_chunks(num_rows: int) -> Iterator[slice]:
    """As few chunks of at most CHUNK_ROWS rows as will do, of about equal length."""
    num_chunks = max(1, -(-num_rows // CHUNK_ROWS))
    step = -(-num_rows // (num_chunks * ROW_STEP)) * ROW_STEP
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step or 1))


class SinglePass:
    """The running results of the chunks.

    Args:
        is_frozen: the head is not trained: there is no dW.
    """

    def __init__(
        self, hidden: Tensor, head: Tensor, *, wants_gradient: bool, is_frozen: bool
    ) -> None:
        self.hidden, self.head = hidden, head
        self.logprob, self.entropy = row_vectors(2, len(hidden), hidden.device)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float32, device=hidden.device)
        self.wants_gradient, self.is_frozen = wants_gradient, is_frozen
        self.d_hidden = torch.empty_like(hidden)
        self.d_head: Tensor | None = None

    def take(
        self,
        rows: slice,
        tokens: Tensor,
        data: TokenData,
        loss: Surrogate,
        inverse_temperature: Tensor,
        inverse_normaliser: Tensor,
    ) -> None:
        """One chunk, from its logits to its share of dX and dW."""
        hidden = self.hidden[rows]
        kept = (
            KeptLogits.empty(len(hidden), len(self.head), hidden) if self.wants_gradient else None
        )
        logprob, entropy, normaliser = forward_rows(
            hidden, self.head, tokens, inverse_temperature, kept
        )
        self.logprob[rows], self.entropy[rows] = logprob, entropy
        sums, *derivatives = surrogate_gradient(logprob, entropy, data, loss, inverse_normaliser)
        self.sums += sums.sum(0)
        if kept is None:
            return
        coefficients = Coefficients.of(
            logprob, entropy, normaliser, inverse_temperature, *derivatives
        )
        in_place = torch.arange(len(hidden), device=hidden.device)
        gradient = kept.values.view(hidden.dtype)
        kept_gradient(gradient, kept, in_place, coefficients, first_column=0)
        own_gradient(gradient, tokens, coefficients.own, first_column=0)
        torch.mm(gradient, self.head, out=self.d_hidden[rows])
        if self.is_frozen:
            return
        if self.d_head is None:
            self.d_head = product(gradient.T, hidden)
        else:
            add_product(self.d_head, gradient.T, hidden)

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """dX `[T, D]` and dW `[V, D]` in the inputs' dtype; None of a frozen head."""
        if self.is_frozen:
            return self.d_hidden, None
        if self.d_head is None:
            return self.d_hidden.zero_(), torch.zeros_like(self.head)
        return self.d_hidden, self.d_head.to(self.head.dtype)


class FusedPolicyLoss(torch.autograd.Function):
    """Loss, sums, log-probs and entropies, with dX and dW from the same pass."""

    @staticmethod
    def forward(ctx, hidden, head, tokens, data, loss, inverse_temperature, normaliser):
        hidden, head, tokens = hidden.contiguous(), head.contiguous(), tokens.contiguous()
        data = TokenData(*(None if field is None else field.contiguous() for field in data))
        inverse_temperature = per_row(inverse_temperature, len(hidden), hidden.device)
        inverse_normaliser = per_row(normaliser, 1, hidden.device).reciprocal()
        wanted = ctx.needs_input_grad
        single_pass = SinglePass(hidden, head, wants_gradient=any(wanted), is_frozen=not wanted[1])
        for rows in even_chunks(len(hidden)):
            single_pass.take(
                rows,
                tokens[rows],
                data.rows(rows),
                loss,
                inverse_temperature[rows],
                inverse_normaliser,
            )
        if single_pass.wants_gradient:
            ctx.save_for_backward(*single_pass.gradients())
        sums, logprob, entropy = single_pass.sums, single_pass.logprob, single_pass.entropy
        ctx.mark_non_differentiable(sums, logprob, entropy)
        ctx.set_materialize_grads(False)
        total = sums[SUMS.index("loss")] * inverse_normaliser
        return total.squeeze(0), sums, logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, *_):
        d_hidden, d_head = ctx.saved_tensors
        d_head = None if d_head is None else d_head * d_loss
        return d_hidden * d_loss, d_head, None, None, None, None, None
