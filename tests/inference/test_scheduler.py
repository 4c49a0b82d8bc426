"""Contexts grow, share, lose their room and change weights, and every completion stays right.

Longer than most: all of it is asked of one small model and its reference.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from mage_async.completion import Prompt, Sampling
from mage_async.errors import ContextFull, PolicyError, RunError
from mage_async.inference.scheduler import Scheduler
from mage_async.policy_version import VersionRun


def text(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 96, num_tokens, np.int32)


def ask(scheduler, context, tokens, *, seed=0, fresh_keys=False, **sampling):
    prompt = Prompt(context, np.asarray(tokens, np.int32), Sampling(**sampling), seed, fresh_keys)
    scheduler.submit(prompt)


def serve(scheduler):
    """Everything that is asked, by context."""
    completions = {}
    while not scheduler.is_idle:
        completions |= dict(scheduler.advance())
    return completions


def answer(scheduler, context, tokens, **options):
    ask(scheduler, context, tokens, **options)
    return serve(scheduler)[context]


def assert_logprobs(reference, tokens, completion, **options) -> None:
    whole = np.concatenate([tokens, completion.tokens])
    rows = reference.logprobs(whole[:-1], **options)[len(tokens) - 1 :]
    theirs = rows[np.arange(len(rows)), completion.tokens]
    np.testing.assert_allclose(completion.logprobs, theirs, atol=1e-4, rtol=0)


@pytest.fixture
def scheduler(reference):
    return Scheduler(reference.engine_model())


@pytest.fixture(scope="session")
def newer(reference, tmp_path_factory):
    return reference.reseeded(1, tmp_path_factory.mktemp("newer"))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_logprobs_of_growing_contexts_are_those_of_transformers(references, family) -> None:
    reference, source = references[family], np.random.default_rng(3)
    scheduler = Scheduler(reference.engine_model())
    tokens = {f"trial {n}": text(n, 3 + 5 * n) for n in range(6)}
    for turn in range(5):
        for context in tokens:
            limit = int(source.integers(1, 5))
            ask(scheduler, context, tokens[context], seed=turn, max_tokens=limit, temperature=0.7)
        for context, completion in serve(scheduler).items():
            assert completion.is_extension
            assert_logprobs(reference, tokens[context], completion, temperature=0.7)
            told = source.integers(0, 96, source.integers(1, 9), np.int32)
            tokens[context] = np.concatenate([tokens[context], completion.tokens, told])


def test_a_seed_draws_the_same_completion_alone_and_among_others(reference) -> None:
    def draw(others: int) -> tuple[np.ndarray, np.ndarray]:
        scheduler = Scheduler(reference.engine_model())
        for number in range(others):
            ask(scheduler, f"other {number}", text(number, 9 + number), seed=number, max_tokens=30)
        completion = answer(scheduler, "mine", text(99, 20), seed=5, max_tokens=40)
        return completion.tokens, completion.logprobs

    alone, together = draw(0), draw(7)
    np.testing.assert_array_equal(alone[0], together[0])
    np.testing.assert_allclose(alone[1], together[1], atol=1e-5)
    assert len(set(alone[0].tolist())) > 5


def test_other_seeds_draw_other_completions(scheduler) -> None:
    drawn = {
        tuple(answer(scheduler, f"c{seed}", text(1, 5), seed=seed, max_tokens=8).tokens)
        for seed in range(20)
    }
    assert len(drawn) == 20


def test_a_group_of_trials_reads_nearly_everything_from_the_cache(reference) -> None:
    scheduler = Scheduler(reference.engine_model(max_tokens=320))
    rules, completions = text(0, 120), []
    tokens = {f"trial {n}": rules for n in range(8)}
    for turn in range(18):
        for context in tokens:
            ask(scheduler, context, tokens[context], seed=turn)
        for context, completion in serve(scheduler).items():
            completions.append(completion)
            told = np.append(completion.tokens, text(turn, 7))
            tokens[context] = np.append(tokens[context], told)
    done = scheduler.statistics()
    assert done.num_reused_tokens / done.num_prompt_tokens >= 0.95
    assert done.num_repeated_tokens == done.num_extension_faults == done.num_evictions == 0
    assert done.num_computed_tokens == 120 + 7 + 8 * 17 * 8  # the prefix once, its end by each
    assert sum(c.num_reused for c in completions) == done.num_reused_tokens


def test_prompts_that_come_together_compute_their_common_prefix_once(reference, scheduler) -> None:
    prompts = {f"t{n}": np.append(text(0, 50), text(n + 1, 4)) for n in range(4)}
    for context, tokens in prompts.items():
        ask(scheduler, context, tokens)
    completions = dict(scheduler.advance())
    assert sorted(c.num_reused for c in completions.values()) == [0, 50, 50, 50]
    for context, completion in completions.items():
        assert_logprobs(reference, prompts[context], completion)


def test_a_released_context_lends_its_prefix_until_its_room_is_needed(reference) -> None:
    scheduler = Scheduler(reference.engine_model(lanes=2))
    answer(scheduler, "first", text(0, 40))
    scheduler.release("first")
    assert scheduler.statistics().num_contexts == 0
    assert answer(scheduler, "second", text(0, 45)).num_reused == 40
    assert answer(scheduler, "another", text(1, 45)).num_reused == 0
    assert answer(scheduler, "third", text(0, 45)).num_reused == 44  # from the second


def test_the_least_recently_used_context_makes_room_and_is_computed_again(reference) -> None:
    scheduler = Scheduler(reference.engine_model(lanes=2))
    first = answer(scheduler, "a", text(0, 30), max_tokens=3)
    answer(scheduler, "b", text(1, 30))
    answer(scheduler, "c", text(2, 30))
    assert scheduler.statistics().num_evictions == 1
    tokens = np.concatenate([text(0, 30), first.tokens, text(3, 5)])
    again = answer(scheduler, "a", tokens)
    assert (again.num_reused, again.num_repeated, again.is_extension) == (0, 32, True)
    assert_logprobs(reference, tokens, again)


def test_an_evicted_context_that_comes_back_changed_is_no_extension(reference) -> None:
    scheduler = Scheduler(reference.engine_model(lanes=1))
    answer(scheduler, "a", text(0, 30))
    answer(scheduler, "b", text(1, 30))
    assert not answer(scheduler, "a", text(2, 35)).is_extension


def test_contexts_wait_while_every_lane_is_busy_and_all_are_served(reference) -> None:
    scheduler = Scheduler(reference.engine_model(lanes=2))
    for number in range(5):
        ask(scheduler, f"c{number}", text(number, 10), max_tokens=4)
    assert scheduler.advance() == []
    assert scheduler.statistics().num_waiting == 3
    completions = serve(scheduler)
    for number in range(5):
        assert_logprobs(reference, text(number, 10), completions[f"c{number}"])


def test_a_context_is_not_evicted_while_its_own_prompt_waits(reference) -> None:
    scheduler = Scheduler(reference.engine_model(lanes=1))
    held = answer(scheduler, "held", text(0, 20))
    ask(scheduler, "new", text(1, 20))
    ask(scheduler, "held", np.append(text(0, 20), held.tokens))
    assert [context for context, _ in scheduler.advance()] == ["held"]
    assert [context for context, _ in scheduler.advance()] == ["new"]
    assert scheduler.statistics().num_repeated_tokens == 0


def test_a_prompt_that_does_not_extend_its_context_is_counted_and_right(
    reference, scheduler
) -> None:
    answer(scheduler, "a", text(0, 30), max_tokens=4)
    tokens = np.append(text(0, 20), text(1, 20))
    completion = answer(scheduler, "a", tokens)
    assert (completion.is_extension, completion.num_reused) == (False, 20)
    assert scheduler.statistics().num_extension_faults == 1
    assert_logprobs(reference, tokens, completion)


def test_leaving_out_what_was_drawn_is_no_extension(scheduler) -> None:
    answer(scheduler, "a", text(0, 30))
    completion = answer(scheduler, "a", text(0, 30))
    assert (completion.is_extension, completion.num_reused) == (False, 29)


def test_a_context_does_not_overwrite_what_it_lends_in_the_same_forward(
    reference, scheduler
) -> None:
    answer(scheduler, "lender", text(0, 40))
    changed, new = np.append(text(0, 5), text(1, 30)), np.append(text(0, 40), text(2, 3))
    ask(scheduler, "new", new)
    ask(scheduler, "lender", changed)
    completions = serve(scheduler)
    assert completions["new"].num_reused == 5
    assert_logprobs(reference, new, completions["new"])
    assert_logprobs(reference, changed, completions["lender"])


def test_what_was_drawn_but_not_yet_computed_is_not_lent(reference, scheduler) -> None:
    first = answer(scheduler, "first", text(0, 30), max_tokens=3)
    tokens = np.concatenate([text(0, 30), first.tokens, text(1, 4)])
    completion = answer(scheduler, "second", tokens)
    assert completion.num_reused == 32
    assert_logprobs(reference, tokens, completion)


def test_a_context_is_not_evicted_by_the_forward_that_lends_from_it(reference) -> None:
    scheduler = Scheduler(reference.engine_model(lanes=2))
    answer(scheduler, "lender", text(0, 40))
    borrower = np.append(text(0, 40), text(1, 3))
    ask(scheduler, "borrower", borrower)
    ask(scheduler, "evicting", text(2, 45))
    (borrowed,) = scheduler.advance()
    assert (borrowed[0], borrowed[1].num_reused) == ("borrower", 40)
    assert_logprobs(reference, borrower, borrowed[1])
    assert_logprobs(reference, text(2, 45), serve(scheduler)["evicting"])


def test_a_lent_prefix_brings_its_versions_along(reference, newer) -> None:
    scheduler = Scheduler(reference.engine_model(lanes=2))
    for context in ("old", "older"):
        answer(scheduler, context, text(0, 40))
        scheduler.release(context)
    scheduler.load(1, newer.directory)
    answer(scheduler, "lender", text(0, 40))
    completion = answer(scheduler, "borrower", np.append(text(0, 40), 5))
    assert completion.versions == (VersionRun(0, 1, 1),)
    assert completion.num_reused == 40


def test_a_long_prompt_is_computed_in_parts_while_others_go_on(reference) -> None:
    scheduler = Scheduler(reference.engine_model(), forward_tokens=16)
    long, short = text(0, 100), text(1, 6)
    ask(scheduler, "short", short, max_tokens=5)
    ask(scheduler, "long", long, max_tokens=2)
    for _ in range(5):
        finished = scheduler.advance()
    assert [context for context, _ in finished] == ["short"]
    assert_logprobs(reference, short, finished[0][1])
    assert_logprobs(reference, long, serve(scheduler)["long"])


def test_one_completion_crosses_a_change_of_weights_and_says_where(reference, newer) -> None:
    scheduler, tokens = Scheduler(reference.engine_model()), text(0, 12)
    ask(scheduler, "a", tokens, max_tokens=6)
    for _ in range(3):
        assert scheduler.advance() == []
    scheduler.load(4, newer.directory / "model.safetensors")
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
    ask(scheduler, "a", tokens, max_tokens=6, fresh_keys=wants_fresh)
    for _ in range(3):
        assert scheduler.advance() == []
    scheduler.load(4, newer.directory)
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
    scheduler.load(3, newer.directory)
    tokens = np.concatenate([tokens, first.tokens, text(1, 4)])
    second = answer(scheduler, "a", tokens)
    assert second.versions == (VersionRun(0, 3, 0),)
    assert (second.num_reused, second.num_repeated) == (20, 0)
    tokens = np.concatenate([tokens, second.tokens, text(2, 4)])
    third = answer(scheduler, "a", tokens, fresh_keys=True)
    assert third.versions == (VersionRun(0, 3, 3),)
    assert (third.num_reused, third.num_repeated, third.is_extension) == (0, 25, True)
    assert_logprobs(newer, tokens, third)
    tokens = np.concatenate([tokens, third.tokens, text(3, 4)])
    assert answer(scheduler, "a", tokens, fresh_keys=True).num_repeated == 0


def test_a_new_context_does_not_begin_with_another_ones_old_keys(reference, newer) -> None:
    scheduler, tokens = Scheduler(reference.engine_model()), text(0, 20)
    answer(scheduler, "old", tokens)
    scheduler.load(1, newer.directory)
    completion = answer(scheduler, "new", np.append(tokens, 7))
    assert completion.versions == (VersionRun(0, 1, 1),)
    assert (completion.num_reused, completion.num_repeated) == (0, 20)
    assert_logprobs(newer, np.append(tokens, 7), completion)


def test_loading_an_older_version_again_is_tagged_by_the_oldest_keys(reference, newer) -> None:
    scheduler = Scheduler(reference.engine_model())
    scheduler.load(5, newer.directory)
    first = answer(scheduler, "a", text(0, 10))
    scheduler.load(2, reference.directory)
    tokens = np.append(text(0, 10), first.tokens)
    second = answer(scheduler, "a", tokens)
    assert second.versions == (VersionRun(0, 2, 2),)
    scheduler.load(5, newer.directory)
    third = answer(scheduler, "a", np.append(tokens, second.tokens))
    assert third.versions == (VersionRun(0, 5, 2),)


def test_weights_that_cannot_be_used_change_nothing(reference, scheduler, tmp_path) -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        scheduler.load(1, tmp_path / "none.safetensors")
    completion = answer(scheduler, "a", text(0, 9))
    assert completion.versions == (VersionRun(0, 0, 0),)
    assert_logprobs(reference, text(0, 9), completion)


def test_a_completion_ends_with_the_first_stop_token(scheduler) -> None:
    free = answer(scheduler, "free", text(0, 9), max_tokens=12)
    assert (free.finish, len(free.tokens)) == ("length", 12)
    stop = int(free.tokens[5])
    first = free.tokens.tolist().index(stop)
    stopped = answer(scheduler, "stopped", text(0, 9), max_tokens=12, stop_tokens=(7777, stop))
    assert stopped.finish == "stop"
    np.testing.assert_array_equal(stopped.tokens, free.tokens[: first + 1])


def test_a_completion_ends_where_the_context_is_full(reference) -> None:
    scheduler = Scheduler(reference.engine_model(max_tokens=16))
    completion = answer(scheduler, "a", text(0, 13), max_tokens=9)
    assert (completion.finish, len(completion.tokens)) == ("length", 3)
    assert_logprobs(reference, text(0, 13), completion)
    with pytest.raises(
        ContextFull,
        match=r"'b': a prompt of 16 tokens does not fit, .*engine\.max_tokens = 16; raise it",
    ):
        ask(scheduler, "b", text(0, 16))


@pytest.mark.parametrize(
    ("tokens", "sampling", "says"),
    [
        ([], {}, "0 tokens cannot be sampled"),
        ([1, 96], {}, r"1 to 96, but the model knows 0 to 95"),
        ([-1, 5], {}, "-1 to 5"),
        ([1], {"max_tokens": 0}, "cannot be sampled"),
        ([1], {"temperature": -1.0}, "cannot be sampled"),
        ([1], {"top_p": 0.0}, "cannot be sampled"),
        ([1], {"top_k": -1}, "cannot be sampled"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(scheduler, tokens, sampling, says) -> None:
    with pytest.raises(RunError, match=says):
        ask(scheduler, "a", tokens, **sampling)
    assert scheduler.is_idle


def test_a_context_has_one_prompt_at_a_time(scheduler) -> None:
    ask(scheduler, "a", [1, 2], max_tokens=3)
    for _ in range(2):  # waiting, then running
        with pytest.raises(RunError, match="'a' has a prompt already"):
            ask(scheduler, "a", [1, 2])
        scheduler.advance()


def test_an_aborted_prompt_can_be_asked_again_and_reuses_what_was_computed(
    reference, scheduler
) -> None:
    ask(scheduler, "a", text(0, 20), max_tokens=9)
    scheduler.advance()
    scheduler.advance()
    scheduler.abort("a")
    assert scheduler.is_idle
    completion = answer(scheduler, "a", text(0, 20), max_tokens=2)
    assert (completion.is_extension, completion.num_reused) == (True, 19)
    assert_logprobs(reference, text(0, 20), completion)


def test_releasing_a_waiting_or_running_context_forgets_its_prompt(reference) -> None:
    scheduler = Scheduler(reference.engine_model(lanes=1))
    ask(scheduler, "running", text(0, 20), max_tokens=9)
    ask(scheduler, "waiting", text(1, 20))
    scheduler.advance()
    for context in ("running", "waiting", "unknown"):
        scheduler.release(context)
    assert scheduler.is_idle
    assert scheduler.statistics().num_contexts == 0


def test_its_memory_is_said_before_it_is_used(scheduler) -> None:
    said = scheduler.describe()
    assert "8 contexts x 256 tokens, 1.0 MB" in said
    assert scheduler.statistics().cache_bytes == 8 * 256 * 2 * 2 * 2 * 16 * 4


def _head(completion, num_tokens):
    return replace(
        completion, tokens=completion.tokens[:num_tokens], logprobs=completion.logprobs[:num_tokens]
    )


def _cache_of(reference, tokens, cache):
    with torch.no_grad():
        reference.model(
            torch.from_numpy(tokens.astype(np.int64))[None], past_key_values=cache, use_cache=True
        )
    return cache


def _logprobs_after(reference, tokens, cache):
    with torch.no_grad():
        logits = reference.model(
            torch.from_numpy(tokens.astype(np.int64))[None], past_key_values=cache
        ).logits[0]
    return torch.log_softmax(logits, -1).numpy()
