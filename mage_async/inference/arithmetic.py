"""Define the arithmetic of the embedded engine: float32, bfloat16, or exact sums.

The value of a float32 sum depends on the order of its terms, and a matrix product chooses the order
by the shape of the whole batch. The last bits of a log-prob therefore depend on the rest of the
batch. That matters only if a run has to be repeated bit by bit.

`BFloat16` multiplies by the layers' matrices in bfloat16, at twice the speed or more on a processor
with AVX512-BF16 or AMX. The LM head stays in float32, because the spacing of bfloat16 at a logit of
20 is 0.1 (MiniMax-M1, arXiv 2506.13585, section 3.2).

`Exact` makes every sum exact, so that its order does not matter. Each row of an operand is rounded
to `b` bits below the row's largest value. A product of two such numbers has `2 b` bits and a sum of
`D` products `2 b + log2 D`, at most the 53 bits of a float64: the first slice of Ozaki, Ogita,
Oishi and Rump, Error-free transformations of matrix multiplication (2012). For 64 terms, `b` is 23;
float32 has 24. All other operations are elementwise, and give an element the same bits at any place
in a tensor: IEEE operations, and torch's exp and log (its sigmoid and SiLU do not). The keys,
values and log-probs of a token are therefore functions of the weights and of the tokens before it,
bit by bit: alone or in a batch, computed at once or in pieces, cached or not, on any number of
threads.

Shapes: `R` rows, `D` terms of a sum, `O` outputs, `V` vocabulary, `T` tokens; of attention `B`
sequences, `N` heads, `K` key-value heads, `n` new tokens and `L` tokens of a sequence, `H` head
size.
"""

import math
from typing import Literal

import torch
from torch.nn import functional

from mage_async.inference.architecture import Activation

Kind = Literal["float32", "bfloat16", "exact"]
"""Value of `engine.arithmetic`."""
MANTISSA = 53
"""Number of bits up to which float64 represents all integers."""
EXPONENT = 0x7FF0_0000_0000_0000
"""Mask of the exponent bits of a float64."""


class Arithmetic:
    """Compute those operations of a forward pass whose bits may depend on the batch. This class
    uses torch in float32; its subclasses override it.
    """

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """Prepare a layer's matrix [O, D], of any type, for `linear`."""
        return tensor.float()

    def head(self, tensor: torch.Tensor) -> torch.Tensor:
        """Prepare the LM head [V, D], which is float32, for `linear`."""
        return tensor

    def linear(
        self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply by a prepared matrix and add a bias [O]: [R, D] -> [R, O]."""
        return functional.linear(rows, matrix, bias)

    def normed(
        self, rows: torch.Tensor, epsilon: float, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply RMS norm, and multiply by a weight [D]: [..., D]."""
        return functional.rms_norm(rows, rows.shape[-1:], weight, epsilon)

    def activated(self, values: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Apply an activation; the result may share the memory of `values`."""
        if activation == "silu":
            return functional.silu(values)
        return functional.gelu(values, approximate="tanh")

    def embedding_scale(self, value: float) -> float:
        """Return the factor that multiplies Gemma's embeddings, rounded to the learner's type."""
        # torch itself rounds the factor of a float32 tensor to float32.
        return value

    def rotate(self, heads: torch.Tensor, rotations: torch.Tensor) -> None:
        """Rotate pairs of [T, N, H] in place by unit complex numbers [T, 1, H / 2]."""
        torch.view_as_complex(heads.unflatten(2, (-1, 2))).mul_(rotations)

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        max_context: int,
        scale: float,
    ) -> torch.Tensor:
        """Attend under a mask of 0 and -inf: [B, N, n, H].

        Args:
            queries: [B, N, n, H]
            keys: [B, K, L, H]
            values: [B, K, L, H]
            mask: [B, 1, n, L]
            max_context: Upper bound of `L` over all calls. `Exact` rounds by it: rounding by the
                `L` of a call would let the rest of the batch change the bits.
            scale: Factor of the products of queries and keys.
        """
        is_grouped = queries.shape[1] != keys.shape[1]
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=is_grouped, scale=scale
        )

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute log-probs in nats: [R, V] -> [R, V]."""
        return torch.log_softmax(logits, 1)


class BFloat16(Arithmetic):
    """Multiply by the layers' matrices, and apply the activation, in bfloat16. The outputs of the
    products, and all other operations, are float32.
    """

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert to bfloat16: half the memory."""
        return tensor.bfloat16()

    def linear(
        self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply by a prepared matrix and add a bias [O]: [R, D] -> [R, O]."""
        out = functional.linear(rows.to(matrix.dtype), matrix).float()
        return out if bias is None else out.add_(bias)

    def activated(self, values: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Round to bfloat16, and apply an activation.

        The model multiplies the result in place by the output of the `up` matrix. That product is
        the input of the `down` matrix, which takes bfloat16.
        """
        return super().activated(values.bfloat16(), activation)

    def embedding_scale(self, value: float) -> float:
        """Round to bfloat16, as transformers' embedding of Gemma does."""
        return float(torch.tensor(value, dtype=torch.bfloat16))


class Exact(Arithmetic):
    """Compute exact sums, so that results do not depend on batch, order or threads."""

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """Round in float64: twice the memory."""
        return _rounded(tensor, tensor.shape[-1])

    def head(self, tensor: torch.Tensor) -> torch.Tensor:
        """Prepare the LM head as `matrix` does."""
        return self.matrix(tensor)

    def linear(
        self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply by a prepared matrix and add a bias [O]: [R, D] -> [R, O]."""
        out = functional.linear(_rounded(rows, rows.shape[-1]), matrix).float()
        return out if bias is None else out.add_(bias)

    def normed(
        self, rows: torch.Tensor, epsilon: float, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply RMS norm: [..., D]."""
        num_terms = rows.shape[-1]
        rounded = _rounded(rows, num_terms)
        squares = (rounded * rounded).sum(-1, keepdim=True)
        normed = rounded.div_((squares / num_terms + epsilon).sqrt_()).float()
        return normed if weight is None else normed.mul_(weight)

    def activated(self, values: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Apply an activation of the form x / (1 + exp(-y)); for SiLU, y is x."""
        wide = y = values.double()
        if activation != "silu":
            # x / 2 * (1 + tanh(z)) = x / (1 + exp(-2 z)); exp has the same bits at any place.
            y = (wide + 0.044715 * wide * wide * wide) * (2 * (2 / math.pi) ** 0.5)
        return (wide / (1.0 + (-y).exp_())).float()

    def rotate(self, heads: torch.Tensor, rotations: torch.Tensor) -> None:
        """Rotate pairs of [T, N, H] in place, by separate operations, so that none is fused."""
        real, imaginary = heads[..., ::2], heads[..., 1::2]
        cosine, sine = rotations.real, rotations.imag
        rotated = real * cosine - imaginary * sine
        imaginary.copy_(real * sine + imaginary * cosine)
        real.copy_(rotated)

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        max_context: int,
        scale: float,
    ) -> torch.Tensor:
        """Attend: [B, N, n, H].

        Each value vector is divided by its own power of two, and its attention weight is multiplied
        by that power. All values then have the same scale, and a weight is rounded in proportion to
        its effect.
        """
        head_dim, kv_heads = queries.shape[3], keys.shape[1]
        grouped = _rounded(queries, head_dim).unflatten(1, (kv_heads, -1)).flatten(2, 3)
        products = grouped @ _rounded(keys, head_dim).transpose(2, 3)  # [B, K, N / K * n, L]
        scores = (products * scale).unflatten(2, (-1, queries.shape[2])) + mask[:, None]
        shares = (scores - scores.amax(-1, keepdim=True)).exp_().flatten(2, 3)
        shares = _rounded(shares, max_context)
        rounded = _rounded(values, max_context)
        units = _power(rounded)  # [B, K, L, 1]
        units = torch.where(units > 0, units, 1.0)  # 1 for a vector of zeros, which has no scale
        weights = _rounded(shares * units.transpose(2, 3), max_context)
        attended = (weights @ (rounded / units)).div_(shares.sum(-1, keepdim=True))
        by_head: torch.Tensor = attended.float().unflatten(2, (-1, queries.shape[2]))
        return by_head.flatten(1, 2)

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute log-probs in nats: [R, V]."""
        wide = logits.double()
        wide -= wide.amax(1, keepdim=True)
        total = _rounded(wide.exp(), logits.shape[1]).sum(1, keepdim=True)
        return wide.sub_(total.log_()).float()


ARITHMETICS: dict[Kind, Arithmetic] = {
    "float32": Arithmetic(),
    "bfloat16": BFloat16(),
    "exact": Exact(),
}


def _rounded(rows: torch.Tensor, num_terms: int) -> torch.Tensor:
    """Round rows [..., D] in float64 so that sums of `num_terms` products of such rows are exact.

    Adding a large number and subtracting it again rounds to multiples of its last bit.
    """
    bits = (MANTISSA - (num_terms - 1).bit_length()) // 2
    wide = rows.double()
    # The factor 1.5 keeps the sum's exponent the same for positive and negative numbers.
    shift = _power(wide) * (1.5 * 2.0 ** (MANTISSA - bits))
    return (wide + shift).sub_(shift)


def _power(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two not above a row's largest absolute value; 0 for zeros."""
    largest = rows.abs().amax(-1, keepdim=True)
    # With all mantissa bits cleared, a float64 is a power of two.
    return (largest.view(torch.int64) & EXPONENT).view(torch.float64)
