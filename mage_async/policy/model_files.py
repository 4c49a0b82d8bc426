"""Read a model directory's `config.json` and safetensors headers, and refuse a model that cannot be
trained or served; without torch and without weights, so within a second.
"""

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from mage_async.config.schema import ADAPTER, MERGE
from mage_async.errors import PolicyError

HEAD = "lm_head.weight"
"""Name of the LM head's tensor."""
SERVED = ("gemma", "gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Values of `model_type` that the embedded engine serves."""
TRAINABLE = (*SERVED, "phi3")
"""Values of `model_type` that can be trained: a test compares the packed forward of each with
transformers' own. They are those that the embedded engine serves, and one more.
"""
# Packed training runs a model's layers with an attention of its own, and multiplies the last hidden
# states by the weight of the LM head. A model with further operations in its attention or after its
# LM head would run without an error, but its log-probs would not be those that an engine samples
# with. So such a model is refused, before any weight is read.
OFF = (None, False, 0, 0.0, 1.0)
"""Values of a key that turn its feature off."""
FEATURES = {
    "soft cap of attention": ["attn_logit_softcapping"],
    "soft cap of logits": ["final_logit_softcapping"],
    "logit scale": ["logit_scale", "logits_scaling", "lm_head_multiplier"],
    "mixture of experts": ["num_experts", "num_local_experts", "n_routed_experts"],
    "dropout": ["attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"],
    "quantised weights": ["quantization_config"],
}
"""Unsupported features, with their keys in `config.json`."""
EMBEDDING = "embed_tokens"
"""Name of the embedding's layer, as a part of its tensor's name."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Describe the shape of a model as far as its files state it."""

    model_type: str
    tensors: dict[str, list[int]]
    """Shapes of tensors by name."""
    kv_token_bytes: int
    """Bytes of one token's keys and values in float32; 0 if `config.json` does not define them."""
    says_untied: bool
    """Whether `config.json` declares the LM head untied from the embedding. (The default depends on
    the architecture, which transformers knows.)"""

    @property
    def num_weights(self) -> int:
        """Number of elements of all tensors in the files."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def num_in_matrices(self) -> int:
        """Number of elements of the matrices of the layers: without embedding and LM head."""
        return sum(math.prod(self.tensors[name]) for name in self._matrices())

    def linear(self) -> set[str]:
        """Return the names of the linear layers of a transformer block."""
        return {name.removesuffix(".weight").rpartition(".")[2] for name in self._matrices()}

    def _matrices(self) -> list[str]:
        """Return the names of the tensors that are matrices of a layer."""
        return [
            name
            for name, shape in self.tensors.items()
            if len(shape) == 2 and name != HEAD and not name.endswith(f"{EMBEDDING}.weight")
        ]


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model directory's `config.json`.

    Raises:
        PolicyError: there is no such file, or it is damaged.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise PolicyError(f"{directory}: no config.json, so this is no HuggingFace model directory")
    return read_json(file)


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model directory, or the file itself.

    Raises:
        PolicyError: the directory's index cannot be read.
    """
    if not path.is_dir():
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    # The single file has precedence, as in transformers: a model that was saved over a larger one
    # does not remove the index of the larger one.
    if index.is_file() and not single.is_file():
        try:
            files = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        except (ValueError, msgspec.MsgspecError) as error:
            raise PolicyError(
                f"{index}: cannot be read as an index of weights: {error}; copy the file again"
            ) from error
        return [path / name for name in sorted(set(files))]
    return [single]


class _Index(msgspec.Struct):
    """Hold the part of an index file that is read."""

    weight_map: dict[str, str]
    """Name of the file of each tensor."""


def read_json(file: Path) -> dict[str, Any]:
    """Read a table from a file of JSON; return an empty one if there is no file."""
    try:
        read = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise PolicyError(f"{file}: cannot be read as JSON: {error}; copy it again") from error
    if not isinstance(read, dict):
        raise PolicyError(f"{file}: must be a table, got {type(read).__name__}")
    return read


def outline_of(directory: Path) -> Outline:
    """Read `config.json` and the safetensors headers.

    Raises:
        PolicyError: `config.json` is missing or no JSON object, the directory holds an adapter too,
            a file of weights is missing, cut short or not safetensors, or there are only `*.bin`
            files.
    """
    config = read_config(directory)
    if (directory / ADAPTER).is_file():
        # transformers would load the adapter as well, and engines the model without it.
        raise PolicyError(
            f"{directory}: holds an adapter ({ADAPTER}), which engines do not read: {MERGE}"
        )
    # Other files, such as Mistral's consolidated.safetensors, hold the same weights again.
    files = weight_files(directory)
    missing = [file for file in files if not file.is_file()]
    if missing == files and any(directory.glob("pytorch_model*.bin")):
        # These files have no header, and the embedded engine reads only safetensors.
        raise PolicyError(
            f"{directory}: weights in *.bin cannot be checked before a run: save them as "
            "safetensors, with AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
        )
    if missing:
        raise PolicyError(
            f"{directory}: it holds no {missing[0].name}: name a directory with a model's weights"
        )
    tensors = {name: shape for file in files for name, shape in _shapes(file).items()}
    is_untied = config.get("tie_word_embeddings") is False
    model_type = str(config.get("model_type", ""))
    return Outline(model_type, tensors, kv_token_bytes(config), is_untied)


def check_type(directory: Path, *, is_embedded: bool) -> None:
    """Refuse a model whose type cannot be trained, or that the embedded engine does not serve, and
    one with a feature in `config.json` that packed training would compute wrongly.

    Args:
        is_embedded: Whether actors have the embedded engine.

    Raises:
        PolicyError: the message names the features, or lists the types that can be trained and, if
            `is_embedded`, served.
    """
    config = read_config(directory)
    kind = config.get("model_type")
    if kind in (SERVED if is_embedded else TRAINABLE):
        if found := features_on(config.get):
            raise untrainable(str(directory), str(kind), found)
        return
    if kind is None:
        raise PolicyError(
            f"{directory}: config.json has no model_type: add that of the architecture, such as "
            '"llama"'
        )
    fault = "served by the embedded engine" if kind in TRAINABLE else "trained"
    advice = ' or set engine.kind = "sglang"' if kind in TRAINABLE else ""
    raise PolicyError(
        f"{directory}: a model of type {kind!r} cannot be {fault}: take one of type "
        f"{', '.join(SERVED if is_embedded else TRAINABLE)}{advice}"
    )


def features_on(value_of: Callable[[str], Any]) -> set[str]:
    """Return the features of `FEATURES` that a model has.

    Args:
        value_of: returns the value of a key of `config.json`; None if it has none.
    """
    return {
        name for name, keys in FEATURES.items() if any(value_of(key) not in OFF for key in keys)
    }


def untrainable(source: str, model_type: str, features: Iterable[str]) -> PolicyError:
    """Return the error for a model with features that packed training would compute wrongly."""
    return PolicyError(
        f"{source}: {model_type} cannot be trained on packed sequences because of its "
        f"{', '.join(sorted(features))}; choose a model without that, of type "
        f"{', '.join(TRAINABLE)}"
    )


def check_head(directory: Path, names: Container[str], *, is_tied: bool) -> None:
    """Refuse a model whose LM head is in no file and not tied to the embedding.

    Without this check, transformers would initialise the LM head at random.

    Args:
        names: Names of the tensors in the files.

    Raises:
        PolicyError: the LM head is missing.
    """
    if HEAD not in names and not is_tied:
        raise PolicyError(
            f"{directory}: config.json says tie_word_embeddings = false, but no file holds "
            f"{HEAD}: set it to true if the LM head is the embedding, or add this tensor"
        )


def check_targets(model_type: str, targets: list[str], linear: set[str]) -> None:
    """Refuse adapters on layers that the model does not have.

    Args:
        linear: Names of the model's linear layers. The LM head is not among them: log-probs are
            computed from its weight alone, without an adapter.

    Raises:
        PolicyError: the message lists the model's layers.
    """
    if missing := [target for target in targets if target not in linear]:
        raise PolicyError(
            f"policy.lora.targets: {model_type} has no layer {missing[0]!r} that "
            f"takes an adapter; it has {', '.join(sorted(linear))}"
        )
    if not targets:
        raise PolicyError("policy.lora.targets is empty: name a layer, or leave policy.lora out")


def kv_token_bytes(config: Mapping[str, Any], itemsize: int = 4, gpus: int = 1) -> int:
    """Return the bytes of a token's keys and values over all layers, on each of the GPUs that share
    the model.
    """
    layers, width, heads = (
        config.get(key) or 0 for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    size = config.get("head_dim") or (width // heads if heads else 0)
    # Several GPUs may hold the same head.
    heads_each = max(1, (config.get("num_key_value_heads") or heads) // gpus)
    return int(2 * itemsize * layers * heads_each * size)


def _shapes(file: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors of a safetensors file, by their names; the file must have
    all bytes of the tensors.
    """
    try:
        with safe_open(file, "np") as opened:
            names: list[str] = opened.keys()
            return {name: opened.get_slice(name).get_shape() for name in names}
    except (OSError, SafetensorError) as error:
        raise PolicyError(
            f"{file}: cannot be read as safetensors, and may be cut short: {error}; copy it again"
        ) from error


def check_divisible(model: Mapping[str, Any], gpus: int, where: str) -> None:
    """Refuse a model whose matrices SGLang cannot divide over the GPUs of an engine.

    With fewer key-value heads than GPUs, several GPUs hold the same head.

    Args:
        model: Fields of `config.json`.
        where: Source of the model, with which the message begins.

    Raises:
        PolicyError: the message names the numbers that do not divide.
    """
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads") or heads
    width = model.get("intermediate_size") or gpus  # an unknown width counts as divisible
    parts = {"attention heads": heads, "rows in its MLP": width}
    if kv_heads >= gpus:
        parts["key-value heads"] = kv_heads
    uneven = [f"{number} {name}" for name, number in parts.items() if number % gpus]
    if kv_heads < gpus and gpus % kv_heads:
        uneven.append(f"{kv_heads} key-value heads")
    if uneven:
        raise PolicyError(
            f"{where}: a model with {' and '.join(uneven)} cannot be shared over "
            f"engine.gpus_per_actor = {gpus} GPUs: set it to a number that divides them"
        )
