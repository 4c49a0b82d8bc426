"""Run SGLang for an actor in a process of its own: `python -m mage_services.engines.sglang.server`.

SGLang ends its whole process tree when its scheduler fails. Because it has a process of its own,
the actor survives and starts another (`watchdog.py`). The process ends when its socket to the actor
closes, and the kernel kills it when the actor dies; SGLang's own children end with the process.

task        waits for                              then
serve       the actor's next message               starts one of the tasks below, or aborts one
generate R  SGLang's reply to request R            sends it to the actor
prepare     a file of weights to be read           keeps them for `load`; sampling goes on meanwhile
load        the requests that it interrupts, then  changes the weights, and lets sampling go on
            the weights
"""

import os

from mage_services.processes.child_process import PARENT, die_with_parent

# SGLang's own child processes import this module too, as their parent's main module. Each of them
# asks to be killed with its parent before the imports below, because these take long.
if __name__ in ("__main__", "__mp_main__"):
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())

import asyncio
import inspect
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import torch

from mage_async.errors import PolicyError, RunError, UnreadableWeights
from mage_async.inference.weight_fingerprint import (
    FingerprintBuilder,
    Precision,
    WeightFingerprint,
    mismatch,
    probe_tokens,
)
from mage_async.inference.weights import check_shapes, tensor_shapes
from mage_async.policy.model_files import weight_files
from mage_async.policy.snapshot import read_snapshot
from mage_async.policy_version import Provenance
from mage_services.engines.sglang.arguments import (
    has_token_versions,
    installed,
    known_names,
    needs_update_messages,
    vocabulary_size,
)
from mage_services.engines.sglang.messages import (
    Abort,
    Failed,
    Generate,
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
from mage_services.engines.weight_acceptance import accepted, is_published, observe_published
from mage_services.processes.child_process import Channel, inherited_socket
from mage_services.weights.process_group import (
    HOST,
    SENDING,
    Manifest,
    connect,
    is_manifest,
    new_group,
    on_disk,
    request_version,
    wait_for_answer,
)

Update = Callable[[], Awaitable[str]]
"""Changes the weights; returns an error message, or an empty string."""


@dataclass(slots=True, eq=False)
class _Running:
    """Hold a request under way: its task, its number of tokens, and where the weights changed."""

    task: asyncio.Task[None]
    cuts: list[tuple[int, int]]
    """(tokens received, version) at its beginning and at each change of weights since."""
    num_received: int = 0
    """Number of tokens received so far."""
    is_aborted: bool = False


class Server:
    """Answer an actor's messages by calls of SGLang, on one event loop.

    Args:
        manager: SGLang's `TokenizerManager`, which takes requests and passes them to its scheduler.
        send: sends a message to the actor.
        name: name of the actor.
        directory: model that SGLang has loaded, whose weights are version 0.
        has_token_versions: whether replies contain the version of each token.
        needs_update_messages: whether an update by tensors needs begin and end messages.
        precision: precision of SGLang's log-probs, for the comparison of fingerprints.
    """

    def __init__(
        self,
        manager: Any,
        send: Callable[[Message], None],
        *,
        name: str,
        directory: Path,
        has_token_versions: bool,
        needs_update_messages: bool,
        precision: Precision = "reduced",
    ) -> None:
        self._manager, self._send = manager, send
        self._has_token_versions = has_token_versions
        self._first = 0, directory
        """Version and path of the weights with which SGLang began."""
        self._version, self._good_path = self._first
        """Version and path of the weights in use; they are loaded again if an update fails."""
        self._shapes = tensor_shapes(directory)
        self._loader = Loader(
            manager,
            name,
            vocabulary_size(directory),
            precision,
            needs_update_messages=needs_update_messages,
        )
        self._ready: tuple[int, str, Update] | None = None
        """Version, path and update of prepared weights."""
        self._running: dict[str, _Running] = {}

    async def serve(self, messages: AsyncIterator[Message]) -> None:
        """Serve until the actor closes its end; raise failures of SGLang as an exception group."""
        async with asyncio.TaskGroup() as tasks:
            async for message in messages:
                match message:
                    case Generate():
                        task = tasks.create_task(
                            self._generate(message), name=f"generate {message.rid}"
                        )
                        self._running[message.rid] = _Running(task, [(0, self._version)])
                    case Abort():
                        self._abort(message.rid)
                    case Prepare():
                        tasks.create_task(self._prepare(message), name="prepare")
                    case Load():
                        tasks.create_task(self._load(message), name="load")
                    case _:
                        raise ValueError(f"an engine cannot take {type(message).__name__}")
            for running in self._running.values():
                running.task.cancel()

    async def _generate(self, message: Generate) -> None:
        """Run a request, and send the message that ends it."""
        running = self._running[message.rid]
        try:
            self._send(
                nothing_generated(message.rid)
                if running.is_aborted
                else await self._reply(message, running)
            )
        finally:
            del self._running[message.rid]

    async def _reply(self, message: Generate, running: _Running) -> Message:
        """Run a request, and return the message that ends it."""
        # Only a streamed reply tells when the prompt is cached, and how many tokens came before a
        # change of weights.
        is_streamed = message.reports_prompt or not self._has_token_versions
        meta: dict[str, Any] = {}
        try:
            async for reply in self._manager.generate_request(_request(message, is_streamed), None):
                if message.reports_prompt and not running.num_received:
                    self._send(PromptCached(rid=message.rid))
                meta = reply["meta_info"]
                running.num_received = len(meta.get("output_token_logprobs") or ())
        except ValueError as error:  # it cannot be served, or was aborted before it ran
            if running.is_aborted:
                return nothing_generated(message.rid)
            return Refused(rid=message.rid, reason=str(error))
        return generated(message.rid, meta, running.cuts)

    def _abort(self, rid: str) -> None:
        """Let SGLang end a request; its task then sends the tokens that were sampled."""
        running = self._running.get(rid)
        if running is not None:
            running.is_aborted = True
            self._manager.abort_request(rid=rid)

    async def _prepare(self, message: Prepare) -> None:
        """Prepare an update. A failure is not reported here: the load will fail in the same way."""
        with suppress(PolicyError):
            self._ready = message.version, message.path, await self._update_of(message)
        self._send(Prepared())

    async def _update_of(self, message: Prepare | Load) -> Update:
        """Return the update to a version: the prepared one, or a new one.

        Raises:
            PolicyError: the weights cannot be read, or are another model's.
        """
        ready, self._ready = self._ready, None
        if ready is not None and ready[:2] == (message.version, message.path):
            return ready[2]
        path = Path(message.path)
        if not is_manifest(path):
            # Weights of another model, or a truncated file, would kill SGLang's scheduler half-way.
            await asyncio.to_thread(check_shapes, path, self._shapes)
        return await self._loader.prepare(message.version, path)

    async def _load(self, message: Load) -> None:
        """Load weights. If they did not arrive, or are not those that the learner published, load
        them once more, from disk if they are there.
        """
        loaded = await self._load_once(message, num_retries=0)
        if loaded.is_refused:
            again = msgspec.structs.replace(message, path=str(on_disk(Path(message.path))))
            loaded = await self._load_once(again, num_retries=1)
        self._send(loaded)

    async def _load_once(self, message: Load, num_retries: int) -> Loaded:
        """Load weights while nothing is sampled, then compare them with the published ones.

        The comparison needs the log-probs of the probe tokens, which it requests from SGLang. Such
        a request waits while sampling is paused, so the comparison comes after the pause.
        """
        try:
            update = await self._update_of(message)
            published, builder = await asyncio.to_thread(observe_published, Path(message.path))
        except PolicyError as error:
            is_refused = isinstance(error, UnreadableWeights) and is_published(Path(message.path))
            return Loaded(version=self._version, error=str(error), is_refused=is_refused)
        began = time.perf_counter()
        if message.interrupts:
            await self._interrupt()
            reason = await self._update(message, update)
        else:
            pause = _io_struct().PauseGenerationReqInput(mode="in_place")
            await self._manager.pause_generation(pause)
            reason = await self._update(message, update)
            await self._manager.continue_generation(_io_struct().ContinueGenerationReqInput())
        stall_s = time.perf_counter() - began
        is_refused = bool(reason) and is_published(Path(message.path))
        loaded = Loaded(version=self._version, error=reason, stall_s=stall_s, is_refused=is_refused)
        if reason or published is None:
            return loaded
        with_logprobs = bool(published.logprobs)
        own = await self._loader.fingerprint(loaded.version, builder, with_logprobs=with_logprobs)
        if reason := mismatch(published, own):
            return msgspec.structs.replace(loaded, error=reason, is_refused=True)
        # A receipt reports that the loaded weights have the fingerprint that the learner published.
        receipt = accepted(published, own, num_retries)
        return msgspec.structs.replace(loaded, receipt=receipt)

    async def _interrupt(self) -> None:
        """Abort all requests, and wait until each has ended with the tokens it has."""
        await asyncio.sleep(0)  # requests that have just arrived reach the scheduler first
        running = list(self._running.items())
        for rid, _ in running:
            self._abort(rid)
        await asyncio.gather(*(each.task for _, each in running))

    async def _update(self, message: Load, update: Update) -> str:
        """Load new weights. If that fails, load the previous ones again, or, if these are gone, the
        first ones, and return the reason.
        """
        error = await update()
        if not error:
            self._use(message.version, Path(message.path))
            return ""
        not_repaired = ""
        previous = self._version, self._good_path
        for version, path in dict.fromkeys([previous, self._first]):  # once if both are the same
            try:
                repair = await self._loader.prepare(version, on_disk(path))
                not_repaired = await repair()
            # A learner that has died sends neither the new weights nor the previous ones.
            except UnreadableWeights as gone:
                not_repaired = str(gone)
            if not not_repaired:
                self._use(version, path)
                return error
        raise RuntimeError(
            f"weights are half-written: {error}; the previous weights cannot be loaded again: "
            f"{not_repaired}"
        )

    def _use(self, version: int, path: Path) -> None:
        """Note that requests go on with the weights of a version."""
        if version != self._version:
            for running in self._running.values():
                running.cuts.append((running.num_received, version))
        self._version, self._good_path = version, path


def _io_struct() -> Any:
    """Return SGLang's module of request types. Its import takes seconds, and needs SGLang."""
    return import_module("sglang.srt.managers.io_struct")


def _allowed_tokens_module() -> Any:
    """Import and return the module of the logit processor, which imports SGLang."""
    return import_module("mage_services.engines.sglang.allowed_tokens")


def _request(message: Generate, is_streamed: bool) -> Any:
    """Make SGLang's request. Log-probs are of the outputs only, after temperature and mask."""
    processor = _allowed_tokens_module() if message.allowed else None
    sampling = message.sampling
    return _io_struct().GenerateReqInput(
        rid=message.rid,
        input_ids=np.frombuffer(message.tokens, np.int32).tolist(),
        sampling_params={
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_tokens),
            "ignore_eos": not sampling.stop_tokens,  # then only `max_tokens` ends the completion
            "sampling_seed": message.seed % 2**63,  # SGLang's seed is a signed integer of 64 bits
            "custom_params": {processor.PARAMETER: message.allowed} if processor else None,
        },
        custom_logit_processor=processor.AllowedTokens.to_str() if processor else None,
        return_logprob=True,
        logprob_start_len=-1,
        stream=is_streamed,
        extra_key=message.extra_key,
    )


# SGLang's reply to a request.

Spans = tuple[tuple[int, int], ...]
"""(start, version) of runs of tokens, in order; a run ends where the next one starts."""


def generated(rid: str, meta: Mapping[str, Any], cuts: Sequence[tuple[int, int]]) -> Generated:
    """Make the message that ends a request.

    Its tokens are those with a log-prob, including the stop token. An aborted request that never
    ran has none.

    Args:
        cuts: see `spans_of`.
    """
    entries = meta.get("output_token_logprobs") or ()
    spans, provenance = spans_of(meta, cuts, len(entries))
    return Generated(
        rid=rid,
        tokens=np.array([entry[1] for entry in entries], np.int32).tobytes(),
        logprobs=np.array([entry[0] for entry in entries], np.float32).tobytes(),
        spans=spans,
        provenance=provenance,
        num_cached=int(meta.get("cached_tokens") or 0),
        is_aborted=(meta.get("finish_reason") or {}).get("type") == "abort",
    )


def nothing_generated(rid: str) -> Generated:
    """Make the message that ends a request which was aborted before its first token."""
    return generated(rid, {"finish_reason": {"type": "abort"}}, ((0, 0),))


def spans_of(
    meta: Mapping[str, Any], cuts: Sequence[tuple[int, int]], num_tokens: int
) -> tuple[Spans, Provenance]:
    """Return which version sampled which tokens of a request, and how that is known.

    From 0.5.19 on, SGLang reports the version of each token (`weight_versions`). With older
    releases the versions are exact too if the weights did not change during the request. If they
    did, the tokens are divided by how many of them had been received at the change ("segment"). If
    the reply was not streamed, only the last version is known, and taken for all ("reply").

    Args:
        cuts: (tokens received, version) at the beginning of the request and at each change of
            weights since; all numbers of tokens are 0 if the reply was not streamed.
    """
    reported = meta.get("weight_versions")
    if reported:
        spans = [(int(span["start"]), int(span["version"])) for span in reported]
        return _inside(spans, num_tokens), "exact"
    if len(cuts) == 1:
        return _inside(cuts, num_tokens), "exact"
    if any(start > 0 for start, _ in cuts):
        return _inside(cuts, num_tokens), "segment"
    return _inside([(0, cuts[-1][1])], num_tokens), "reply"


def _inside(spans: Sequence[tuple[int, int]], num_tokens: int) -> Spans:
    """Drop spans without tokens: of several with the same start, the last one is kept."""
    last = {start: version for start, version in spans if start < num_tokens}
    return tuple(sorted(last.items()))


# New weights for a running SGLang. Their path says how they arrive:
#
#     a directory, or a file on disk   SGLang reads them
#     a file in shared memory          handed over to SGLang as one tensor with all weights, its
#                                      "flattened bucket". On a GPU it is copied there first and
#                                      shared by CUDA IPC; with several GPUs, each takes its part
#     a manifest                       the learner sends them to SGLang's scheduler, in a process
#                                      group (`mage_services/weights/process_group.py`)
#
# `prepare` does everything that is possible while tokens are sampled; sampling stops only for the
# update that it returns. An update never flushes the cache, because SGLang ends its whole process
# tree if it cannot flush. Instead, every request names the weights whose cached keys and values it
# may read (`mage_async/inference/server_prefixes.py`).

SHARED = Path("/dev/shm")


class Loader:
    """Load weights into an SGLang through its `TokenizerManager`."""

    def __init__(
        self,
        manager: Any,
        name: str,
        vocabulary: int,
        precision: Precision,
        *,
        needs_update_messages: bool,
    ) -> None:
        self._manager, self._name = manager, name
        self._needs_update_messages = needs_update_messages
        self._vocabulary: int = vocabulary
        self._precision: Precision = precision
        self._port, self._group = 0, ""
        """Port of the learner whose process group SGLang has joined, 0 if it is in none; and the
        name of the group."""
        self._kept: Any = None
        """Tensors handed over last: SGLang reads their memory until the update is answered."""

    async def prepare(self, version: int, path: Path) -> Update:
        """Do everything that needs no pause, and return the rest as an update.

        An update that fails may leave the weights half-written: the previous ones must then be
        loaded again. Cancellation leaves the old weights.

        Raises:
            UnreadableWeights: the weights cannot be read; nothing has changed.
        """
        if is_manifest(path):
            return await self._request_sending(Manifest.read(path))
        if path.suffix == ".safetensors" and path.is_relative_to(SHARED):
            self._forget_last()
            bucket = await asyncio.to_thread(_bucket, path)
            return partial(self._in_session, partial(self._hand_over, version, bucket))
        return partial(self._read, version, path)

    async def fingerprint(
        self, version: int, builder: FingerprintBuilder, *, with_logprobs: bool
    ) -> WeightFingerprint:
        """Return the fingerprint of the loaded weights.

        Args:
            builder: has summed the tensors that SGLang was given.
            with_logprobs: whether SGLang's log-probs of the probe tokens are part of it.
        """
        logprobs = await self._logprobs() if with_logprobs else ()
        return await asyncio.to_thread(builder.fingerprint, version, self._precision, logprobs)

    async def _logprobs(self) -> tuple[float, ...]:
        """Compute log-probs of the probe tokens after the first, without cached keys and values."""
        meta: dict[str, Any] = {}
        async for reply in self._manager.generate_request(_probe_request(self._vocabulary), None):
            meta = reply["meta_info"]
        return tuple(entry[0] for entry in meta["input_token_logprobs"][1:])

    def _forget_last(self) -> None:
        """Free the tensors handed over last, which SGLang has copied, before new ones are made."""
        self._kept = None
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    async def _read(self, version: int, path: Path) -> str:
        """Let SGLang read files of weights; an `Update`. SGLang reads all files of a folder, so one
        is made with links to these files alone.
        """
        with tempfile.TemporaryDirectory(prefix="mage-weights-") as folder:
            for number, file in enumerate(weight_files(path)):
                (Path(folder) / f"{number}.safetensors").symlink_to(file.resolve())
            request = _io_struct().UpdateWeightFromDiskReqInput(
                model_path=folder, weight_version=str(version), flush_cache=False
            )
            return await _failure(self._manager.update_weights_from_disk(request, None))

    async def _in_session(self, update: Update) -> str:
        """Run another update between begin and end messages, which SGLang needs from 0.5.21 on; an
        `Update`.
        """
        if not self._needs_update_messages:
            return await update()
        begin, end = _io_struct().BeginWeightUpdateReqInput, _io_struct().EndWeightUpdateReqInput
        if reason := await _failure(self._manager.begin_weight_update(begin())):
            return reason
        reason = await update()
        not_ended = await _failure(self._manager.end_weight_update(end()))
        return reason or not_ended

    async def _hand_over(self, version: int, bucket: dict[str, Any]) -> str:
        """Hand a bucket of all weights over to SGLang, once for each of its GPUs; an `Update`."""
        from sglang.srt.utils import MultiprocessingSerializer

        self._kept, num_gpus = bucket, self._manager.server_args.tp_size
        request = _io_struct().UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize(bucket) for _ in range(num_gpus)
            ],
            load_format="flattened_bucket",
            weight_version=str(version),
            flush_cache=False,
        )
        return await _failure(self._manager.update_weights_from_tensor(request, None))

    async def _request_sending(self, manifest: Manifest) -> Update:
        """Ask the learner to send weights, and wait until it is ready; return the update that
        receives them.

        Raises:
            UnreadableWeights: the learner has ended, or no longer has this version.
        """
        store = await asyncio.to_thread(connect, manifest.port)
        is_new = self._port != manifest.port  # another learner: the first, or a restarted one
        if is_new:
            await self._leave()
            self._group = new_group(self._name)
        members = 1 + self._manager.server_args.tp_size  # the learner, and each GPU
        try:
            number = request_version(store, self._group, manifest.version, members)
            if is_new:
                await self._join(manifest, members)
            reply = await asyncio.to_thread(wait_for_answer, store, number)
        except RuntimeError as error:  # the learner has ended, or could not join the group
            await self._leave()
            raise UnreadableWeights(f"weights of version {manifest.version}: {error}") from error
        if reply != SENDING:
            raise UnreadableWeights(f"weights of version {manifest.version}: {reply}")
        return partial(self._in_session, partial(self._receive, manifest))

    async def _join(self, manifest: Manifest, members: int) -> None:
        """Let SGLang join the group with the learner, whose rank is 0."""
        request = _io_struct().InitWeightsUpdateGroupReqInput(
            master_address=HOST,
            master_port=manifest.port,
            rank_offset=1,
            world_size=members,
            group_name=self._group,
            backend=manifest.backend,
        )
        if reason := await _failure(self._manager.init_weights_update_group(request, None)):
            raise UnreadableWeights(f"no group with the learner: {reason}")
        self._port = manifest.port

    async def _leave(self) -> None:
        """Let SGLang leave the group, if it is in one: the next request joins a new one."""
        if self._port:
            request = _io_struct().DestroyWeightsUpdateGroupReqInput(group_name=self._group)
            # Its answer does not matter: the name of a group is used only once.
            await self._manager.destroy_weights_update_group(request, None)
            self._port = 0

    async def _receive(self, manifest: Manifest) -> str:
        """Let SGLang receive the weights from the learner, bucket by bucket; an `Update`."""
        for bucket in manifest.buckets:
            names, dtypes, shapes = zip(*bucket, strict=True)
            request = _io_struct().UpdateWeightsFromDistributedReqInput(
                names=list(names),
                dtypes=list(dtypes),
                shapes=[list(shape) for shape in shapes],
                group_name=self._group,
                load_format="flattened_bucket",
                weight_version=str(manifest.version),
                flush_cache=False,
            )
            change = self._manager.update_weights_from_distributed(request, None)
            if reason := await _failure(change):
                # After a failed broadcast the group can send nothing more; the learner leaves it
                # too.
                await self._leave()
                return reason
        return ""


async def _failure(answer: Awaitable[Sequence[Any]]) -> str:
    """Await SGLang's answer to a change of weights; return why it failed, or "" if it did not."""
    is_done, message, *_ = await answer
    return "" if is_done else message


def _probe_request(vocabulary: int) -> Any:
    """Make a request of one token that returns the log-probs of the probe tokens, its prompt."""
    rid = uuid4().hex
    return _io_struct().GenerateReqInput(
        rid=rid,
        input_ids=probe_tokens(vocabulary).tolist(),
        sampling_params={"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        extra_key=rid,
    )


def _bucket(path: Path) -> dict[str, Any]:
    """Read a file in shared memory as SGLang's flattened bucket, in memory that it can share."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    places, data = read_snapshot(path)
    if torch.cuda.is_available():
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        # From here on handles of shared GPU memory name the GPU by its UUID, as SGLang expects.
        monkey_patch_torch_reductions()
        flat = data.to("cuda")
        torch.cuda.synchronize()
    else:
        flat = torch.empty(len(data), dtype=torch.uint8).share_memory_()
        flat.copy_(data)
    metadata = [
        FlattenedTensorMetadata(
            name=place.name,
            shape=torch.Size(place.shape),
            dtype=place.dtype,
            start_idx=place.start,
            end_idx=place.end,
            numel=place.end - place.start,  # in bytes, because the flattened tensor is of uint8
        )
        for place in places
    ]
    return {"flattened_tensor": flat, "metadata": metadata}


# The process.

_SHOWN = (
    *("device", "dtype", "attention_backend", "sampling_backend"),
    *("mem_fraction_static", "max_total_tokens", "chunked_prefill_size", "max_running_requests"),
)
"""Arguments that the engine's description shows."""


def _launch(start: Start) -> Any:
    """Start an `Engine` of SGLang, and wait until it has loaded the model, which takes long.

    Raises:
        RunError: its KV cache is too small for one context.
    """
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    engine = Engine(**known_names(start.arguments, known))
    # SGLang sizes its cache by the memory that other processes leave free. Prompts must be shorter
    # than `longest`.
    longest = engine.tokenizer_manager.max_req_input_len
    if longest < start.max_tokens:
        raise RunError(
            f"SGLang's KV cache has room for contexts of {longest} tokens, and engine.max_tokens = "
            f"{start.max_tokens}: raise engine.server.mem_fraction_static or max_total_tokens, let "
            "other processes leave more of the GPU's memory, or lower engine.max_tokens"
        )
    return engine


def _facts(engine: Any, found: str) -> str:
    """Describe version and main arguments in one line."""
    # In some releases `resolved_dict` returns the arguments with defaults filled in.
    resolve = getattr(engine.server_args, "resolved_dict", None)
    values = vars(engine.server_args) if resolve is None else resolve()
    shown = ", ".join(f"{name} {values[name]}" for name in _SHOWN if values.get(name) is not None)
    return f"SGLang {found}: {shown}"


async def _main() -> None:
    """Start SGLang as the first message describes, and serve."""
    end = inherited_socket()
    assert end is not None, "an actor starts this process"
    channel: Channel[Message] = await Channel.over(end, Message)
    start = await channel.receive()
    if not isinstance(start, Start):
        return
    send, found = channel.send, installed()
    try:
        engine = _launch(start)
    except Exception as error:  # foreign code may raise anything; the actor must get the reason
        send(Failed(reason=f"{type(error).__name__}: {error}"))
        await channel.drain()
        raise
    send(Serving(facts=_facts(engine, found)))
    server = Server(
        engine.tokenizer_manager,
        send,
        name=start.name,
        directory=Path(start.directory),
        has_token_versions=has_token_versions(found),
        needs_update_messages=needs_update_messages(found),
    )
    await server.serve(channel.messages())


def main() -> None:
    """Serve the actor that started this process, then exit at once."""
    import uvloop

    code = 0
    try:
        uvloop.run(_main())
    except BaseException:  # os._exit below: SGLang's own exit would wait for its children
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
