"""Contexts go on over a change of weights, and every token says which weights drew it."""

from dataclasses import replace
from inspect import signature

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from mage_async.errors import PolicyError
from mage_async.inference.scheduler import Scheduler
from mage_async.policy_version import VersionRun
from tests.helpers.completions import answer, ask, assert_logprobs, load, serve, text

# transformers has another name for the cache's argument since 5.24.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in signature(Qwen3ForCausalLM.forward).parameters
)


def test_a_lent_prefix_brings_its_versions_along(reference, newer) -> None:
    scheduler = Scheduler(reference.engine_model(slots=2))
    for context in ("old", "older"):
        answer(scheduler, context, text(0, 40))
        scheduler.release(context)
    load(scheduler, 1, newer.directory)
    answer(scheduler, "lender", text(0, 40))
    completion = answer(scheduler, "borrower", np.append(text(0, 40), 5))
    assert completion.versions == (VersionRun(0, 1, 1),)
    assert completion.num_reused == 40


def test_one_completion_crosses_a_change_of_weights_and_says_where(reference, newer) -> None:
    scheduler, tokens = Scheduler(reference.engine_model()), text(0, 12)
    ask(scheduler, "a", tokens, max_tokens=6)
    for _ in range(3):
        assert scheduler.advance() == []
    load(scheduler, 4, newer.directory / "model.safetensors")
    completion = serve(scheduler)["a"]
    assert completion.versions == (VersionRun(0, 0, 0), VersionRun(3, 4, 0))
    whole = np.append(tokens, completion.tokens)
    cache = _cache_of(reference, whole[: 12 + 2], DynamicCache())  # keys of the first two drawn
    theirs = _logprobs_after(newer, whole[12 + 2 : -1], cache)
    np.testing.assert_allclose(
        completion.logprobs[3:], theirs[np.arange(3), completion.tokens[3:]], atol=1e-4
    )
    assert_logprobs(reference, tokens, _head(completion, 3))


@pytest.mark.parametrize("wants_fresh", [True, False])
def test_an_interrupted_completion_goes_on_over_fresh_keys_where_it_wanted_them(
    reference, newer, wants_fresh
) -> None:
    scheduler, tokens = Scheduler(reference.engine_model(), interrupts=True), text(0, 12)
    ask(scheduler, "a", tokens, max_tokens=6, refresh_kv=wants_fresh)
    for _ in range(3):
        assert scheduler.advance() == []
    load(scheduler, 4, newer.directory)
    completion = serve(scheduler)["a"]
    assert completion.versions == (VersionRun(0, 0, 0), VersionRun(3, 4, 4 if wants_fresh else 0))
    assert completion.num_repeated == (14 if wants_fresh else 0)  # prompt and two drawn
    assert_logprobs(reference, tokens, _head(completion, 3))
    if wants_fresh:
        whole = np.append(tokens, completion.tokens[:3])
        rest = replace(completion, tokens=completion.tokens[3:], logprobs=completion.logprobs[3:])
        assert_logprobs(newer, whole, rest)


def test_old_keys_are_read_on_unless_fresh_ones_are_asked_for(reference, newer) -> None:
    scheduler, tokens = Scheduler(reference.engine_model()), text(0, 20)
    first = answer(scheduler, "a", tokens)
    load(scheduler, 3, newer.directory)
    tokens = np.concatenate([tokens, first.tokens, text(1, 4)])
    second = answer(scheduler, "a", tokens)
    assert second.versions == (VersionRun(0, 3, 0),)
    assert (second.num_reused, second.num_repeated) == (20, 0)
    tokens = np.concatenate([tokens, second.tokens, text(2, 4)])
    third = answer(scheduler, "a", tokens, refresh_kv=True)
    assert third.versions == (VersionRun(0, 3, 3),)
    assert (third.num_reused, third.num_repeated, third.is_extension) == (0, 25, True)
    assert_logprobs(newer, tokens, third)
    tokens = np.concatenate([tokens, third.tokens, text(3, 4)])
    assert answer(scheduler, "a", tokens, refresh_kv=True).num_repeated == 0


def test_a_new_context_does_not_begin_with_another_ones_old_keys(reference, newer) -> None:
    scheduler, tokens = Scheduler(reference.engine_model()), text(0, 20)
    answer(scheduler, "old", tokens)
    load(scheduler, 1, newer.directory)
    completion = answer(scheduler, "new", np.append(tokens, 7))
    assert completion.versions == (VersionRun(0, 1, 1),)
    assert (completion.num_reused, completion.num_repeated) == (0, 20)
    assert_logprobs(newer, np.append(tokens, 7), completion)


def test_loading_an_older_version_again_is_tagged_by_the_oldest_keys(reference, newer) -> None:
    scheduler = Scheduler(reference.engine_model())
    load(scheduler, 5, newer.directory)
    first = answer(scheduler, "a", text(0, 10))
    load(scheduler, 2, reference.directory)
    tokens = np.append(text(0, 10), first.tokens)
    second = answer(scheduler, "a", tokens)
    assert second.versions == (VersionRun(0, 2, 2),)
    load(scheduler, 5, newer.directory)
    third = answer(scheduler, "a", np.append(tokens, second.tokens))
    assert third.versions == (VersionRun(0, 5, 2),)


def test_weights_that_cannot_be_used_change_nothing(reference, scheduler, tmp_path) -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        load(scheduler, 1, tmp_path / "none.safetensors")
    completion = answer(scheduler, "a", text(0, 9))
    assert completion.versions == (VersionRun(0, 0, 0),)
    assert_logprobs(reference, text(0, 9), completion)


def _head(completion, num_tokens):
    return replace(
        completion, tokens=completion.tokens[:num_tokens], logprobs=completion.logprobs[:num_tokens]
    )


def _cache_of(reference, tokens, cache):
    with torch.no_grad():
        reference.model(
            torch.from_numpy(tokens.astype(np.int64))[None], **{CACHE: cache}, use_cache=True
        )
    return cache


def _logprobs_after(reference, tokens, cache):
    with torch.no_grad():
        logits = reference.model(
            torch.from_numpy(tokens.astype(np.int64))[None], **{CACHE: cache}
        ).logits[0]
    return torch.log_softmax(logits, -1).numpy()
