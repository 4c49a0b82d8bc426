"""Turns that are restricted to the actions of a pattern."""

import re
from pathlib import Path

import numpy as np
import pytest

from mage_async.environments.legal_pattern import NUM_TEXTS, matching_texts, pattern_fault
from mage_async.errors import EnvironmentFault
from mage_async.inference.chat_files import load_chat
from mage_async.trials import allowed_tokens
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.allowed_tokens import action_tokens, restriction_of
from tests.helpers.random_models import SPACE_SCHEMES, save_spaced_chat

BOTH = ActionParser("both")
PATTERNS = ["[0-9]{1,3} [a-c]", "north|south", "x/y|z", "é{1,2}", "[1-9] [1-9]( [1-9]){0,2}"]
PATTERNS += [r"a\/b|c", r"a\\/b|c", r"[\\/]{1,2}", r"\\\/\\\\/[/]|c", "a\nb|c", "a\\\nb|c"]


class Play:
    """An episode that has only a pattern of its actions."""

    def __init__(self, pattern: str) -> None:
        self.legal_pattern = pattern


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_completion_is_an_action_that_matches(chat, pattern: str) -> None:
    source, found = np.random.default_rng(0), set()
    for _ in range(30):
        restriction, node, tokens = restriction_of(Play(pattern), chat, BOTH), 0, []
        while True:
            forced, node = restriction.forced(node)
            tokens += forced
            if restriction.is_end(node):
                break
            allowed = restriction.allowed(node)
            assert len(allowed) > 1
            assert (np.diff(allowed) > 0).all()
            tokens.append(int(source.choice(allowed)))
            node = restriction.after(node, tokens[-1])
        action = BOTH.parse(0, chat.decode(tokens))
        assert re.fullmatch(pattern, action)
        assert len(tokens) <= restriction.max_length
        found.add(action)
    assert len(found) > 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_for_a_player_without_a_model_are_among_those_that_can_be_sampled(
    chat, pattern: str
) -> None:
    texts = matching_texts(pattern, ("3", "north"))
    assert len(set(texts)) > 1
    for text in texts:
        assert re.fullmatch(pattern, text)
        restriction, node = restriction_of(Play(pattern), chat, BOTH), 0
        for token in chat.encode(f" {text}</action>"):
            assert token in restriction.allowed(node)
            node = restriction.after(node, token)
        assert restriction.is_end(node)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("[1-4] (tea|coffee) ", "1 coffee "),
        ("go| stay", " stay"),
        ("[0-9]{2}[ a]", "00 "),
        ("x/y|z ", "z "),
        *((each, "") for each in (*PATTERNS, "[a-z ]{1,8}", ".{1,200}", " a|a", "[a-z]{5} b")),
    ],
)
def test_texts_that_match_only_with_a_space_at_an_end_are_refused(pattern: str, text: str) -> None:
    fault = pattern_fault(pattern)
    assert fault == "" if not text else f"matches {text!r}, and not {text.strip()!r}" in fault


def test_few_matching_texts_are_all_listed_and_of_more_some_are_drawn() -> None:
    assert matching_texts("(b|a) [21]|é{1,2}", ()) == ("a 1", "a 2", "b 1", "b 2", "é", "éé")
    numbers = tuple(sorted(map(str, range(NUM_TEXTS))))
    assert matching_texts(f"(?:{'|'.join(numbers)})", ()) == numbers
    drawn = matching_texts("[a-z]{5}", ("crane", "no"))
    assert len(drawn) == NUM_TEXTS
    assert not drawn.is_whole
    assert "zzzzz" in drawn
    assert "no" not in drawn
    assert list(drawn).count("crane") > 1
    assert len(set(drawn)) > NUM_TEXTS / 2
    matching_texts.cache_clear()
    assert matching_texts("[a-z]{5}", ("crane", "no")) == drawn
    assert "".join(matching_texts("[^a]{2}", ())).isascii()


def test_a_text_that_can_only_go_on_in_one_way_is_forced(chat) -> None:
    restriction = restriction_of(Play("please wait here"), chat, BOTH)
    tokens, node = restriction.forced(0)
    assert restriction.is_end(node)
    assert BOTH.parse(0, chat.decode(tokens)) == "please wait here"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a+", r"matches actions of more than 1,000 .* such as \{1,8\} instead of \+"),
        ("[0-9]*", "matches actions of more than 1,000 characters"),
        ("a{99999999999}", "cannot be read: the repetition number is too large"),
        (9999 * "(" + 9999 * ")", "cannot be read: maximum recursion depth"),
        ("(", "cannot be read"),
        (r"(a)\1", "cannot be read"),
        ("a?", "matches an empty action"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_in_a_sentence(chat, pattern, reason) -> None:
    with pytest.raises(EnvironmentFault, match=f"(?s)legal_pattern .* {reason}") as fault:
        restriction_of(Play(pattern), chat, BOTH)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("pattern", "tokens"),
    [
        ("[0-9]{1,3} (left|right)", 9),
        (r"(?:yes|no)\.", 4),
        (r"\w{1,8}", 32),
        ("[^a]{2}", 8),
        ("(?i:k)", 4),
        ("é", 4),
    ],
)
def test_the_longest_match_has_room_for_all_bytes_of_characters_that_are_not_ascii(
    pattern: str, tokens: int
) -> None:
    assert allowed_tokens._longest(pattern) == tokens


@pytest.mark.parametrize("scheme", SPACE_SCHEMES)
def test_a_pattern_is_sampled_with_tokens_that_are_also_bytes(tmp_path: Path, scheme: str) -> None:
    """Llama 2's `>` and `<0x3E>` are the same byte."""
    save_spaced_chat(tmp_path, scheme, "{% for m in messages %}<s>{{ m.content }}{% endfor %}")
    chat = load_chat(tmp_path)
    wanted = action_tokens("7", chat, BOTH)
    restriction = restriction_of(Play("7|12"), chat, BOTH)
    assert wanted[0] in restriction.allowed(0)
    tokens, node = restriction.forced(restriction.after(0, wanted[0]))
    assert [wanted[0], *tokens] == list(wanted)
    assert restriction.is_end(node)
