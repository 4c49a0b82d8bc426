"""SGLang's server arguments, made from the configuration under the names of the installed version.

These are chosen here; `engine.server` may override them:

    tokens in, tokens out        skip_tokenizer_init: no text, no tokenizer files
    GPUs of an engine            tp_size: as engine.gpus_per_actor says
    a page is one token          a context is reused to its last token
    without a GPU                PyTorch's own attention and sampling, no graphs
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mage_async.config.schema import Sglang as EngineRules
from mage_async.errors import ConfigError, PolicyError
from mage_async.policy.tensor_parallel import check_divisible

_RENAMED = {
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
}
"""Names until 0.5.13, and from 0.5.14 on."""
_OURS = ("model_path", "skip_tokenizer_init", "weight_version", "max_running_requests", "tp_size")
"""Arguments that other keys of the configuration say."""


def chosen(rules: EngineRules, directory: Path, *, dtype: str, has_gpu: bool) -> dict[str, Any]:
    """Arguments for an engine, by the newest names.

    Raises:
        ConfigError: `engine.server` says what another key says.
        PolicyError: the model cannot be shared over `engine.gpus_per_actor` GPUs.
    """
    if rules.gpus_per_actor > 1:
        check_divisible(_model(directory), rules.gpus_per_actor, str(directory))
    for name in _OURS:
        if name in rules.server:
            raise ConfigError(f"engine.server: `{name}` follows from the other keys; remove it")
    machine = {} if has_gpu else _without_gpu(rules)
    own = {
        "model_path": str(directory),
        "skip_tokenizer_init": True,
        "weight_version": "0",
        "dtype": dtype,
        "page_size": 1,
        "max_running_requests": rules.max_contexts,
        "tp_size": rules.gpus_per_actor,
        "grammar_backend": "none",
        "log_level": "error",
    }
    return own | machine | dict(rules.server)


def vocabulary(directory: Path) -> int:
    """How many token ids a model knows.

    Raises:
        PolicyError: its directory does not say it.
    """
    try:
        return _model(directory)["vocab_size"]
    except KeyError as error:
        raise PolicyError(f"{directory}: no config.json with a vocab_size") from error


def _model(directory: Path) -> dict[str, Any]:
    """What a model's config.json says of its part for text."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{directory}: no config.json that can be read: {error}") from error
    return config.get("text_config") or config


def known_names(arguments: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The same arguments under the names that this SGLang knows.

    Raises:
        ConfigError: it does not know one.
    """
    names = frozenset(known)
    older = {new: old for old, new in _RENAMED.items()}
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        spellings = (name, _RENAMED.get(name, name), older.get(name, name))
        spelling = next((one for one in spellings if one in names), None)
        if spelling is None:
            raise ConfigError(f"engine.server: this SGLang has no argument `{name}`")
        found[spelling] = value
    return found


def _without_gpu(rules: EngineRules) -> dict[str, Any]:
    """Arguments for CPU cores; keys of two versions of every context have room."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 2 * rules.max_contexts * rules.max_tokens,
    }
