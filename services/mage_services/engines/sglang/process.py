"""The process of an SGLang engine, under the actor that uses it.

SGLang ends its whole process tree when its scheduler fails; here that costs this process, and the
actor starts another. The process lives as long as its socket to the actor and, by the kernel's
help, no longer than the actor; SGLang's own children live no longer than the process.

task        waits for                           then
serve       the actor's next message            starts a request, aborts one, begins a load
draw RID    its reply                           sends it
prepare     a file of weights                   has them ready, while tokens are drawn
load        the requests that it interrupts,    changes the weights, lets everything go on
            then the weights
"""

import asyncio
import inspect
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mage_async.errors import PolicyError, UnreadableWeights
from mage_async.inference.receipts.receipt import Precision, mismatch
from mage_async.inference.weights import layout, misfit
from mage_services.engines.accepting import accepted, is_published, promised
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.arguments import known_names, vocabulary
from mage_services.engines.sglang.replies import drew, nothing
from mage_services.engines.sglang.versions import has_sessions, installed, says_spans
from mage_services.engines.sglang.weights import Loader, Update
from mage_services.weights.weight_group import is_manifest, on_disk

_SHOWN = (
    "device",
    "dtype",
    "attention_backend",
    "sampling_backend",
    "mem_fraction_static",
    "max_total_tokens",
    "chunked_prefill_size",
    "max_running_requests",
)


@dataclass(slots=True, eq=False)
class _Running:
    """A request under way."""

    task: asyncio.Task[None]
    cuts: list[tuple[int, int]]
    """(tokens heard of, version) at its begin and whenever weights changed under it."""
    num_heard: int = 0
    is_aborted: bool = False


class Server:
    """Answers an actor's messages with an SGLang `TokenizerManager`, on one event loop."""

    def __init__(
        self,
        manager: Any,
        send: Callable[[say.Message], None],
        *,
        version: int,
        directory: Path,
        says_spans: bool,
        has_sessions: bool,
        precision: Precision = "reduced",
    ) -> None:
        self._manager, self._send, self._says_spans = manager, send, says_spans
        self._version, self._good = version, directory
        self._layout = layout(directory)
        self._loader = Loader(manager, vocabulary(directory), precision, has_sessions=has_sessions)
        self._ready: tuple[int, str, Update] | None = None
        """A version and path, and what is left to do of their load."""
        self._running: dict[str, _Running] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Take messages until the actor's end closes. Any failure of SGLang ends it as a group."""
        async with asyncio.TaskGroup() as tasks:
            while (message := await say.read(reader)) is not None:
                match message:
                    case say.Draw():
                        task = tasks.create_task(self._draw(message), name=f"draw {message.rid}")
                        self._running[message.rid] = _Running(task, [(0, self._version)])
                    case say.Abort():
                        self._abort(message.rid)
                    case say.Prepare():
                        tasks.create_task(self._prepare(message), name="prepare")
                    case say.Load():
                        tasks.create_task(self._load(message), name="load")
                    case _:
                        raise ValueError(f"an engine cannot take {type(message).__name__}")
            for running in self._running.values():
                running.task.cancel()

    async def _draw(self, ask: say.Draw) -> None:
        running = self._running[ask.rid]
        try:
            self._send(nothing(ask.rid) if running.is_aborted else await self._reply(ask, running))
        finally:
            del self._running[ask.rid]

    async def _reply(self, ask: say.Draw, running: _Running) -> say.Message:
        """What SGLang says to a request. It raises ValueError for one that it cannot serve, and for
        one that was aborted before it ran.
        """
        is_streamed = ask.says_when_it_began or not self._says_spans
        meta: dict[str, Any] = {}
        try:
            async for reply in self._manager.generate_request(_request(ask, is_streamed), None):
                if ask.says_when_it_began and not running.num_heard:
                    self._send(say.Began(rid=ask.rid))
                meta = reply["meta_info"]
                running.num_heard = len(meta.get("output_token_logprobs") or ())
        except ValueError as error:
            if running.is_aborted:
                return nothing(ask.rid)
            return say.Refused(rid=ask.rid, reason=str(error))
        return drew(ask.rid, meta, running.cuts)

    def _abort(self, rid: str) -> None:
        running = self._running.get(rid)
        if running is not None:
            running.is_aborted = True
            self._manager.abort_request(rid=rid)

    async def _prepare(self, ask: say.Prepare) -> None:
        """Have an update ready; where that fails, the load will say why."""
        with suppress(PolicyError):
            self._ready = ask.version, ask.path, await self._update_of(ask)
        self._send(say.Prepared())

    async def _update_of(self, ask: say.Prepare | say.Load) -> Update:
        ready, self._ready = self._ready, None
        if ready is not None and ready[:2] == (ask.version, ask.path):
            return ready[2]
        await asyncio.to_thread(self._check, Path(ask.path))
        return await self._loader.prepare(ask.version, Path(ask.path))

    async def _load(self, ask: say.Load) -> None:
        """Change the weights, and again where they are not what the learner published."""
        loaded = await self._load_once(ask, num_retries=0)
        if loaded.is_refused:
            again = msgspec.structs.replace(ask, path=str(on_disk(Path(ask.path))))
            loaded = await self._load_once(again, num_retries=1)
        self._send(loaded)

    async def _load_once(self, ask: say.Load, num_retries: int) -> say.Loaded:
        """Change the weights while nothing is drawn, then score the check tokens: a pause in place
        would hold that up too. Says how long nothing was drawn.
        """
        try:
            update = await self._update_of(ask)
            published, observed = await asyncio.to_thread(promised, Path(ask.path))
        except PolicyError as error:
            is_refused = isinstance(error, UnreadableWeights) and is_published(Path(ask.path))
            return say.Loaded(version=self._version, error=str(error), is_refused=is_refused)
        began = time.perf_counter()
        await (self._interrupt() if ask.interrupts else self._pause())
        reason = await self._update(ask, update)
        if not ask.interrupts:
            await self._go_on()
        stall_s = time.perf_counter() - began
        loaded = say.Loaded(version=self._version, error=reason, stall_s=stall_s)
        if reason or published is None:
            return loaded
        scores = bool(published.logprobs)
        own = await self._loader.receipt(loaded.version, observed, scores=scores)
        if reason := mismatch(published, own):
            return msgspec.structs.replace(loaded, error=reason, is_refused=True)
        receipt = accepted(published, own, num_retries)
        return msgspec.structs.replace(loaded, receipt=receipt)

    def _check(self, path: Path) -> None:
        """Refuse another model's weights: a scheduler that is given them dies half-way."""
        reason = "" if is_manifest(path) else misfit(path, self._layout)
        if reason:
            raise PolicyError(reason)

    async def _interrupt(self) -> None:
        """Abort what runs, and wait until each has ended with what it drew."""
        await asyncio.sleep(0)  # what has just been asked reaches the scheduler first
        running = list(self._running.items())
        for rid, _ in running:
            self._abort(rid)
        await asyncio.gather(*(one.task for _, one in running))

    async def _pause(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))

    async def _go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _update(self, ask: say.Load, update: Update) -> str:
        """Load the weights asked for; where that fails, those of before again."""
        error = await update()
        if not error:
            self._version, self._good = ask.version, Path(ask.path)
            for running in self._running.values():
                running.cuts.append((running.num_heard, ask.version))
            return ""
        repair = await self._loader.prepare(self._version, self._good)
        if worse := await repair():
            raise RuntimeError(f"weights are half-written: {error}; and then: {worse}")
        return error


def _request(ask: say.Draw, is_streamed: bool) -> Any:
    """SGLang's own request. Log-probs are of the outputs only, after temperature."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(
        rid=ask.rid,
        input_ids=np.frombuffer(ask.tokens, np.int32).tolist(),
        sampling_params={
            "max_new_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k or -1,
            "stop_token_ids": list(ask.stop_tokens),
            "ignore_eos": not ask.stop_tokens,
            "sampling_seed": ask.seed % 2**63,
        },
        return_logprob=True,
        logprob_start_len=-1,
        stream=is_streamed,
        extra_key=ask.key,
    )


def _launch(start: say.Start) -> Any:
    """An `Engine` of SGLang; takes as long as its imports and the model."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    return Engine(**known_names(start.arguments, known))


def _facts(engine: Any, found: str) -> str:
    resolve = getattr(engine.server_args, "resolved_dict", None)
    values = vars(engine.server_args) if resolve is None else resolve()
    shown = ", ".join(f"{name} {values[name]}" for name in _SHOWN if values.get(name) is not None)
    return f"SGLang {found}: {shown}"


async def _main(connection: socket.socket) -> None:
    """Start what the first message says, and serve."""
    reader, writer = await asyncio.open_connection(sock=connection)
    start = await say.read(reader)
    if not isinstance(start, say.Start):
        return
    send, found = partial(say.write, writer), installed()
    try:
        engine = _launch(start)
    except Exception as error:  # the border to foreign code: the actor has to hear the reason
        send(say.Failed(reason=f"{type(error).__name__}: {error}"))
        await writer.drain()
        raise
    send(say.Serving(facts=_facts(engine, found)))
    server = Server(
        engine.tokenizer_manager,
        send,
        version=start.version,
        directory=Path(start.directory),
        says_spans=says_spans(found),
        has_sessions=has_sessions(found),
    )
    await server.serve(reader)


def main() -> None:
    """Serve on the socket whose number is the only argument; ends without a farewell to SGLang."""
    import uvloop

    code = 0
    try:
        uvloop.run(_main(socket.socket(fileno=int(sys.argv[1]))))
    except BaseException:  # the outermost main: SGLang's own exit would wait for its children
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)
