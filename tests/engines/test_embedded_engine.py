"""The embedded engine among tasks: it batches, aborts, changes weights, fails and ends."""

import asyncio
import dataclasses
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.completion import Prompt, Sampling
from mage_async.config.schema import Embedded as EngineRules
from mage_async.errors import ContextFull, PolicyError, RunError
from mage_services.engines import embedded
from mage_services.engines.embedded import MAX_IDLE, EmbeddedEngine

RULES = EngineRules(
    arithmetic="float32",
    max_contexts=16,
    max_tokens=256,
    cache_rule="keep",
    threads=1,
    in_flight="in_place",
    turn_deadline_s=300.0,
    devices=[],
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A random model as people save it."""
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(made)
    return made


def prompt(context: str, num_tokens: int = 5, **sampling) -> Prompt:
    return Prompt(context, np.arange(num_tokens, dtype=np.int32), Sampling(**sampling), seed=1)


def weights(directory):
    return directory / "model.safetensors"


async def a_forward(engine: EmbeddedEngine, directory) -> None:
    """Return after a forward: the first load lets one begin, the second waits for it to end."""
    for _ in range(2):
        await engine.load(0, weights(directory))


def run(directory, scenario, rules=RULES):
    """Run a scenario on an engine; what it returns."""

    async def main():
        async with asyncio.timeout(60), EmbeddedEngine(directory, rules) as engine:
            return await scenario(engine)

    return asyncio.run(main())


def test_concurrent_trials_share_every_forward(directory) -> None:
    async def trial(engine, name):
        tokens = np.arange(6, dtype=np.int32)
        for turn in range(10):
            completion = await engine.complete(Prompt(name, tokens, Sampling(), seed=turn))
            tokens = np.concatenate([tokens, completion.tokens, [3, 4]]).astype(np.int32)
        engine.release(name)

    async def scenario(engine):
        async with asyncio.TaskGroup() as trials:
            for number in range(16):
                trials.create_task(trial(engine, f"t{number}"), name=f"trial {number}")
        return engine.statistics()

    done = run(directory, scenario)
    assert done.num_completions == 160
    assert done.num_forwards == 10
    assert done.num_rows / done.num_forwards == 16
    assert done.num_extension_faults == 0


def test_the_event_loop_runs_on_while_a_forward_computes(directory, monkeypatch) -> None:
    began, may_go_on = threading.Event(), threading.Event()
    advance = embedded._advance

    def slow(schedulers):
        began.set()
        assert may_go_on.wait(10)
        return advance(schedulers)

    monkeypatch.setattr(embedded, "_advance", slow)

    async def scenario(engine):
        asking = asyncio.ensure_future(engine.complete(prompt("a")))
        assert await asyncio.get_running_loop().run_in_executor(None, began.wait, 10)
        late = asyncio.ensure_future(engine.complete(prompt("b")))  # heard during the forward
        await asyncio.sleep(0)
        may_go_on.set()
        return await asking, await late

    first, second = run(directory, scenario)
    assert first.tokens.tolist() == second.tokens.tolist()


def test_loaded_weights_draw_the_next_token(directory) -> None:
    async def scenario(engine):
        before = await engine.complete(prompt("a"))
        await engine.load(7, weights(directory))
        return before, await engine.complete(prompt("b"))

    before, after = run(directory, scenario)
    assert [run_.policy for run_ in (*before.versions, *after.versions)] == [0, 7]


def test_weights_change_inside_a_completion_and_nothing_is_lost(directory) -> None:
    async def scenario(engine):
        asking = asyncio.ensure_future(engine.complete(prompt("a", max_tokens=240)))
        await a_forward(engine, directory)
        await engine.load(1, weights(directory))
        return await asking

    completion = run(directory, scenario)
    assert len(completion.tokens) == 240
    assert [(r.policy, r.kv) for r in completion.versions] == [(0, 0), (1, 0)]


def test_a_bad_weights_file_fails_its_load_alone(directory) -> None:
    async def scenario(engine):
        with pytest.raises(PolicyError, match="cannot be read"):
            await engine.load(1, directory / "none.safetensors")
        return await engine.complete(prompt("a"))

    assert run(directory, scenario).versions[0].policy == 0


def test_a_prompt_that_does_not_fit_fails_alone(directory) -> None:
    async def scenario(engine):
        fitting = asyncio.ensure_future(engine.complete(prompt("a", 9)))
        with pytest.raises(ContextFull, match="does not fit"):
            await engine.complete(Prompt("b", np.zeros(256, np.int32), Sampling(), seed=0))
        return await fitting

    assert len(run(directory, scenario).tokens) == 1


def test_a_cancelled_completion_leaves_room_and_its_context_can_go_on(directory) -> None:
    async def scenario(engine):
        asking = asyncio.ensure_future(engine.complete(prompt("a", max_tokens=240)))
        await a_forward(engine, directory)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return await engine.complete(prompt("a"))

    completion = run(directory, scenario, msgspec.structs.replace(RULES, max_contexts=1))
    assert completion.is_extension
    assert completion.num_reused == 4


def test_a_context_released_while_it_is_completed_says_so(directory) -> None:
    async def scenario(engine):
        asking = asyncio.ensure_future(engine.complete(prompt("a", max_tokens=240)))
        await a_forward(engine, directory)
        engine.release("a")
        with pytest.raises(RunError, match="'a' was released"):
            await asking

    run(directory, scenario)


def test_a_failing_forward_fails_whoever_waits_and_ends_the_engine(directory) -> None:
    async def main():
        async with EmbeddedEngine(directory, RULES) as engine:
            engine._scheduler.model._cache.clear()  # what no caller can do
            try:
                await engine.complete(prompt("a"))
            finally:
                with pytest.raises(RunError, match="does not run"):
                    await engine.complete(prompt("b"))

    with pytest.raises(ExceptionGroup) as group:
        asyncio.run(main())
    assert group.group_contains(IndexError)


def test_closing_fails_whoever_still_waits(directory) -> None:
    async def main():
        async with EmbeddedEngine(directory, RULES) as engine:
            asking = asyncio.ensure_future(engine.complete(prompt("a", max_tokens=240)))
            queued = asyncio.ensure_future(engine.load(3, weights(directory)))
            await a_forward(engine, directory)
        with pytest.raises(RunError, match="closed"):
            await asking
        await asyncio.gather(queued, return_exceptions=True)
        with pytest.raises(RunError, match="does not run"):
            await engine.complete(prompt("a"))

    asyncio.run(main())


def test_a_failure_of_the_block_is_raised_as_it_is(directory) -> None:
    async def scenario(engine):
        await engine.complete(prompt("a"))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(directory, scenario)


def test_cancelling_the_block_ends_the_engine(directory) -> None:
    async def main():
        began = asyncio.Event()

        async def serve():
            async with EmbeddedEngine(directory, RULES) as engine:
                began.set()
                await engine.complete(prompt("a", max_tokens=240))

        serving = asyncio.ensure_future(serve())
        await began.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        return [task.get_name() for task in asyncio.all_tasks()]

    assert len(asyncio.run(main())) == 1
    assert not [t.name for t in threading.enumerate() if t.name.startswith("embedded engine")]


def test_another_kind_of_model_is_refused_before_anything_runs(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(PolicyError, match=r'set engine\.kind = "sglang"'):
        EmbeddedEngine(tmp_path, RULES)


def test_it_starts_without_transformers() -> None:
    imports = "import sys, mage_services.engines.embedded; print('transformers' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", imports], capture_output=True, text=True, check=True
    )
    assert said.stdout == "False\n"


@pytest.fixture(scope="module")
def other(directory, tmp_path_factory):
    """The same model with other weights."""
    made = tmp_path_factory.mktemp("other")
    torch.manual_seed(1)
    model = Qwen3ForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(made)
    return made


def as_rival(asked: Prompt, version: int) -> Prompt:
    return dataclasses.replace(asked, rival=version)


def test_a_held_version_draws_as_it_did_when_it_was_the_current_one(directory, other) -> None:
    """Beside whatever else, and after the current weights have changed twice."""

    async def alone(engine):
        return await engine.complete(prompt("a", num_tokens=9, max_tokens=20))

    async def scenario(engine):
        await engine.load_past(3, weights(other))
        asked = prompt("a", num_tokens=9, max_tokens=20)
        beside = dataclasses.replace(asked, context="b")
        first, own = await asyncio.gather(
            engine.complete(as_rival(asked, 3)), engine.complete(beside)
        )
        await engine.load(4, weights(other))
        await engine.load(5, weights(directory))
        again = await engine.complete(as_rival(dataclasses.replace(asked, context="c"), 3))
        statistics = engine.statistics()
        assert statistics.num_completions == 1, "a rival's completions are not the policy's"
        assert statistics.num_reused_tokens == 0
        return first, own, again

    first, own, again = run(directory, scenario)
    theirs, ours = run(other, alone), run(directory, alone)
    assert (first.tokens == theirs.tokens).all()
    assert (again.tokens == theirs.tokens).all()
    assert (own.tokens == ours.tokens).all()
    assert (theirs.tokens != ours.tokens).any()


def test_a_version_stays_while_somebody_needs_it_and_is_read_once(directory, other) -> None:
    async def scenario(engine):
        await asyncio.gather(*(engine.load_past(1, weights(other)) for _ in range(3)))
        held = engine._past_policies.scheduler(1)
        for version in range(2, 12):
            await engine.load_past(version, weights(other))
            engine.release_past(version)
        assert engine._past_policies.scheduler(1) is held
        assert len(engine._past_policies.schedulers()) == 1 + MAX_IDLE
        with pytest.raises(RunError, match="has not loaded version 2"):
            await engine.complete(as_rival(prompt("a"), 2))
        for _ in range(3):
            engine.release_past(1)
        await engine.complete(as_rival(prompt("a"), 11))

    run(directory, scenario)


def test_a_rivals_missing_file_is_named_and_leaves_nothing_behind(directory, tmp_path) -> None:
    async def scenario(engine):
        with pytest.raises(PolicyError, match=r"gone\.safetensors"):
            await engine.load_past(1, tmp_path / "gone.safetensors")
        await engine.load_past(1, weights(directory))
        await engine.complete(as_rival(prompt("a"), 1))

    run(directory, scenario)
