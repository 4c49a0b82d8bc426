"""What trials of two sides share."""

import pytest

from mage_async.environments import catalogue
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.trials.chat_format import ChatFormat

DUELS = ("kuhn", "rps", "tictactoe")


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """The format of a policy that knows the words of the games with a seat for a rival."""
    folder = tmp_path_factory.mktemp("policy")
    words = {word for name in DUELS for word in catalogue.load(name).facts.words}
    save_tokenizer(build_tokenizer(words), folder)
    return load_chat(folder)
