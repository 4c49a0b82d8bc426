"""Build a tiny model, load a causal LM for training or refuse it, and export one as a model
directory.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from mage_async.config.schema import Config, Tiny
from mage_async.errors import PolicyError, first_line
from mage_async.inference.chat_files import CHAT_FILES
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.lora import adapted_layers, add_adapters, load_adapters, merged_tensors
from mage_async.learning.trainer import Trainer
from mage_async.methods.method import Methods
from mage_async.policy.model_files import (
    TRAINABLE,
    check_head,
    features_on,
    outline_of,
    read_config,
    untrainable,
)
from mage_async.policy.tiny_tokenizer import END, build_tokenizer, save_tokenizer

WEIGHTS = "model.safetensors"
"""Name of the file of weights in a model directory."""

ROTATIONS_BY_LENGTH = ("dynamic", "longrope")
"""Values of `rope_type` whose rotation of each sequence depends on the longest of the batch."""


def build_tiny(shape: Tiny, words: Iterable[str], seed: int, directory: Path) -> None:
    """Build a Qwen3 model of random weights with a tokenizer for an environment's words,
    as a model directory.
    """
    tokenizer = build_tokenizer(words)
    config = tiny_shape(shape, tokenizer)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    _initialise(model)
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory)
    export_hf(model, directory, directory)


def load_policy(directory: Path, dtype: str, device: str) -> PreTrainedModel:
    """Load a causal LM for training on packed sequences.

    Raises:
        PolicyError: packed training would compute the model wrongly, or weights are missing.
    """
    check_trainable(directory)
    try:
        # With `output_loading_info` transformers returns a pair, but its annotation has only the
        # model.
        with _without_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, dtype),
                attn_implementation=PACKED_ATTENTION,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise PolicyError(f"{directory}: transformers cannot load it: {error}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise PolicyError(
            f"{directory}: {len(missing)} weights are in no file, {missing[0]} first: "
            "name a directory with all files of the model"
        )
    policy: PreTrainedModel = model.to(device)
    policy.train()
    return policy


def load_trained(
    config: Config, policy: Path, checkpoint: Path | None = None, *, device: str
) -> PreTrainedModel:
    """Load the policy as the learner trains it: all weights, or frozen under adapters.

    Args:
        policy: Model directory that the run began from.
        checkpoint: Checkpoint whose weights or adapters replace the initial ones.

    Raises:
        PolicyError: the model cannot be trained, or lacks the configured layers or adapters.
    """
    lora, dtype = config.policy.lora, config.policy.dtype
    if lora is None:
        return load_policy(checkpoint or policy, dtype, device)
    model = load_policy(policy, dtype, device)
    add_adapters(model, lora, config.seed, roles=Methods(config).roles())
    if checkpoint:
        load_adapters(model, checkpoint)
    return model


def load_frozen(directory: Path, dtype: str, device: str) -> PreTrainedModel:
    """Load a policy that is never trained, such as the reference of the KL term."""
    model = load_policy(directory, dtype, device).requires_grad_(False)
    model.eval()
    return model


def load_frozen_policies(trainer: Trainer, config: Config, initial_policy: Path) -> None:
    """Load those frozen policies that a configuration needs and that the trainer does not have yet.

    Args:
        initial_policy: Model directory of version 0.

    Raises:
        PolicyError: the directory of a method's frozen policy cannot be loaded, or its vocabulary
            has another size.
    """
    if needs_reference(config) and trainer.reference is None:
        trainer.refer_to(load_frozen(initial_policy, config.policy.dtype, loading_device(config)))
    source = Methods(config).frozen_policy()
    if source is None or trainer.frozen_policy is not None:
        return
    # On the learner's own device: unlike the reference, it is not sharded, and a rank has it whole.
    frozen = load_frozen(source, config.policy.dtype, config.learner.device)
    frozen_size, own_size = frozen.config.vocab_size, trainer.model.config.vocab_size
    if frozen_size != own_size:
        raise PolicyError(
            f"{source} has {frozen_size:,} tokens and the policy {own_size:,}: a frozen policy of "
            "a method has to share the policy's tokenizer"
        )
    trainer.frozen_policy = frozen


def loading_device(config: Config) -> str:
    """Return the device to load a trained model on. Several ranks load it in host memory, and move
    their shards to their devices themselves.
    """
    return config.learner.device if config.learner.ranks == 1 else "cpu"


def needs_reference(config: Config) -> bool:
    """Return whether training needs the initial policy as a second model.

    With adapters it does not: the initial policy is the model without them.
    """
    is_needed = any(term.needs_reference for term in Methods(config).loss_terms())
    return bool(config.learner.kl or is_needed) and config.policy.lora is None


def check_trainable(directory: Path) -> PreTrainedModel:
    """Check a model directory without reading its weights.

    Returns:
        The model on torch's meta device (shapes without values).

    Raises:
        PolicyError: packed training would compute this model wrongly (the message names the
            features), or the LM head is missing although it is not tied to the embedding.
    """
    read_config(directory)  # raises if there is none
    with as_policy_error(str(directory)):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    refuse_untrainable(model, str(directory))
    check_head(directory, outline_of(directory).tensors, is_tied=model.config.tie_word_embeddings)
    return model


@contextmanager
def as_policy_error(source: str) -> Iterator[None]:
    """Turn an error of transformers about a model that it cannot build into one line.

    Raises:
        PolicyError: transformers cannot build the model; the message begins with `source`.
    """
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        # Further lines list all classes of transformers.
        raise PolicyError(f"{source}: transformers cannot build it: {first_line(error)}") from error


def refuse_untrainable(model: PreTrainedModel, source: str) -> None:
    """Refuse a model, on any device, that packed training would compute wrongly.

    Raises:
        PolicyError: the message begins with `source` and names the features.
    """
    config = model.config
    found = features_on(lambda key: getattr(config, key, None))
    found |= _attention_features(model, config) | _head_features(model)
    if not found and config.model_type not in TRAINABLE:
        found = {f"unknown architecture {type(model).__name__}"}
    if found:
        raise untrainable(source, config.model_type, found)


def _attention_features(model: nn.Module, config: PretrainedConfig) -> set[str]:
    """Return the unsupported features of a model's attention, in words."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unsupported = kinds - {"full_attention", "sliding_attention"}
    found = {f"layers with {kind.replace('_', ' ')}" for kind in unsupported}
    if getattr(config, "use_bidirectional_attention", False):
        found.add("attention to later tokens")
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        found.add("attention sinks")
    rotation = getattr(config, "rope_parameters", None) or {}
    # Layers with and without a window may have a table of their own.
    for table in (rotation, *(each for each in rotation.values() if isinstance(each, dict))):
        if table.get("rope_type") in ROTATIONS_BY_LENGTH:
            found.add(
                f"rotation of type {table['rope_type']}, which depends on the longest sequence"
            )
    return found


def _head_features(model: PreTrainedModel) -> set[str]:
    """Return the unsupported features of a model's LM head, in words."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return {f"head of type {type(head).__name__}"}
    return {"head bias"} if head.bias is not None else set()


def export_hf(model: PreTrainedModel, chat_source: Path, directory: Path) -> None:
    """Save a model, its adapters merged, as one HuggingFace folder.

    transformers 4, transformers 5 and SGLang read the folder alike.

    Args:
        chat_source: Folder of the tokenizer and the chat template.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = dict(merged_tensors(model)) if adapted_layers(model) else None
    with _without_progress_bar():
        model.save_pretrained(directory, state_dict=state)
    _add_files(chat_source, directory)
    # safetensors 0.8 writes files with mode 0600, which an engine of another user cannot read.
    for weights in directory.glob("*.safetensors"):
        os.chmod(weights, 0o644)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a progress bar over the lines of a command."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def export_without_weights(model: PreTrainedModel, chat_source: Path, directory: Path) -> None:
    """Save all that `export_hf` saves except the weights, which the caller writes to `WEIGHTS`."""
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    _add_files(chat_source, directory)


def _add_files(chat_source: Path, directory: Path) -> None:
    """Copy the tokenizer's files, and add to `config.json` what transformers 4 needs."""
    _write_rotation(directory / "config.json")
    for name in CHAT_FILES:
        if (chat_source / name).is_file() and chat_source != directory:
            shutil.copyfile(chat_source / name, directory / name)


def _write_rotation(file: Path) -> None:
    """Write the rotary embedding of a `config.json` where transformers 4 looks for it."""
    # transformers 5 writes base and scaling into `rope_parameters` alone. transformers 4 does not
    # look there, and would silently use a base of 10,000 and no scaling.
    config: dict[str, Any] = json.loads(file.read_text())
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:  # Gemma 3, whose layers with a window rotate otherwise
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tiny_shape(shape: Tiny, tokenizer: Tokenizer) -> Qwen3Config:
    """Return the configuration of a tiny model for a tokenizer."""
    vocabulary, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
    return Qwen3Config(
        # `-(-a // b)` rounds a / b up: the size becomes a multiple of 32.
        vocab_size=-(-vocabulary // 32) * 32,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden_size // shape.heads,
        intermediate_size=shape.mlp_size,
        # No weight depends on it: the engine refuses longer contexts (`engine.max_tokens`).
        max_position_embeddings=1 << 16,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )


@torch.no_grad()
def _initialise(model: Qwen3ForCausalLM) -> None:
    """Initialise the matrices with the standard deviation `fan_in ** -0.5`; those at the end of a
    residual branch are also divided by the square root of the number of branches.

    At width 64, transformers' 0.02 for all weights learns far more slowly.
    """
    depth = (2 * model.config.num_hidden_layers) ** -0.5
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or "embed" in name:
            continue
        branch = depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        weight.normal_(0.0, branch * weight.shape[1] ** -0.5)
