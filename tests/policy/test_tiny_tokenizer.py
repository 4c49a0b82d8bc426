"""The tokenizer of a policy built here: words of its environment are tokens, no text is unknown."""

import pytest

from mage_async.environments.catalogue import load
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.trials.chat_format import ChatFormat

WORDS = load("rps").facts.words


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("policy")
    save_tokenizer(build_tokenizer((*WORDS, "episode", "reflect", "remark")), folder)
    return load_chat(folder)


def test_every_word_of_the_environment_is_one_token(chat: ChatFormat) -> None:
    assert {word for word in WORDS if len(chat.encode(f" {word}")) != 1} == set()


@pytest.mark.parametrize("text", ["héllo\n\n 日本 \t x", "<action>rock", "scissorss rockk", ""])
def test_no_text_is_ever_unknown_to_the_tokenizer(chat: ChatFormat, text: str) -> None:
    assert chat.decode(chat.encode(text)) == text
