"""Make SGLang's server arguments from the configuration, for each supported version of SGLang.

    argument                        why it is set
    skip_tokenizer_init             token ids in, token ids out: no tokenizer files are needed
    tp_size                         the model is shared over `engine.gpus_per_actor` GPUs
    page_size = 1                   a cached prefix is reused to its last token
    enable_custom_logit_processor   actions are restricted by `allowed_tokens.py`
    disable_overlap_schedule        no batch is computed while weights change; otherwise tokens
                                    sampled with the old weights would get the new version
    those of `_without_gpu`         PyTorch's own attention and sampling, no CUDA graphs

`engine.server` may set any argument, except those of `_FIXED`.
"""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mage_async.config.schema import Sglang as EngineConfig
from mage_async.errors import ConfigError, PolicyError
from mage_async.policy.model_files import check_divisible, read_config

_RENAMED = {
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
}
"""Arguments that SGLang 0.5.14 renamed: older names, with the newer ones."""
_FIXED = ("model_path", "skip_tokenizer_init", "weight_version", "max_running_requests", "tp_size")
"""Arguments that follow from other keys of the configuration."""


def server_arguments(
    config: EngineConfig, directory: Path, *, dtype: str, has_gpu: bool
) -> dict[str, Any]:
    """Make the arguments of an engine, under the names of the newest supported SGLang.

    Raises:
        ConfigError: `engine.server` holds an argument that follows from another key.
        PolicyError: the model cannot be shared over `engine.gpus_per_actor` GPUs.
    """
    if config.gpus_per_actor > 1:
        check_divisible(_model(directory), config.gpus_per_actor, str(directory))
    for name in _FIXED:
        if name in config.server:
            raise ConfigError(f"engine.server: `{name}` follows from the other keys; remove it")
    of_machine = {} if has_gpu else _without_gpu(config)
    of_every_engine = {
        "model_path": str(directory),
        "skip_tokenizer_init": True,
        "weight_version": "0",
        "dtype": dtype,
        "page_size": 1,
        "max_running_requests": config.max_contexts,
        "tp_size": config.gpus_per_actor,
        "grammar_backend": "none",
        "enable_custom_logit_processor": True,
        "disable_overlap_schedule": True,
        "log_level": "error",
    }
    return of_every_engine | of_machine | dict(config.server)


SPARE_TOKENS = 8
"""Number of tokens by which SGLang's context length, and its KV cache, must exceed the longest
context that it serves. SGLang refuses prompts that are only 6 tokens shorter than either, and cuts
completions.
"""


def check_context_length(config: EngineConfig, directory: Path) -> None:
    """Check that SGLang can serve this model with contexts of `engine.max_tokens` tokens.

    Raises:
        ConfigError: the context length of the model, or `engine.server.context_length`, is too
            short. The message has the largest possible value of `engine.max_tokens`.
        PolicyError: the directory has no config.json.
    """
    model = _model(directory)
    length = config.server.get("context_length", _num_positions(model))
    if length is not None and config.max_tokens > length - SPARE_TOKENS:
        is_set = "context_length" in config.server
        what = "engine.server.context_length" if is_set else f"the context length of {directory}"
        raise ConfigError(
            f"engine.max_tokens = {config.max_tokens}, but {what} is {length}, and SGLang "
            f"serves at most {SPARE_TOKENS} tokens fewer: set engine.max_tokens = "
            f"{length - SPARE_TOKENS}"
        )


def _num_positions(model: Mapping[str, Any]) -> int | None:
    """Return the context length that SGLang derives from config.json; None if none is stated."""
    positions = model.get("max_position_embeddings")
    scaling = model.get("rope_scaling") or model.get("rope_parameters") or {}
    is_included = "original_max_position_embeddings" in scaling
    factor = 1 if is_included or scaling.get("rope_type") == "llama3" else scaling.get("factor", 1)
    return None if positions is None else int(factor * positions)


def vocabulary_size(directory: Path) -> int:
    """Read the size of a model's vocabulary.

    Raises:
        PolicyError: the directory has no config.json with a `vocab_size`.
    """
    try:
        return int(_model(directory)["vocab_size"])
    except KeyError as error:
        raise PolicyError(f"{directory}: no config.json with a vocab_size") from error


def _model(directory: Path) -> dict[str, Any]:
    """Read config.json; of a multimodal model, the part for text."""
    config = read_config(directory)
    return config.get("text_config") or config


def known_names(arguments: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Rename arguments to the names that the installed SGLang knows.

    Raises:
        ConfigError: the installed SGLang has no such argument.
    """
    names = frozenset(known)
    older = {new: old for old, new in _RENAMED.items()}
    renamed: dict[str, Any] = {}
    for name, value in arguments.items():
        # The name as given, its newer name and its older one.
        spellings = (name, _RENAMED.get(name, name), older.get(name, name))
        spelling = next((each for each in spellings if each in names), None)
        if spelling is None:
            raise ConfigError(f"engine.server: this SGLang has no argument `{name}`")
        renamed[spelling] = value
    return renamed


def _without_gpu(config: EngineConfig) -> dict[str, Any]:
    """Make the arguments for CPU cores; the cache has room for two versions of every sequence."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 2 * config.max_contexts * config.max_tokens,
    }


OLDEST, NEWEST = (0, 5, 12), (0, 5, 23)
"""Oldest and newest supported version. For the versions in this range, the calls that the engine
makes were run, or compared with SGLang's source."""


def installed() -> str:
    """Return the version of the installed SGLang.

    Raises:
        ConfigError: SGLang is not installed, or its version is not supported.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ConfigError(
            'engine.kind = "sglang" needs SGLang, which is not installed: '
            'pip install "mage_async[sglang]", or set engine.kind = "embedded"'
        ) from None
    check_version(found)
    return found


def check_version(found: str) -> None:
    """Check that a version is supported.

    Raises:
        ConfigError: the version is not supported. The message names the supported range.
    """
    if not OLDEST <= release(found) <= NEWEST:
        oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise ConfigError(
            f"SGLang {found} is installed, and {oldest} to {newest} are supported: "
            f'pip install "mage_async[sglang]"'
        )


def release(found: str) -> tuple[int, int, int]:
    """Return the first three numbers of a version; (0, 0, 0) if it has no such numbers."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2]), int(numbers[3])) if numbers else (0, 0, 0)


def has_token_versions(found: str) -> bool:
    """Return whether the replies of this version of SGLang contain the weight version of each
    token.
    """
    return release(found) >= (0, 5, 19)


def needs_update_messages(found: str) -> bool:
    """Return whether this version of SGLang needs begin and end messages around an update by
    tensors.
    """
    return release(found) >= (0, 5, 21)
