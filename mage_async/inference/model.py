"""Compute the forward pass ("forward") of a decoder of the Llama family or a related one: it takes
new tokens of several sequences, and returns next-token logits.

A *slot* of the KV cache holds the keys and values of one sequence. A *row* is the new tokens of one
sequence in one forward. The rows are *packed*: their tokens follow each other without padding. All
matrix products take packed tokens. Only attention needs rectangles: a *bucket* is a set of rows of
similar length, padded to the widest. A `Plan` collects the rows of the next forward.

The KV cache is one tensor per layer, `[slots, 2, K, positions, H]`, so that the keys of a head in
one sequence are one block of memory. In the last layer, only tokens whose logits are returned are
computed beyond their keys and values.

A policy may have two *roles*, such as a planner and an executor, with matrices of their own. A
token of the second role is given as `~token` (`with_roles` of `mage_async/completion.py`).

Several policies may share a forward (`forward_together`), if their weights differ in adapters only.
Each has a `Model` with a KV cache of its own. The tokens of all policies with the same matrices are
multiplied by these at once; then the products of each policy's own adapters are added.

Shapes: `R` rows, `T` packed tokens, `W` rows whose logits are returned, `V` vocabulary, `D` hidden,
`N` heads, `K` key-value heads, `H` head size, `I` inputs and `O` outputs of a matrix; of a bucket
`B` lines, `n` tokens in the widest, `L` tokens in the longest sequence.
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import torch

from mage_async.completion import without_roles
from mage_async.inference.architecture import (
    Architecture,
    LayerKind,
    Rotation,
    read_architecture,
    rotations,
)
from mage_async.inference.arithmetic import ARITHMETICS, Arithmetic, Kind
from mage_async.inference.weights import Adapter, Layer, Weights, read_weights

PrefixCopies = dict[tuple[int, int], list[int]]
"""For each source slot and length of a prefix: the slots to which it is copied. Copies are made in
order, because a slot may be the source of a copy after it was the target of another.
"""
Angles = dict[Rotation, torch.Tensor]
"""For each rotation of a layer: the unit complex numbers of the tokens, [T, 1, H / 2]."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Describe the new tokens of a forward: row `r` computes `counts[r]` positions of a slot from
    `starts[r]` on.
    """

    slots: np.ndarray
    """int64 [R]: KV slots, all different."""
    starts: np.ndarray
    """int64 [R]: first positions."""
    counts: np.ndarray
    """int64 [R]: numbers of tokens, at least 1, never increasing."""

    def take(self, rows: np.ndarray) -> "Rows":
        """Select rows by index, in the given order."""
        return Rows(self.slots[rows], self.starts[rows], self.counts[rows])

    def last_tokens(self) -> "Rows":
        """Reduce every row to its last token."""
        return Rows(self.slots, self.starts + self.counts - 1, np.ones_like(self.counts))


@dataclass(slots=True)
class Plan:
    """Collect what the next forward computes: `counts[i]` tokens of slot `slots[i]`, from position
    `starts[i]` on.
    """

    num_left: int
    """Number of tokens that may still be added."""
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    copies: PrefixCopies = field(default_factory=dict)
    """Prefixes to copy between slots during this forward."""

    def add(self, slot: int, start: int, count: int) -> None:
        """Add tokens of a slot."""
        self.num_left -= count
        self.slots.append(slot)
        self.starts.append(start)
        self.counts.append(count)

    def rows(self) -> Rows:
        """Return the planned rows, longest first.

        Equally long rows are ordered by slot, so that attention can read neighbours in place.
        """
        slots, starts, counts = (
            np.array(column, np.int64) for column in (self.slots, self.starts, self.counts)
        )
        return Rows(slots, starts, counts).take(np.lexsort((slots, -counts)))


def packed_positions(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return row and position of every packed token: int64 [T] each."""
    row = np.repeat(np.arange(len(rows.counts)), rows.counts)
    return row, _joined_ranges(rows.starts, rows.counts)


# A bucket is a set of rows that attend together, as a rectangle.
#
# Rows are ordered by their number of new tokens, longest first, and cut into buckets with little
# padding. If the slots of a bucket are close together, its rectangle has a line for every slot
# between the first and the last, so that keys and values are read in place: copying them would cost
# as much as the attention itself.

MAX_WIDTH_RATIO = 4
"""Largest ratio between the numbers of tokens of two rows of a bucket."""
SMALL_PADDING = 512
"""Number of padded tokens below which rows share a bucket in any case, because a bucket costs time
too.
"""
MAX_SPAN_RATIO = 1.25
"""Slots are read in place up to this ratio of their range, from the first slot to the last, to the
number of rows: attention for the unused slots in between costs time too.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Describe rows that attend together, as a rectangle."""

    tokens: slice
    """Range of the rows' packed tokens."""
    slots: slice | torch.Tensor
    """KV slots of the rectangle's lines: a range, or int64 [B]."""
    height: int
    """Number of lines of the rectangle, B: one for each row, and for slots between theirs."""
    width: int
    """Number of tokens of the widest row, n."""
    context: int
    """Number of tokens of the longest sequence, L."""
    cells: torch.Tensor | None
    """Cell of the rectangle in which each token lies, int64, an index into its B * n cells; None if
    the tokens fill all cells in order.
    """
    masks: Mapping[int, torch.Tensor]
    """For each window of a layer in tokens (0: none), float32 [B, 1, n, L]: 0 where a token may
    attend, else -inf.
    """


def buckets(rows: Rows, windows: Iterable[int] = (0,)) -> list[Bucket]:
    """Group the rows of a forward, longest first, into buckets, with masks for the windows of the
    layers.
    """
    windows = set(windows)
    ends = np.cumsum(rows.counts)
    begins = ends - rows.counts
    return [
        _bucket(
            rows.take(np.arange(first, last)),
            slice(int(begins[first]), int(ends[last - 1])),
            windows,
        )
        for first, last in _cuts(rows.counts)
    ]


def _cuts(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows that share a bucket."""
    first, num_rows = 0, len(counts)
    while first < num_rows:
        widest = int(counts[first])
        is_padded_little = (num_rows - first) * widest - counts[first:].sum() < SMALL_PADDING
        # `argmax` finds the first row that is too narrow for this bucket.
        narrow = counts[first:] * MAX_WIDTH_RATIO < widest
        is_all = is_padded_little or not narrow.any()
        last = num_rows if is_all else first + int(narrow.argmax())
        yield first, last
        first = last


def _bucket(rows: Rows, tokens: slice, windows: set[int]) -> Bucket:
    """Return the bucket of some rows, whose packed tokens are the range `tokens`."""
    width, context = int(rows.counts[0]), int((rows.starts + rows.counts).max())
    slots, lines, height = _rectangle(rows.slots)
    starts, counts = np.zeros(height, np.int64), np.zeros(height, np.int64)
    starts[lines], counts[lines] = rows.starts, rows.counts
    offsets = np.arange(width)
    is_token = offsets < counts[:, None]
    # Padding gets position 0, so that it attends to something; nothing reads its result.
    positions = np.where(is_token, starts[:, None] + offsets, 0)
    keys, queries = np.arange(context), positions[:, None, :, None]
    is_before = keys <= queries
    masks: dict[int, torch.Tensor] = {}
    for window in windows:
        is_visible = is_before & (keys > queries - window) if window else is_before
        masks[window] = torch.from_numpy(np.where(is_visible, np.float32(0), np.float32(-np.inf)))
    is_packed = is_token.all() and np.array_equal(lines, np.arange(height))
    cells = None if is_packed else torch.from_numpy(_joined_ranges(lines * width, rows.counts))
    return Bucket(tokens, slots, height, width, context, cells, masks)


def _rectangle(slots: np.ndarray) -> tuple[slice | torch.Tensor, np.ndarray, int]:
    """Return the slots of a rectangle's lines, the line of each given slot, and the height B."""
    first, last = int(slots.min()), int(slots.max()) + 1
    if last - first > MAX_SPAN_RATIO * len(slots):
        return torch.from_numpy(slots), np.arange(len(slots)), len(slots)
    return slice(first, last), slots - first, last - first


def _joined_ranges(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate `range(begins[r], begins[r] + counts[r])` over all rows."""
    # Difference between each range's begin and its index in the result.
    shift = begins - (np.cumsum(counts) - counts)
    counted: np.ndarray = np.arange(counts.sum()) + np.repeat(shift, counts)
    return counted


# The forward.


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLayer:
    """Hold one layer of one policy, which multiplies each token by the matrices of its role."""

    roles: tuple[tuple[Layer, torch.Tensor | None], ...]
    """For each role: its matrices, and the indices of its tokens, int64; None for all tokens."""
    arithmetic: Arithmetic
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """Low-rank adapters that are not merged, by the name of the matrix. An adapter adds the product
    of two matrices, `up @ down`, to its matrix."""

    @property
    def shared(self) -> Layer:
        """Layer of the first role; the norms of both roles are equal."""
        return self.roles[0][0]

    def linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Multiply by the matrix of that name and add its bias: [T, I] -> [T, O]."""
        parts = []
        for layer, index in self.roles:
            matrix, bias = getattr(layer, name), getattr(layer, f"{name}_bias")
            of_role = rows if index is None else rows.index_select(0, index)
            parts.append(self.arithmetic.linear(of_role, matrix, bias))
        if len(parts) == 1:
            return parts[0]
        out = rows.new_empty(len(rows), parts[0].shape[1])
        for (_, index), part in zip(self.roles, parts, strict=True):
            assert index is not None, "with several roles each has its own tokens"
            out.index_copy_(0, index, part)
        return out

    def adapt(self, rows: torch.Tensor, name: str, out: torch.Tensor) -> None:
        """Add the products of `rows`, [T, I], with the adapters of the matrix `name` to `out`, in
        place.

        Args:
            out: [T, O]: products of the rows with the matrix itself.
        """
        if (adapter := self.adapters.get(name)) is not None:
            # [T, sum of ranks]. A fused matrix, such as qkv, may have an adapter for each of its
            # parts, such as q, which has its own columns here, and its own columns of `out`.
            reduced = self.arithmetic.linear(rows, adapter.down)
            for out_columns, reduced_columns, up in adapter.ups:
                out[:, out_columns] += self.arithmetic.linear(reduced[:, reduced_columns], up)


@dataclass(frozen=True, slots=True, eq=False)
class JointLayer:
    """Hold the same layer of the policies that share a forward."""

    layers: Sequence[PolicyLayer]
    sizes: list[int]
    """Number of tokens of each policy; the policies' tokens follow each other in this order."""
    kind: LayerKind

    @property
    def shared(self) -> Layer:
        """Layer of the first policy; the norms of all policies are equal."""
        return self.layers[0].shared

    def linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Multiply by the matrices of that name, and add adapters and biases: [T, I] -> [T, O]."""
        if len(self.layers) == 1 and not self.layers[0].adapters:
            return self.layers[0].linear(rows, name)
        ends = np.cumsum([0, *self.sizes]).tolist()
        spans = list(zip(self.layers, pairwise(ends), strict=True))
        parts = []
        # Policies with the same matrices are neighbours, and are multiplied by them at once.
        for _, group in groupby(spans, lambda one: id(one[0].shared)):
            own = list(group)
            first, last = own[0][1][0], own[-1][1][1]
            out = own[0][0].linear(rows[first:last], name)
            for layer, (begin, end) in own:
                layer.adapt(rows[begin:end], name, out[begin - first : end - first])
            parts.append(out)
        return _joined(parts)


@dataclass(frozen=True, slots=True, eq=False)
class PolicyForward:
    """Describe what one policy computes in a forward that several policies may share."""

    model: "Model"
    tokens: np.ndarray
    """int [T], packed in the order of `rows`; tokens of the second role as `~token`."""
    rows: Rows
    copies: PrefixCopies
    """Prefixes to copy. In each layer they are copied after the new keys and values are stored, so
    that this forward may compute their source."""
    logit_rows: np.ndarray
    """Indices of the rows for whose last token logits are returned, int64 [W], increasing."""
    columns: np.ndarray | None = None
    """Ids of the tokens whose logits are returned, int64 [U]; None for all."""

    def ends(self) -> np.ndarray:
        """Return the indices of the tokens whose logits are returned: int64 [W]."""
        ends: np.ndarray = (np.cumsum(self.rows.counts) - 1)[self.logit_rows]
        return ends


class Model:
    """Hold a decoder: its weights, and the KV cache.

    Args:
        slots: Number of KV slots, one for each sequence whose keys and values are kept.
        max_tokens: Number of positions of each slot.
        arithmetic: Arithmetic that the weights were read for.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        slots: int,
        max_tokens: int,
        arithmetic: Arithmetic = ARITHMETICS["float32"],
    ) -> None:
        self.architecture, self.weights, self.arithmetic = architecture, weights, arithmetic
        block = (2, architecture.kv_heads, max_tokens, architecture.head_dim)
        self._pages = [_map_zeros(slots, *block) for _ in range(architecture.layers)]
        self._cache = [
            torch.frombuffer(pages, dtype=torch.float32).view(slots, *block)
            for pages in self._pages
        ]
        kinds = set(architecture.layer_kinds)
        self._rotations = {
            each.rotation: rotations(each.rotation, architecture.head_dim, max_tokens)
            for each in kinds
            if each.rotation is not None
        }
        self.windows = {each.window for each in kinds}
        """Windows of all layers in tokens; 0: none."""
        self.slots, self.max_tokens = slots, max_tokens

    @staticmethod
    def load(
        directory: Path, *, slots: int, max_tokens: int, arithmetic: Kind = "float32"
    ) -> "Model":
        """Read a model directory.

        Raises:
            PolicyError: this engine cannot serve the model. The message has the reason and a
                remedy.
        """
        architecture = read_architecture(directory, max_tokens)
        computed = ARITHMETICS[arithmetic]
        weights = read_weights(directory, architecture, computed)
        return Model(architecture, weights, slots=slots, max_tokens=max_tokens, arithmetic=computed)

    def describe(self) -> str:
        """Describe model and memory in one line."""
        size = self.weights.num_parameters
        return (
            f"embedded {self.architecture.model_type} of {size:,} parameters, "
            f"{1e-6 * self.weights.num_bytes():.1f} MB; "
            f"keys and values of {self.slots} contexts x {self.max_tokens} tokens, "
            f"{1e-6 * self.cache_bytes():.1f} MB"
        )

    def discard_cache(self) -> None:
        """Discard all keys and values, and give their memory back to the system."""
        for pages in self._pages:
            pages.madvise(mmap.MADV_DONTNEED)

    def cache_bytes(self) -> int:
        """Return the memory that the KV cache takes if every slot is full, in bytes."""
        return sum(layer.numel() * layer.element_size() for layer in self._cache)

    @torch.inference_mode()
    def score(self, tokens: np.ndarray) -> torch.Tensor:
        """Compute the log-probs of a sequence's tokens after the first, in nats; overwrites slot 0.

        Args:
            tokens: int64 [T], T at most `max_tokens`; tokens of the second role as `~token`.

        Returns:
            float32 [T - 1]
        """
        # One row: all tokens, in slot 0 from position 0 on.
        rows = Rows(*(np.array([value]) for value in (0, 0, len(tokens))))
        hidden, angles, cache_rows = self._embed(tokens, rows)
        kinds, own_buckets = self.architecture.layer_kinds, buckets(rows, self.windows)
        for own, cache, kind in zip(self._layers(tokens), self._cache, kinds, strict=True):
            layer = JointLayer((own,), [len(tokens)], kind)
            qkv = self._store(layer, [(cache, cache_rows, {})], hidden, angles)
            hidden = self._block(layer, [(cache, own_buckets)], hidden, qkv)
        logits = self._logits(hidden[:-1], self.weights.head)
        targets = torch.from_numpy(without_roles(tokens[1:, None]))
        return self.arithmetic.log_softmax(logits).gather(1, targets)[:, 0]

    def _embed(self, tokens: np.ndarray, rows: Rows) -> tuple[torch.Tensor, Angles, torch.Tensor]:
        """Return the inputs of the layers for packed tokens.

        Returns:
            The embeddings, float32 [T, D]; the angles of each rotation; and the cache rows in which
            the tokens' keys and values are stored, int64 [T * 2K]. A cache row is H numbers: a
            position of a key or value head of a slot.
        """
        row, positions = packed_positions(rows)
        blocks = 2 * self.architecture.kv_heads
        # A slot has 2K blocks, each of `max_tokens` cache rows.
        block = rows.slots[row, None] * blocks + np.arange(blocks)
        cache_rows = torch.from_numpy((block * self.max_tokens + positions[:, None]).ravel())
        index = torch.from_numpy(positions)
        angles = {
            rotation: all_angles.index_select(0, index)[:, None]
            for rotation, all_angles in self._rotations.items()
        }
        hidden = self.weights.embedding.index_select(0, torch.from_numpy(without_roles(tokens)))
        if self.architecture.embedding_scale != 1.0:
            hidden = hidden * self.arithmetic.embedding_scale(self.architecture.embedding_scale)
        return hidden, angles, cache_rows

    def _layers(self, tokens: np.ndarray) -> list[PolicyLayer]:
        """Return the layers, each with the matrices of the roles that occur among the tokens."""
        first_role, second_role = self.weights.layers, self.weights.second_role
        is_second = tokens < 0
        if self.weights.adapters:
            return [
                PolicyLayer(((each, None),), self.arithmetic, own)
                for each, own in zip(first_role, self.weights.adapters, strict=True)
            ]
        if not second_role or not is_second.any():
            return [PolicyLayer(((each, None),), self.arithmetic) for each in first_role]
        if is_second.all():
            return [PolicyLayer(((each, None),), self.arithmetic) for each in second_role]
        first, second = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~is_second, is_second))
        return [
            PolicyLayer(((one, first), (other, second)), self.arithmetic)
            for one, other in zip(first_role, second_role, strict=True)
        ]

    def _logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Apply the last norm and rows of the LM head, [U, D]: [T, D] -> [T, U]."""
        return self.arithmetic.linear(self._norm(hidden, self.weights.norm), head)

    def _store(
        self,
        layer: JointLayer,
        writes: Sequence[tuple[torch.Tensor, torch.Tensor, PrefixCopies]],
        hidden: torch.Tensor,
        angles: Angles,
    ) -> torch.Tensor:
        """Store new keys and values, then make the copies; return QKV: [T, (N + 2K) H].

        Args:
            writes: For each policy: its cache of this layer, the cache rows of its tokens
                (`_embed`), and the copies of prefixes.
        """
        shape, computed = self.architecture, self.arithmetic
        qkv = layer.linear(self._norm(hidden, layer.shared.input_norm), "qkv")
        num_rotated = (shape.heads + shape.kv_heads) * shape.head_dim
        heads = qkv[:, :num_rotated].unflatten(1, (-1, shape.head_dim))
        if (factors := layer.shared.head_norms) is not None:
            over_all = shape.query_key_norms == "all"  # all queries together, and all keys
            counts = [shape.heads, shape.kv_heads] if over_all else [len(factors)]
            for part, own in zip(heads.split(counts, 1), factors.split(counts), strict=True):
                whole = part.flatten(1) if over_all else part
                normed = computed.normed(whole, shape.norm_epsilon).view_as(part)
                torch.mul(normed, own, out=part)
        if layer.kind.rotation is not None:
            computed.rotate(heads, angles[layer.kind.rotation])
        keys_and_values = qkv[:, shape.heads * shape.head_dim :].split(layer.sizes)
        for (cache, cache_rows, copies), own in zip(writes, keys_and_values, strict=True):
            new = own.reshape(-1, shape.head_dim)
            cache.view(-1, shape.head_dim).index_copy_(0, cache_rows, new)
            for (source, length), targets in copies.items():
                cache[targets, :, :, :length] = cache[source, :, :, :length]
        return qkv

    def _block(
        self,
        layer: JointLayer,
        reads: Sequence[tuple[torch.Tensor, Sequence[Bucket]]],
        hidden: torch.Tensor,
        qkv: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention and MLP of a layer: [T, D].

        Args:
            reads: For each policy: its cache of this layer, and the buckets of its rows.
        """
        queries = qkv[:, : self.architecture.heads * self.architecture.head_dim]
        parts = [
            self._attend(cache, own[bucket.tokens], bucket, layer.kind.window)
            for (cache, own_buckets), own in zip(reads, queries.split(layer.sizes), strict=True)
            for bucket in own_buckets
        ]
        attended = layer.linear(_joined(parts), "output")
        hidden = self._norm(attended, layer.shared.attention_out_norm).add_(hidden)
        normed = self._norm(hidden, layer.shared.mlp_norm)
        gate, up = layer.linear(normed, "gate_up").chunk(2, 1)
        inner = self.arithmetic.activated(gate, self.architecture.activation).mul_(up)
        out = layer.linear(inner, "down")
        return self._norm(out, layer.shared.mlp_out_norm).add_(hidden)

    def _attend(
        self, cache: torch.Tensor, queries: torch.Tensor, bucket: Bucket, window: int
    ) -> torch.Tensor:
        """Attend within a bucket: queries [T, N H] -> [T, N H]."""
        shape = self.architecture
        if bucket.cells is not None:
            cells = queries.new_zeros(bucket.height * bucket.width, queries.shape[1])
            queries = cells.index_copy_(0, bucket.cells, queries)
        folded = queries.view(bucket.height, bucket.width, shape.heads, shape.head_dim)
        read, slots = cache[:, :, :, : bucket.context], bucket.slots
        rows = read[slots] if isinstance(slots, slice) else read.index_select(0, slots)
        keys, values = rows.unbind(1)  # [B, K, L, H]
        attended = self.arithmetic.attention(
            folded.transpose(1, 2),
            keys,
            values,
            bucket.masks[window],
            # Bits of "exact" arithmetic depend on this bound. It is the same in all calls, and not
            # that of this bucket, so the bits of a context do not depend on the rest of the batch.
            max_context=self.max_tokens,
            scale=shape.query_scale,
        )
        flat = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        return flat if bucket.cells is None else flat.index_select(0, bucket.cells)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Apply RMS norm with the model's epsilon; without a weight, return the argument."""
        if weight is None:
            return hidden
        return self.arithmetic.normed(hidden, self.architecture.norm_epsilon, weight)


@torch.inference_mode()
def forward_together(policies: Sequence[PolicyForward]) -> list[torch.Tensor]:
    """Compute one forward of several policies; store keys and values, and return logits.

    Args:
        policies: What each policy computes. Those with the same matrices are neighbours. All
            have the same embedding, norms and LM head.

    Returns:
        Logits of each policy: float32 [W, V], or [W, U].
    """
    model, count = policies[0].model, len(policies)
    embedded = [each.model._embed(each.tokens, each.rows) for each in policies]
    hidden = _joined([each for each, _, _ in embedded])
    angles = {
        rotation: _joined([each[rotation] for _, each, _ in embedded])
        for rotation in embedded[0][1]
    }
    sizes = [len(each.tokens) for each in policies]
    by_policy = [each.model._layers(each.tokens) for each in policies]
    kinds = model.architecture.layer_kinds
    *layers, last_layer = (
        JointLayer(one, sizes, kind) for *one, kind in zip(*by_policy, kinds, strict=True)
    )
    bucket_lists = [buckets(each.rows, model.windows) if layers else [] for each in policies]
    caches = list(zip(*(each.model._cache for each in policies), strict=True))
    cache_rows, copies = [each for *_, each in embedded], [each.copies for each in policies]

    def store(layer: JointLayer, number: int) -> torch.Tensor:
        writes = list(zip(caches[number], cache_rows, copies, strict=True))
        return model._store(layer, writes, hidden, angles)

    for number, layer in enumerate(layers):
        qkv = store(layer, number)
        reads = list(zip(caches[number], bucket_lists, strict=True))
        hidden = model._block(layer, reads, hidden, qkv)
    # Later forwards need the last layer's keys and values of all tokens. The rest of that layer is
    # needed only for the tokens whose logits are returned.
    qkv = store(last_layer, -1)
    ends = [each.ends() for each in policies]
    num_logits = [len(each) for each in ends]
    if not any(num_logits):
        return [hidden.new_zeros(0, model.architecture.vocabulary)] * count
    begins = np.cumsum([0, *sizes[:-1]])
    last = torch.from_numpy(np.concatenate([b + own for b, own in zip(begins, ends, strict=True)]))
    hidden, qkv = hidden.index_select(0, last), qkv.index_select(0, last)
    bucket_lists = [
        buckets(each.rows.take(each.logit_rows).last_tokens(), {kinds[-1].window}) if num else []
        for each, num in zip(policies, num_logits, strict=True)
    ]
    # The layer is built again for the tokens that remain, which may all have the same role.
    last_layer = JointLayer(
        tuple(
            each.model._layers(each.tokens[own])[-1]
            for each, own in zip(policies, ends, strict=True)
        ),
        num_logits,
        kinds[-1],
    )
    reads = list(zip(caches[-1], bucket_lists, strict=True))
    hidden = model._block(last_layer, reads, hidden, qkv)
    head = model.weights.head
    if all(each.columns is None for each in policies):
        return list(model._logits(hidden, head).split(num_logits))
    return [
        model._logits(own, head if each.columns is None else head[torch.from_numpy(each.columns)])
        for each, own in zip(policies, hidden.split(num_logits), strict=True)
    ]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows; a single part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _map_zeros(*shape: int) -> mmap.mmap:
    """Map memory for a float32 array of this shape, filled with zeros.

    The system allocates a page when it is first written. A slot therefore takes the memory of its
    longest sequence so far, not of the longest possible.
    """
    size = math.prod(shape) * torch.float32.itemsize
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
