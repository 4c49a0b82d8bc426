"""The adapter and the real engine, whose turns go on in place when weights come between."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from mage_async.completion import Completion, Prompt
from mage_async.errors import ContextFull, PolicyError, RunError
from mage_services.engines.sglang.arguments import installed
from tests.helpers.completions import policy_per_token
from tests.sglang.served import (
    CROSSED,
    EOS,
    PROVENANCES,
    Policies,
    Served,
    prompt,
    rules,
    word_of,
    words,
)

pytestmark = pytest.mark.timeout(600)
CLOSE = 1e-4
"""Nats; float32 on a processor."""
FAR = 1e-2
"""Other weights, or keys of other weights, are further off than this."""
PUBLICATIONS, PLAYERS = 200, 32


@pytest.fixture(scope="module")
def served(policies: Policies) -> Iterator[Served]:
    engine = Served(policies.directory, rules())
    yield engine
    engine.close()


def longer(asked: Prompt, completion: Completion, told: int, **options: object) -> Prompt:
    """The next turn of a context: what was drawn, and eight tokens that say something."""
    tokens = np.concatenate([asked.tokens, completion.tokens, words(told, 8)])
    return prompt(asked.context, tokens, 8, **options)


def test_the_start_says_what_serves(served: Served) -> None:
    assert served.facts.startswith(f"SGLang {installed()}: device cpu, dtype float32")
    assert served.facts.endswith("weights in_place, cache rule keep")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_learners_model(
    served: Served, policies: Policies, temperature: float
) -> None:
    version = served.publish(policies.file)
    asked = prompt(f"parity {temperature}", words(0, 50), 16, temperature=temperature)
    for turn in range(4):
        (done,) = served.complete(asked)
        assert [(run.policy, run.provenance) for run in done.versions] == [(version, "exact")]
        assert policies.gap(version, asked, done).max() <= CLOSE
        assert policies.gap(version - 1, asked, done).max() > FAR
        asked = longer(asked, done, turn, temperature=temperature)


def test_a_trial_computes_each_token_once(served: Served) -> None:
    """3 episodes of 6 turns behind rules that every trial begins with."""
    (first,) = served.complete(asked := prompt("trial", words(5, 400), 8))
    num_prompt = num_reused = 0
    for turn in range(1, 18):
        asked = longer(asked, first, turn)
        (first,) = served.complete(asked)
        num_prompt += len(asked.tokens)
        num_reused += first.num_reused
        assert (first.num_repeated, first.is_extension) == (0, True)
    assert num_reused / num_prompt >= 0.95


def test_the_first_of_a_group_warms_the_others_prompt(served: Served) -> None:
    tokens = words(6, 120)
    group = served.complete(*(prompt(f"group {n}", tokens) for n in range(8)))
    assert sorted(done.num_reused for done in group) == [0] + [119] * 7


def test_a_completion_ends_at_its_stop_tokens_and_at_no_others(served: Served) -> None:
    tokens = words(7, 20)
    (free,) = served.complete(prompt("free", tokens, 32, temperature=0.0))
    assert (free.finish, len(free.tokens)) == ("length", 32)
    stop = int(free.tokens[5])
    count = free.tokens.tolist().index(stop) + 1
    (ended,) = served.complete(prompt("ended", tokens, 32, temperature=0.0, stop_tokens=(stop,)))
    assert (ended.finish, ended.tokens.tolist()) == ("stop", free.tokens[:count].tolist())


def test_the_models_own_end_of_text_does_not_end_a_turn_that_does_not_stop_there(
    served: Served,
) -> None:
    """The model ends at its EOS unless told otherwise; a prompt says itself where it stops."""
    asked = [prompt(f"eos {n}", words(n, 9), 64, stop_tokens=(VERY_RARE,)) for n in range(48)]
    completions = served.complete(*asked)
    within = [done for done in completions if EOS in done.tokens[:-1]]
    assert within, "none of 3072 tokens was an end of text: take other seeds"
    assert all(len(done.tokens) == 64 or done.finish == "stop" for done in completions)


VERY_RARE = 3


def test_a_prompt_that_cannot_be_served_fails_alone(served: Served) -> None:
    async def main() -> list[object]:
        bad = prompt("bad", [5, 6, 100_000])
        long = prompt("long", words(0, 1024))
        good = prompt("good", words(0, 20))
        turns = map(served.engine.complete, (bad, long, good))
        return await asyncio.gather(*turns, return_exceptions=True)

    bad, long, good = served.run(main())
    assert isinstance(bad, RunError)
    assert "token ids from 5 to 100000, but the model knows 0 to 511" in str(bad)
    assert isinstance(long, ContextFull)
    assert "a prompt of 1024 tokens does not fit" in str(long)
    assert isinstance(good, Completion)


def test_a_cancelled_turn_is_aborted_and_its_context_goes_on(
    served: Served, policies: Policies
) -> None:
    version = served.publish(policies.file)
    asked = prompt("cancelled", words(8, 60), 900)

    async def main() -> Completion:
        turn = asyncio.ensure_future(served.engine.complete(asked))
        await served.engine.complete(prompt("beside", words(9, 20), 4))
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        return await served.engine.complete(prompt("cancelled", words(8, 60), 8))

    before = served.engine.statistics().num_completions
    done = served.run(main())
    assert policies.gap(version, asked, done).max() <= CLOSE
    assert done.num_reused == 59
    assert served.engine.statistics().num_completions == before + 2


@pytest.mark.parametrize("rule", ["keep", "refresh_at_episode", "isolate"])
def test_no_key_of_older_weights_is_read_where_the_rule_forbids_it(
    served: Served, policies: Policies, rule: str
) -> None:
    """A turn of a context; new weights; a turn of the same episode; and the first of the next."""
    served.publish(policies.file)
    (done,) = served.complete(asked := prompt(rule, words(10, 200), 8))
    version = served.publish(policies.file)
    gaps, keys = [], []
    for turn, begins in enumerate([False, True]):
        fresh = rule == "isolate" or (rule == "refresh_at_episode" and begins)
        asked = longer(asked, done, turn)
        asked = prompt(rule, asked.tokens, 8, refresh_kv=fresh)
        (done,) = served.complete(asked)
        gaps.append(policies.gap(version, asked, done).max())
        keys.append({(run.policy, version - run.kv) for run in done.versions})
    is_stale = {
        "keep": [True, True],
        "refresh_at_episode": [True, False],
        "isolate": [False, False],
    }[rule]
    assert [gap > FAR for gap in gaps] == is_stale
    assert [gap > CLOSE for gap in gaps] == is_stale
    assert keys == [{(version, int(stale))} for stale in is_stale]
    newcomer = prompt(f"{rule}, anew", asked.tokens, 8)
    (done,) = served.complete(newcomer)
    assert policies.gap(version, newcomer, done).max() <= CLOSE


def test_a_turn_goes_on_over_its_keys_with_new_weights_and_says_from_where(
    served: Served, policies: Policies
) -> None:
    old = served.publish(policies.file)
    asked = prompt("crossing", words(11, 40), 200)

    async def main() -> Completion:
        turn = asyncio.ensure_future(served.engine.complete(asked))
        await served.engine.complete(prompt("clock", words(12, 20), 12))
        served.version += 1
        await served.engine.load(served.version, policies.file(served.version))
        return await turn

    done = served.run(main())
    first, second = done.versions
    assert (first.policy, first.kv, first.provenance) == (old, old, CROSSED)
    assert (second.policy, second.kv, second.provenance) == (old + 1, old, CROSSED)
    assert 0 < second.start < len(done.tokens) == 200
    assert policies.gap(old, asked, done)[: second.start].max() <= CLOSE
    assert policies.gap(old, asked, done)[second.start :].max() > FAR


def test_weights_that_cannot_be_read_leave_the_old_ones(
    served: Served, policies: Policies, tmp_path
) -> None:
    version = served.publish(policies.file)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(policies.file(version).read_bytes()[:-1000])
    with pytest.raises(PolicyError, match="cannot be read as safetensors"):
        served.run(served.engine.load(version + 1, cut))
    (done,) = served.complete(asked := prompt("after a cut file", words(13, 30)))
    assert policies.gap(version, asked, done).max() <= CLOSE


def test_weights_of_another_model_are_refused_before_they_are_half_written(
    served: Served, policies: Policies
) -> None:
    version = served.publish(policies.file)
    with pytest.raises(PolicyError, match=r"weights of another model: model\.norm\.weight"):
        served.run(served.engine.load(version + 1, policies.broken()))
    (done,) = served.complete(asked := prompt("after another model", words(14, 30)))
    assert {run.policy for run in done.versions} == {version}
    assert policies.gap(version, asked, done).max() <= CLOSE


def test_no_turn_is_lost_and_no_token_wrongly_tagged_under_200_publications(
    served: Served, policies: Policies
) -> None:
    """Every version draws a token of its own, so each token says which version drew it."""
    served.publish(policies.speller)
    num_asked = 0
    completions: list[Completion] = []
    is_over = asyncio.Event()

    async def play(number: int) -> None:
        nonlocal num_asked
        turn = 0
        while not is_over.is_set():
            num_asked += 1
            context = f"player {number}, {turn}"
            asked = prompt(context, words(number, 20 + turn % 30), 24 + number)
            completions.append(await served.engine.complete(asked))
            served.engine.release(context)
            turn += 1

    async def publish() -> None:
        for _ in range(PUBLICATIONS):
            served.version += 1
            await served.engine.load(served.version, policies.speller(served.version))
            await served.engine.complete(prompt(f"after {served.version}", words(0, 5), 2))
        is_over.set()

    async def main() -> None:
        async with asyncio.timeout(500), asyncio.TaskGroup() as tasks:
            for number in range(PLAYERS):
                tasks.create_task(play(number))
            tasks.create_task(publish())

    before = served.engine.statistics()
    served.run(main())
    after = served.engine.statistics()
    assert len(completions) == num_asked
    assert after.num_loads - before.num_loads == PUBLICATIONS
    wrong = [
        (int(token), int(version))
        for done in completions
        for token, version in zip(
            done.tokens, policy_per_token(done.versions, len(done.tokens)), strict=True
        )
        if token != word_of(int(version))
    ]
    assert wrong == []
    assert max(len(done.versions) for done in completions) > 2, "no turn crossed two publications"
    assert {run.provenance for done in completions for run in done.versions} <= PROVENANCES
