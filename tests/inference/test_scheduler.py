"""Contexts grow, share and lose their room, and every completion stays right."""

import numpy as np
import pytest

from mage_async.inference.scheduler import Scheduler
from tests.helpers.completions import answer, ask, assert_logprobs, serve, text


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
    scheduler = Scheduler(reference.engine_model(slots=2))
    answer(scheduler, "first", text(0, 40))
    scheduler.release("first")
    assert scheduler.statistics().num_contexts == 0
    assert answer(scheduler, "second", text(0, 45)).num_reused == 40
    assert answer(scheduler, "another", text(1, 45)).num_reused == 0
    assert answer(scheduler, "third", text(0, 45)).num_reused == 44  # from the second


def test_the_least_recently_used_context_makes_room_and_is_computed_again(reference) -> None:
    scheduler = Scheduler(reference.engine_model(slots=2))
    first = answer(scheduler, "a", text(0, 30), max_tokens=3)
    answer(scheduler, "b", text(1, 30))
    answer(scheduler, "c", text(2, 30))
    assert scheduler.statistics().num_evictions == 1
    tokens = np.concatenate([text(0, 30), first.tokens, text(3, 5)])
    again = answer(scheduler, "a", tokens)
    assert (again.num_reused, again.num_repeated, again.is_extension) == (0, 32, True)
    assert_logprobs(reference, tokens, again)


def test_an_evicted_context_that_comes_back_changed_is_no_extension(reference) -> None:
    scheduler = Scheduler(reference.engine_model(slots=1))
    answer(scheduler, "a", text(0, 30))
    answer(scheduler, "b", text(1, 30))
    assert not answer(scheduler, "a", text(2, 35)).is_extension


def test_contexts_wait_while_every_slot_is_busy_and_all_are_served(reference) -> None:
    scheduler = Scheduler(reference.engine_model(slots=2))
    for number in range(5):
        ask(scheduler, f"c{number}", text(number, 10), max_tokens=4)
    assert scheduler.advance() == []
    assert scheduler.statistics().num_contexts == 2
    completions = serve(scheduler)
    for number in range(5):
        assert_logprobs(reference, text(number, 10), completions[f"c{number}"])


def test_a_context_is_not_evicted_while_its_own_prompt_waits(reference) -> None:
    scheduler = Scheduler(reference.engine_model(slots=1))
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
    scheduler = Scheduler(reference.engine_model(slots=2))
    answer(scheduler, "lender", text(0, 40))
    borrower = np.append(text(0, 40), text(1, 3))
    ask(scheduler, "borrower", borrower)
    ask(scheduler, "evicting", text(2, 45))
    (borrowed,) = scheduler.advance()
    assert (borrowed[0], borrowed[1].num_reused) == ("borrower", 40)
    assert_logprobs(reference, borrower, borrowed[1])
    assert_logprobs(reference, text(2, 45), serve(scheduler)["evicting"])


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
