"""Read a model's weights from safetensors files, and arrange them for the forward.

Matrices with the same input are concatenated. Within each head, the dimensions `j` and `j + H / 2`,
which rotate together, are moved next to each other, so that a rotation is one complex product.
Queries and keys are reordered in the same way, so their products do not change.

Shapes: `V` vocabulary, `D` hidden, `N` heads, `K` key-value heads, `H` head size, `F` MLP size,
`R` sum of the ranks of the adapted parts of a matrix, `I` input size of that matrix.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from mage_async.completion import SECOND_ROLE
from mage_async.errors import PolicyError, UnreadableWeights
from mage_async.inference.architecture import Architecture
from mage_async.inference.arithmetic import ARITHMETICS, Arithmetic
from mage_async.policy.model_files import weight_files

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layer:
    """Hold one transformer layer: norms and biases in float32, matrices as `Arithmetic.matrix`
    prepares them. A norm or bias that the model's family does not have is None.
    """

    input_norm: torch.Tensor | None = None
    """[D]: of the input of attention."""
    qkv: torch.Tensor
    """[(N + 2K) H, D]"""
    qkv_bias: torch.Tensor | None
    head_norms: torch.Tensor | None
    """[N + K, H]: of queries, then of keys."""
    output: torch.Tensor
    """[D, N H]"""
    output_bias: torch.Tensor | None
    attention_out_norm: torch.Tensor | None = None
    """[D]: of what attention adds to the residual stream."""
    mlp_norm: torch.Tensor | None = None
    """[D]: of the input of the MLP."""
    gate_up: torch.Tensor
    """[2F, D]"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """[D, F]"""
    down_bias: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None = None
    """[D]: of what the MLP adds to the residual stream."""

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield all tensors."""
        named = (getattr(self, each.name) for each in fields(self))
        return (part for part in named if part is not None)


ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
"""Linear layers whose rows are in the order of `paired`."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Endings of the published names of an adapter's two matrices, after the name of their layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Hold the adapters of one matrix of a layer, unmerged; prepared by `Arithmetic.matrix`."""

    down: torch.Tensor
    """[R, I]: those of all adapted parts of the matrix, one after the other."""
    ups: tuple[tuple[slice, slice, torch.Tensor], ...]
    """For each part: its rows in the matrix, those in `down`, and the scaled second matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Hold all weights of a model in float32; LM head and layers are prepared by `Arithmetic`.

    Weights are never changed in place: an update replaces the whole object.
    """

    embedding: torch.Tensor
    """[V, D]"""
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    """[D]"""
    head: torch.Tensor
    """[V, D]: LM head; the embedding itself if they are tied and the arithmetic is not exact."""
    num_parameters: int
    """Number of parameters of the first role, of a tied LM head once."""
    second_role: tuple[Layer, ...] = ()
    """Layers of the policy's second role (such as the executor beside a planner;
    `trajectory.SecondRole`); empty if it shares all of them with the first role."""
    adapters: tuple[Mapping[str, Adapter], ...] = ()
    """Adapters of each layer that are not merged, by the name of the matrix; empty: there are none.
    """

    def num_bytes(self) -> int:
        """Return the memory of all tensors, in bytes; of tensors in the same memory once."""
        parts = [self.embedding, self.norm, self.head]
        for layer in self.layers + self.second_role:
            parts += layer.parts()
        for adapters in self.adapters:
            for adapter in adapters.values():
                parts += [adapter.down, *(up for _, _, up in adapter.ups)]
        return sum({part.data_ptr(): part.nbytes for part in parts}.values())


def read_weights(
    path: Path, architecture: Architecture, arithmetic: Arithmetic = ARITHMETICS["float32"]
) -> Weights:
    """Read a safetensors file, or all files of a model directory.

    float32 tensors that need no preparation stay mapped from the file: processes of one machine
    share these pages, which remain valid if the file is deleted. A published file must therefore be
    replaced as a whole, and never written into.

    Raises:
        PolicyError: a file cannot be read, or holds the tensors of another model, or a value that
            is NaN or infinite.
    """
    named = _finite(read_tensors(path), str(path))
    return as_weights(named, architecture, str(path), arithmetic, copies=False)


def _finite(
    named: Iterable[tuple[str, torch.Tensor]], where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors; raise a `PolicyError` if a value is NaN or infinite."""
    for name, tensor in named:
        # The sum is finite only if all values are, and needs no memory as `isfinite` of all would.
        if not tensor.sum(dtype=torch.float64).isfinite():
            raise PolicyError(
                f"{where}: {name} holds values that are NaN or infinite, as training that diverged "
                "or a conversion to 16 bits leaves them: take another copy of the model"
            )
        yield name, tensor


def as_weights(
    named: Iterable[tuple[str, torch.Tensor]],
    architecture: Architecture,
    where: str,
    arithmetic: Arithmetic = ARITHMETICS["float32"],
    *,
    copies: bool = True,
    like: Weights | None = None,
) -> Weights:
    """Arrange the tensors of a model, by their HuggingFace names.

    Args:
        where: Source of the tensors, with which errors begin.
        copies: Whether to copy every tensor, because the source may change later.
        like: Weights with the same embedding, last norm and LM head, which are taken from there.

    Raises:
        PolicyError: the tensors are those of another model.
    """
    tensors = {
        name: tensor.clone() if copies else tensor
        for name, tensor in named
        if not name.endswith("rotary_emb.inv_freq")
    }
    try:
        weights = _assemble(tensors, architecture, arithmetic, like)
    except _WrongTensor as error:
        raise PolicyError(
            f"{where}: weights of another model than config.json's: {error}"
        ) from error
    if tensors:
        first, rest = sorted(tensors)[:3], " …" if len(tensors) > 3 else ""
        raise PolicyError(f"{where}: tensors this model does not have: {', '.join(first)}{rest}")
    return weights


def as_adapters(
    named: Tensors, scale: float, shape: Architecture, arithmetic: Arithmetic
) -> tuple[dict[str, Adapter], ...]:
    """Arrange published adapters for `Weights.adapters`.

    Args:
        named: Both matrices of each adapter, by their published names; they fit the model.
    """

    def adapter(number: int, sizes: Mapping[str, int]) -> Adapter | None:
        """Return the adapters of one matrix of layer `number`; None if no part of it has one."""
        downs, ups, first, rank = [], [], 0, 0
        for part, size in sizes.items():
            stem = f"model.layers.{number}.{part}"
            if stem + UP in named:
                down, up = named[stem + DOWN], scale * named[stem + UP]
                up = paired(up, shape.head_dim) if part in ROTATED else up
                own = slice(rank, rank + len(down))
                ups.append((slice(first, first + size), own, arithmetic.matrix(up)))
                downs.append(down)
                rank = own.stop
            first += size
        return Adapter(arithmetic.matrix(torch.cat(downs)), tuple(ups)) if downs else None

    layers = (
        {name: adapter(number, sizes) for name, sizes in _parts(shape).items()}
        for number in range(shape.layers)
    )
    return tuple({name: one for name, one in each.items() if one} for each in layers)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of every tensor, by name, from the headers of a file or model directory.

    A truncated file is found, because its size is compared with its header.

    Tensors that not all files of a model hold are left out: the LM head, which may be tied to the
    embedding, and the frequencies of the rotation, which old files hold.

    Raises:
        UnreadableWeights: a file cannot be read.
        PolicyError: the directory's index cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        with reading(file), safe_open(file, "pt") as tensors:
            names: list[str] = tensors.keys()
            for name in names:
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return {
        name: shape
        for name, shape in shapes.items()
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    }


def check_shapes(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the tensors of a file or model directory have the expected names and shapes.

    Args:
        expected: Shapes by name, as `tensor_shapes` returns them.

    Raises:
        UnreadableWeights: a file cannot be read.
        PolicyError: the directory's index cannot be read; or the weights are another model's, and
            the text names the first wrong tensor.
    """
    found = tensor_shapes(path)
    for name in sorted(expected.keys() | found.keys()):
        ours, theirs = expected.get(name), found.get(name)
        if ours != theirs:
            raise PolicyError(
                f"{path}: weights of another model: {name} is {theirs}, and should be {ours}"
            )


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a safetensors file or model directory; mapped, not copied.

    Raises:
        UnreadableWeights: a file cannot be read.
        PolicyError: the directory's index cannot be read.
    """
    for file in weight_files(path):
        with reading(file):
            tensors = load_file(file)
        yield from tensors.items()


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn errors of reading a file of weights into `UnreadableWeights`."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise UnreadableWeights(f"{file}: cannot be read as safetensors: {error}") from error


class _WrongTensor(Exception):
    """A tensor is not that of the architecture.

    It is no RuntimeError, as torch's are, such as that for want of memory.
    """


def _assemble(
    tensors: Tensors, shape: Architecture, arithmetic: Arithmetic, like: Weights | None
) -> Weights:
    """Move all tensors out of `tensors` into weights."""
    second_role = _second_role_layers(tensors, shape, arithmetic)
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    embedding = _take(tensors, "model.embed_tokens.weight", shape.vocabulary, shape.hidden_size)
    is_tied = shape.is_tied if shape.is_tied is not None else "lm_head.weight" not in tensors
    if is_tied:
        head, copy = embedding, tensors.pop("lm_head.weight", None)
        num_parameters -= 0 if copy is None else copy.numel()
    else:
        head = _take(tensors, "lm_head.weight", shape.vocabulary, shape.hidden_size)
    layers = _layers(tensors, shape, arithmetic)
    norm = _norm(tensors, "model.norm", shape)
    if like is not None:
        return Weights(like.embedding, layers, like.norm, like.head, num_parameters, second_role)
    wide = embedding.float()
    head = arithmetic.head(wide if is_tied else head.float())
    return Weights(wide, layers, norm, head, num_parameters, second_role)


def _second_role_layers(
    tensors: Tensors, shape: Architecture, arithmetic: Arithmetic
) -> tuple[Layer, ...]:
    """Move the second role's tensors into its layers, which take the rest from the first role."""
    names = [name for name in tensors if name.startswith(SECOND_ROLE)]
    own = {name.removeprefix(SECOND_ROLE): tensors.pop(name) for name in names}
    if strange := own.keys() - tensors.keys():
        raise _WrongTensor(f"the first role has no {min(strange)}")
    if not own:
        return ()
    left = tensors | own
    layers = _layers(left, shape, arithmetic)
    if unused := own.keys() & left.keys():
        raise _WrongTensor(f"the second role has its own {min(unused)}, which belongs to no layer")
    return layers


def _layers(tensors: Tensors, shape: Architecture, arithmetic: Arithmetic) -> tuple[Layer, ...]:
    """Move the tensors of all layers into `Layer` objects."""
    return tuple(_layer(tensors, number, shape, arithmetic) for number in range(shape.layers))


def _parts(shape: Architecture) -> dict[str, dict[str, int]]:
    """Return, for each matrix of a layer, its linear layers with their numbers of outputs."""
    heads, kv_heads = (each * shape.head_dim for each in (shape.heads, shape.kv_heads))
    return {
        "qkv": {
            "self_attn.q_proj": heads,
            "self_attn.k_proj": kv_heads,
            "self_attn.v_proj": kv_heads,
        },
        "output": {"self_attn.o_proj": shape.hidden_size},
        "gate_up": {"mlp.gate_proj": shape.mlp_size, "mlp.up_proj": shape.mlp_size},
        "down": {"mlp.down_proj": shape.hidden_size},
    }


def _layer(tensors: Tensors, number: int, shape: Architecture, arithmetic: Arithmetic) -> Layer:
    """Move the tensors of one layer into a `Layer`."""
    stem, hidden, parts = f"model.layers.{number}", shape.hidden_size, _parts(shape)

    def joined(name: str, ending: str, *width: int) -> torch.Tensor:
        """Concatenate the weights, or the biases, of a matrix's linear layers."""
        taken = []
        for part, size in parts[name].items():
            tensor = _take(tensors, f"{stem}.{part}.{ending}", size, *width)
            taken.append(paired(tensor, shape.head_dim) if part in ROTATED else tensor)
        # One that is alone is not copied, so that it stays mapped from its file.
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def matrix(name: str, width: int) -> torch.Tensor:
        return arithmetic.matrix(joined(name, "weight", width))

    def bias(name: str, is_there: bool) -> torch.Tensor | None:
        return joined(name, "bias").float() if is_there else None

    norms = {own: _norm(tensors, f"{stem}.{name}", shape) for own, name in shape.norms.items()}
    return Layer(
        qkv=matrix("qkv", hidden),
        qkv_bias=bias("qkv", shape.has_qkv_bias),
        head_norms=_head_norms(tensors, stem, shape) if shape.query_key_norms != "none" else None,
        output=matrix("output", shape.heads * shape.head_dim),
        output_bias=bias("output", shape.has_output_bias),
        gate_up=matrix("gate_up", hidden),
        gate_up_bias=bias("gate_up", shape.has_mlp_bias),
        down=matrix("down", shape.mlp_size),
        down_bias=bias("down", shape.has_mlp_bias),
        **norms,
    )


def _norm(tensors: Tensors, name: str, shape: Architecture) -> torch.Tensor:
    """Return the factors of a norm over the residual stream: float32 [D]."""
    return _norm_factors(_take(tensors, f"{name}.weight", shape.hidden_size), shape)


def _norm_factors(weight: torch.Tensor, shape: Architecture) -> torch.Tensor:
    """Return what a norm with this weight multiplies by, in float32."""
    # Without an offset, a float32 weight stays mapped from its file.
    return weight.float() + shape.norm_offset if shape.norm_offset else weight.float()


def _head_norms(tensors: Tensors, stem: str, shape: Architecture) -> torch.Tensor:
    """Return the factors of the norms of queries, then of keys: [N + K, H]."""
    parts = []
    for part, heads in (("q", shape.heads), ("k", shape.kv_heads)):
        num_rows = heads if shape.query_key_norms == "all" else 1
        name, size = f"{stem}.self_attn.{part}_norm.weight", num_rows * shape.head_dim
        weight = paired(_take(tensors, name, size), shape.head_dim)
        parts.append(_norm_factors(weight, shape).view(num_rows, -1).expand(heads, -1))
    return torch.cat(parts)


def paired(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head from 0, 1, … to 0, H/2, 1, H/2 + 1, …"""
    halves: torch.Tensor = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def unpaired(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo `paired`."""
    pairs: torch.Tensor = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _take(tensors: Tensors, name: str, *shape: int) -> torch.Tensor:
    """Remove a tensor from `tensors`, and return it.

    Raises:
        _WrongTensor: the tensor is missing, or has another shape.
    """
    if name not in tensors:
        raise _WrongTensor(f"{name} is missing")
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise _WrongTensor(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
    return tensor
