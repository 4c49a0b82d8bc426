"""What the benchmarks of serving share: random models by size, engines by kind, statistics.

Nothing here needs more than torch, transformers, numpy and, for its engine, SGLang: it also runs on
a machine that has no environments installed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.config.schema import Embedded, Sglang
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
"""Qwen3's; weights are random, for how fast a model is does not depend on them."""


def random_model(size: str, *, is_tied: bool) -> Qwen3ForCausalLM:
    """A model of random weights: in bfloat16 on the GPU where there is one, or float32."""
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


def engine_of(kind: str, directory: Path, rules: dict[str, Any], name: str = "bench") -> Engine:
    """An engine, not yet running; on the GPU where there is one."""
    shared: dict[str, Any] = {
        "max_contexts": rules["max_contexts"],
        "max_tokens": rules["max_tokens"],
        "cache_rule": "keep",  # the prompts say what is recomputed
        "threads": 1,
        "in_flight": rules.get("in_flight", "in_place"),
        "turn_deadline_s": 600.0,
    }
    if kind == "embedded":
        from mage_services.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(directory, Embedded(**shared))
    from mage_services.engines.sglang.engine import SglangEngine

    has_gpu = torch.cuda.is_available()
    return SglangEngine(
        directory,
        Sglang(**shared, server=rules.get("server", {})),
        dtype="bfloat16" if has_gpu else "float32",
        seed=sum(name.encode()),
        has_gpu=has_gpu,
        max_deaths=0,
        silence_s=120.0,
    )


def spread(values: list[float], digits: int = 4) -> dict[str, float]:
    """Median, 99th percentile, largest, and how many."""
    return {
        "p50": round(float(np.percentile(values, 50)), digits),
        "p99": round(float(np.percentile(values, 99)), digits),
        "most": round(max(values), digits),
        "count": len(values),
    }


def machine_of_figures() -> dict[str, str]:
    """The accelerator, where there is one."""
    if not torch.cuda.is_available():
        return {"accelerator": "none"}
    return {"accelerator": torch.cuda.get_device_name(0)}
