"""Serve an actor with SGLang, and survive the death of SGLang's process.

SGLang runs in a process of its own (`server.py`), which the watchdog restarts (`watchdog.py`). A
turn is one request to it or several (`turn_queue.py`). Weights are loaded one version after the
other, and no request is sent meanwhile (`WeightLoads`). After a death, the next process loads the
newest weights and samples the interrupted turns again from their prompts.
"""

import asyncio
from collections.abc import Coroutine
from hashlib import blake2s
from pathlib import Path
from typing import Any

from mage_async.completion import Completion, Prompt, check_prompt
from mage_async.config.schema import Config
from mage_async.config.schema import Sglang as EngineConfig
from mage_async.errors import PolicyError, RunError
from mage_async.inference.scheduler import Statistics
from mage_async.inference.server_prefixes import TurnRequests
from mage_async.inference.weight_fingerprint import AcceptedWeights
from mage_services.engines.engine import Engine
from mage_services.engines.sglang.arguments import (
    check_context_length,
    installed,
    server_arguments,
    vocabulary_size,
)
from mage_services.engines.sglang.messages import (
    Generated,
    Load,
    Loaded,
    Message,
    Prepare,
    Prepared,
    PromptCached,
    Refused,
    Serving,
    Start,
)
from mage_services.engines.sglang.turn_queue import PendingLoad, PendingTurn, TurnQueue
from mage_services.engines.sglang.watchdog import START_OR_LOAD, EngineWatchdog
from mage_services.engines.weight_acceptance import refusal
from mage_services.processes.child_process import settle
from mage_services.weights.process_group import is_manifest

PREPARED = "prepared"
"""Name of the answer to `Prepare`, for the watchdog; different from every request id."""
MAX_DEATHS_OF_A_LOAD = 2
"""Number of deaths during one load after which the load fails, because it may cause them."""


class WeightLoads:
    """Let the process load weights, one version at a time, and the newest one after a restart.

    A method `take_...` handles the message of that name, or the process's death.

    Args:
        directory: model directory, with which every process starts; its weights are version 0.
        name: name of the actor, for errors.
    """

    def __init__(
        self,
        watchdog: EngineWatchdog,
        turns: TurnQueue,
        config: EngineConfig,
        directory: Path,
        name: str,
    ) -> None:
        self._watchdog, self._turns, self._config, self._name = watchdog, turns, config, name
        self._loading: PendingLoad | None = None
        """The load that the process is doing; None if there is none."""
        self._loads: list[PendingLoad] = []
        """Loads that callers wait for, oldest first, the one under way included."""
        self._preparation: asyncio.Event | None = None
        """Set once the file that is being prepared is ready; None if no file is being prepared."""
        self._version = -1
        """Version that the process uses; -1 while there is no process."""
        self._newest: tuple[int, Path] = (0, directory)
        """Version and path of the newest weights that were loaded, by this process or an earlier
        one."""

    @property
    def interrupts_turns(self) -> bool:
        """Whether a load is under way that aborts requests."""
        return self._loading is not None and self._config.in_flight == "interrupt"

    async def prepare(self, version: int, path: Path) -> None:
        """Read a file while tokens are sampled, which shortens the pause of the load.

        Weights that the learner sends (`process_group.py`) are not prepared: the learner begins to
        send them when they are requested, and they must be received at once. The call returns early
        if the process dies. Cancellation loses only the work done so far.
        """
        if not self._turns.is_open or self._preparation is not None or is_manifest(path):
            return
        self._preparation = preparation = asyncio.Event()
        self._watchdog.expect(PREPARED, self._config.turn_deadline_s)
        self._watchdog.send(Prepare(version=version, path=str(path)))
        await preparation.wait()

    def add(self, weights: PendingLoad) -> None:
        """Queue a load; it is skipped if a newer one is queued before it begins."""
        self._loads.append(weights)
        self._begin_next()

    def take_serving(self) -> None:
        """Handle `Serving`: a new process serves version 0, and has to load the newest weights."""
        self._version = 0
        self._begin_next()

    def take_prepared(self) -> None:
        """Handle `Prepared`."""
        self._watchdog.answered(PREPARED)
        self._end_preparation()

    def take_loaded(self, message: Loaded) -> None:
        """Handle `Loaded`: settle this load and all older ones, which are obsolete.

        Raises:
            RunError: a new process could not load the weights that were in use before.
        """
        weights, self._loading = self._loading, None
        assert weights is not None
        self._watchdog.answered(START_OR_LOAD)
        self._version = message.version
        # A load that restores the newest weights after a restart is not in the list.
        num_ended = self._loads.index(weights) + 1 if weights in self._loads else 0
        ended, self._loads = [weights, *self._loads[:num_ended]], self._loads[num_ended:]
        if message.error and not num_ended:
            raise RunError(f"the weights of version {weights.version} are gone: {message.error}")
        if not message.error:
            self._newest = weights.version, weights.path
            self._turns.totals.num_loads += 1
            self._turns.totals.stall_s += message.stall_s
        error = PolicyError(message.error) if message.error else None
        if message.is_refused:
            error = refusal(self._name, weights.version, weights.path, message.error)
        for each in ended:
            settle(each.future, error, message.receipt if each is weights else None)
        self._begin_next()

    def take_death(self) -> int:
        """Handle the process's death; return the version that the next process will use.

        A load that was under way in `MAX_DEATHS_OF_A_LOAD` deaths fails.
        """
        weights, self._loading = self._loading, None
        if weights is not None and weights in self._loads:
            weights.num_deaths += 1
            if weights.num_deaths == MAX_DEATHS_OF_A_LOAD:
                self._loads.remove(weights)
                reason = f"{weights.path}: SGLang died {weights.num_deaths} times as it loaded them"
                settle(weights.future, PolicyError(reason))
        self._end_preparation()
        self._version = -1
        return self._loads[-1].version if self._loads else self._newest[0]

    def _begin_next(self) -> None:
        """Begin the newest load. If none is queued, load the weights that an earlier process had,
        or resume the turns.

        Does nothing while a load is under way; `take_loaded` calls it again.
        """
        if self._version < 0 or self._loading is not None:
            return
        if self._loads:
            self._begin(self._loads[-1])
        elif self._version != self._newest[0]:
            future = asyncio.get_running_loop().create_future()
            self._begin(PendingLoad(*self._newest, future))
        elif not self._turns.is_open:
            self._turns.resume(self._version)

    def _begin(self, weights: PendingLoad) -> None:
        """Hold turns back, and let the process load weights."""
        self._turns.pause()
        self._loading = weights
        # The process answers nothing else while it loads, so this deadline replaces all others.
        self._watchdog.expect(START_OR_LOAD, self._config.turn_deadline_s)
        self._watchdog.send(
            Load(
                version=weights.version,
                path=str(weights.path),
                interrupts=self._config.in_flight == "interrupt",
            )
        )

    def _end_preparation(self) -> None:
        """Let `prepare` return, if it waits."""
        if self._preparation is not None:
            self._preparation.set()
        self._preparation = None


class SglangEngine(Engine):
    """Serve a model directory with an SGLang process of its own.

    Args:
        directory: model directory; its weights are version 0.
        config: configuration of the run. After more than `supervision.max_restarts` deaths in a
            row, without a completion between them, the engine fails. A process that does not
            answer an abort within `supervision.silence_s` counts as hanging and is killed.
        name: name of the actor, for errors, and for the groups in which weights are sent.

    Raises:
        ConfigError: no SGLang of a known version is installed, `engine.server` is wrong, or the
            model's contexts are too short.
        PolicyError: `directory` has no config.json.
    """

    def __init__(self, directory: Path, config: Config, name: str = "an engine") -> None:
        import torch

        super().__init__()
        engine, supervision = config.engine, config.supervision
        assert isinstance(engine, EngineConfig), "`make_engine` makes the others"
        installed()  # if no supported SGLang is installed, this raises before a process is started
        self._vocabulary = vocabulary_size(directory)
        check_context_length(engine, directory)
        # Without a GPU SGLang runs on CPU cores, with PyTorch's own operators.
        self._arguments = server_arguments(
            engine, directory, dtype=config.policy.dtype, has_gpu=torch.cuda.is_available()
        )
        # Every engine of a run samples with random numbers of its own.
        seed = blake2s(f"{config.seed}/{name}".encode(), digest_size=4).digest()
        self._seed = int.from_bytes(seed, "little")
        self._directory, self._config, self._name = directory, engine, name
        self._watchdog = EngineWatchdog(
            self._start,
            self._on_message,
            self._on_death,
            threads=engine.threads,
            max_deaths=supervision.max_restarts,
        )
        self._facts: asyncio.Future[str] | None = None
        """Description of the first process that served; None before the engine's tasks run."""
        self._busy: set[str] = set()
        """Contexts with a prompt that is being completed."""
        self._turns = TurnQueue(self._watchdog, silence_s=supervision.silence_s)
        self._loads = WeightLoads(self._watchdog, self._turns, engine, directory, name)

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
            f"SGLang serves one version only, and cannot load version {version} as well: set "
            'engine.kind = "embedded", or population.rivals = 0'
        )

    def release_past(self, version: int) -> None:
        """Do nothing: there are no past versions."""

    def release(self, context: str) -> None:
        """Forget a sequence; SGLang evicts its keys and values when it needs room."""
        self._turns.contexts.release(context)

    def trim(self) -> None:
        """Do nothing: SGLang's server reserves its memory once."""

    def statistics(self) -> Statistics:
        """Return the statistics up to now."""
        return self._turns.statistics()

    async def describe(self) -> str:
        """Wait until the process serves, and describe it in one line."""
        assert self._facts is not None
        facts = await asyncio.shield(self._facts)
        return f"{facts}; weights {self._config.in_flight}, cache rule {self._config.cache_rule}"

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

    def _start(self, number: int) -> Start:
        """Make the first message for process `number`, from 0; each has a seed of its own."""
        arguments = {"random_seed": (self._seed + number) % 2**31} | self._arguments
        return Start(
            name=self._name,
            directory=str(self._directory),
            arguments=arguments,
            max_tokens=self._config.max_tokens,
        )

    def _on_message(self, message: Message) -> None:
        """Pass a message of the process to the object that handles it."""
        match message:
            case Serving():
                self._serve(message)
            case PromptCached():
                self._turns.take_prompt_cached(message.rid)
            case Generated():
                self._turns.take_generated(message, may_abort=self._loads.interrupts_turns)
            case Refused():
                self._turns.take_refused(message)
            case Prepared():
                self._loads.take_prepared()
            case Loaded():
                self._loads.take_loaded(message)
            case _:
                raise RunError(f"an actor cannot take {type(message).__name__} of its engine")

    def _serve(self, message: Serving) -> None:
        assert self._facts is not None
        if not self._facts.done():
            self._facts.set_result(message.facts)
        self._loads.take_serving()

    def _on_death(self) -> None:
        """Handle the process's death, which loses the KV cache and all requests under way."""
        self._turns.take_death(self._loads.take_death())

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail every waiting call, and cancel that of `describe`."""
        super()._task_ended(task)
        assert self._facts is not None
        # asyncio would log a failure that no `describe` waits for.
        if not self._facts.done():
            self._facts.cancel()
