"""The SGLang adapter's turns, loads and deaths, with a scripted process in SGLang's place."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.config.schema import Config, Supervision
from mage_async.config.schema import Sglang as EngineRules
from mage_async.errors import PolicyError, RunError, TurnLost, WeightsRefused
from mage_async.inference.weight_fingerprint import AcceptedWeights
from mage_services.engines.sglang import engine as engine_module
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang import watchdog
from mage_services.engines.sglang.engine import SglangEngine
from tests.engines.test_sglang_parts import RULES

DRAWN = 3


class Child:
    """A process that answers when the test says so."""

    pid = 1

    def __init__(self) -> None:
        self.said: asyncio.Queue[say.Message | None] = asyncio.Queue()
        self.heard: list[say.Message] = []
        self.tells(say.Serving("scripted"))

    def send(self, message: say.Message) -> None:
        self.heard.append(message)

    async def receive(self) -> say.Message | None:
        return await self.said.get()

    def tells(self, message: say.Message | None) -> None:
        self.said.put_nowait(message)

    def kill(self) -> None:
        """It has nothing to end."""

    async def wait(self) -> int:
        return 0

    def requests(self) -> list[say.Generate]:
        return [message for message in self.heard if isinstance(message, say.Generate)]

    def generated(
        self, rid: str, *, tokens: int = DRAWN, version: int = 0, aborted: bool = False
    ) -> None:
        drawn, logprobs = np.full(tokens, 7, np.int32), np.zeros(tokens, np.float32)
        spans = ((0, version),) if tokens else ()
        self.tells(
            say.Generated(rid, drawn.tobytes(), logprobs.tobytes(), spans, "unknown", 0, aborted)
        )


class Scene:
    """An engine and the processes that it has started."""

    def __init__(self, engine: SglangEngine, children: list[Child]) -> None:
        self.engine, self.children = engine, children

    def begin(self, context: str, *tokens: int) -> "asyncio.Task[Completion]":
        prompt = Prompt(context, np.array(tokens, np.int32), Sampling(max_tokens=DRAWN), 1)
        return asyncio.create_task(self.engine.complete(prompt))

    async def settle(self) -> Child:
        """Let everything happen that can; the process that runs now."""
        for _ in range(50):
            await asyncio.sleep(0)
        return self.children[-1]


def play(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[Scene], Awaitable[None]], rules: EngineRules
) -> None:
    children: list[Child] = []

    async def start(threads: int) -> Child:
        children.append(Child())
        return children[-1]

    monkeypatch.setattr(watchdog, "start_process", start)
    monkeypatch.setattr(watchdog, "BACK_OFF_S", 0.0)
    monkeypatch.setattr(engine_module, "installed", lambda: "0.5.12")
    monkeypatch.setattr(engine_module, "vocabulary_size", lambda directory: 100)
    monkeypatch.setattr(engine_module, "server_arguments", lambda *_, **__: {})
    monkeypatch.setattr(engine_module, "check_context_length", lambda *_: None)

    async def scene() -> None:
        supervision = Supervision(max_restarts=9, silence_s=9.0)
        config = Config(engine=rules, supervision=supervision)
        engine = SglangEngine(Path("model"), config, "actor-1")
        async with asyncio.timeout(60), engine:
            await main(Scene(engine, children))

    asyncio.run(scene())


def rules(in_flight: str = "in_place") -> EngineRules:
    fields = {name: getattr(RULES, name) for name in RULES.__struct_fields__}
    return EngineRules(**fields | {"in_flight": in_flight})


def test_a_turn_is_one_request_and_equal_prompts_wait_for_the_keys_of_the_first(
    monkeypatch,
) -> None:
    async def main(scene: Scene) -> None:
        turns = [scene.begin(name, 1, 2) for name in "abc"] + [scene.begin("d", 3)]
        child = await scene.settle()
        first, other = child.requests()
        assert first.tokens != other.tokens
        child.tells(say.PromptCached(first.rid))
        await scene.settle()
        assert [request.reports_prompt for request in child.requests()] == [
            True,
            True,
            False,
            False,
        ]
        for request in child.requests():
            child.generated(request.rid)
        assert [len((await turn).tokens) for turn in turns] == [DRAWN] * 4
        statistics = scene.engine.statistics()
        assert statistics.num_completions == 4
        assert statistics.num_generated_tokens == 4 * DRAWN

    play(monkeypatch, main, rules())


def test_a_turn_that_a_load_interrupts_goes_on_with_the_new_weights(monkeypatch) -> None:
    async def main(scene: Scene) -> None:
        turn = scene.begin("a", 1, 2)
        child = await scene.settle()
        load = asyncio.create_task(scene.engine.load(1, Path("v1")))
        await scene.settle()
        assert isinstance(child.heard[-1], say.Prepare)
        late = scene.begin("b", 3)
        child.tells(say.Prepared())
        child = await scene.settle()
        assert child.heard[-1] == say.Load(1, "v1", interrupts=True)
        child.generated(child.requests()[0].rid, tokens=1, aborted=True)
        child.tells(say.Loaded(1, stall_s=0.5))
        await load
        await scene.settle()
        waiting = child.requests()[2:]
        assert [len(request.tokens) // 4 for request in waiting] == [
            3
        ]  # `b` was asked before the load
        child.generated(waiting[0].rid, tokens=2, version=1)
        child.generated(child.requests()[1].rid)
        assert [run.policy for run in (await turn).versions] == [0, 1]
        await late
        assert scene.engine.statistics().num_loads == 1
        assert scene.engine.statistics().stall_s == 0.5

    play(monkeypatch, main, rules("interrupt"))


@pytest.mark.parametrize("num_drawn", [0, 1])
def test_equal_prompts_that_a_load_interrupts_wait_for_one_of_them_unless_it_is_cached(
    monkeypatch: pytest.MonkeyPatch, num_drawn: int
) -> None:
    async def main(scene: Scene) -> None:
        turns = [scene.begin(name, 1, 2) for name in "abc"]
        load = asyncio.create_task(scene.engine.load(1, Path("v1")))
        child = await scene.settle()
        child.tells(say.Prepared())
        await scene.settle()
        (first,) = child.requests()
        child.generated(first.rid, tokens=num_drawn, aborted=True)
        child.tells(say.Loaded(1))
        await load
        await scene.settle()
        # Tokens of the first turn show that its prompt is in the cache, under their KV version.
        num_sent = 3 if num_drawn else 1
        assert len(child.requests()) == 1 + num_sent
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)

    play(monkeypatch, main, rules("interrupt"))


def test_a_process_that_died_is_followed_by_one_that_loads_the_newest_and_draws_again(
    monkeypatch,
) -> None:
    async def main(scene: Scene) -> None:
        first = await scene.settle()
        load = asyncio.create_task(scene.engine.load(1, Path("v1")))
        await scene.settle()
        first.tells(say.Prepared())
        await scene.settle()
        first.tells(say.Loaded(1))
        await load
        turn = scene.begin("a", 1, 2)
        await scene.settle()
        first.tells(None)
        second = await scene.settle()
        assert second is not first
        assert scene.engine.num_restarts == 1
        assert second.heard[1:] == [say.Load(1, "v1", interrupts=False)]
        second.tells(say.Loaded(1))
        await scene.settle()
        second.generated(second.requests()[0].rid, version=1)
        assert len((await turn).tokens) == DRAWN

    play(monkeypatch, main, rules())


def test_a_turn_and_a_load_under_way_in_too_many_deaths_are_given_up(monkeypatch) -> None:
    async def main(scene: Scene) -> None:
        turn = scene.begin("a", 1, 2)
        for _ in range(3):
            (await scene.settle()).tells(None)
        with pytest.raises(TurnLost, match="SGLang died 3 times while this turn was sampled"):
            await turn
        load = asyncio.create_task(scene.engine.load(2, Path("v2")))
        child = await scene.settle()
        child.tells(say.Prepared())
        for _ in range(2):
            (await scene.settle()).tells(None)
        with pytest.raises(PolicyError, match="v2: SGLang died 2 times as it loaded them"):
            await load

    play(monkeypatch, main, rules())


def test_weights_that_cannot_be_loaded_leave_the_old_ones(monkeypatch) -> None:
    async def main(scene: Scene) -> None:
        load = asyncio.create_task(scene.engine.load(1, Path("v1")))
        child = await scene.settle()
        child.tells(say.Prepared())
        await scene.settle()
        child.tells(say.Loaded(0, error="no such file"))
        with pytest.raises(PolicyError, match="no such file"):
            await load
        turn = scene.begin("a", 1, 2)
        await scene.settle()
        child.generated(child.requests()[0].rid)
        assert len((await turn).tokens) == DRAWN

    play(monkeypatch, main, rules())


def test_a_load_returns_its_receipt_and_others_than_the_published_weights_are_refused_by_name(
    monkeypatch,
) -> None:
    receipt = AcceptedWeights(digest="d", difference=1e-6, num_retries=0)

    async def main(scene: Scene) -> None:
        async def load(version: int, answer: say.Loaded) -> AcceptedWeights | None:
            path = Path(f"v{version}.safetensors")
            loading = asyncio.create_task(scene.engine.load(version, path))
            child = await scene.settle()
            child.tells(say.Prepared())
            await scene.settle()
            child.tells(answer)
            return await loading

        assert await load(1, say.Loaded(1, receipt=receipt)) == receipt
        reason = "log-probs are 1 nats from the learner's"
        with pytest.raises(WeightsRefused, match=rf"^actor-1: .* version 2 at v2.*: {reason}"):
            await load(2, say.Loaded(2, error=reason, is_refused=True))
        child = await scene.settle()
        assert child.heard[-1] == say.Load(1, "v1.safetensors", interrupts=False)

    play(monkeypatch, main, rules())


def test_a_turn_nobody_waits_for_is_aborted_and_one_that_is_refused_says_why(monkeypatch) -> None:
    async def main(scene: Scene) -> None:
        turn, other = scene.begin("a", 1, 2), scene.begin("b", 3)
        child = await scene.settle()
        turn.cancel()
        await scene.settle()
        one, two = child.requests()
        assert child.heard[-1] == say.Abort(one.rid)
        child.generated(one.rid, tokens=1, aborted=True)
        child.tells(say.Refused(two.rid, "too long"))
        with pytest.raises(RunError, match="context 'b': SGLang refuses it: too long"):
            await other

    play(monkeypatch, main, rules())
