"""How the embedded engine multiplies and sums: in float32, in bfloat16, or exactly.

A float32 sum depends on its order, and a matrix product chooses its order by the shape of the whole
batch, so a log-prob differs in its last bits by what is computed beside it. That is harmless,
unless a run is to be repeated bit by bit.

`BFloat16` multiplies by the layers' matrices in bfloat16, which a processor with AVX512-BF16 or AMX
does at twice the speed and more; the head stays float32, because a logit of 20 in bfloat16 is only
known to 0.1 (MiniMax-M1, arXiv 2506.13585, 3.2).

An exact sum has one value, whatever its order. `Exact` rounds each row of what it multiplies to `b`
bits below the row's largest value; a product of two has `2 b` bits and a sum of `K` of them
`2 b + log2 K`, at most the 53 that float64 holds. (The first slice of Ozaki, Ogita, Oishi and
Rump, Error-free transformations of matrix multiplication, 2012; at 64 terms `b` is 23, where
float32 has 24.) Everything else is done element by element, by operations that give an element the
same bits wherever it stands: IEEE's own, and torch's exp and log. (Its sigmoid and SiLU do not.) So
what a token leaves behind is a function of the tokens before it and of the weights, bit by bit:
alone or in a batch, at once or piece by piece, cached or not, on however many threads.

Shapes: `R` rows, `D` terms, `O` outputs; `B`, `N`, `K`, `n`, `L`, `H` as in `model`.
"""

from typing import Literal, Protocol

import torch
from torch.nn import functional

Kind = Literal["float32", "bfloat16", "exact"]
MANTISSA = 53
"""Bits of an integer that float64 holds."""
EXPONENT = 0x7FF0_0000_0000_0000
"""The exponent bits of a float64."""


class Arithmetic(Protocol):
    """What a forward needs beside single operations per element. All but matrices is float32."""

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """A matrix [O, D] as `linear` wants it."""
        ...

    def head(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix [V, D] of the logits, as `linear` wants it."""
        ...

    def linear(
        self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, D] -> [R, O]"""
        ...

    def normed(
        self, rows: torch.Tensor, epsilon: float, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows divided by the root of their mean square, times a weight [D]: [..., D]"""
        ...

    def silu(self, values: torch.Tensor) -> torch.Tensor:
        """x / (1 + exp(-x)); may be the same memory."""
        ...

    def turn(self, heads: torch.Tensor, turns: torch.Tensor) -> None:
        """Multiply pairs [T, N, H], in place, by complex numbers [T, 1, H / 2]."""
        ...

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        max_context: int,
    ) -> torch.Tensor:
        """[B, N, n, H], twice [B, K, L, H], and 0 or -inf [B, 1, n, L] -> [B, N, n, H]

        Args:
            max_context: `L` of this and every other call is at most this.
        """
        ...

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, V] -> [R, V], in nats"""
        ...


class Float32:
    """What torch does fastest."""

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix itself."""
        return tensor

    def head(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix itself."""
        return tensor

    def linear(
        self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, D] -> [R, O]"""
        return functional.linear(rows, matrix, bias)

    def normed(
        self, rows: torch.Tensor, epsilon: float, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., D]"""
        return functional.rms_norm(rows, rows.shape[-1:], weight, epsilon)

    def silu(self, values: torch.Tensor) -> torch.Tensor:
        """x / (1 + exp(-x))"""
        return functional.silu(values)

    def turn(self, heads: torch.Tensor, turns: torch.Tensor) -> None:
        """Pairs of [T, N, H] by [T, 1, H / 2], in place."""
        torch.view_as_complex(heads.unflatten(2, (-1, 2))).mul_(turns)

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        max_context: int,
    ) -> torch.Tensor:
        """[B, N, n, H]"""
        is_grouped = queries.shape[1] != keys.shape[1]
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=is_grouped
        )

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, V]"""
        return torch.log_softmax(logits, 1)


class BFloat16(Float32):
    """The layers' matrices, and the rows they multiply, in bfloat16; all else in float32."""

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """In bfloat16: half the memory."""
        return tensor.bfloat16()

    def linear(
        self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, D] -> [R, O]"""
        out = functional.linear(rows.to(matrix.dtype), matrix).float()
        return out if bias is None else out.add_(bias)


class Exact:
    """Every sum is exact."""

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """Float64, rounded: twice the memory."""
        return _rounded(tensor, tensor.shape[-1])

    def head(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `matrix`."""
        return self.matrix(tensor)

    def linear(
        self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, D] -> [R, O]"""
        out = functional.linear(_rounded(rows, rows.shape[-1]), matrix).float()
        return out if bias is None else out.add_(bias)

    def normed(
        self, rows: torch.Tensor, epsilon: float, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., D]"""
        num_terms = rows.shape[-1]
        rounded = _rounded(rows, num_terms)
        squares = (rounded * rounded).sum(-1, keepdim=True)
        normed = rounded.div_((squares / num_terms + epsilon).sqrt_()).float()
        return normed if weight is None else normed.mul_(weight)

    def silu(self, values: torch.Tensor) -> torch.Tensor:
        """x / (1 + exp(-x))"""
        wide = values.double()
        return (wide / (1.0 + (-wide).exp_())).float()

    def turn(self, heads: torch.Tensor, turns: torch.Tensor) -> None:
        """Pairs of [T, N, H] by [T, 1, H / 2], in place; one operation at a time."""
        real, imaginary = heads[..., ::2], heads[..., 1::2]
        cosine, sine = turns.real, turns.imag
        turned = real * cosine - imaginary * sine
        imaginary.copy_(real * sine + imaginary * cosine)
        real.copy_(turned)

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        max_context: int,
    ) -> torch.Tensor:
        """[B, N, n, H]

        Each value is divided by a power of two of its own, which its weight is multiplied by: so
        the values have one unit, and weights are rounded as they count.
        """
        head_dim, kv_heads = queries.shape[3], keys.shape[1]
        grouped = _rounded(queries, head_dim).unflatten(1, (kv_heads, -1)).flatten(2, 3)
        products = grouped @ _rounded(keys, head_dim).transpose(2, 3)  # [B, K, N / K * n, L]
        scores = (products * head_dim**-0.5).unflatten(2, (-1, queries.shape[2])) + mask[:, None]
        shares = (scores - scores.amax(-1, keepdim=True)).exp_().flatten(2, 3)
        shares = _rounded(shares, max_context)
        rounded = _rounded(values, max_context)
        units = _power(rounded)  # [B, K, L, 1]
        units = torch.where(units > 0, units, 1.0)
        weights = _rounded(shares * units.transpose(2, 3), max_context)
        seen = (weights @ (rounded / units)).div_(shares.sum(-1, keepdim=True))
        return seen.float().unflatten(2, (-1, queries.shape[2])).flatten(1, 2)

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, V]"""
        wide = logits.double()
        wide -= wide.amax(1, keepdim=True)
        total = _rounded(wide.exp(), logits.shape[1]).sum(1, keepdim=True)
        return wide.sub_(total.log_()).float()


ARITHMETICS: dict[Kind, Arithmetic] = {
    "float32": Float32(),
    "bfloat16": BFloat16(),
    "exact": Exact(),
}


def _rounded(rows: torch.Tensor, num_terms: int) -> torch.Tensor:
    """Rows [..., D] as float64, so that sums of `num_terms` products of such rows are exact.

    Adding a large number and taking it away rounds to multiples of its last bit.
    """
    bits = (MANTISSA - (num_terms - 1).bit_length()) // 2
    wide = rows.double()
    shift = _power(wide) * (1.5 * 2.0 ** (MANTISSA - bits))
    return (wide + shift).sub_(shift)


def _power(rows: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is at most a row's largest absolute value; 0 of zeros."""
    largest = rows.abs().amax(-1, keepdim=True)
    return (largest.view(torch.int64) & EXPONENT).view(torch.float64)
