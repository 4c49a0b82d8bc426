"""The tokenizer of a policy built here: words of its environment are tokens, no text is unknown."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, Qwen3Config

from mage_async.environments.catalogue import load
from mage_async.errors import ConfigError
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import SPECIALS, TAGS, build_tokenizer, save_tokenizer
from mage_async.trials.chat_format import ChatFormat

WORDS = load("rps").facts.words
NUMBERS = ("12", "123", "-3", "0.5", "3,4", "rock's", "♠A", "e\u0301t\u00e9", "x2y")
OWN_WORDS = st.text(min_size=1, max_size=8).filter(
    lambda word: word.split() == [word] and not any(mark in word for mark in (*SPECIALS, *TAGS))
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("policy")
    save_tokenizer(build_tokenizer(WORDS), folder)
    return load_chat(folder)


def test_every_word_of_the_environment_is_one_token(chat: ChatFormat) -> None:
    assert {word for word in WORDS if len(chat.encode(f" {word}")) != 1} == set()


@pytest.mark.parametrize("text", ["héllo\n\n 日本 \t x", "<action>rock", "scissorss rockk", ""])
def test_no_text_is_ever_unknown_to_the_tokenizer(chat: ChatFormat, text: str) -> None:
    assert chat.decode(chat.encode(text)) == text


@given(words=st.lists(OWN_WORDS, min_size=1, max_size=8), text=st.text())
def test_any_word_behind_a_space_is_one_token_and_every_text_is_read_back(words, text) -> None:
    tokenizer = build_tokenizer(words)
    whole = text.join(f" {word}" for word in words) + text
    read = tokenizer.decode(tokenizer.encode(whole).ids, skip_special_tokens=False)
    assert read == whole
    for word in words:
        assert len(tokenizer.encode(f" {word}").ids) == 1, word
    between = tokenizer.encode(" ".join(["", *words])).ids
    assert between == [tokenizer.encode(f" {word}").ids[0] for word in words]


@given(text=st.lists(st.sampled_from((*WORDS, " ", "  ", "\n", ".", "12", "'s", "-"))).map("".join))
def test_words_of_letters_have_the_tokens_of_a_tokenizer_that_cuts_a_text_first(text) -> None:
    assume(text)
    own, cutting = build_tokenizer(WORDS), build_tokenizer(WORDS)
    cutting.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    assert own.encode(text).ids == cutting.encode(text).ids


def test_transformers_reads_the_saved_tokenizer_as_it_is(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(NUMBERS)
    save_tokenizer(tokenizer, tmp_path)
    Qwen3Config(vocab_size=tokenizer.get_vocab_size()).save_pretrained(tmp_path)
    text = f"<|user|> {' '.join(NUMBERS)} <action> 12</action> 1234"
    ids = AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False)
    assert ids == tokenizer.encode(text).ids


@pytest.mark.parametrize("word", ["</action>", "a<think>b", "<|user|>"])
def test_a_word_with_a_mark_of_the_transcript_is_refused_by_name(word: str) -> None:
    with pytest.raises(
        ConfigError, match=f"the word '{word}' cannot be one token".replace("|", r"\|")
    ):
        build_tokenizer(["rock", word])
