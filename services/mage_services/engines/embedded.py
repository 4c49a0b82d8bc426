"""The embedded engine, awaited: a task drives the scheduler, one worker thread computes.

The scheduler is never touched by two threads: what arrives during a forward waits, and is handed
over between two forwards, while the worker is idle.

    queue     filled by                emptied by   bounded by
    errands   complete, release        the driver   trials: each waits for its completion
    loads     load                     the driver   the actor: it waits for its weights
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from mage_async.completion import Completion, Prompt
from mage_async.config.schema import Embedded as EngineRules
from mage_async.errors import MageError, RunError
from mage_async.inference.model import Model
from mage_async.inference.receipts.receipt import Accepted, Receipt
from mage_async.inference.receipts.scoring import receipted
from mage_async.inference.scheduler import Scheduler
from mage_async.inference.statistics import Statistics
from mage_async.inference.weights import Weights, read_tensors
from mage_services.engines.accepting import read_again
from mage_services.engines.rivals import Rivals
from mage_services.weights.weight_group import Manifest, Receiver, is_manifest


class EmbeddedEngine:
    """Serves a model directory on the CPU cores of this process; an `Engine`.

    Args:
        directory: its weights are version 0 until others are loaded.
        name: of the process, for an error.

    Raises:
        PolicyError: the model cannot be served; the text says what can.
    """

    def __init__(self, directory: Path, rules: EngineRules, name: str = "an engine") -> None:
        model = Model.load(
            directory,
            lanes=rules.max_contexts,
            max_tokens=rules.max_tokens,
            arithmetic=rules.arithmetic,
        )
        interrupts = rules.in_flight == "interrupt"
        self._scheduler = Scheduler(model, interrupts=interrupts, now=time.perf_counter)
        self._rivals, self._rules, self._name = Rivals(self._rival), rules, name
        self._worker = ThreadPoolExecutor(
            1, "embedded engine", initializer=torch.set_num_threads, initargs=(rules.threads,)
        )
        self._tasks = asyncio.TaskGroup()
        self._driver: asyncio.Task[None] | None = None
        self._errands: list[tuple[Callable[[], None], asyncio.Future[Any] | None]] = []
        self._loads: list[tuple[int, Weights, asyncio.Future[None]]] = []
        self._receiver = Receiver()
        self._completing: dict[str, asyncio.Future[Completion]] = {}
        self._has_work = asyncio.Event()

    async def complete(self, prompt: Prompt) -> Completion:
        """Draw a completion. Cancellation aborts it; the context keeps what was computed."""
        future: asyncio.Future[Completion] = self._promise()
        self._post(partial(self._submit, prompt, future), future)
        try:
            return await future
        finally:
            if future.cancelled():
                self._post(partial(self._abort, prompt.context, future))

    async def load(self, version: int, path: Path) -> Accepted | None:
        """Draw with other weights; returns when the next token will be drawn by them.

        Cancellation leaves the old weights or the new ones, whole. A file that cannot be used is a
        PolicyError, and leaves the old ones.
        """
        self._promise()  # an engine that has ended reads nothing
        weights, receipt = await asyncio.to_thread(self._read, version, path)
        future: asyncio.Future[None] = self._promise()
        self._loads.append((version, weights, future))
        self._has_work.set()
        await future
        return receipt

    async def hold(self, version: int, path: Path) -> None:
        """Hold a version beside the current one until `let_go`. Cancellation leaves it as it was.

        A file that cannot be used is a PolicyError.
        """
        await self._rivals.hold(version, path)

    def let_go(self, version: int) -> None:
        """Release a held version; returns at once."""
        self._rivals.let_go(version)

    def release(self, context: str) -> None:
        """Forget a context; returns at once."""
        self._post(partial(self._release, context))

    def statistics(self) -> Statistics:
        """A snapshot of what was done so far."""
        own = self._scheduler.statistics()
        return replace(
            own,
            forward_s=own.forward_s + self._rivals.forward_s(),
            cache_bytes=own.cache_bytes + self._rivals.cache_bytes(),
        )

    async def describe(self) -> str:
        """What is served and what memory it takes, in one line."""
        return self._scheduler.describe()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._driver = self._tasks.create_task(self._drive(), name="embedded engine")
        self._driver.add_done_callback(self._fail_waiting)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End. A failure of the block is raised as it is, one of the engine as a group."""
        assert self._driver is not None
        self._driver.cancel()
        is_cancelled = isinstance(error, asyncio.CancelledError)
        try:
            await self._tasks.__aexit__(*((kind, error, trace) if is_cancelled else (None,) * 3))
        finally:
            self._worker.shutdown()

    async def _drive(self) -> None:
        """Compute whatever comes. Cancellation leaves a forward to end unheard."""
        loop = asyncio.get_running_loop()
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            self._hand_over()
            self._swap()
            busy = [each for each in self._schedulers() if not each.is_idle]
            if not busy:
                continue
            finished = await loop.run_in_executor(self._worker, _advance, busy)
            self._deliver(finished)
            await self._hear_answers()
            self._has_work.set()

    def _scheduler_of(self, rival: int | None) -> Scheduler:
        return self._scheduler if rival is None else self._rivals.scheduler(rival)

    def _schedulers(self) -> list[Scheduler]:
        """Schedulers of the current version and of those held beside it."""
        return [self._scheduler, *self._rivals.schedulers()]

    def _rival(self, version: int, path: Path) -> Scheduler:
        """A version beside the current one, with room for a quarter of its contexts."""
        own, tokens = self._scheduler, self._rules.max_tokens
        shape, arithmetic = own.architecture, own.arithmetic
        weights, _ = self._read(version, path)
        lanes = max(1, self._rules.max_contexts // 4)
        model = Model(shape, weights, lanes=lanes, max_tokens=tokens, arithmetic=arithmetic)
        return Scheduler(model, now=time.perf_counter)

    def _read(self, version: int, path: Path) -> tuple[Weights, Accepted | None]:
        """Read weights and compare their receipt, in a thread beside the one that computes:
        forwards go on meanwhile.
        """
        return read_again(self._name, version, path, partial(self._read_once, version))

    def _read_once(
        self, version: int, path: Path, published: Receipt | None
    ) -> tuple[Weights, Receipt]:
        shape, arithmetic = self._scheduler.architecture, self._scheduler.arithmetic
        is_sent = is_manifest(path)
        named = (
            self._receiver.receive(Manifest.read(path)).items() if is_sent else read_tensors(path)
        )
        return receipted(
            version, named, shape, path, arithmetic, is_sent=is_sent, published=published
        )

    def _swap(self) -> None:
        loads, self._loads = self._loads, []
        for version, weights, future in loads:
            if not future.done():
                self._scheduler.swap(version, weights)
                _settle(future, None)

    async def _hear_answers(self) -> None:
        """Let trials that got completions send their next prompts before the next forward."""
        num_heard = -1
        while num_heard != len(self._errands):
            num_heard = len(self._errands)
            await _one_pass()

    def _hand_over(self) -> None:
        errands, self._errands = self._errands, []
        for act, _ in errands:
            act()

    def _deliver(self, finished: list[tuple[str, Completion]]) -> None:
        for context, completion in finished:
            future = self._completing.pop(context)
            if not future.done():
                future.set_result(completion)

    def _submit(self, prompt: Prompt, future: asyncio.Future[Completion]) -> None:
        if future.done():
            return
        try:
            self._scheduler_of(prompt.rival).submit(prompt)
        except MageError as error:
            future.set_exception(error)
        else:
            self._completing[prompt.context] = future

    def _abort(self, context: str, future: asyncio.Future[Completion]) -> None:
        if self._completing.get(context) is future:
            del self._completing[context]
            for scheduler in self._schedulers():
                scheduler.abort(context)

    def _release(self, context: str) -> None:
        future = self._completing.pop(context, None)
        if future is not None:
            _settle(future, RunError(f"context {context!r} was released while it was completed"))
        for scheduler in self._schedulers():
            scheduler.release(context)

    def _post(self, act: Callable[[], None], future: asyncio.Future[Any] | None = None) -> None:
        self._errands.append((act, future))
        self._has_work.set()

    def _promise(self) -> asyncio.Future[Any]:
        if self._driver is None or self._driver.done():
            raise RunError("the engine does not run: use it inside its `async with`")
        return asyncio.get_running_loop().create_future()

    def _fail_waiting(self, driver: asyncio.Task[None]) -> None:
        """Fail every waiting call: the engine has ended."""
        error = None if driver.cancelled() else driver.exception()
        futures = [future for _, future in self._errands if future is not None]
        futures += [*self._completing.values(), *(future for _, _, future in self._loads)]
        for future in futures:
            _settle(future, error or RunError("the engine was closed"))


def _advance(schedulers: Sequence[Scheduler]) -> list[tuple[str, Completion]]:
    """One forward for each; what they ended, by context."""
    return [ended for scheduler in schedulers for ended in scheduler.advance()]


def _settle(future: asyncio.Future[Any], error: BaseException | None) -> None:
    """Settle a future with a result or a failure, unless it is done."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


async def _one_pass() -> None:
    """Return after every ready task has run once."""
    await asyncio.sleep(0)
