"""Turns that are restricted to the legal actions."""

from pathlib import Path

import pytest

from mage_async.environments import catalogue
from mage_async.environments.games.shop import Shop
from mage_async.errors import EnvironmentFault
from mage_async.inference.chat_files import load_chat
from mage_async.trajectory import Task
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.allowed_tokens import answer_restriction, restriction_of
from mage_async.trials.chat_format import ChatFormat
from tests.helpers.random_models import save_text_model

BOTH = ActionParser("both")


class Play:
    """An episode that has only its legal actions."""

    def __init__(self, *actions: str) -> None:
        self.actions = actions

    def legal_actions(self) -> tuple[str, ...]:
        return self.actions


def written(trie, node: int = 0) -> set[tuple[int, ...]]:
    """All sequences of a trie."""
    if trie.is_end(node):
        return {()}
    return {
        (token, *rest)
        for token in trie.allowed(node).tolist()
        for rest in written(trie, trie.after(node, token))
    }


@pytest.mark.parametrize(
    "actions", [("rock", "paper", "scissors"), ("1", "1 2", "1 2 3"), ("go north", "go", "wait")]
)
def test_every_legal_action_and_nothing_else_is_written(chat: ChatFormat, actions) -> None:
    trie = restriction_of(Play(*actions), chat, BOTH)
    read = [BOTH.parse(0, chat.decode(list(tokens))) for tokens in written(trie)]
    assert sorted(read) == sorted(actions)


def test_a_form_of_answers_of_a_policy_without_a_stop_token_is_refused(chat: ChatFormat) -> None:
    endless = ChatFormat(chat._tokenize, chat.decode, chat._render, ())
    with pytest.raises(EnvironmentFault, match="the policy has none: state the `eos_token_id`"):
        answer_restriction("/yes|no/", endless, 8)


def test_a_word_of_the_game_is_one_choice(chat: ChatFormat) -> None:
    trie = restriction_of(Play("rock", "paper", "scissors"), chat, BOTH)
    assert len(trie.allowed(0)) == 3


@pytest.mark.parametrize("action", ["", " rock", "rock ", "a</action>b", "<|user|>", "<think>no"])
def test_an_action_that_cannot_be_written_is_named(chat: ChatFormat, action: str) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written: its tokens decode to") as fault:
        restriction_of(Play("rock", action), chat, BOTH)
    assert repr(action) in str(fault.value)


@pytest.mark.parametrize("parser", [ActionParser("none"), ActionParser("both", has_tools=True)])
def test_where_the_policy_writes_the_tag_nothing_is_restricted(chat, parser) -> None:
    assert restriction_of(Play("rock"), chat, parser) is None


def test_actions_that_are_not_all_listed_restrict_nothing(chat: ChatFormat) -> None:
    shop = catalogue.load("shop")
    assert isinstance(shop, Shop)
    play = shop.begin(Task("shop", shop.members("train")[0], 0), 0)
    assert play.legal_actions()
    assert restriction_of(play, chat, BOTH) is None
    assert restriction_of(Play(), chat, BOTH) is None


def test_an_answer_ends_as_the_template_ends_a_turn_if_a_model_has_several_stop_tokens(
    tmp_path: Path,
) -> None:
    (other,) = load_chat(save_text_model(tmp_path)).encode("<|endoftext|>")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {other}}}')
    chat = load_chat(tmp_path)
    assert chat.stop_tokens[0] == other
    tokens, _ = answer_restriction("/ab/", chat, 9).forced(0)
    assert chat.decode(tokens) == "ab<|im_end|>"
