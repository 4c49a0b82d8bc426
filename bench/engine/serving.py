"""Make random models, engines and statistics for the benchmarks of serving.

It needs torch, transformers and numpy only, and SGLang for its engine. So it also runs on a GPU
machine on which no environment is installed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.config.schema import Config, Embedded, Pretrained, Sglang, Supervision
from mage_services.engines.engine import Engine

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    },
    "0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
    "4b": {
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
    },
}
"""Shapes of Qwen3 models, by size. Weights may be random: speed does not depend on them."""


def random_model(size: str, *, is_tied: bool) -> Qwen3ForCausalLM:
    """Return a model with random weights, in bfloat16 on a GPU, else in float32 on the CPU."""
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config = Qwen3Config(
        **SHAPES[size],
        rope_parameters=rope,
        tie_word_embeddings=is_tied,
        max_position_embeddings=16_384,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    dtype = torch.bfloat16 if has_gpu else torch.float32
    with torch.device("cuda" if has_gpu else "cpu"):
        return Qwen3ForCausalLM(config).to(dtype).eval()


def engine_of(kind: str, directory: Path, settings: dict[str, Any], name: str = "bench") -> Engine:
    """Return an engine, not yet running, on a GPU if there is one.

    Args:
        kind: "embedded" or "sglang".
        settings: `max_contexts`, `max_tokens` and, if wanted, `threads`, `in_flight`, `arithmetic`
            and `server`, as in the configuration's `[engine]`. SGLang computes in `arithmetic` too;
            without it in bfloat16 on a GPU, and in float32 on a CPU.
        name: Name of the engine; SGLang's random seed is made of it.
    """
    shared: dict[str, Any] = {
        "max_contexts": settings["max_contexts"],
        "max_tokens": settings["max_tokens"],
        "cache_rule": "keep",  # each prompt says itself (`refresh_kv`) what is recomputed
        "threads": settings.get("threads", 1),
        "in_flight": settings.get("in_flight", "in_place"),
        "turn_deadline_s": 600.0,
    }
    if kind == "embedded":
        from mage_services.engines.embedded import EmbeddedEngine

        arithmetic = settings.get("arithmetic", "float32")
        return EmbeddedEngine(directory, Embedded(**shared, arithmetic=arithmetic))
    from mage_services.engines.sglang.engine import SglangEngine

    dtype = settings.get("arithmetic", "bfloat16" if torch.cuda.is_available() else "float32")
    config = Config(
        engine=Sglang(**shared, server=settings.get("server", {})),
        policy=Pretrained(dtype=dtype),
        supervision=Supervision(max_restarts=0, silence_s=120.0),
    )
    return SglangEngine(directory, config, name)


def spread(values: list[float], digits: int = 4) -> dict[str, float]:
    """Return median, 99th percentile, largest value, and number of values."""
    return {
        "p50": round(float(np.percentile(values, 50)), digits),
        "p99": round(float(np.percentile(values, 99)), digits),
        "most": round(max(values), digits),
        "count": len(values),
    }


def machine_of_figures() -> dict[str, str]:
    """Return the name of the GPU, or "none", for a baseline."""
    if not torch.cuda.is_available():
        return {"accelerator": "none"}
    return {"accelerator": torch.cuda.get_device_name(0)}
