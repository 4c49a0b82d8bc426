"""What a trial needs of a context, said without a tokenizer and never too much."""

import pytest

from mage_async.assembly import trial_config_of
from mage_async.config import config_file
from mage_async.environments import catalogue
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.trials.scripted_play import chat_in_words, shortest_context

CONFIG = config_file.load(config_file.find(None), [])
READS = [
    "transcript.rules=true",
    "transcript.forced_tags=none",
    "trial.memory=reflection",
    "trial.strategy=turn",
]


@pytest.mark.parametrize("changes", [[], READS], ids=["bare", "with rules, remarks and plans"])
@pytest.mark.parametrize("name", ["rps", "scout", "kuhn", "shop"])
def test_a_tokenizer_needs_as_much_or_more(name, changes, tmp_path):
    environment = catalogue.load(name)
    config = config_file.load(config_file.find(None), changes)
    save_tokenizer(build_tokenizer(environment.facts.words), tmp_path)
    needed = [
        shortest_context(environment, trial_config_of(config, environment, chat, 3), chat)
        for chat in (chat_in_words(), load_chat(tmp_path))
    ]
    assert 0 < needed[0] <= needed[1]


def test_of_words_that_are_a_token_each_it_is_exact_but_for_the_spaces_before_numbers(chat):
    environment = catalogue.load("rps")
    needed = [
        shortest_context(environment, trial_config_of(CONFIG, environment, each, 3), each)
        for each in (chat_in_words(), chat)
    ]
    assert needed[0] == needed[1] - 3  # of "episode 1", "episode 2", "episode 3"
