"""Restricted completions: only legal sequences, with the log-probs of the restricted softmax."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.errors import ContextFull
from mage_async.inference.scheduler import Scheduler
from mage_async.restriction import AllowedSets, TokenTrie
from tests.helpers.completions import serve, text

END = 95
sequences = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=4).map(lambda each: (*each, END)),
    min_size=1,
    max_size=8,
    unique=True,
)


def completed(
    scheduler: Scheduler, trie: TokenTrie | None, *, context: str = "a", seed: int = 0, **sampling
) -> Completion:
    prompt = Prompt(context, text(1, 9), Sampling(**sampling), seed, restriction=trie)
    scheduler.submit(prompt)
    return serve(scheduler)[context]


@given(sequences)
def test_a_walk_through_a_trie_is_one_of_its_sequences(given_sequences) -> None:
    trie = TokenTrie(given_sequences)
    assert trie.max_length == max(map(len, given_sequences))
    source, node, walked = np.random.default_rng(0), 0, []
    while not trie.is_end(node):
        tokens, node = trie.forced(node)
        walked += tokens
        if trie.is_end(node):
            break
        allowed = trie.allowed(node)
        assert len(allowed) > 1
        assert (np.diff(allowed) > 0).all()
        walked.append(int(source.choice(allowed)))
        node = trie.after(node, walked[-1])
    assert tuple(walked) in given_sequences


@given(sequences, st.integers(0, 99))
def test_the_log_probs_are_those_of_the_softmax_over_the_allowed_tokens(reference, wanted, seed):
    scheduler = Scheduler(reference.engine_model())
    found = completed(scheduler, TokenTrie(wanted), seed=seed, temperature=0.7)
    tokens = tuple(found.tokens.tolist())
    assert tokens in wanted
    whole = np.concatenate([text(1, 9), found.tokens])
    rows = reference.logprobs(whole[:-1], temperature=0.7)[8:]
    assert found.drawn_from is not None
    for place, allowed in enumerate(found.drawn_from):
        begins = [each for each in wanted if each[:place] == tokens[:place]]
        following = sorted({each[place] for each in begins})
        if allowed is None:
            assert following == [tokens[place]]
            assert found.logprobs[place] == 0.0
        else:
            assert following == allowed.tolist()
            logits = rows[place][allowed]
            expected = rows[place][tokens[place]] - np.log(np.exp(logits).sum())
            assert found.logprobs[place] == pytest.approx(expected, abs=1e-4)
    assert found.is_sampled().sum() == sum(each is not None for each in found.drawn_from)
    assert found.versions[0].start == 0


def test_the_frequencies_are_the_probabilities(reference) -> None:
    scheduler, trie = (
        Scheduler(reference.engine_model()),
        TokenTrie([(3, END), (7, END), (7, 8, END)]),
    )
    drawn = [completed(scheduler, trie, context=f"c{seed}", seed=seed) for seed in range(1500)]
    counts = Counter(tuple(each.tokens.tolist()) for each in drawn)
    for each in drawn:
        share = counts[tuple(each.tokens.tolist())] / len(drawn)
        assert share == pytest.approx(np.exp(each.logprobs.sum()), abs=0.05)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}])
def test_the_likeliest_is_the_likeliest_of_the_allowed(reference, sampling) -> None:
    found = completed(
        Scheduler(reference.engine_model()), TokenTrie([(3, END), (7, END)]), **sampling
    )
    row = reference.logprobs(text(1, 9))[-1]
    assert found.tokens[0] == (3 if row[3] > row[7] else 7)


def test_free_and_restricted_prompts_share_a_forward(reference) -> None:
    trie = TokenTrie([(3, END), (7, END), (9, 4, END)])
    alone = completed(Scheduler(reference.engine_model()), trie, seed=5)
    scheduler = Scheduler(reference.engine_model())
    for number in range(3):
        scheduler.submit(Prompt(f"free {number}", text(number, 7), Sampling(max_tokens=6), number))
    together = completed(scheduler, trie, seed=5)
    np.testing.assert_array_equal(alone.tokens, together.tokens)
    np.testing.assert_allclose(alone.logprobs, together.logprobs, atol=1e-5)


def test_a_single_legal_action_is_completed_without_a_forward(scheduler) -> None:
    found = completed(scheduler, TokenTrie([(3, 4, END)]))
    assert found.tokens.tolist() == [3, 4, END]
    assert not found.is_sampled().any()
    assert scheduler.statistics().num_completions == 1
    assert scheduler.statistics().num_forwards == 0
    # The sequence goes on from there.
    tokens = np.concatenate([text(1, 9), found.tokens, text(2, 5)])
    scheduler.submit(Prompt("a", tokens, Sampling(), 0))
    assert serve(scheduler)["a"].is_extension


def test_the_next_prompt_finds_the_keys_of_a_restricted_completion(scheduler) -> None:
    found = completed(scheduler, TokenTrie([(3, 4, END), (7, END)]))
    tokens = np.concatenate([text(1, 9), found.tokens, text(2, 5)])
    scheduler.submit(Prompt("a", tokens, Sampling(), 0))
    after = serve(scheduler)["a"]
    assert after.is_extension
    assert after.num_reused >= 9
    assert after.num_repeated == 0


def test_an_action_that_does_not_fit_behind_its_prompt_is_refused_before_it_is_drawn(reference):
    scheduler = Scheduler(reference.engine_model(max_tokens=12))
    with pytest.raises(
        ContextFull, match=r"with an action of 4 tokens, into engine\.max_tokens = 12"
    ):
        completed(scheduler, TokenTrie([(1, 2, 3, END), (5, END)]))


def test_exact_arithmetic_draws_the_same_bits_in_any_company(reference) -> None:
    from mage_async.inference.model import Model

    def model() -> Model:
        return Model.load(reference.directory, slots=8, max_tokens=64, arithmetic="exact")

    trie = TokenTrie([(3, END), (7, END)])
    alone = completed(Scheduler(model()), trie, seed=5)
    scheduler = Scheduler(model())
    many = TokenTrie([(n, END) for n in range(60)])
    scheduler.submit(Prompt("other", text(3, 7), Sampling(), 0, restriction=many))
    together = completed(scheduler, trie, seed=5)
    assert alone.logprobs.tobytes() == together.logprobs.tobytes()


@given(st.lists(st.none() | st.sets(st.integers(0, 9), min_size=2).map(sorted), max_size=9))
def test_each_set_is_stored_once_and_given_back(drawn_from) -> None:
    arrays = [None if each is None else np.array(each, np.int32) for each in drawn_from]
    stored = AllowedSets.of(arrays)
    different = {tuple(each) for each in drawn_from if each is not None}
    if not different:
        assert stored is None
        return
    assert len(stored.offsets) - 1 == len(different)
    assert [None if each is None else each.tolist() for each in stored] == drawn_from
    sampled = np.array([0 if each is None else each[0] for each in drawn_from], np.int32)
    assert stored.fault(sampled) is None
    restricted = stored.index >= 0
    sampled[np.flatnonzero(restricted)[0]] = 10
    assert "got one that does not" in stored.fault(sampled)


@pytest.mark.parametrize(
    ("index", "offsets", "sampled"),
    [
        ([], [0, 2], []),  # sets, and no sampled token
        ([0], [0], [1]),  # no set
        ([0], [0, 2**31 - 1, -7, 2], [1]),  # differences that overflow in int32
    ],
)
def test_sets_that_a_peer_made_up_are_a_fault_in_words(
    index: list[int], offsets: list[int], sampled: list[int]
) -> None:
    tokens = np.array([1, 2] if len(offsets) > 1 else [], np.int32)
    made_up = AllowedSets(np.array(index, np.int32), np.array(offsets, np.int32), tokens)
    assert made_up.fault(np.array(sampled, np.int32))
