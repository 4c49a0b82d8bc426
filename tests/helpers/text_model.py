"""A small model of random weights that reads and writes any text."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import Qwen3Config, Qwen3ForCausalLM

TEMPLATE = Path(__file__).parents[1] / "inference" / "chat_templates" / "smollm2.jinja"
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")


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
    _model(tokenizer, room).save_pretrained(folder)
    return folder


def _model(tokenizer: Tokenizer, room: int) -> Qwen3ForCausalLM:
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
