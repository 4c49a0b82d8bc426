"""Which keys a prompt may read, under each rule of the cache."""

import numpy as np
import pytest

from mage_async.assembly import KV_REFRESH
from mage_async.completion import Prompt, Sampling
from mage_async.inference.server_prefixes import ServerPrefixes


def prompt(context: str, *tokens: int, fresh: bool = False) -> Prompt:
    return Prompt(context, np.array(tokens, np.int32), Sampling(), 0, refresh_kv=fresh)


def drawn(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        ("keep", [5, 5, 5, 5]),
        ("refresh_at_episode", [5, 5, 7, 7]),
        ("isolate", [5, 6, 7, 8]),
    ],
)
def test_two_episodes_of_two_turns_under_a_version_each(rule: str, keys: list[int]) -> None:
    contexts = ServerPrefixes()
    found, tokens = [], [1]
    for turn, version in enumerate([5, 6, 7, 8]):
        begins = turn == 2
        fresh = {"never": False, "episode": begins, "turn": True}[KV_REFRESH[rule]]
        asked = prompt("a", *tokens, fresh=fresh)
        found.append(contexts.open(asked, version).kv_version)
        contexts.close(asked, drawn(9), len(tokens))
        tokens += [9, 1]
    assert found == keys


def test_a_new_context_begins_with_the_version_that_is_loaded() -> None:
    contexts = ServerPrefixes()
    assert contexts.open(prompt("a", 1), 3).kv_version == 3
    assert contexts.open(prompt("b", 1), 4).kv_version == 4
    contexts.release("a")
    assert contexts.open(prompt("a", 1), 5).kv_version == 5
    assert len(contexts) == 2


def test_a_prompt_that_goes_on_under_new_weights_keeps_its_keys_unless_it_wants_fresh_ones() -> (
    None
):
    contexts = ServerPrefixes()
    old, fresh = prompt("a", 1), prompt("b", 1, fresh=True)
    contexts.open(old, 3)
    contexts.open(fresh, 3)
    assert contexts.reopen(old, 4) == 3
    assert contexts.reopen(fresh, 4) == 4


def test_a_server_that_died_has_no_old_keys() -> None:
    contexts = ServerPrefixes()
    asked = prompt("a", 1)
    contexts.open(asked, 3)
    contexts.discard_kv(6)
    assert contexts.reopen(asked, 6) == 6


def test_what_a_context_had_computed_is_known() -> None:
    contexts = ServerPrefixes()
    first = prompt("a", 1, 2, 3)
    assert (contexts.open(first, 0).num_known, contexts.open(first, 0).is_extension) == (0, True)
    contexts.close(first, drawn(4, 5), 4)
    opened = contexts.open(prompt("a", 1, 2, 3, 4, 5, 6), 0)
    assert (opened.num_known, opened.is_extension) == (4, True)  # the last one drawn has no keys
    opened = contexts.open(prompt("a", 1, 2, 7, 4, 5, 6), 0)
    assert (opened.num_known, opened.is_extension) == (2, False)
    opened = contexts.open(prompt("a", 1, 2, 3), 0)
    assert (opened.num_known, opened.is_extension) == (2, False)


def test_forced_tokens_at_the_end_have_no_keys() -> None:
    contexts = ServerPrefixes()
    first = prompt("a", 1, 2, 3)
    contexts.open(first, 0)
    contexts.close(first, drawn(4, 5, 6), 3)
    assert contexts.open(prompt("a", 1, 2, 3, 4, 5, 6, 7), 0).num_known == 3


def test_a_prompt_with_other_tokens_has_no_keys_of_those_it_replaced() -> None:
    contexts = ServerPrefixes()
    first = prompt("a", 1, 2, 3, 4, 5, 6)
    contexts.open(first, 0)
    contexts.close(first, drawn(7, 8), 7)
    other = prompt("a", 1, 2, 9)
    contexts.open(other, 0)
    contexts.close(other, drawn(10, 11, 12), 3)  # forced tokens
    assert contexts.open(prompt("a", 1, 2, 9, 10, 11, 12, 13), 0).num_known == 3


def test_a_turn_that_computes_nothing_keeps_the_keys_that_its_prompt_shares() -> None:
    contexts = ServerPrefixes()
    first = prompt("a", 1, 2, 3, 4)
    contexts.open(first, 0)
    contexts.close(first, drawn(5), 4)
    other = prompt("a", 1, 2, 9)
    contexts.open(other, 0)
    contexts.close(other, drawn(10), 0)
    assert contexts.open(prompt("a", 1, 2, 9, 10, 11), 0).num_known == 2
