"""Compute the layers of Llama's family with adapters on a CPU, with hand-written backward passes.

transformers and peft compute such a model operation by operation. Here a layer is five functions
whose backward passes are written out. A step of SmolLM2-135M then takes 0.85 of the time on one
core (`bench/models/limits.py`):

- Adapters are merged into the frozen matrices once per update, so a layer multiplies by `W + s B A`
  alone. The gradients of `A` and `B` follow from the input of that product and the gradient of its
  output (`Matrix.gradients`).
- Matrices with the same input (queries, keys and values; gate and up) are one matrix.
- Attention is computed for one block of positions at a time. Scores of keys after the block, which
  a causal mask would hide, are not computed.

The operations and their types are those of the engine (`mage_async/inference/model.py`): matrices
and their operands have the model's type, sums along the residual stream are float32. The learner's
log-probs are therefore the engine's up to the order of sums.

A row of tokens holds several sequences, one after the other. They may share their first tokens, the
*opening*, which then stands once at the beginning of the row; every sequence attends to it
(`TokenRow` in `mage_async/learning/packing.py`).

Shapes: `T` tokens of the row, `D` hidden, `F` MLP size, `N` heads, `K` key-value heads, `H` head
size, `I` and `O` inputs and outputs of a matrix, `R` rank of an adapter; `S` sequences, `P` tokens
of the opening, `L` tokens after the opening in the longest sequence. `any` is `N` for queries and
outputs of attention, and `K` for keys and values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from mage_async.inference.architecture import Architecture, architecture_of, rotations
from mage_async.inference.weights import paired, unpaired
from mage_async.learning.attention import Boundaries, placed
from mage_async.learning.lora import adapted_layers, has_adapters, has_roles, merge
from mage_async.learning.packing import TokenRow

Gradients = tuple[Tensor | None, ...]
"""Result of a backward pass: for each argument of `forward` its gradient, or None."""
ATTRIBUTE = "merged_layers"
"""Name under which a model keeps its `MergedLayers`."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers this module computes, if they have no sliding window."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """Describe which rows of a `Matrix` one of the model's linear layers is."""

    layer: Any
    """torch's linear layer, or peft's with an adapter."""
    rows: slice
    head_dim: int
    """Size of a head, if rows are reordered for the rotary position embedding; 0: rows keep their
    order. The embedding combines each row of a head's first half with one of the second half. In
    the matrix the two rows are neighbours, so that a pair of outputs can be viewed as one complex
    number (`Folding.rotated`).
    """

    def ordered(self, tensor: Tensor) -> Tensor:
        """Bring rows of the layer, [O, ...], into the order of the matrix."""
        return paired(tensor, self.head_dim) if self.head_dim else tensor

    def original(self, tensor: Tensor) -> Tensor:
        """Bring rows of the matrix, [O, ...], into the order of the layer."""
        return unpaired(tensor, self.head_dim) if self.head_dim else tensor


class Matrix:
    """Multiply by linear layers with the same input as one matrix, [O, I], with their adapters
    merged into it.

    Args:
        layers: the linear layers, each with the size of the heads to reorder, or 0.
    """

    def __init__(self, layers: Sequence[tuple[Any, int]]) -> None:
        ends = torch.tensor([layer.weight.shape[0] for layer, _ in layers]).cumsum(0).tolist()
        parts = [
            LayerRows(layer, slice(end - layer.weight.shape[0], end), head_dim)
            for (layer, head_dim), end in zip(layers, ends, strict=True)
        ]
        self.adapted = [part for part in parts if hasattr(part.layer, "lora_A")]
        self.merged = torch.cat([part.ordered(part.layer.weight) for part in parts])
        """[O, I]: the frozen weights, plus the adapters once `merge` has been called."""
        biases = [part.layer.bias for part in parts]
        self.bias = None
        if biases[0] is not None:
            ordered = [part.ordered(one) for part, one in zip(parts, biases, strict=True)]
            self.bias = torch.cat(ordered).float()

    def adapters(self) -> list[Tensor]:
        """Return the trained tensors: `A` and `B` of each adapted part."""
        return [tensor for part in self.adapted for tensor in _adapter(part.layer)[:2]]

    @torch.no_grad()
    def merge(self, *, is_on: bool) -> None:
        """Merge the present adapters; with `is_on` false, restore the frozen matrix."""
        for part in self.adapted:
            weight = part.layer.weight
            whole = merge(part.layer, weight, 0) if is_on else weight
            self.merged[part.rows] = part.ordered(whole)

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply rows [T, I] of the matrix's type: [T, O], float32 if there is a bias."""
        out = functional.linear(rows, self.merged)
        return out if self.bias is None else out.float().add_(self.bias)

    def gradients(self, rows: Tensor, gradient: Tensor) -> Iterator[Tensor]:
        """Yield the gradients of `adapters`.

        With `y = x (W + s B A)^T` and the gradient `g` of `y`, the gradient of `A` is
        `s (g B)^T x`, and that of `B` is `s g^T (x A^T)`. The gradient of the whole matrix, [O, I],
        is never computed.

        Args:
            rows: [T, I]: the input of `multiply`.
            gradient: [T, O]: gradient of the output of `multiply`, in the matrix's type.
        """
        if not self.adapted:
            return
        downs = torch.cat([_adapter(part.layer)[0] for part in self.adapted]).to(rows.dtype)
        inner = functional.linear(rows, downs).split(
            [_adapter(part.layer)[0].shape[0] for part in self.adapted], 1
        )
        for part, part_inner in zip(self.adapted, inner, strict=True):
            _, up, scale = _adapter(part.layer)
            d_part = gradient[:, part.rows]
            d_inner = d_part @ part.ordered(up).to(d_part.dtype)
            yield (d_inner.T @ rows).float().mul_(scale)
            yield part.original((d_part.T @ part_inner).float().mul_(scale))


def _adapter(layer: Any) -> tuple[Tensor, Tensor, float]:
    """Return `A` [R, I], `B` [O, R] and the scale of a layer's only adapter."""
    ((name, down),) = layer.lora_A.items()
    return down.weight, layer.lora_B[name].weight, layer.scaling[name]


class NormedProduct(torch.autograd.Function):
    """RMS norm [T, D], then a matrix: [T, D] to [T, O]. The norm's weight is frozen."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float, matrix: Matrix, *adapters: Tensor
    ) -> Tensor:
        """Compute the product. `adapters` are those of `matrix`: autograd gives gradients only to
        tensors that are arguments.
        """
        normed, inverse = _normed(hidden, weight, epsilon)
        rows = normed.to(matrix.merged.dtype)
        ctx.save_for_backward(hidden, weight, inverse, rows, matrix.merged)
        ctx.matrix = matrix
        return matrix.multiply(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        hidden, weight, inverse, rows, merged = ctx.saved_tensors
        gradient = gradient.to(rows.dtype)
        d_hidden = None
        if ctx.needs_input_grad[0]:
            d_normed = (gradient @ merged).float()
            d_hidden = _norm_backward(d_normed, hidden, weight, inverse)
        return d_hidden, None, None, None, *ctx.matrix.gradients(rows, gradient)


class AddedProduct(torch.autograd.Function):
    """Apply a matrix, and add the residual: [T, I] and float32 [T, D] to float32 [T, D]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, residual: Tensor, matrix: Matrix, *adapters: Tensor
    ) -> Tensor:
        """Compute the sum. `adapters` are those of `matrix`, as in `NormedProduct`."""
        ctx.save_for_backward(rows, matrix.merged)
        ctx.matrix = matrix
        return residual + matrix.multiply(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        rows, merged = ctx.saved_tensors
        rounded = gradient.to(rows.dtype)
        return rounded @ merged, gradient, None, *ctx.matrix.gradients(rows, rounded)


class SwiGlu(torch.autograd.Function):
    """`silu(gate) * up`: [T, 2F] to [T, F]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product in `dtype`."""
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, 1)
        return functional.silu(gate.to(dtype)).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, 1)
        gate = gate.to(gradient.dtype)
        d_gate_up = gradient.new_empty(gate_up.shape)
        d_gate, d_up = d_gate_up.chunk(2, 1)  # views, which are filled below
        torch.mul(gradient, functional.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=d_gate)
        return d_gate_up, None


class HeadNorms(torch.autograd.Function):
    """RMS norm of every query and key: the first (N + K) H columns of float32 [T, (N + 2K) H]."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Compute the norms; `weight` is frozen, float32 [N + K, H]."""
        count, size = weight.shape
        heads = qkv[:, : count * size].float().unflatten(1, (count, size))
        normed, inverse = _normed(heads, None, epsilon)
        ctx.save_for_backward(heads, weight, inverse)
        return torch.cat((normed.mul_(weight).flatten(1), qkv[:, count * size :]), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        heads, weight, inverse = ctx.saved_tensors
        d_normed = gradient[:, : weight.numel()].float().view(heads.shape)
        # Cloned, because `_norm_backward` overwrites it.
        d_heads = _norm_backward(d_normed.clone(), heads, weight, inverse).flatten(1)
        return torch.cat((d_heads, gradient[:, weight.numel() :]), 1), None, None


@dataclass(frozen=True, slots=True, eq=False)
class Folding:
    """Describe a row to attention: its shapes, its sequences, and the angles of its positions.

    The row is *folded* for attention: each sequence is padded on the right to `L` positions, and
    the `N / K` queries of a position that share a key-value head become rows of one matrix. Under
    the causal mask the padding has no effect.
    """

    shape: Architecture
    """Architecture of the model: `heads` N, `kv_heads` K and `head_dim` H."""
    boundaries: Boundaries
    """Where the sequences of the row lie."""
    angles: Tensor
    """complex64 [T, 1, H / 2]"""
    dtype: torch.dtype
    """Type of the operands of the matrices; attention's forward is float32."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the attention weights of the sequences are kept for the backward pass."""
        count, length = self.boundaries.shape
        # A position sees the opening and, on average over the blocks, about half of its sequence.
        pairs = length * (self.boundaries.opening + (length + BLOCK) // 2)
        return count * self.shape.heads * pairs <= MOST_KEPT

    def split(self, qkv: Tensor) -> list[Tensor]:
        """[T, (N + 2K) H] -> queries [T, N, H], keys and values [T, K, H]."""
        heads = qkv.unflatten(1, (-1, self.shape.head_dim))
        return list(heads.split((self.shape.heads, self.shape.kv_heads, self.shape.kv_heads), 1))

    def rotated(self, qkv: Tensor, *, is_back: bool = False) -> Tensor:
        """Apply the rotary position embedding in place, to the queries and keys of float32
        [T, (N + 2K) H]; with `is_back`, undo it.
        """
        queries_keys = qkv[:, : (self.shape.heads + self.shape.kv_heads) * self.shape.head_dim]
        pairs = torch.view_as_complex(queries_keys.unflatten(1, (-1, self.shape.head_dim // 2, 2)))
        pairs.mul_(self.angles.conj() if is_back else self.angles)
        return qkv

    def folded(self, rows: Tensor) -> Tensor:
        """Fold the tokens after the opening: [T - P, any, H] -> [S K, L * any / K, H]"""
        return self._by_kv_head(placed(rows, self.boundaries.places, self.boundaries.shape))

    def unfolded(self, folded: Tensor) -> Tensor:
        """Undo `folded`: [S K, L * any / K, H] -> [T - P, any, H]"""
        rows = self._by_token(folded, self.boundaries.shape[1]).flatten(0, 1)
        return rows.index_select(0, self.boundaries.places)

    def opening(self, rows: Tensor) -> Tensor:
        """Fold the opening's tokens: [P, any, H] -> [K, P * any / K, H]"""
        return self._by_kv_head(rows[None])

    def unfolded_opening(self, folded: Tensor) -> Tensor:
        """Undo `opening`: [K, P * any / K, H] -> [P, any, H]"""
        return self._by_token(folded, self.boundaries.opening)[0]

    def _by_kv_head(self, rows: Tensor) -> Tensor:
        """Group heads by their key-value head: [S, L, any, H] -> [S K, L * any / K, H]"""
        grouped = rows.unflatten(2, (self.shape.kv_heads, -1)).transpose(1, 2)
        folded: Tensor = grouped.reshape(len(rows) * self.shape.kv_heads, -1, self.shape.head_dim)
        return folded

    def _by_token(self, folded: Tensor, length: int) -> Tensor:
        """Undo `_by_kv_head`: [S K, L * any / K, H] -> [S, L, any, H]"""
        shape = (-1, self.shape.kv_heads, length, folded.shape[1] // length, self.shape.head_dim)
        grouped = folded.reshape(shape)
        rows: Tensor = grouped.transpose(1, 2).flatten(2, 3)
        return rows


class Attention(torch.autograd.Function):
    """Rotate queries and keys, and attend inside each sequence: [T, (N + 2K) H] to [T, N H]."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, folding: Folding) -> Tensor:
        """Compute in float32, as the engine does."""
        heads = folding.split(folding.rotated(qkv.to(torch.float32, copy=True)))
        opening, length = folding.boundaries.opening, folding.boundaries.shape[1]
        own = [folding.folded(each[opening:]) for each in heads]
        parts, kept = [], []
        if opening:
            # The opening attends to itself, once for all sequences.
            shared = [folding.opening(each[:opening]) for each in heads]
            attended, _ = _attend(shared, opening)
            parts.append(folding.unfolded_opening(attended))
            kept += shared
            # Each sequence attends to a copy of the opening's keys and values before its own.
            count = folding.boundaries.shape[0]
            own[1:] = [
                torch.cat((each.repeat(count, 1, 1), after), 1)
                for each, after in zip(shared[1:], own[1:], strict=True)
            ]
        keeps = ctx.needs_input_grad[0] and folding.keeps_weights
        attended, weights = _attend(own, length, keeps=keeps)
        parts.append(folding.unfolded(attended))
        ctx.save_for_backward(*(each.to(folding.dtype) for each in (*kept, *own, *weights)))
        ctx.folding, ctx.qkv_dtype = folding, qkv.dtype
        return torch.cat(parts).flatten(1).to(folding.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        folding, kept = ctx.folding, list(ctx.saved_tensors)
        opening, length = folding.boundaries.opening, folding.boundaries.shape[1]
        # `kept` holds the queries, keys and values of the opening if there is one, then those of
        # the sequences, then the attention weights of each block of the sequences if `forward` kept
        # them.
        shared = [kept.pop(0) for _ in range(3)] if opening else []
        d_out = gradient.unflatten(1, (-1, folding.shape.head_dim))
        width = (folding.shape.heads + 2 * folding.shape.kv_heads) * folding.shape.head_dim
        d_qkv = gradient.new_empty((len(gradient), width), dtype=torch.float32)
        parts = folding.split(d_qkv)  # views of `d_qkv`
        d_own = _attend_backward(folding.folded(d_out[opening:]), kept[:3], length, kept[3:])
        for part, each in zip(parts, d_own, strict=True):
            # Keys and values begin with those of the opening, queries do not.
            after = each if each is d_own[0] else each[:, opening:]
            part[opening:] = folding.unfolded(after)
        if opening:
            d_opening = _attend_backward(folding.opening(d_out[:opening]), shared, opening)
            # Every sequence had a copy of the opening's keys and values: their gradients add up.
            for d_shared, each in zip(d_opening[1:], d_own[1:], strict=True):
                d_shared += each[:, :opening].unflatten(0, (-1, folding.shape.kv_heads)).sum(0)
            for part, each in zip(parts, d_opening, strict=True):
                part[:opening] = folding.unfolded_opening(each)
        return folding.rotated(d_qkv, is_back=True).to(ctx.qkv_dtype), None


BLOCK = 64
"""Number of positions whose attention is computed at once. They attend to the keys up to the last
of these positions, so most scores that a causal mask would hide are not computed."""
MOST_KEPT = 32 * 2**20
"""Largest number of attention weights that a layer keeps for its backward pass. If there are more,
the backward pass computes all of them again: their number grows with the square of a sequence's
length."""


def _attend(
    qkv: Sequence[Tensor], length: int, *, keeps: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Attend causally: the last position sees all keys.

    Args:
        qkv: queries [B, length * N / K, H], where the heads of one position are next to each other;
            keys [B, M, H], of which the last `length` belong to the queries' positions, and the
            earlier ones are seen by every position; values, of the keys' shape. B is `S K`, or K
            for the opening.
        keeps: whether to return the attention weights.

    Returns:
        Outputs, of the queries' shape; and, with `keeps`, the attention weights of each block,
        [B, positions of the block * N / K, keys that the block sees].
    """
    queries, keys, values = qkv
    attended, kept = torch.empty_like(queries), []
    for rows, num_keys in _rows_of_blocks(queries, keys, length):
        weights = _weights(queries[:, rows], keys[:, :num_keys], queries.shape[1] // length)
        torch.bmm(weights, values[:, :num_keys], out=attended[:, rows])
        if keeps:
            kept.append(weights)
    return attended, kept


def _rows_of_blocks(queries: Tensor, keys: Tensor, length: int) -> Iterator[tuple[slice, int]]:
    """Yield the rows of each block's queries, and the number of keys that the block sees."""
    per_position, before = queries.shape[1] // length, keys.shape[1] - length
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        yield slice(begin * per_position, end * per_position), before + end


def _weights(queries: Tensor, keys: Tensor, per_position: int) -> Tensor:
    """Return the attention weights of a block, whose last position sees all keys.

    Args:
        per_position: rows of `queries` that belong to one position.
    """
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(1, 2)
    width = queries.shape[1] // per_position
    # Only the block's own keys, the last ones, can come after a position of the block.
    later = scores.new_full((width, width), -torch.inf).triu_(1)
    scores[..., -width:] += later.repeat_interleave(per_position, 0)
    return torch.softmax(scores, -1)


def _attend_backward(
    gradient: Tensor, qkv: Sequence[Tensor], length: int, kept: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of `_attend`; those of keys and values are
    float32.

    Args:
        gradient: gradient of the outputs of `_attend`.
        kept: attention weights of each block; empty: they are computed again.
    """
    queries, keys, values = qkv
    per_position, scale = queries.shape[1] // length, queries.shape[-1] ** -0.5
    d_queries = torch.empty_like(queries)
    d_keys, d_values = (one.new_zeros(one.shape, dtype=torch.float32) for one in (keys, values))
    for number, (rows, num_keys) in enumerate(_rows_of_blocks(queries, keys, length)):
        block, visible = queries[:, rows], keys[:, :num_keys]
        weights = kept[number] if kept else _weights(block, visible, per_position)
        d_values[:, :num_keys] += weights.transpose(1, 2) @ gradient[:, rows]
        d_weights = gradient[:, rows] @ values[:, :num_keys].transpose(1, 2)
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        d_scores.mul_(scale)
        torch.bmm(d_scores, visible, out=d_queries[:, rows])
        d_keys[:, :num_keys] += d_scores.transpose(1, 2) @ block
    return d_queries, d_keys, d_values


def _normed(hidden: Tensor, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Apply RMS norm to [..., D]; also return the inverse root mean squares, [..., 1]."""
    normed, inverse = torch.ops.aten._fused_rms_norm(hidden, hidden.shape[-1:], weight, epsilon)
    return normed, inverse


def _norm_backward(gradient: Tensor, hidden: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of an RMS norm's input; overwrites `gradient`."""
    # With n = x / rms and y = w n, for g = w dy: dx = (g - n mean(g n)) / rms.
    direction = hidden * inverse
    gradient.mul_(weight)
    along = (gradient * direction).mean(-1, keepdim=True)
    return gradient.addcmul_(direction, along, value=-1).mul_(inverse)


@dataclass(frozen=True, slots=True, eq=False)
class MergedLayer:
    """Compute one layer: its matrices, and its frozen norms in float32."""

    input_norm: Tensor
    """[D]"""
    qkv: Matrix
    """[(N + 2K) H, D]"""
    head_norms: Tensor | None
    """[N + K, H]: norm weights of the query heads, then of the key heads; None if the model does
    not norm them."""
    output: Matrix
    """[D, N H]"""
    mlp_norm: Tensor
    """[D]"""
    gate_up: Matrix
    """[2F, D]"""
    down: Matrix
    """[D, F]"""

    @staticmethod
    def of(layer: Any, shape: Architecture) -> "MergedLayer":
        """Arrange the parts of transformers' layer."""
        attention, mlp, size = layer.self_attn, layer.mlp, shape.head_dim
        head_norms = None
        if shape.query_key_norms == "head":
            norms = (attention.q_norm.weight, attention.k_norm.weight)
            query, key = (paired(each.float(), size) for each in norms)
            rows = (query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1))
            head_norms = torch.cat(rows).detach()
        return MergedLayer(
            layer.input_layernorm.weight.detach().float(),
            Matrix([(attention.q_proj, size), (attention.k_proj, size), (attention.v_proj, 0)]),
            head_norms,
            Matrix([(attention.o_proj, 0)]),
            layer.post_attention_layernorm.weight.detach().float(),
            Matrix([(mlp.gate_proj, 0), (mlp.up_proj, 0)]),
            Matrix([(mlp.down_proj, 0)]),
        )

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the layer's four matrices."""
        return self.qkv, self.output, self.gate_up, self.down

    def forward(self, hidden: Tensor, folding: Folding, epsilon: float) -> Tensor:
        """Compute the layer: float32 [T, D]."""
        qkv = _normed_product(hidden, self.input_norm, epsilon, self.qkv)
        if self.head_norms is not None:
            qkv = HeadNorms.apply(qkv, self.head_norms, epsilon)
        hidden = _added_product(Attention.apply(qkv, folding), hidden, self.output)
        gate_up = _normed_product(hidden, self.mlp_norm, epsilon, self.gate_up)
        return _added_product(SwiGlu.apply(gate_up, folding.dtype), hidden, self.down)


def _normed_product(hidden: Tensor, norm: Tensor, epsilon: float, matrix: Matrix) -> Tensor:
    """Apply `NormedProduct` with the adapters of a matrix."""
    out: Tensor = NormedProduct.apply(hidden, norm, epsilon, matrix, *matrix.adapters())
    return out


def _added_product(rows: Tensor, residual: Tensor, matrix: Matrix) -> Tensor:
    """Apply `AddedProduct` with the adapters of a matrix."""
    out: Tensor = AddedProduct.apply(rows, residual, matrix, *matrix.adapters())
    return out


class MergedLayers:
    """Compute hidden states in float32 by a model's layers, with the adapters merged into their
    matrices, and hold the LM head. Each forward first merges the adapters again, if they have
    changed since the last one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        shape = architecture_of(model.config.to_dict(), Path(model.name_or_path or "the policy"))
        self._model, self._shape = model, shape
        self._layers = [MergedLayer.of(each, shape) for each in _layers(model)]
        self._norm = model.base_model.get_parameter("norm.weight").detach().float()
        self.head = model.get_output_embeddings().weight.detach().float()
        """float32 [V, D]; the engine computes logits in float32 too."""
        self._adapted = list(adapted_layers(model).values())
        self._adapters = [
            each for layer in self._layers for one in layer.matrices() for each in one.adapters()
        ]
        self._frozen = [weight for weight in model.parameters() if not weight.requires_grad]
        self._base = self._base_state()
        """State of the frozen weights that the layers were made of."""
        self._merged = (False, 0)
        """Whether adapters are merged into the matrices and, if so, the sum of torch's version
        counters of their tensors when they were merged (otherwise 0). A change of a tensor in place
        increases its counter.
        """
        (kind,) = set(shape.layer_kinds)
        assert kind.rotation is not None
        self._rotation = kind.rotation
        self._angles = rotations(self._rotation, shape.head_dim, 0)  # `_folding` adds positions

    def is_current(self) -> bool:
        """Return whether the frozen weights are those that the layers were made of."""
        return self._base == self._base_state()

    def _base_state(self) -> tuple[torch.dtype, int]:
        """Return the type of the frozen weights, and how often they were changed in place."""
        return self._model.dtype, sum(weight._version for weight in self._frozen)

    def hidden_states(self, row: TokenRow) -> Tensor:
        """Compute the input of the LM head: float32 [T, D]."""
        self._merge()
        hidden = self._model.get_input_embeddings()(row.tokens[0]).float()
        folding, epsilon = self._folding(row), self._shape.norm_epsilon
        for layer in self._layers:
            hidden = layer.forward(hidden, folding, epsilon)
        return functional.rms_norm(hidden, hidden.shape[-1:], self._norm, epsilon)

    def _merge(self) -> None:
        """Merge the adapters if their tensors have changed, or if they were switched on or off,
        since the last call.
        """
        is_on = not any(layer.disable_adapters for layer in self._adapted)
        present = (is_on, sum(tensor._version for tensor in self._adapters) if is_on else 0)
        if present != self._merged:
            for layer in self._layers:
                for matrix in layer.matrices():
                    matrix.merge(is_on=is_on)
            self._merged = present

    def _folding(self, row: TokenRow) -> Folding:
        """Describe a row to attention, with angles for its positions."""
        shape, num_positions = self._shape, int(row.positions.max()) + 1
        if num_positions > len(self._angles):
            self._angles = rotations(self._rotation, shape.head_dim, num_positions)
        angles = self._angles.index_select(0, row.positions[0])[:, None]
        return Folding(shape, row.boundaries, angles, self._model.dtype)


def merged_layers(model: PreTrainedModel) -> MergedLayers | None:
    """Return the model's layers with adapters merged. They are made at the first call, and again
    after the frozen weights have changed.

    Returns:
        None if the model has to be computed operation by operation, because it has no adapters or
        those of two roles, lies on a GPU, is in float16 or float64, is of a family that is not in
        `FAMILIES`, has a sliding window, or checkpoints activations.
    """
    if not has_adapters(model) or has_roles(model) or model.device.type != "cpu":
        return None
    if model.dtype not in (torch.float32, torch.bfloat16):
        return None
    has_window = getattr(model.config, "sliding_window", None)
    if model.config.model_type not in FAMILIES or has_window:
        return None
    if any(layer.gradient_checkpointing for layer in _layers(model)):
        return None
    made = getattr(model, ATTRIBUTE, None)
    if made is None or not made.is_current():
        made = MergedLayers(model)
        setattr(model, ATTRIBUTE, made)
    return made


def _layers(model: PreTrainedModel) -> Any:
    """Return transformers' layers."""
    return model.base_model.get_submodule("layers")
