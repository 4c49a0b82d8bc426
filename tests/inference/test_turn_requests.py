"""Turns of one or several requests, by hand and at random."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_async.completion import Prompt, Sampling
from mage_async.errors import RunError
from mage_async.inference.server_prefixes import Opened, Piece, TurnRequests
from mage_async.policy_version import VersionRun
from mage_async.restriction import TokenTrie

STOP = 9
NEW = Opened(kv_version=0, num_known=0, is_extension=True)


def prompt(*tokens: int, max_tokens: int = 6) -> Prompt:
    sampling = Sampling(max_tokens=max_tokens, stop_tokens=(STOP,))
    return Prompt("a.1", np.array(tokens, np.int32), sampling, seed=0)


def piece(*tokens: int, version: int = 0, cached: int = 0, aborted: bool = False) -> Piece:
    runs = (VersionRun(0, version, version),) if tokens else ()
    ids = np.array(tokens, np.int32)
    return Piece(ids, -ids.astype(np.float32), runs, cached, aborted)


def test_a_turn_that_one_request_draws_is_that_request() -> None:
    turn = TurnRequests(prompt(1, 2, 3), max_tokens=100)
    assert (turn.tokens().tolist(), turn.budget()) == ([1, 2, 3], 6)
    turn.receive(piece(5, STOP, cached=2))
    assert turn.is_done
    done = turn.completion(NEW, 0)
    assert (done.tokens.tolist(), done.logprobs.tolist()) == ([5, STOP], [-5.0, -9.0])
    assert (done.finish, done.num_reused, done.num_repeated) == ("stop", 2, 0)
    assert done.versions == (VersionRun(0, 0, 0),)


def test_an_interrupted_turn_goes_on_behind_what_it_drew_within_the_same_budget() -> None:
    turn = TurnRequests(prompt(1, 2, 3), max_tokens=100)
    turn.receive(piece(5, 6, aborted=True))
    assert not turn.is_done
    assert (turn.tokens().tolist(), turn.budget()) == ([1, 2, 3, 5, 6], 4)
    turn.receive(piece(7, 7, 7, 7, version=1))
    assert turn.is_done
    done = turn.completion(NEW, 0)
    assert (done.tokens.tolist(), done.finish) == ([5, 6, 7, 7, 7, 7], "length")
    assert done.versions == (VersionRun(0, 0, 0), VersionRun(2, 1, 1))
    assert done.num_repeated == 4  # of 5 asked again, the last is always computed


def test_a_turn_that_was_interrupted_before_its_first_token_loses_nothing() -> None:
    turn = TurnRequests(prompt(1, 2, 3), max_tokens=100)
    turn.receive(piece(aborted=True))
    assert (turn.tokens().tolist(), turn.budget()) == ([1, 2, 3], 6)
    turn.receive(piece(STOP, version=1))
    assert turn.completion(NEW, 0).versions == (VersionRun(0, 1, 1),)


def test_a_request_that_was_interrupted_before_its_first_token_says_nothing_of_the_cache() -> None:
    turn = TurnRequests(prompt(1, 2, 3), max_tokens=100)
    turn.receive(piece(aborted=True))
    turn.receive(piece(5, cached=2))
    turn.receive(piece(aborted=True))
    turn.receive(piece(STOP, cached=3))
    done = turn.completion(Opened(kv_version=0, num_known=2, is_extension=True), 0)
    assert (done.num_reused, done.num_repeated) == (2, 0)


def test_a_stop_that_the_prompt_does_not_know_does_not_end_the_turn() -> None:
    turn = TurnRequests(prompt(1), max_tokens=100)
    turn.receive(piece(5, 8))  # the server stops at 8, as the model's own configuration says
    assert not turn.is_done
    turn.receive(piece(STOP, cached=2))
    assert turn.completion(NEW, 0).tokens.tolist() == [5, 8, STOP]


def test_a_turn_ends_where_the_context_does() -> None:
    turn = TurnRequests(prompt(1, 2, 3), max_tokens=5)
    assert turn.budget() == 2
    turn.receive(piece(4, 4))
    assert (turn.is_done, turn.completion(NEW, 0).finish) == (True, "length")


def test_a_turn_whose_server_died_begins_again() -> None:
    turn = TurnRequests(prompt(1, 2, 3), max_tokens=100)
    turn.receive(piece(5, 6, aborted=True))
    turn.restart()
    assert (turn.tokens().tolist(), turn.budget()) == ([1, 2, 3], 6)
    turn.receive(piece(STOP, version=4))
    assert turn.completion(NEW, 0).versions == (VersionRun(0, 4, 4),)


def test_what_a_context_knew_and_the_server_did_not_reuse_is_repeated() -> None:
    turn = TurnRequests(prompt(1, 2, 3, 4), max_tokens=100)
    turn.receive(piece(STOP, cached=1))
    done = turn.completion(Opened(kv_version=0, num_known=3, is_extension=False), 0)
    assert (done.num_reused, done.num_repeated, done.is_extension) == (1, 2, False)


@pytest.mark.parametrize("wrong", [piece(), piece(*range(20, 27))])
def test_a_server_that_draws_nothing_or_too_much_is_refused(wrong: Piece) -> None:
    turn = TurnRequests(prompt(1), max_tokens=100)
    with pytest.raises(RunError, match=r"context 'a\.1': the server sampled \d tokens, and 1 to"):
        turn.receive(wrong)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=8))
def test_pieces_add_up_to_the_turn_whatever_comes_between(cuts: list[tuple[int, bool]]) -> None:
    turn = TurnRequests(prompt(1, 2, max_tokens=20), max_tokens=100)
    drawn: list[tuple[int, int]] = []
    version = 0
    for count, has_new_weights in cuts:
        count = min(count, turn.budget())
        version += has_new_weights
        turn.receive(piece(*[version + 20] * count, version=version, aborted=True))
        drawn += [(version + 20, version)] * count
        assert turn.tokens().tolist() == [1, 2, *(token for token, _ in drawn)]
        assert turn.budget() == 20 - len(drawn)
    done = turn.completion(NEW, 0)
    assert done.tokens.tolist() == [token for token, _ in drawn]
    policies = [0] * len(drawn)
    for run in done.versions:
        policies[run.start :] = [run.policy] * (len(drawn) - run.start)
    assert policies == [policy for _, policy in drawn]


def restricted(*sequences: tuple[int, ...]) -> TurnRequests:
    asked = replace(prompt(1, 2, 3), restriction=TokenTrie(sequences))
    return TurnRequests(asked, max_tokens=100)


def test_a_restricted_turn_needs_a_request_for_each_choice_and_none_for_forced_tokens() -> None:
    turn = restricted((10, 11, 12, STOP), (10, 11, 13, 14, STOP), (10, 11, 13, 15, STOP))
    assert turn.tokens().tolist() == [1, 2, 3, 10, 11]
    assert (turn.budget(), turn.allowed().tolist()) == (1, [12, 13])
    turn.receive(piece(version=3, aborted=True))  # new weights came first
    turn.receive(piece(13, version=4, cached=2))
    assert turn.tokens().tolist() == [1, 2, 3, 10, 11, 13]
    assert turn.allowed().tolist() == [14, 15]
    turn.receive(piece(14, version=5, cached=4))
    assert turn.is_done
    done = turn.completion(NEW, 9)
    assert done.tokens.tolist() == [10, 11, 13, 14, STOP]
    assert done.finish == "stop"
    assert done.is_sampled().tolist() == [False, False, True, True, False]
    sets = [None if each is None else each.tolist() for each in done.drawn_from]
    assert sets == [None, None, [12, 13], [14, 15], None]
    assert [(run.start, run.policy) for run in done.versions] == [(0, 4), (3, 5)]
    assert turn.num_computed == 6  # not the token that was drawn last, nor the forced one
    assert done.num_repeated == 1  # of the 5 tokens of the request before, 4 were found again


def test_a_turn_of_forced_tokens_needs_no_request() -> None:
    turn = restricted((10, STOP))
    assert turn.is_done
    done = turn.completion(NEW, 9)
    assert (done.tokens.tolist(), done.versions) == ([10, STOP], (VersionRun(0, 9, 9),))
    assert not done.is_sampled().any()
    assert done.num_reused == 3


def test_a_token_that_was_not_allowed_is_refused() -> None:
    turn = restricted((10, STOP), (11, STOP))
    with pytest.raises(RunError, match="sampled token 12, which is not one of the 2 allowed ones"):
        turn.receive(piece(12))
