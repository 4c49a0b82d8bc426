"""SGLang as an engine: prompts in, completions out, while its process may die and come back.

The process (`process.py`) answers single requests. Here a turn is one request or several, and
weights go to the process one version after the other. A process that has died is followed by
another with the newest weights, which plays the interrupted turns again from their prompts.

This file is longer than most: turns, loads and deaths move one state together.

    queue      filled by                             emptied by            bounded by
    held       complete, while nothing may be asked  Serving, Loaded       trials
    warming    complete, where an equal prompt is    Began or Drew of      trials
               being read                            the first
    loads      load                                  Loaded, newest first  the actor: it waits
"""

import asyncio
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from mage_async.completion import Completion, Prompt, check_prompt
from mage_async.config.schema import Sglang as EngineRules
from mage_async.errors import PolicyError, RunError, TurnLost
from mage_async.inference.kv_contexts import KVContexts
from mage_async.inference.statistics import Statistics
from mage_async.inference.turn_requests import TurnRequests
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.arguments import chosen, vocabulary
from mage_services.engines.sglang.keeper import EVERYTHING, Keeper
from mage_services.engines.sglang.turns import Asked, WantedWeights, piece_of, settle
from mage_services.engines.sglang.versions import installed
from mage_services.engines.sglang.warming import Warming
from mage_services.weights.weight_group import is_manifest

PREPARED = "prepared"
"""Among answers that are owed; ids of requests are longer."""
MAX_DEATHS_OF_A_TURN = 3
"""A turn under way in so many deaths may be their cause, and is given up."""
MAX_DEATHS_OF_A_LOAD = 2


class SglangEngine:
    """Serves a model directory with an SGLang of its own; an `Engine`.

    Args:
        directory: its weights are version 0 until others are loaded.
        seed: of its own random numbers; different for every engine of a run.
        has_gpu: otherwise SGLang computes on CPU cores, with PyTorch's own operators.
        max_deaths: so many in a row, without a completion between, are made good.
        silence_s: an aborted request is answered within this, or the process is taken to hang.

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
    ) -> None:
        installed()
        self._vocabulary = vocabulary(directory)
        self._arguments = chosen(rules, directory, dtype=dtype, has_gpu=has_gpu)
        self._seed = seed
        self._directory, self._rules = directory, rules
        self._silence_s = silence_s
        self._keeper = Keeper(
            self._start, self._hear, self._die, threads=rules.threads, max_deaths=max_deaths
        )
        self._tasks = asyncio.TaskGroup()
        self._keeping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._facts: asyncio.Future[str] | None = None
        self._is_open = False
        """Requests may be sent: a process serves, and loads nothing."""
        self._loading: WantedWeights | None = None
        self._loads: list[WantedWeights] = []
        self._ready: asyncio.Future[None] | None = None
        """Done when a file that is read while turns are drawn is ready."""
        self._served = -1
        """The version the process draws with."""
        self._wanted: tuple[int, Path] = (0, directory)
        """The newest weights that were loaded."""
        self._contexts = KVContexts()
        self._busy: set[str] = set()
        self._held: list[Asked] = []
        self._running: dict[str, Asked] = {}
        self._warming: Warming[Asked] = Warming()
        self._totals: dict[str, float] = dict.fromkeys(Statistics.__slots__, 0)
        self._busy_since, self._busy_s = 0.0, 0.0

    async def complete(self, prompt: Prompt) -> Completion:
        """Draw a completion. Cancellation aborts it; the context keeps what was computed."""
        self._check(prompt)
        asked = Asked(TurnRequests(prompt, self._rules.max_tokens), self._promise())
        self._busy.add(prompt.context)
        self._ask(asked)
        try:
            return await asked.future
        finally:
            self._busy.discard(prompt.context)
            if asked.future.cancelled():
                self._give_up(asked)

    async def load(self, version: int, path: Path) -> None:
        """Draw with other weights; returns when the next token will be drawn by them or by newer.

        Cancellation leaves the old weights or the new ones, whole. A file that cannot be used is a
        PolicyError, and leaves the old ones.
        """
        await self._have_ready(version, path)
        weights = WantedWeights(version, path, self._promise())
        self._loads.append(weights)
        self._go_on()
        await weights.future

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
        self._contexts.release(context)

    def statistics(self) -> Statistics:
        """What was done so far; `forward_s` is the time in which any request was under way."""
        running = time.perf_counter() - self._busy_since if self._running else 0.0
        now = {
            "num_contexts": len(self._contexts),
            "num_waiting": len(self._held),
            "forward_s": self._busy_s + running,
        }
        return Statistics(**self._totals | now)

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
                self._lead(self._running.get(message.rid), is_warm=True)
            case say.Drew():
                self._take(message)
            case say.Refused():
                self._refuse(message)
            case say.Prepared():
                self._keeper.paid(PREPARED)
                self._take_ready()
            case say.Loaded():
                self._take_loaded(message)
            case _:
                raise RunError(f"an actor cannot take {type(message).__name__} of its engine")

    def _serve(self, message: say.Serving) -> None:
        assert self._facts is not None
        if not self._facts.done():
            self._facts.set_result(message.facts)
        self._served = 0
        self._go_on()

    def _go_on(self) -> None:
        """Load what is to be loaded, or else ask what is held back."""
        if self._served < 0 or self._loading is not None:
            return
        if self._loads:
            self._begin_load(self._loads[-1])
        elif self._served != self._wanted[0]:
            version, path = self._wanted
            self._begin_load(WantedWeights(version, path, self._promise()))
        elif not self._is_open:
            self._is_open = True
            held, self._held = self._held, []
            for asked in held:
                self._submit(asked)

    async def _have_ready(self, version: int, path: Path) -> None:
        """Have a file read while turns are drawn, so that the update waits less.

        Weights that are sent are not prepared: the process that asks for them has to take them.
        Returns also when the process dies meanwhile. Cancellation leaves the file read in vain.
        """
        if not self._is_open or self._ready is not None or is_manifest(path):
            return
        self._ready = self._promise()
        self._keeper.owe(PREPARED, self._rules.turn_deadline_s)
        self._keeper.send(say.Prepare(version=version, path=str(path)))
        await asyncio.shield(self._ready)

    def _take_ready(self) -> None:
        """What was being read is there, or never will be."""
        ready, self._ready = self._ready, None
        if ready is not None:
            settle(ready, None)

    def _begin_load(self, weights: WantedWeights) -> None:
        self._is_open, self._loading = False, weights
        self._keeper.owe(EVERYTHING, self._rules.turn_deadline_s)
        self._keeper.send(
            say.Load(version=weights.version, path=str(weights.path), interrupts=self._interrupts)
        )

    @property
    def _interrupts(self) -> bool:
        return self._rules.in_flight == "interrupt"

    def _take_loaded(self, message: say.Loaded) -> None:
        """The newest load settles those before it, whose weights are no longer wanted."""
        weights, self._loading = self._loading, None
        assert weights is not None
        self._keeper.paid(EVERYTHING)
        self._served = message.version
        index = self._loads.index(weights) + 1 if weights in self._loads else 0
        settled, self._loads = [weights, *self._loads[:index]], self._loads[index:]
        if message.error and not index:
            raise RunError(f"the weights of version {weights.version} are gone: {message.error}")
        if not message.error:
            self._wanted = weights.version, weights.path
            self._totals["num_loads"] += 1
            self._totals["stall_s"] += message.stall_s
        for one in settled:
            settle(one.future, PolicyError(message.error) if message.error else None)
        self._go_on()

    def _ask(self, asked: Asked) -> None:
        if self._is_open:
            self._submit(asked)
        else:
            self._held.append(asked)

    def _submit(self, asked: Asked) -> None:
        """Send a turn's next request, unless an equal prompt is being read."""
        if asked.future.done():
            return
        self._name_keys(asked)
        is_cold = asked.is_cold
        if is_cold and not self._warming.enter(asked.place(), asked):
            return
        asked.rid = uuid4().hex
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running[asked.rid] = asked
        self._keeper.send(asked.request(says_when_it_began=is_cold))

    def _name_keys(self, asked: Asked) -> None:
        prompt = asked.turn.prompt
        if asked.opened is None:
            asked.opened = self._contexts.open(prompt, self._served)
            asked.key_version = asked.opened.key_version
        else:
            asked.key_version = self._contexts.reopen(prompt, self._served)

    def _take(self, message: say.Drew) -> None:
        """A request has ended: its turn is done, or goes on."""
        self._keeper.paid(message.rid)
        asked = self._end(message.rid)
        if asked is None:
            return
        if message.is_aborted and not (self._loading and self._interrupts):
            settle(asked.future, RunError(f"{asked.name()}: SGLang gave the request up"))
            return
        try:
            asked.turn.receive(piece_of(message, asked.key_version))
        except RunError as error:
            settle(asked.future, error)
            return
        if asked.turn.is_done:
            self._deliver(asked)
        else:
            self._ask(asked)

    def _end(self, rid: str) -> Asked | None:
        """A request is no longer under way; returns the turn it belonged to."""
        asked = self._running.pop(rid, None)
        if asked is not None:
            if not self._running:
                self._busy_s += time.perf_counter() - self._busy_since
            self._lead(asked, is_warm=True)
            asked.rid = ""
        return asked

    def _lead(self, asked: Asked | None, *, is_warm: bool) -> None:
        """Turns that waited for this one may be asked."""
        if asked is None:
            return
        for other in self._warming.leave(asked.place()):
            other.is_warm = is_warm
            self._ask(other)

    def _refuse(self, message: say.Refused) -> None:
        self._keeper.paid(message.rid)
        asked = self._end(message.rid)
        if asked is not None:
            settle(asked.future, RunError(f"{asked.name()}: SGLang refuses it: {message.reason}"))

    def _deliver(self, asked: Asked) -> None:
        assert asked.opened is not None
        completion = asked.turn.completion(asked.opened)
        self._contexts.close(asked.turn.prompt, completion.tokens)
        self._keeper.cheer()
        for name, value in {
            "num_completions": 1,
            "num_prompt_tokens": len(asked.turn.prompt.tokens),
            "num_reused_tokens": completion.num_reused,
            "num_repeated_tokens": completion.num_repeated,
            "num_extension_faults": not completion.is_extension,
            "num_generated_tokens": len(completion.tokens),
        }.items():
            self._totals[name] += value
        if not asked.future.done():
            asked.future.set_result(completion)

    def _give_up(self, asked: Asked) -> None:
        """Abandon a turn that is no longer waited for."""
        if asked in self._held:
            self._held.remove(asked)
        if asked.rid:
            rid = asked.rid
            del self._running[rid]
            if not self._running:
                self._busy_s += time.perf_counter() - self._busy_since
            self._keeper.owe(rid, self._silence_s)
            self._keeper.send(say.Abort(rid=rid))
            self._lead(asked, is_warm=False)

    def _die(self) -> None:
        """The process has ended, and with it every key and what was being drawn."""
        self._blame_load()
        self._take_ready()
        self._is_open, self._served = False, -1
        if self._running:
            self._busy_s += time.perf_counter() - self._busy_since
        interrupted, waiting = list(self._running.values()), self._warming.clear()
        for asked in interrupted:
            asked.num_deaths += 1
            if asked.num_deaths == MAX_DEATHS_OF_A_TURN:
                reason = f"{asked.name()}: SGLang died {asked.num_deaths} times while it was drawn"
                settle(asked.future, TurnLost(reason))
        self._held = [*interrupted, *waiting, *self._held]
        for asked in self._held:
            asked.turn.restart()
            asked.rid, asked.is_warm = "", False
        self._running.clear()
        newest = self._loads[-1].version if self._loads else self._wanted[0]
        self._contexts.lose_keys(newest)

    def _blame_load(self) -> None:
        """Give up weights that were under way in two deaths."""
        weights, self._loading = self._loading, None
        if weights is None or weights not in self._loads:
            return
        weights.num_deaths += 1
        if weights.num_deaths == MAX_DEATHS_OF_A_LOAD:
            self._loads.remove(weights)
            reason = f"{weights.path}: SGLang died {weights.num_deaths} times as it loaded them"
            settle(weights.future, PolicyError(reason))

    def _check(self, prompt: Prompt) -> None:
        if prompt.context in self._busy:
            raise RunError(
                f"context {prompt.context!r} has a prompt already; a context has one at a time"
            )
        check_prompt(prompt, max_tokens=self._rules.max_tokens, vocabulary=self._vocabulary)

    def _promise(self) -> asyncio.Future[Any]:
        if self._keeping is None or self._keeping.done():
            raise RunError("the engine does not run: use it inside its `async with`")
        return asyncio.get_running_loop().create_future()

    def _fail_waiting(self, keeper: asyncio.Task[None]) -> None:
        """Fail every waiting call: the engine has ended."""
        error = None if keeper.cancelled() else keeper.exception()
        reason = error or RunError("the engine was closed")
        asked = [*self._held, *self._running.values(), *self._warming.clear()]
        futures: list[asyncio.Future[Any]] = [one.future for one in asked]
        futures += [one.future for one in self._loads]
        for future in futures:
            settle(future, reason)
        assert self._facts is not None
        if not self._facts.done():
            self._facts.cancel()
