"""What the engine's process makes of SGLang's answers, where SGLang does not fail on request."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mage_async.completion import Sampling
from mage_async.inference.weight_fingerprint import (
    NUM_PROBE_TOKENS,
    WeightFingerprint,
    tensor_digest,
)
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.server import Server
from tests.sglang.served import Policies

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of SGLang's own imports, here in this process
    pytest.mark.timeout(300),
]


class Manager:
    """Stands where a `TokenizerManager` of SGLang 0.5.12 does, and keeps a list of what is done.

    Args:
        fails: numbers of the updates that fail, from 0.
    """

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.done: list[str] = []
        self.scores: list[list[float]] = []
        """What the next probe tokens are given for log-probs."""
        self._fails, self._num_updates = fails, 0
        self.drawn = asyncio.Event()
        self.may_end = asyncio.Event()

    async def pause_generation(self, request: Any) -> None:
        self.done.append(f"pause {request.mode}")

    async def continue_generation(self, request: Any) -> None:
        self.done.append("continue")

    async def update_weights_from_disk(self, request: Any, _: None) -> tuple[bool, str, int]:
        assert request.flush_cache is False
        fails = self._num_updates in self._fails
        self._num_updates += 1
        self.done.append(f"update to {request.weight_version} of {_source(request.model_path)}")
        return not fails, "out of memory" if fails else "", 0

    async def generate_request(self, request: Any, _: None) -> AsyncIterator[dict[str, Any]]:
        """Three tokens, and after new weights two more; no spans. Log-probs of probe tokens."""
        if request.logprob_start_len == 0:
            self.done.append("score")
            entries = [(score, 7, None) for score in (None, *self.scores.pop(0))]
            yield {"meta_info": {"input_token_logprobs": entries}}
            return
        assert request.stream
        yield self._reply(3, None)
        self.drawn.set()
        await self.may_end.wait()
        yield self._reply(5, {"type": "length"})

    def abort_request(self, rid: str) -> None:
        self.done.append(f"abort {rid}")
        self.may_end.set()

    def _reply(self, count: int, finish: dict[str, str] | None) -> dict[str, Any]:
        entries = [(-1.0, 7, None)] * count
        meta = {"output_token_logprobs": entries, "cached_tokens": 2, "finish_reason": finish}
        return {"output_ids": [7] * count, "meta_info": meta}


def _source(folder: str) -> str:
    """The name of the folder that a folder of links leads to."""
    (link,) = Path(folder).iterdir()
    return link.resolve().parent.name


class Process:
    """A server among messages; what it says is kept."""

    def __init__(self, manager: Manager, directory: Path) -> None:
        self.said: list[say.Message] = []
        self._fresh: asyncio.Queue[say.Message] = asyncio.Queue()
        self.messages: asyncio.Queue[say.Message | None] = asyncio.Queue()
        self.server = Server(
            manager,
            self._fresh.put_nowait,
            name="actor-0",
            directory=directory,
            has_token_versions=False,
            needs_update_messages=False,
        )

    def tell(self, message: say.Message) -> None:
        """Send a message."""
        self.messages.put_nowait(message)

    async def asked(self) -> AsyncIterator[say.Message]:
        """The messages that were sent, until a None."""
        while (message := await self.messages.get()) is not None:
            yield message

    async def hear(self, kind: type) -> Any:
        """The first message of a kind that was said."""
        async with asyncio.timeout(60):
            while not (found := [each for each in self.said if isinstance(each, kind)]):
                self.said.append(await self._fresh.get())
        return found[0]


REQUEST = say.Generate(
    rid="a" * 32,
    tokens=np.arange(4, dtype=np.int32).tobytes(),
    extra_key="v0",
    sampling=Sampling(max_tokens=5),
    seed=1,
    reports_prompt=True,
)


@pytest.fixture
def published(policies: Policies, tmp_path: Path) -> Path:
    folder = tmp_path / "new"
    folder.mkdir()
    return policies.file(1).rename(folder / "v1.safetensors")


def run(main: Any, manager: Manager, directory: Path) -> None:
    async def whole() -> None:
        process = Process(manager, directory)
        serving = asyncio.create_task(process.server.serve(process.asked()))
        await main(process)
        process.messages.put_nowait(None)
        await serving

    asyncio.run(whole())


FAILED = ["pause in_place", "update to 1 of new", "update to 0 of policy", "continue"]
"""An update that failed and was repaired."""


def test_a_failed_update_is_repaired_with_the_weights_of_before_and_tried_again(
    policies: Policies, published: Path
) -> None:
    async def main(process: Process) -> None:
        process.tell(say.Load(version=1, path=str(published), interrupts=False))
        loaded = await process.hear(say.Loaded)
        assert (loaded.version, loaded.error) == (1, "")

    manager = Manager(fails=(0,))
    run(main, manager, policies.directory)
    assert manager.done == [*FAILED, "pause in_place", "update to 1 of new", "continue"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_update_that_fails_twice_is_refused_as_if_it_were_unreadable(
    policies: Policies, published: Path, *, is_gone: bool
) -> None:
    async def main(process: Process) -> None:
        if is_gone:  # the learner that sent the weights in use has died
            process.server._version = 7
            process.server._good_path = published.with_name("v7.json")
        process.tell(say.Load(version=1, path=str(published), interrupts=False))
        loaded = await process.hear(say.Loaded)
        assert (loaded.version, loaded.error) == (0, "out of memory")
        assert loaded.is_refused

    manager = Manager(fails=(0, 2))
    run(main, manager, policies.directory)
    assert manager.done == [*FAILED, *FAILED]


GOOD, OTHER = [-1.0] * (NUM_PROBE_TOKENS - 1), [-2.0] * (NUM_PROBE_TOKENS - 1)


@pytest.mark.parametrize(
    ("scores", "num_retries"), [([GOOD], 0), ([OTHER, GOOD], 1), ([OTHER, OTHER], None)]
)
def test_others_than_the_published_weights_are_loaded_again_and_then_refused(
    policies: Policies, published: Path, scores: list[list[float]], num_retries: int | None
) -> None:
    tensors = load_file(published)
    receipt = WeightFingerprint(
        version=1,
        precision="float32",
        tensors={name: tensor_digest(name, one) for name, one in tensors.items()},
        logprobs=tuple(GOOD),
    )
    save_file(tensors, published, {"receipt": receipt.text()})

    async def main(process: Process) -> None:
        process.tell(say.Load(version=1, path=str(published), interrupts=False))
        loaded = await process.hear(say.Loaded)
        assert loaded.is_refused == (num_retries is None)
        if num_retries is None:
            assert loaded.error.startswith("log-probs are 1 nats from the learner's")
        else:
            assert loaded.receipt.num_retries == num_retries
            assert loaded.receipt.digest == receipt.digest

    manager = Manager()
    manager.scores = list(scores)
    run(main, manager, policies.directory)
    once = ["pause in_place", "update to 1 of new", "continue", "score"]
    assert manager.done == once * len(scores)


def test_weights_that_cannot_be_repaired_end_the_process(
    policies: Policies, published: Path
) -> None:
    async def main(process: Process) -> None:
        process.tell(say.Load(version=1, path=str(published), interrupts=False))

    with pytest.raises(ExceptionGroup) as caught:
        run(main, Manager(fails=(0, 1)), policies.directory)
    assert caught.group_contains(RuntimeError, match="weights are half-written: out of memory")


def test_an_sglang_that_names_no_versions_is_cut_where_new_weights_came(
    policies: Policies, published: Path
) -> None:
    async def main(process: Process) -> None:
        process.tell(REQUEST)
        await manager.drawn.wait()
        assert await process.hear(say.PromptCached) == say.PromptCached(rid=REQUEST.rid)
        process.tell(say.Load(version=1, path=str(published), interrupts=False))
        assert (await process.hear(say.Loaded)).version == 1
        manager.may_end.set()
        generated = await process.hear(say.Generated)
        assert (generated.spans, generated.provenance) == (((0, 0), (3, 1)), "segment")
        assert (len(generated.tokens), generated.num_cached, generated.is_aborted) == (20, 2, False)

    manager = Manager()
    run(main, manager, policies.directory)


def test_an_interrupted_sglang_that_names_no_versions_is_exact_all_the_same(
    policies: Policies, published: Path
) -> None:
    async def main(process: Process) -> None:
        process.tell(REQUEST)
        await manager.drawn.wait()
        process.tell(say.Load(version=1, path=str(published), interrupts=True))
        await process.hear(say.Loaded)
        generated = await process.hear(say.Generated)
        assert (generated.spans, generated.provenance) == (((0, 0),), "exact")
        assert process.said.index(generated) < process.said.index(await process.hear(say.Loaded))

    manager = Manager()
    run(main, manager, policies.directory)
    assert manager.done == [f"abort {REQUEST.rid}", "update to 1 of new"]
