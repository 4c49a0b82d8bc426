"""Which models can be shared over the GPUs of an engine, each with a part of every matrix."""

from collections.abc import Mapping
from typing import Any

from mage_async.errors import PolicyError


def check_divisible(model: Mapping[str, Any], gpus: int, where: str) -> None:
    """Refuse what SGLang cannot share over so many GPUs. Where there are fewer key-value heads than
    GPUs, several GPUs have the same one.

    Args:
        model: what its `config.json` says.
        where: it is from; begins the sentence.

    Raises:
        PolicyError: with the number that does not divide.
    """
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads") or heads
    width = model.get("intermediate_size") or gpus
    parts = {"attention heads": heads, "rows in its MLP": width}
    if kv_heads >= gpus:
        parts["key-value heads"] = kv_heads
    uneven = [f"{number} {name}" for name, number in parts.items() if number % gpus]
    if kv_heads < gpus and gpus % kv_heads:
        uneven.append(f"{kv_heads} key-value heads")
    if uneven:
        raise PolicyError(
            f"{where}: a model with {' and '.join(uneven)} cannot be shared over "
            f"engine.gpus_per_actor = {gpus} GPUs: set a divisor"
        )


def kv_heads_of_a_gpu(kv_heads: int, gpus: int) -> int:
    """Key-value heads that each GPU keeps."""
    return max(1, kv_heads // gpus)
