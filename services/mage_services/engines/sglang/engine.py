"""SGLang as an `Engine`, which survives the death of SGLang's process.

The process (`server.py`) answers single requests, and the watchdog (`watchdog.py`) restarts it.
Here a turn is one request or several (`turns.py`), and weights are loaded one version after the
other (`weight_loads.py`). After a death, the next process loads the newest weights and samples the
interrupted turns again from their prompts.
"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from mage_async.completion import Completion, Prompt, check_prompt
from mage_async.config.schema import Sglang as EngineConfig
from mage_async.errors import RunError
from mage_async.inference.scheduler import Statistics
from mage_async.inference.server_prefixes import TurnRequests
from mage_async.inference.weight_fingerprint import AcceptedWeights
from mage_services.engines.engine import Engine
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.arguments import chosen, installed, vocabulary
from mage_services.engines.sglang.turns import PendingLoad, PendingTurn, TurnQueue
from mage_services.engines.sglang.watchdog import EngineWatchdog
from mage_services.engines.sglang.weight_loads import WeightLoads


class SglangEngine(Engine):
    """Serves a model directory with an SGLang of its own.

    Args:
        directory: model directory; its weights are version 0.
        seed: seed of SGLang's random numbers; different for every engine of a run.
        has_gpu: otherwise SGLang runs on CPU cores, with PyTorch's own operators.
        max_deaths: deaths in a row, without a completion in between, after which it is restarted.
        silence_s: time limit for the answer to an abort; a process that exceeds it hangs.
        name: name of the actor, for errors.

    Raises:
        ConfigError: no SGLang of a known version is installed, or `engine.server` is wrong.
        PolicyError: `directory` has no config.json.
    """

    def __init__(
        self,
        directory: Path,
        config: EngineConfig,
        *,
        dtype: str,
        seed: int,
        has_gpu: bool,
        max_deaths: int,
        silence_s: float,
        name: str = "an engine",
    ) -> None:
        super().__init__()
        installed()
        self._vocabulary = vocabulary(directory)
        self._arguments = chosen(config, directory, dtype=dtype, has_gpu=has_gpu)
        self._seed = seed
        self._directory, self._config = directory, config
        self._watchdog = EngineWatchdog(
            self._start,
            self._on_message,
            self._on_death,
            threads=config.threads,
            max_deaths=max_deaths,
        )
        self._facts: asyncio.Future[str] | None = None
        self._busy: set[str] = set()
        """Contexts with a prompt that is being completed."""
        self._turns = TurnQueue(self._watchdog, silence_s=silence_s)
        self._loads = WeightLoads(self._watchdog, self._turns, config, directory, name)

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample a completion. Cancellation aborts it; the sequence keeps its keys and values."""
        if prompt.context in self._busy:
            raise RunError(
                f"context {prompt.context!r} has a prompt already; a context has one at a time"
            )
        check_prompt(prompt, max_tokens=self._config.max_tokens, vocabulary=self._vocabulary)
        pending = PendingTurn(TurnRequests(prompt, self._config.max_tokens), self._promise())
        self._busy.add(prompt.context)
        self._turns.request(pending)
        try:
            return await pending.future
        finally:
            self._busy.discard(prompt.context)
            if pending.future.cancelled():
                self._turns.abort(pending)

    async def load(self, version: int, path: Path) -> AcceptedWeights | None:
        """Load weights; return when the next token will be sampled with them or newer ones."""
        self._check_runs()
        await self._loads.prepare(version, path)
        weights = PendingLoad(version, path, self._promise())
        self._loads.add(weights)
        return await weights.future

    async def load_past(self, version: int, path: Path) -> None:
        """Raise RunError: an SGLang serves one version only."""
        raise RunError(
            f"SGLang cannot hold version {version} beside the current one: set "
            'engine.kind = "embedded", or population.rivals = 0'
        )

    def release_past(self, version: int) -> None:
        """Do nothing: there are no past versions."""

    def release(self, context: str) -> None:
        """Forget a sequence; SGLang evicts its keys when it needs room."""
        self._turns.contexts.release(context)

    def statistics(self) -> Statistics:
        """Return the statistics up to now."""
        return self._turns.statistics()

    async def describe(self) -> str:
        """Wait until the process serves, and describe it in one line."""
        assert self._facts is not None
        facts = await asyncio.shield(self._facts)
        return f"{facts}; weights {self._config.in_flight}, keys {self._config.cache_rule}"

    @property
    def pid(self) -> int | None:
        """Process id of SGLang's process; None while there is none."""
        return self._watchdog.pid

    @property
    def num_restarts(self) -> int:
        """Number of processes after the first."""
        return self._watchdog.num_restarts

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        self._facts = asyncio.get_running_loop().create_future()
        return [self._watchdog.run(), self._watchdog.watch()]

    def _start(self, number: int) -> say.Start:
        """Make the first message for the process with a number; each has a seed of its own."""
        arguments = {"random_seed": (self._seed + number) % 2**31} | self._arguments
        return say.Start(directory=str(self._directory), arguments=arguments, version=0)

    def _on_message(self, message: say.Message) -> None:
        match message:
            case say.Serving():
                self._serve(message)
            case say.Began():
                self._turns.take_began(message.rid)
            case say.Drew():
                self._turns.take_drew(message, may_abort=self._loads.interrupts_turns)
            case say.Refused():
                self._turns.take_refused(message)
            case say.Prepared():
                self._loads.take_prepared()
            case say.Loaded():
                self._loads.take_loaded(message)
            case _:
                raise RunError(f"an actor cannot take {type(message).__name__} of its engine")

    def _serve(self, message: say.Serving) -> None:
        assert self._facts is not None
        if not self._facts.done():
            self._facts.set_result(message.facts)
        self._loads.take_serving()

    def _on_death(self) -> None:
        """Handle the process's death, which loses all keys and all requests under way."""
        self._turns.take_death(self._loads.take_death())

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        super()._task_ended(task)
        assert self._facts is not None
        if not self._facts.done():
            self._facts.cancel()
