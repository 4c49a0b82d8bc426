"""The forward of a Llama-family decoder: ragged rows in, next-token logits out.

The cache is one tensor per layer, `[lanes, 2, K, positions, H]`: what a head reads of a context is
one block of memory, and the lanes of a bucket are read where they are, if they are neighbours. In
the last layer only the tokens whose logits are wanted go past the keys and values.

Shapes: `T` packed tokens, `W` rows whose logits are wanted, `V` vocabulary, `D` hidden, `N` heads,
`K` key-value heads, `H` head size; `B`, `n`, `L` as in `ragged`.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mage_async.completion import without_roles
from mage_async.errors import PolicyError
from mage_async.inference.architecture import Architecture, read_architecture
from mage_async.inference.arithmetic import ARITHMETICS, Arithmetic, Kind
from mage_async.inference.ragged import Bucket, Rows, buckets, packed_positions
from mage_async.inference.rotation import rotations
from mage_async.inference.weights import Layer, Weights, read_weights


@dataclass(frozen=True, slots=True, eq=False)
class PrefixCopy:
    """The first `length` positions of a lane, given to others."""

    source: int
    targets: list[int]
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class RoutedLayer:
    """A layer that multiplies each row by the matrices of the row's role."""

    roles: tuple[tuple[Layer, torch.Tensor | None], ...]
    """Layers with their rows, int64; None: all rows"""
    arithmetic: Arithmetic

    @property
    def shared(self) -> Layer:
        """What both roles have in common is its: norms."""
        return self.roles[0][0]

    def linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """[T, D] -> [T, O], by the matrix of that name and its bias."""
        parts = []
        for layer, own in self.roles:
            matrix, bias = getattr(layer, name), getattr(layer, f"{name}_bias")
            given = rows if own is None else rows.index_select(0, own)
            parts.append(self.arithmetic.linear(given, matrix, bias))
        if len(parts) == 1:
            return parts[0]
        out = rows.new_empty(len(rows), parts[0].shape[1])
        for (_, own), part in zip(self.roles, parts, strict=True):
            out.index_copy_(0, own, part)
        return out


class Model:
    """Weights and the keys and values they made.

    Args:
        lanes: contexts whose keys and values are kept.
        max_tokens: positions of each.
        arithmetic: the one the weights were read for.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        lanes: int,
        max_tokens: int,
        arithmetic: Arithmetic = ARITHMETICS["float32"],
    ) -> None:
        self.architecture, self.weights, self.arithmetic = architecture, weights, arithmetic
        block = (2, architecture.kv_heads, max_tokens, architecture.head_dim)
        self._cache = [_mapped(lanes, *block) for _ in range(architecture.layers)]
        self._rotations = rotations(architecture.rotation, architecture.head_dim, max_tokens)
        self.lanes, self.max_tokens = lanes, max_tokens

    @staticmethod
    def load(
        directory: Path, *, lanes: int, max_tokens: int, arithmetic: Kind = "float32"
    ) -> "Model":
        """Read a model directory.

        Raises:
            PolicyError: it cannot be served; the text says what can.
        """
        architecture = read_architecture(directory)
        if max_tokens > architecture.max_positions:
            raise PolicyError(
                f"{directory}: was made for {architecture.max_positions} positions, but "
                f"engine.max_tokens is {max_tokens}; lower it"
            )
        computed = ARITHMETICS[arithmetic]
        weights = read_weights(directory, architecture, computed)
        return Model(architecture, weights, lanes=lanes, max_tokens=max_tokens, arithmetic=computed)

    def describe(self) -> str:
        """What it is and the memory it takes, in one line."""
        size = self.weights.num_parameters
        return (
            f"embedded {self.architecture.model_type} of {size:,} parameters, "
            f"{1e-6 * self.weights.num_bytes():.1f} MB; "
            f"keys and values of {self.lanes} contexts x {self.max_tokens} tokens, "
            f"{1e-6 * self.cache_bytes():.1f} MB"
        )

    def cache_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(layer.numel() * layer.element_size() for layer in self._cache)

    @torch.inference_mode()
    def forward(
        self, tokens: np.ndarray, rows: Rows, copies: Sequence[PrefixCopy], wanted: np.ndarray
    ) -> torch.Tensor:
        """Compute new tokens, keep their keys and values, and return logits.

        Args:
            tokens: int [T], packed in the order of `rows`; the exploiter's as `~token`.
            copies: in this order, after each layer's new keys and values are kept; so a source may
                be a lane that this very forward computes.
            wanted: int64 [W]: rows after whose last token logits are wanted, in increasing order.

        Returns:
            float32 [W, V]
        """
        hidden, turns, places = self._placed(tokens, rows)
        folded = buckets(rows) if len(self._cache) > 1 else []
        for layer, cache in zip(self._routed(tokens, slice(-1)), self._cache, strict=False):
            qkv = self._remember(layer, cache, hidden, turns, places, copies)
            hidden = self._block(layer, cache, hidden, qkv, folded)
        return self._last(tokens, hidden, turns, places, copies, rows, wanted)

    @torch.inference_mode()
    def score(self, tokens: np.ndarray) -> torch.Tensor:
        """Log-probs of a context's tokens after the first, in nats; takes the first lane.

        Args:
            tokens: int64 [T], T at most `max_tokens`; the exploiter's as `~token`.

        Returns:
            float32 [T - 1]
        """
        rows = Rows(*(np.array([value]) for value in (0, 0, len(tokens))))
        hidden, turns, places = self._placed(tokens, rows)
        for layer, cache in zip(self._routed(tokens), self._cache, strict=True):
            qkv = self._remember(layer, cache, hidden, turns, places, [])
            hidden = self._block(layer, cache, hidden, qkv, buckets(rows))
        logits = self._logits(hidden[:-1])
        targets = torch.from_numpy(without_roles(tokens[1:, None]))
        return self.arithmetic.log_softmax(logits).gather(1, targets)[:, 0]

    def _placed(
        self, tokens: np.ndarray, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embeddings [T, D] and rotations [T, 1, H / 2] of new tokens, and the places in the cache
        [T * 2K] of their keys and values.
        """
        row, positions = packed_positions(rows)
        blocks = 2 * self.architecture.kv_heads
        block = rows.lanes[row, None] * blocks + np.arange(blocks)
        places = torch.from_numpy((block * self.max_tokens + positions[:, None]).ravel())
        turns = self._rotations.index_select(0, torch.from_numpy(positions))[:, None]
        hidden = self.weights.embedding.index_select(0, torch.from_numpy(without_roles(tokens)))
        return hidden, turns, places

    def _routed(self, tokens: np.ndarray, layers: slice = slice(None)) -> list[RoutedLayer]:
        """Some layers as they compute these tokens."""
        exploring, exploiting = self.weights.layers[layers], self.weights.exploiting[layers]
        exploits = tokens < 0
        if not exploiting or not exploits.any():
            return [RoutedLayer(((each, None),), self.arithmetic) for each in exploring]
        if exploits.all():
            return [RoutedLayer(((each, None),), self.arithmetic) for each in exploiting]
        first, second = (torch.from_numpy(np.flatnonzero(own)) for own in (~exploits, exploits))
        return [
            RoutedLayer(((one, first), (other, second)), self.arithmetic)
            for one, other in zip(exploring, exploiting, strict=True)
        ]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, V]"""
        return self.arithmetic.linear(self._norm(hidden, self.weights.norm), self.weights.head)

    def _last(
        self,
        tokens: np.ndarray,
        hidden: torch.Tensor,
        turns: torch.Tensor,
        places: torch.Tensor,
        copies: Sequence[PrefixCopy],
        rows: Rows,
        wanted: np.ndarray,
    ) -> torch.Tensor:
        """The last layer and the head, for the last tokens of the wanted rows: [W, V]"""
        (layer,), cache = self._routed(tokens, slice(-1, None)), self._cache[-1]
        qkv = self._remember(layer, cache, hidden, turns, places, copies)
        if not len(wanted):
            return hidden.new_zeros(0, self.architecture.vocabulary)
        ends = (np.cumsum(rows.counts) - 1)[wanted]
        last = torch.from_numpy(ends)
        hidden, qkv = hidden.index_select(0, last), qkv.index_select(0, last)
        (layer,) = self._routed(tokens[ends], slice(-1, None))
        hidden = self._block(layer, cache, hidden, qkv, buckets(rows.take(wanted).last_tokens()))
        return self._logits(hidden)

    def _remember(
        self,
        layer: RoutedLayer,
        cache: torch.Tensor,
        hidden: torch.Tensor,
        turns: torch.Tensor,
        places: torch.Tensor,
        copies: Sequence[PrefixCopy],
    ) -> torch.Tensor:
        """Keep the new tokens' keys and values, carry out the copies; returns [T, (N + 2K) H]."""
        shape, computed = self.architecture, self.arithmetic
        qkv = layer.linear(self._norm(hidden, layer.shared.input_norm), "qkv")
        num_turning = (shape.heads + shape.kv_heads) * shape.head_dim
        heads = qkv[:, :num_turning].unflatten(1, (-1, shape.head_dim))
        if layer.shared.head_norms is not None:
            normed = computed.normed(heads, shape.norm_epsilon)
            torch.mul(normed, layer.shared.head_norms, out=heads)
        computed.turn(heads, turns)
        kept = qkv[:, shape.heads * shape.head_dim :].reshape(-1, shape.head_dim)
        cache.view(-1, shape.head_dim).index_copy_(0, places, kept)
        for copy in copies:
            cache[copy.targets, :, :, : copy.length] = cache[copy.source, :, :, : copy.length]
        return qkv

    def _block(
        self,
        layer: RoutedLayer,
        cache: torch.Tensor,
        hidden: torch.Tensor,
        qkv: torch.Tensor,
        folded: Sequence[Bucket],
    ) -> torch.Tensor:
        """Attention and MLP: [T, D]"""
        queries = qkv[:, : self.architecture.heads * self.architecture.head_dim]
        seen = [self._attend(cache, queries[bucket.tokens], bucket) for bucket in folded]
        attended = seen[0] if len(seen) == 1 else torch.cat(seen)
        hidden = layer.linear(attended, "output").add_(hidden)
        normed = self._norm(hidden, layer.shared.mlp_norm)
        gate, up = layer.linear(normed, "gate_up").chunk(2, 1)
        inner = self.arithmetic.silu(gate).mul_(up)
        return layer.linear(inner, "down").add_(hidden)

    def _attend(self, cache: torch.Tensor, queries: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """[T, N H] of one bucket -> [T, N H]"""
        shape = self.architecture
        if bucket.cells is not None:
            cells = queries.new_zeros(bucket.height * bucket.width, queries.shape[1])
            queries = cells.index_copy_(0, bucket.cells, queries)
        folded = queries.view(bucket.height, bucket.width, shape.heads, shape.head_dim)
        read, lanes = cache[:, :, :, : bucket.context], bucket.lanes
        rows = read[lanes] if isinstance(lanes, slice) else read.index_select(0, lanes)
        keys, values = rows.unbind(1)  # [B, K, L, H]
        seen = self.arithmetic.attention(
            folded.transpose(1, 2), keys, values, bucket.mask, self.max_tokens
        )
        flat = seen.transpose(1, 2).flatten(2).flatten(0, 1)
        return flat if bucket.cells is None else flat.index_select(0, bucket.cells)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.arithmetic.normed(hidden, self.architecture.norm_epsilon, weight)


def _mapped(*shape: int) -> torch.Tensor:
    """float32 zeros whose memory the system gives page by page, where they are written: a lane
    takes what its longest context took, not what it may take.
    """
    size = math.prod(shape) * torch.float32.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)
