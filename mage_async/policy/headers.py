"""What a model directory says of itself without its weights: `config.json` and safetensors headers.

torch is not imported, so a person is told within a second.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mage_async.errors import PolicyError

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens"
MAX_HEADER_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class Outline:
    """A model's shape as far as its files tell."""

    model_type: str
    tensors: dict[str, list[int]]
    """Shapes by name; empty where there are no safetensors files."""
    kv_token_bytes: int
    """Bytes of the float32 keys and values of one token; 0 where `config.json` does not say."""

    @property
    def num_weights(self) -> int:
        """Numbers in the files."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    def linear(self) -> set[str]:
        """Names of the linear layers of a block."""
        matrices = (name for name, shape in self.tensors.items() if len(shape) == 2)
        layers = (name.removesuffix(".weight").rpartition(".")[2] for name in matrices)
        return {*layers} - {HEAD.removesuffix(".weight"), EMBEDDING}


def outline_of(directory: Path) -> Outline:
    """Read `config.json` and the headers.

    Raises:
        PolicyError: `config.json` is no table, or a file is cut short or is no safetensors file.
    """
    config = _config(directory)
    tensors = {
        name: entry["shape"]
        for file in sorted(directory.glob("*.safetensors"))
        for name, entry in _header(file)
        if name != "__metadata__"
    }
    return Outline(str(config.get("model_type", "")), tensors, _kv_token_bytes(config))


def check_head(directory: Path, names: Iterable[str], *, is_tied: bool) -> None:
    """Refuse a head that is in no file and not declared to be the embedding.

    Without this, transformers would draw the head at random.

    Args:
        names: of the tensors in the files; of none nothing is said.

    Raises:
        PolicyError: there is no head.
    """
    known = set(names)
    if known and HEAD not in known and not is_tied:
        raise PolicyError(
            f"{directory}: config.json says tie_word_embeddings = false, but no file holds "
            f"{HEAD}: set it to true where the head is the embedding, or add the head"
        )


def check_targets(model_type: str, targets: list[str], linear: set[str]) -> None:
    """Refuse adapters of layers that there are not.

    Args:
        linear: names of the model's linear layers. The head is none of them: its log-probs are
            computed from its weight alone.

    Raises:
        PolicyError: with the layers that there are.
    """
    if missing := [target for target in targets if target not in linear]:
        raise PolicyError(
            f"policy.lora.targets: {model_type} has no layer {missing[0]!r} that "
            f"takes an adapter; it has {', '.join(sorted(linear))}"
        )
    if not targets:
        raise PolicyError("policy.lora.targets is empty: name a layer, or leave policy.lora out")


def says_untied(directory: Path) -> bool:
    """Whether `config.json` says that the head is not the embedding; its default depends on the
    architecture, which transformers knows.
    """
    return _config(directory).get("tie_word_embeddings") is False


def _config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError(f"{file}: cannot be read as a model's configuration: {error}") from error
    if not isinstance(read, dict):
        raise PolicyError(f"{file}: must be a table, got {type(read).__name__}")
    return read


def _kv_token_bytes(config: dict[str, Any]) -> int:
    """Of all layers, in float32."""
    layers, width, heads = (
        config.get(key) or 0 for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    size = config.get("head_dim") or (width // heads if heads else 0)
    return 2 * 4 * layers * (config.get("num_key_value_heads") or heads) * size


def _header(file: Path) -> Iterator[tuple[str, dict[str, list[int]]]]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            yield from json.loads(opened.read(min(size, MAX_HEADER_BYTES))).items()
    except (OSError, ValueError, AttributeError) as error:
        raise PolicyError(f"{file}: cannot be read as safetensors: {error}") from error
