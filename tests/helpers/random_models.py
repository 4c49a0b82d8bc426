"""Models of random weights: of any architecture that transformers knows, and a folder of one that
reads and writes any text; and segments.
"""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.packing import SampledTokens, TrainingSequence

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPLATE = Path(__file__).parents[1] / "inference" / "chat_templates" / "smollm2.jinja"
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")


def smallest_qwen3() -> Qwen3Config:
    """The smallest shape that the packed forward takes, with fewer key heads than heads."""
    return Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_implementation=PACKED_ATTENTION,
    )


def random_model(name: str, **changes: Any) -> PreTrainedModel:
    """A small model of a class of transformers, as "Qwen3"; the same at every call."""
    config = getattr(transformers, f"{name}Config")(**SHAPE, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def sequence(length: int) -> TrainingSequence:
    """Two turns of a segment that all but ends with the second."""
    source = random.Random(length)
    places = np.concatenate([np.arange(2, 6), np.arange(length - 3, length)])
    zeros = np.zeros(7, np.int32)
    return TrainingSequence(
        np.array([source.randrange(3, 64) for _ in range(length)], np.int32),
        places,
        SampledTokens(
            np.array([-source.uniform(3.5, 4.5) for _ in range(7)], np.float32),
            *(zeros.copy() for _ in range(5)),
        ),
        np.array([4, 3]),
        torch.tensor([1.0, -0.7]),
    )


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model, in place, in float64 throughout: transformers' norms compute in float32."""
    for norm in model.double().modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(
                rms_norm,
                normalized_shape=norm.weight.shape,
                weight=norm.weight,
                eps=norm.variance_epsilon,
            )
    return model


def save_text_model(folder: Path, texts: Sequence[str] = (), room: int = 4096) -> Path:
    """Write Qwen3's architecture with random weights and SmolLM2's chat template, as
    `policy.source` takes a model.

    Args:
        texts: what the tokens are made for; without them a token is a byte.
        room: most tokens of a context.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts or ["1 2 3"],
        BpeTrainer(
            vocab_size=2048 if texts else 256, initial_alphabet=letters, show_progress=False
        ),
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    )
    _text_model(tokenizer, room).save_pretrained(folder)
    return folder


SPACE_SCHEMES = ("normalizer", "always", "first")
"""How a tokenizer adds a space before a text, as those of Llama 2 and Mistral do."""


def save_spaced_chat(folder: Path, scheme: str, template: str) -> Tokenizer:
    """Write a tokenizer that adds a space before a text, with a token for each byte, and a chat
    template.

    Args:
        scheme: one of `SPACE_SCHEMES`.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *map(chr, range(33, 127)), "▁7", "▁<", "</", "▁▁", "▁["]
    merges = [("▁", "7"), ("▁", "<"), ("<", "/"), ("▁", "▁"), ("▁", "[")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    space = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    if scheme == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        options = {"prepend_scheme": scheme, "split": False}
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**options)
        if scheme == "always":
            tokenizer.decoder = decoders.Metaspace(**options)
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return tokenizer


def _text_model(tokenizer: Tokenizer, room: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    end = tokenizer.token_to_id("<|im_end|>")
    shape = Qwen3Config(
        vocab_size=-(-tokenizer.get_vocab_size() // 32) * 32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=room,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(shape)
