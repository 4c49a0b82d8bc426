"""How a completion ends, and which prompts are refused, aborted or forgotten."""

import numpy as np
import pytest

from mage_async.errors import ContextFull, RunError
from mage_async.inference.scheduler import Scheduler
from tests.helpers.completions import answer, ask, assert_logprobs, text


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
        ([1, 96], {}, r"1 to 96, but the model knows 0 to 95: .*resize_token_emb"),
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
    scheduler = Scheduler(reference.engine_model(slots=1))
    ask(scheduler, "running", text(0, 20), max_tokens=9)
    ask(scheduler, "waiting", text(1, 20))
    scheduler.advance()
    for context in ("running", "waiting", "unknown"):
        scheduler.release(context)
    assert scheduler.is_idle
    assert scheduler.statistics().num_contexts == 0


def test_its_memory_is_said_before_it_is_used(scheduler) -> None:
    said = scheduler.model.describe()
    assert "8 contexts x 256 tokens, 1.0 MB" in said
    assert scheduler.statistics().cache_bytes == 8 * 256 * 2 * 2 * 2 * 16 * 4


def test_memory_is_given_back_only_when_no_context_needs_it(reference, scheduler) -> None:
    answer(scheduler, "a", text(0, 20), max_tokens=2)
    scheduler.trim()
    assert answer(scheduler, "b", text(0, 20), max_tokens=2).num_reused == 19
    scheduler.release("a")
    scheduler.release("b")
    scheduler.trim()
    completion = answer(scheduler, "c", text(0, 20), max_tokens=2)
    assert completion.num_reused == 0
    assert_logprobs(reference, text(0, 20), completion)
