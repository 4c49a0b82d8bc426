"""Read the architecture of a model from its HuggingFace `config.json`.

transformers is not imported, because its import takes seconds per process. A setting that the
embedded engine does not implement is refused: a model with a wrong rotation, or without its sliding
window, would compute wrong log-probs without an error.

The families are Llama's relatives. They differ in where a layer normalises (before attention and
MLP, after them, or both), in the activation of the MLP, and in what a token of a layer sees.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from mage_async.errors import PolicyError
from mage_async.policy.model_files import SERVED, read_config

ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}
"""Values of `rope_type`, with the keys that each needs, in the order of the fields of `Rotation`.
`linear` interpolates the positions of all dimensions, `llama3` only of those that turn slowly."""
GEMMA = ("gemma", "gemma3_text")
"""Values of `model_type` of Gemma's families: they scale embeddings, and their norms multiply by
`1 + weight`."""
Activation = Literal["silu", "gelu_pytorch_tanh"]
"""Activation of an MLP's gate, by transformers' name."""
NORMS_BEFORE = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Norms of most families: field of `weights.Layer` to name in a file of weights."""
NORMS = {
    "gemma3_text": {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "olmo2": {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
"""Norms of the other families."""
DEFAULT_ROPE_BASES = {"smollm3": 2_000_000.0}
"""Base of the rotation of families whose default is not 10,000."""
LEAST_VALUES = dict.fromkeys(
    (
        *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("no_rope_layer_interval", "sliding_window_pattern", "_sliding_window_pattern"),
    ),
    1,
) | {"sliding_window": 0, "max_window_layers": 0}
"""Least values of the keys of `config.json` that hold whole numbers."""
DEFAULT_WINDOWS = {"gemma3_text": 4096, "mistral": 4096}
"""Sliding window in tokens of families that have one by default."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Describe rotary position embedding: base of the angles, and scaling for long contexts."""

    kind: str
    """One of `ROPE_TYPES`."""
    base: float
    factor: float = 1.0
    """Factor by which rotations are slowed down."""
    low_frequency_factor: float = 1.0
    """With `llama3`, dimensions that make at most this many turns within `original_positions` are
    slowed down by the whole `factor`.
    """
    high_frequency_factor: float = 4.0
    """With `llama3`, dimensions that make at least this many turns are not slowed down; those in
    between are slowed down by less than `factor`."""
    original_positions: int = 8192
    """Context length of the model before its context was extended."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Describe what the attention of a layer sees."""

    rotation: Rotation | None
    """Rotary position embedding; None: queries and keys are not rotated."""
    window: int = 0
    """Number of tokens that a token sees, itself and those before it; 0: all."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Hold shapes and options of a decoder of the Llama family and its relatives."""

    model_type: str
    vocabulary: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    norm_epsilon: float
    max_positions: int
    layer_kinds: tuple[LayerKind, ...]
    """What attention sees, by layer."""
    activation: Activation
    norms: Mapping[str, str]
    """Names of a layer's norms in a file of weights, by their names in `Layer`."""
    norm_offset: float
    """Number that is added to the weights of norms."""
    query_scale: float
    """Factor of the products of queries and keys."""
    embedding_scale: float
    """Factor of embeddings."""
    is_tied: bool | None
    """Whether the LM head is the embedding; None if the file does not say."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    query_key_norms: Literal["none", "head", "all"]
    """What queries and keys are normalised over: each head, or all heads of a token together."""


def read_architecture(directory: Path, max_tokens: int = 0) -> Architecture:
    """Read a model directory's `config.json`, of transformers 4 or 5.

    Args:
        max_tokens: Length of the longest context that is to be computed.

    Raises:
        PolicyError: there is no such file, the embedded engine does not serve the model, or the
            model was made for shorter contexts.
    """
    found = architecture_of(read_config(directory), directory / "config.json")
    if max_tokens > found.max_positions:
        raise PolicyError(
            f"{directory}: was made for {found.max_positions} positions, but engine.max_tokens is "
            f"{max_tokens}; lower it"
        )
    return found


def architecture_of(written: dict[str, Any], file: Path) -> Architecture:
    """Return the architecture that a configuration of transformers describes.

    Args:
        file: source of the configuration, with which errors begin.

    Raises:
        PolicyError: the embedded engine does not serve the model.
    """
    config = {name: value for name, value in written.items() if value is not None}
    _refuse_unknown(file, config)
    _check_values(file, config)
    # A window that is null is no window; one that is left out has the family's default.
    if "sliding_window" not in written and config["model_type"] in DEFAULT_WINDOWS:
        config["sliding_window"] = DEFAULT_WINDOWS[config["model_type"]]
    try:
        return _architecture(file, config)
    except KeyError as error:
        raise PolicyError(f"{file}: has no {error}") from error


def _architecture(file: Path, config: dict[str, Any]) -> Architecture:
    """Return the architecture that a `config.json` describes."""
    kind, heads = config["model_type"], config["num_attention_heads"]
    has_bias = bool(config.get("attention_bias", False))
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    is_gemma = kind in GEMMA
    query_size = config.get("query_pre_attn_scalar", 256) if kind == "gemma3_text" else head_dim
    return Architecture(
        model_type=kind,
        vocabulary=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp_size=config["intermediate_size"],
        norm_epsilon=config.get("rms_norm_eps", 1e-5 if kind == "olmo2" else 1e-6),
        max_positions=config["max_position_embeddings"],
        layer_kinds=layer_kinds(file, config),
        activation=_activation(config),
        norms=NORMS.get(kind, NORMS_BEFORE),
        # A norm of Gemma multiplies by 1 + weight.
        norm_offset=1.0 if is_gemma else 0.0,
        query_scale=query_size**-0.5,
        embedding_scale=config["hidden_size"] ** 0.5 if is_gemma else 1.0,
        is_tied=config.get("tie_word_embeddings"),
        # transformers fixes the biases of qwen2 in its code: on queries, keys and values, and
        # nowhere else.
        has_qkv_bias=has_bias or kind == "qwen2",
        has_output_bias=has_bias and kind != "qwen2",
        has_mlp_bias=bool(config.get("mlp_bias", False)) and kind in ("llama", "smollm3"),
        query_key_norms=_query_key_norms(kind),
    )


def _query_key_norms(kind: str) -> Literal["none", "head", "all"]:
    """Return what a family normalises queries and keys over."""
    if kind in ("qwen3", "gemma3_text"):
        return "head"
    return "all" if kind == "olmo2" else "none"


def _activation(config: dict[str, Any]) -> Activation:
    """Return the activation of the MLP, by transformers' name; gemma3 has its own key for it."""
    kind = config["model_type"]
    key = "hidden_activation" if kind == "gemma3_text" else "hidden_act"
    activation: Activation = config.get(key, "gelu_pytorch_tanh" if kind in GEMMA else "silu")
    return activation


def _not_served(file: Path, what: str, known: str) -> PolicyError:
    """Return the error for a setting that the embedded engine does not implement."""
    return PolicyError(
        f"{file}: {what} is not served by the embedded engine, which knows {known}; set "
        'engine.kind = "sglang"'
    )


def _refuse_unknown(file: Path, config: dict[str, Any]) -> None:
    """Raise a `PolicyError` if the embedded engine does not implement a setting of the model."""
    kind = config.get("model_type")
    if kind not in SERVED:
        raise _not_served(file, f"model_type {kind!r}", ", ".join(SERVED))
    known = get_args(Activation)
    if (activation := _activation(config)) not in known:
        raise _not_served(file, f"activation {activation!r}", ", ".join(known))
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    if unknown := [key for key in (*caps, "use_bidirectional_attention") if config.get(key)]:
        raise _not_served(file, f"{unknown[0]} = {config[unknown[0]]}", "models without")
    if config.get("quantization_config") is not None:
        raise PolicyError(
            f"{file}: the embedded engine serves no quantised weights; give it the original model"
        )


def _check_values(file: Path, config: dict[str, Any]) -> None:
    """Raise a `PolicyError` if a count, a table or a list is something else."""
    for key, value in config.items():
        least = LEAST_VALUES.get(key)
        if least is not None:
            expected = f"a whole number of at least {least}"
            is_right = isinstance(value, int) and value >= least
        elif key in ("rope_scaling", "rope_parameters"):
            expected, is_right = "a table", isinstance(value, dict)
        elif key in ("layer_types", "no_rope_layers"):
            expected, is_right = "a list", isinstance(value, list)
        else:
            continue
        if not is_right:
            raise PolicyError(f"{file}: {key} must be {expected}, got {value!r}: correct it")


def layer_kinds(file: Path, config: dict[str, Any]) -> tuple[LayerKind, ...]:
    """Return what the attention of each layer sees.

    Raises:
        PolicyError: a layer has a rotation or a kind of attention that the engine does not know, or
            the configuration does not say what all layers are.
    """
    count, kind = config["num_hidden_layers"], config["model_type"]
    windows = _windows(file, config, count)
    if kind == "gemma3_text":
        return tuple(LayerKind(_gemma3_rotation(file, config, each), each) for each in windows)
    rotation = read_rotation(file, config)
    # In smollm3, each layer whose number, counted from 1, is a multiple of the interval has no
    # rotation. In other families every layer rotates: no number is a multiple of `count + 1`.
    interval = config.get("no_rope_layer_interval", 4) if kind == "smollm3" else count + 1
    has_rotation = [(number + 1) % interval != 0 for number in range(count)]
    if kind == "smollm3" and "no_rope_layers" in config:
        # Despite its name, 1 stands for a layer that does rotate. transformers ignores entries
        # beyond the last layer.
        has_rotation = config["no_rope_layers"][:count]
        _check_count(file, "no_rope_layers", has_rotation, count)
    return tuple(
        LayerKind(rotation if rotates else None, window)
        for rotates, window in zip(has_rotation, windows, strict=True)
    )


def _check_count(file: Path, key: str, values: Sequence[object], count: int) -> None:
    """Raise a `PolicyError` unless a list of the configuration has one value for each layer."""
    if len(values) != count:
        raise PolicyError(
            f"{file}: {key} has {len(values)} values, and num_hidden_layers is {count}: it must "
            "have one for each layer"
        )


def _windows(file: Path, config: dict[str, Any], count: int) -> list[int]:
    """Return the sliding window of each layer in tokens; 0: it has none."""
    kind, window = config["model_type"], config.get("sliding_window") or 0
    if kind in ("qwen2", "qwen3", "smollm3") and not config.get("use_sliding_window", False):
        window = 0
    if kind == "mistral":  # which has no `layer_types`
        return [window] * count
    written = config.get("layer_types")
    if written is not None:
        _check_count(file, "layer_types", written, count)
    known = ("full_attention", "sliding_attention")
    if strange := set(written or ()).difference(known):
        raise _not_served(file, f"a layer of type {min(strange)!r}", " and ".join(known))
    if written is None and kind == "gemma3_text":
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
        written = [
            "sliding_attention" if (number + 1) % pattern else "full_attention"
            for number in range(count)
        ]
    if written is None and kind in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return [window if number >= first else 0 for number in range(count)]
    if written is None and window:
        raise PolicyError(f"{file}: a sliding window needs layer_types, which says its layers")
    slides = [name == "sliding_attention" for name in written or ["full_attention"] * count]
    if any(slides) and not window:
        raise PolicyError(f"{file}: layers with sliding attention need sliding_window in tokens")
    return [window if each else 0 for each in slides]


def _gemma3_rotation(file: Path, config: dict[str, Any], window: int) -> Rotation:
    """Return the rotation of a layer of gemma3, whose layers with and without a window differ."""
    name = "sliding_attention" if window else "full_attention"
    base = (
        config.get("rope_local_base_freq", 10_000.0)
        if window
        else config.get("rope_theta", 1_000_000.0)
    )
    tables = config.get("rope_parameters") or {}
    if not all(isinstance(table, dict | None) for table in tables.values()):
        raise PolicyError(
            f"{file}: rope_parameters of gemma3_text must be two tables, sliding_attention and "
            f"full_attention, got {tables}: write a table for each kind of layer"
        )
    scaling = {} if window else config.get("rope_scaling") or {}
    table = {"rope_theta": base, **scaling, **(tables.get(name) or {})}
    return read_rotation(file, {"model_type": "gemma3_text", "rope_parameters": table})


def read_rotation(file: Path, config: dict[str, Any]) -> Rotation:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4.

    Raises:
        PolicyError: the engine does not know the rotation, or a number of it is missing or wrong.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    # transformers 5 has a table for each kind of layer where layers rotate differently.
    is_nested = any(isinstance(value, dict) for value in scaling.values())
    if kind not in ROPE_TYPES or partial != 1.0 or is_nested:
        known = f"whole heads that are turned by {', '.join(ROPE_TYPES)}"
        raise _not_served(file, f"rotary positions {scaling}", known)
    base = config.get("rope_theta", DEFAULT_ROPE_BASES.get(config["model_type"], 10_000.0))
    # As in transformers, only the base has a default.
    numbers = {key: scaling.get(key) for key in ROPE_TYPES[kind]}
    numbers = {"rope_theta": scaling.get("rope_theta", base)} | numbers
    for key, value in numbers.items():
        if not isinstance(value, int | float) or value <= 0:
            raise PolicyError(
                f"{file}: {key} must be a number above 0 with rope_type {kind!r}, got {value!r}: "
                "correct it"
            )
    return Rotation(kind, *numbers.values())


def rotations(rotation: Rotation, head_dim: int, num_positions: int) -> torch.Tensor:
    """Compute the complex numbers that rotate pairs: complex64 [positions, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = _scaled(rotation, 1.0 / rotation.base**exponents)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _scaled(rotation: Rotation, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the frequencies, scaled for long contexts by the kind of rotation."""
    if rotation.kind == "default":
        return frequencies
    slow = frequencies / rotation.factor
    if rotation.kind == "linear":
        return slow
    low, high = rotation.low_frequency_factor, rotation.high_frequency_factor
    turns = rotation.original_positions * frequencies / (2 * math.pi)
    share_kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share_kept) * slow + share_kept * frequencies
