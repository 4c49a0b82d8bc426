"""Build the tokenizer of a tiny policy: byte-level BPE in which each word of an environment is one
token.

The alphabet is all 256 bytes, so no text is unknown. Every merge extends a word from its left edge
(the space included), so the merge table is a trie of the words, and the merges of one word cannot
change the tokens of another. A text therefore needs no pre-tokenization, the rules by which large
tokenizers cut a text first and which would separate a number or a sign from the space before it.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from mage_async.errors import ConfigError

END = "<|endoftext|>"
SPECIALS = (END, "<|user|>", "<|assistant|>", "<think>", "</think>")
"""Special tokens of a tiny policy."""
TAGS = ("<action>", "</action>", "<remark>", "</remark>")
"""Tags around actions and remarks, each one token."""
WORDS = ("episode", "reflect", "remark", "opp")
"""Words of every tiny policy, besides those of its environment: a transcript adds the first three,
and "opp" marks an opponent's move in several games."""
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
"""Pre-tokenizer that writes each byte of a text as a letter, and cuts nothing."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{{ m['content'] if m['role'] == 'assistant' else ' ' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Chat template. It marks a role by one token and nothing else, so a turn costs about eight tokens.
A word is a token only with a space before it, so the template puts a space before each message but
the assistant's, which begin with a space of their own.
"""


def build_tokenizer(words: Iterable[str]) -> Tokenizer:
    """Build a tokenizer in which ` word` is one token for each of an environment's `words`, and of
    `WORDS`.

    Raises:
        ConfigError: a word contains the text of a special token or of a tag.
    """
    vocabulary = {
        piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    merges: list[tuple[str, str]] = []
    for word in sorted({*words, *WORDS}):
        if marker := next((each for each in (*SPECIALS, *TAGS) if each in word), ""):
            raise ConfigError(
                f"the word {word!r:.100} cannot be one token of the tiny model, which reads "
                f"the {marker!r} in it as a token of its own: rename the word"
            )
        left, *rest = _pieces(f" {word}")
        for piece in rest:
            if left + piece not in vocabulary:
                vocabulary[left + piece] = len(vocabulary)
                merges.append((left, piece))
            left += piece
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _BYTES
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in SPECIALS]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TAGS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that transformers 4 and 5 both read."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": 1_000_000,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _pieces(text: str) -> list[str]:
    """Return a word's bytes in the letters of the byte-level alphabet."""
    return list("".join(piece for piece, _ in _BYTES.pre_tokenize_str(text)))
