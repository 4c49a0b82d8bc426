"""SGLang as an engine: prompts in, completions out, while its process may die and come back.

The process (`process.py`) answers single requests. Here a turn is one request or several
(`turn_queue.py`), and weights go to the process one version after the other (`weight_loads.py`). A
process that has died is followed by another with the newest weights, which plays the interrupted
turns again from their prompts.
"""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mage_async.completion import Completion, Prompt, check_prompt
from mage_async.config.schema import Sglang as EngineRules
from mage_async.errors import RunError
from mage_async.inference.receipts.receipt import Accepted
from mage_async.inference.statistics import Statistics
from mage_async.inference.turn_requests import TurnRequests
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.arguments import chosen, vocabulary
from mage_services.engines.sglang.keeper import Keeper
from mage_services.engines.sglang.turn_queue import TurnQueue
from mage_services.engines.sglang.turns import Asked, WantedWeights
from mage_services.engines.sglang.versions import installed
from mage_services.engines.sglang.weight_loads import WeightLoads


class SglangEngine:
    """Serves a model directory with an SGLang of its own; an `Engine`.

    Args:
        directory: its weights are version 0 until others are loaded.
        seed: of its own random numbers; different for every engine of a run.
        has_gpu: otherwise SGLang computes on CPU cores, with PyTorch's own operators.
        max_deaths: so many in a row, without a completion between, are made good.
        silence_s: an aborted request is answered within this, or the process is taken to hang.
        name: of the process that uses it, for an error.

    Raises:
        ConfigError: no SGLang of a known version is installed, or `engine.server` is wrong.
        PolicyError: `directory` has no config.json.
    """

    def __init__(
        self,
        directory: Path,
        rules: EngineRules,
        *,
        dtype: str,
        seed: int,
        has_gpu: bool,
        max_deaths: int,
        silence_s: float,
        name: str = "an engine",
    ) -> None:
        installed()
        self._vocabulary = vocabulary(directory)
        self._arguments = chosen(rules, directory, dtype=dtype, has_gpu=has_gpu)
        self._seed = seed
        self._directory, self._rules = directory, rules
        self._keeper = Keeper(
            self._start, self._hear, self._die, threads=rules.threads, max_deaths=max_deaths
        )
        self._tasks = asyncio.TaskGroup()
        self._keeping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._facts: asyncio.Future[str] | None = None
        self._busy: set[str] = set()
        """Contexts with a prompt under way."""
        self._turns = TurnQueue(self._keeper, silence_s=silence_s)
        self._loads = WeightLoads(self._keeper, self._turns, rules, directory, name)

    async def complete(self, prompt: Prompt) -> Completion:
        """Draw a completion. Cancellation aborts it; the context keeps what was computed."""
        self._check(prompt)
        asked = Asked(TurnRequests(prompt, self._rules.max_tokens), self._promise())
        self._busy.add(prompt.context)
        self._turns.ask(asked)
        try:
            return await asked.future
        finally:
            self._busy.discard(prompt.context)
            if asked.future.cancelled():
                self._turns.give_up(asked)

    async def load(self, version: int, path: Path) -> Accepted | None:
        """Draw with other weights; returns when the next token will be drawn by them or by newer.

        Cancellation leaves the old weights or the new ones, whole. A file that cannot be used is a
        PolicyError, and leaves the old ones.
        """
        self._check_runs()
        await self._loads.have_ready(version, path)
        weights = WantedWeights(version, path, self._promise())
        self._loads.add(weights)
        return await weights.future

    async def hold(self, version: int, path: Path) -> None:
        """An SGLang serves one version: always a RunError."""
        raise RunError(
            f"SGLang cannot hold version {version} beside the current one: set "
            'engine.kind = "embedded", or population.rivals = 0'
        )

    def let_go(self, version: int) -> None:
        """Nothing is ever held."""

    def release(self, context: str) -> None:
        """Forget a context; its keys give way to others when room is needed."""
        self._turns.contexts.release(context)

    def statistics(self) -> Statistics:
        """What was done so far; `forward_s` is the time in which any request was under way."""
        return Statistics(**self._turns.totals() | self._loads.totals())

    async def describe(self) -> str:
        """What is served and how, in one line, once it is. Cancellation leaves nothing."""
        assert self._facts is not None
        facts = await asyncio.shield(self._facts)
        return f"{facts}; weights {self._rules.in_flight}, keys {self._rules.cache_rule}"

    @property
    def pid(self) -> int | None:
        """Process id of the engine's process, while there is one."""
        return self._keeper.pid

    @property
    def num_restarts(self) -> int:
        """Processes that were started after the first."""
        return self._keeper.num_restarts

    async def __aenter__(self) -> Self:
        """Begin to start; calls wait until the process serves."""
        await self._tasks.__aenter__()
        self._facts = asyncio.get_running_loop().create_future()
        self._keeping = self._tasks.create_task(self._keeper.keep(), name="sglang")
        self._keeping.add_done_callback(self._fail_waiting)
        self._watching = self._tasks.create_task(self._keeper.watch(), name="watch sglang")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End. A failure of the block is raised as it is, one of the engine as a group."""
        assert self._keeping is not None
        assert self._watching is not None
        self._keeping.cancel()
        self._watching.cancel()
        is_cancelled = isinstance(error, asyncio.CancelledError)
        await self._tasks.__aexit__(*((kind, error, trace) if is_cancelled else (None,) * 3))

    def _start(self, number: int) -> say.Start:
        """What the process with this number serves; each draws from a stream of its own."""
        arguments = {"random_seed": (self._seed + number) % 2**31} | self._arguments
        return say.Start(directory=str(self._directory), arguments=arguments, version=0)

    def _hear(self, message: say.Message) -> None:
        match message:
            case say.Serving():
                self._serve(message)
            case say.Began():
                self._turns.began(message.rid)
            case say.Drew():
                self._turns.take(message, may_abort=self._loads.interrupts_turns)
            case say.Refused():
                self._turns.refuse(message)
            case say.Prepared():
                self._loads.take_ready()
            case say.Loaded():
                self._loads.take_loaded(message)
            case _:
                raise RunError(f"an actor cannot take {type(message).__name__} of its engine")

    def _serve(self, message: say.Serving) -> None:
        assert self._facts is not None
        if not self._facts.done():
            self._facts.set_result(message.facts)
        self._loads.serve()

    def _die(self) -> None:
        """The process has ended, and with it every key and what was being drawn."""
        self._turns.die(self._loads.die())

    def _check(self, prompt: Prompt) -> None:
        if prompt.context in self._busy:
            raise RunError(
                f"context {prompt.context!r} has a prompt already; a context has one at a time"
            )
        check_prompt(prompt, max_tokens=self._rules.max_tokens, vocabulary=self._vocabulary)

    def _promise(self) -> asyncio.Future[Any]:
        self._check_runs()
        return asyncio.get_running_loop().create_future()

    def _check_runs(self) -> None:
        if self._keeping is None or self._keeping.done():
            raise RunError("the engine does not run: use it inside its `async with`")

    def _fail_waiting(self, keeper: asyncio.Task[None]) -> None:
        """Nobody waits for an engine that has ended."""
        error = None if keeper.cancelled() else keeper.exception()
        reason = error or RunError("the engine was closed")
        self._turns.fail(reason)
        self._loads.fail(reason)
        assert self._facts is not None
        if not self._facts.done():
            self._facts.cancel()
