"""Sample on CPU cores with the embedded engine: a task drives the scheduler, one thread computes.

The scheduler is never used by two threads: calls that arrive during a forward are queued, and run
between two forwards, while the thread is idle.

    queue     filled by              emptied by   bounded, because
    _calls    `complete`, `release`  `_drive`     a trial waits for its completion
    _loads    `load`                 `_drive`     the actor waits for its weights

Past versions of the policy play opponents' seats. Each has a scheduler of its own, and with it a KV
cache. A past version that was published as adapters (LoRA) keeps them unmerged: it shares the
matrices of its base, the model that the run began from, and is computed in one forward with the
current version. The current version's own adapters are merged, as in the learner: not merged, its
log-probs would differ from the learner's by 0.03 nats in bfloat16.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from mage_async.completion import Completion, Prompt
from mage_async.config.schema import Embedded as EngineConfig
from mage_async.errors import MageError, RunError
from mage_async.inference.arithmetic import BFloat16
from mage_async.inference.merged_adapters import Adapters, BaseWeights
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler, Statistics, advance_together
from mage_async.inference.weight_fingerprint import (
    TOLERANCES,
    AcceptedWeights,
    AdapterBase,
    FingerprintBuilder,
    Precision,
    WeightFingerprint,
    difference,
    precision_of,
    probe_logprobs,
)
from mage_async.inference.weights import Weights, as_adapters, as_weights, read_tensors
from mage_services.engines.engine import Engine
from mage_services.engines.weight_acceptance import read_checked, refusal
from mage_services.processes.child_process import settle
from mage_services.weights.process_group import Manifest, Receiver, is_manifest

MAX_IDLE = 4
"""Largest number of past versions that stay in memory although no group uses them: a later group
may have one of them as its opponent."""


class PastPolicies:
    """Hold past versions of the policy in memory, each with a scheduler of its own.

    Each scheduler has a KV cache of its own, so a sequence never reads keys of another version. The
    users of a version are the groups that play against it. A few versions without users are kept
    for later groups.

    Args:
        make: reads the weights of a version and returns its scheduler; called in threads, one call
            at a time.
    """

    def __init__(self, make: Callable[[int, Path], Scheduler]) -> None:
        self._make = make
        self._schedulers = dict[int, Scheduler]()
        """Schedulers by version, in the order of their latest loads."""
        self._num_users = Counter[int]()
        """Number of users of each version."""
        self._reading, self._making = asyncio.Lock(), Lock()
        self._removed_s = 0.0
        """Seconds of forwards of the versions that were dropped."""

    async def load(self, version: int, path: Path) -> None:
        """Load a version for one more user, unless it is in memory. Cancellation changes nothing.

        Raises:
            PolicyError: the file cannot be used.
        """
        async with self._reading:
            scheduler = self._schedulers.pop(version, None)
            if scheduler is None:
                scheduler = await asyncio.to_thread(self._make_alone, version, path)
            self._schedulers[version] = scheduler  # now the last one
            self._num_users[version] += 1

    def _make_alone(self, version: int, path: Path) -> Scheduler:
        """Call `make` once the previous call has ended."""
        # The thread of a cancelled `load` goes on after `_reading` is free again.
        with self._making:
            return self._make(version, path)

    def release(self, version: int) -> None:
        """End one use of a version. Of versions without users, drop all but the `MAX_IDLE` that
        were loaded last.
        """
        self._num_users -= Counter([version])  # the subtraction also removes a count of 0
        idle = [each for each in self._schedulers if not self._num_users[each]]
        for each in idle[:-MAX_IDLE]:
            self._removed_s += self._schedulers.pop(each).statistics().forward_s

    def scheduler(self, version: int) -> Scheduler:
        """Return the scheduler of a past version.

        Raises:
            RunError: the version is not in memory.
        """
        if version not in self._schedulers:
            raise RunError(f"the engine has not loaded version {version} as a past version")
        return self._schedulers[version]

    def schedulers(self) -> list[Scheduler]:
        """Return the schedulers of all past versions in memory."""
        return list(self._schedulers.values())

    def add_to(self, current: Statistics) -> Statistics:
        """Add the time and memory of past versions to the statistics of the current version."""
        past = [each.statistics() for each in self.schedulers()]
        return replace(
            current,
            forward_s=current.forward_s + self._removed_s + sum(each.forward_s for each in past),
            cache_bytes=current.cache_bytes + sum(each.cache_bytes for each in past),
        )


class EmbeddedEngine(Engine):
    """Serve a model directory on the CPU cores of this process.

    Args:
        directory: model directory; its weights are version 0.
        name: name of the process, for errors.
        base: model directory to whose weights published adapters are added; None for `directory`.

    Raises:
        PolicyError: the model cannot be served. The message has the reason and a remedy.
    """

    def __init__(
        self,
        directory: Path,
        config: EngineConfig,
        name: str = "an engine",
        base: Path | None = None,
    ) -> None:
        super().__init__()
        model = Model.load(
            directory,
            slots=config.max_contexts,
            max_tokens=config.max_tokens,
            arithmetic=config.arithmetic,
        )
        interrupts = config.in_flight == "interrupt"
        self._scheduler = Scheduler(model, interrupts=interrupts, now=time.perf_counter)
        self._past_policies = PastPolicies(self._make_past_policy)
        self._config, self._name = config, name
        self._base = BaseWeights(base or directory, is_tied=bool(model.architecture.is_tied))
        self._unadapted: dict[str, Weights] = {}
        """Weights of the base, by `AdapterBase.dtype`. Embedding, last norm and LM head, which all
        versions share, are those of the first version that is read. The base's layers are read when
        a past version is loaded for the first time.
        """
        self._worker = ThreadPoolExecutor(
            1, "embedded engine", initializer=torch.set_num_threads, initargs=(config.threads,)
        )
        self._calls: list[Callable[[], None]] = []
        """Calls of schedulers, to be made after the current forward."""
        self._loads: list[tuple[int, Weights, asyncio.Future[None]]] = []
        """Version, weights and future of each load, to be made after the current forward."""
        self._receiver = Receiver(name)
        self._completing: dict[str, asyncio.Future[Completion]] = {}
        """Futures of the prompts that schedulers are completing, by context."""
        self._has_work = asyncio.Event()

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample a completion. Cancellation aborts it; the sequence keeps its keys and values."""
        future: asyncio.Future[Completion] = self._promise()
        self._post(partial(self._submit, prompt, future))
        try:
            return await future
        finally:
            if future.cancelled():
                self._post(partial(self._abort, prompt.context, future))

    async def load(self, version: int, path: Path) -> AcceptedWeights | None:
        """Load weights; return when the next token will be sampled with them."""
        self._check_runs()
        (weights, _), receipt = await asyncio.to_thread(self._read, version, path)
        future: asyncio.Future[None] = self._promise()
        self._loads.append((version, weights, future))
        self._has_work.set()
        await future
        return receipt

    async def load_past(self, version: int, path: Path) -> None:
        """Load a past version, for one more group that plays against it."""
        await self._past_policies.load(version, path)

    def release_past(self, version: int) -> None:
        """End one use of a past version; return at once."""
        self._past_policies.release(version)

    def release(self, context: str) -> None:
        """Forget a sequence; return at once."""
        self._post(partial(self._release, context))

    def trim(self) -> None:
        """Give the KV cache's memory back to the system if no sequence holds a slot."""
        self._post(self._scheduler.trim)

    def statistics(self) -> Statistics:
        """Return the statistics up to now, with those of past versions."""
        return self._past_policies.add_to(self._scheduler.statistics())

    async def describe(self) -> str:
        """Describe model and memory in one line."""
        return self._scheduler.model.describe()

    def _work(self) -> list[Coroutine[Any, Any, None]]:
        return [self._drive()]

    async def _drive(self) -> None:
        """Run forwards while schedulers have prompts, and queued calls and loads between them.

        Cancellation discards the result of the current forward.
        """
        loop = asyncio.get_running_loop()
        with self._worker:  # at the end of the block, waits for the current forward
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                self._run_calls()
                self._swap()
                busy = [each for each in self._schedulers() if not each.is_idle]
                if not busy:
                    continue
                for context, completion in await loop.run_in_executor(self._worker, _advance, busy):
                    settle(self._completing.pop(context), None, completion)
                await self._wait_for_next_prompts()
                self._has_work.set()  # some of the prompts need further forwards

    def _schedulers(self) -> list[Scheduler]:
        """Return the schedulers of the current version and of all past versions in memory."""
        return [self._scheduler, *self._past_policies.schedulers()]

    def _make_past_policy(self, version: int, path: Path) -> Scheduler:
        """Make the scheduler of a past version, with a quarter of the KV slots."""
        current = self._scheduler.model
        (weights, adapters), _ = self._read(version, path)
        # A model applies one set of unmerged adapters to all tokens alike (`Model._layers`), so the
        # adapters of two roles, which change from token to token, stay merged.
        if adapters is not None and not weights.second_role:
            weights = self._unmerged(version, path, weights, adapters)
        model = Model(
            current.architecture,
            weights,
            slots=max(1, self._config.max_contexts // 4),
            max_tokens=self._config.max_tokens,
            arithmetic=current.arithmetic,
        )
        return Scheduler(model, now=time.perf_counter)

    def _unmerged(self, version: int, path: Path, merged: Weights, adapters: Adapters) -> Weights:
        """Return the weights of a past version as the weights of its base plus unmerged adapters.

        Args:
            merged: the same version's weights with its adapters merged, to compare with.

        Raises:
            WeightsRefused: log-probs of the probe tokens differ by more than rounding from those of
                `merged`.
        """
        base, model = adapters.base, self._scheduler.model
        architecture, arithmetic = model.architecture, model.arithmetic
        if not self._unadapted[base.dtype].layers:
            named = self._base.tensors(base.dtype)
            like = self._unadapted[base.dtype]
            self._unadapted[base.dtype] = as_weights(
                named, architecture, str(path), arithmetic, copies=False, like=like
            )
        own = replace(
            self._unadapted[base.dtype],
            adapters=as_adapters(adapters.tensors, base.scale, architecture, arithmetic),
        )
        scores = [probe_logprobs(each, architecture, arithmetic) for each in (merged, own)]
        distance, bound = difference(*scores), TOLERANCES[self._precision()]
        if distance > bound:
            reason = (
                f"with adapters not merged, log-probs are {distance:.3g} nats from those with "
                "merged adapters"
            )
            raise refusal(self._name, version, path, reason)
        return own

    def _precision(self) -> Precision:
        """Return the precision of this engine's log-probs, for the comparison of fingerprints."""
        is_rounded = isinstance(self._scheduler.model.arithmetic, BFloat16)
        return precision_of(torch.bfloat16 if is_rounded else torch.float32)

    def _read(
        self, version: int, path: Path
    ) -> tuple[tuple[Weights, Adapters | None], AcceptedWeights | None]:
        """Read weights and compare their fingerprint with the learner's.

        Runs in a thread, while forwards go on. Also returns the adapters, if they were published.
        """
        return read_checked(self._name, version, path, partial(self._read_once, version))

    def _read_once(
        self, version: int, path: Path, published: WeightFingerprint | None
    ) -> tuple[tuple[Weights, Adapters | None], WeightFingerprint]:
        """Read weights, merge published adapters into their base, and compute the fingerprint.

        Tensors pass through the builder of the fingerprint on their way into the weights.
        """
        # `path` is that of the weights' file or, if the learner sends weights to the engines
        # (`transport.weights`), that of their manifest.
        model, is_sent = self._scheduler.model, is_manifest(path)
        named = self._receiver.receive(Manifest.read(path)) if is_sent else read_tensors(path)
        builder = FingerprintBuilder(published, None if is_sent else path)
        # `like`: weights of the same base, if a version of it was read. Their embedding, norm and
        # LM head are used again instead of being converted once more.
        if published is None or (base := published.base) is None:
            adapters, like, passing = None, None, builder.passing(named)
        else:
            # Copied out of the mapped file, so that the bytes of the fingerprint are the bytes that
            # are merged below, even if the file changes meanwhile.
            copied = builder.passing((name, tensor.clone()) for name, tensor in named)
            adapters = Adapters(dict(copied), base)
            builder.base = AdapterBase(self._base.digest(base.dtype), base.dtype, base.scale)
            like = self._unadapted.get(base.dtype)
            merged = self._base.merged(adapters.tensors, base)
            passing = builder.passing(merged, are_published=False)
        # Tensors that were sent are copied: each is a part of a large buffer, and would keep all of
        # that buffer in memory. Tensors of a file are mapped, and merged ones are new.
        weights = as_weights(
            passing,
            model.architecture,
            str(path),
            model.arithmetic,
            copies=is_sent and adapters is None,
            like=like,
        )
        if adapters is not None:
            # All versions use the embedding, norm and LM head of the first version that was read,
            # because these have no adapters. Another thread may have read that version meanwhile.
            first = replace(weights, layers=(), second_role=())
            like = self._unadapted.setdefault(adapters.base.dtype, first)
            weights = replace(weights, embedding=like.embedding, norm=like.norm, head=like.head)
        logprobs: tuple[float, ...] = ()
        if published is not None and published.logprobs:
            logprobs = probe_logprobs(weights, model.architecture, model.arithmetic)
        return (weights, adapters), builder.fingerprint(version, self._precision(), logprobs)

    def _swap(self) -> None:
        """Let the current version's scheduler sample with weights that were read meanwhile."""
        loads, self._loads = self._loads, []
        for version, weights, future in loads:
            if not future.done():  # otherwise the caller of `load` was cancelled
                self._scheduler.swap(version, weights)
                settle(future, None)

    async def _wait_for_next_prompts(self) -> None:
        """Let trials that got a completion submit their next prompt before the next forward."""
        num_queued = -1
        while num_queued != len(self._calls):
            num_queued = len(self._calls)
            await asyncio.sleep(0)  # every task that is ready runs once

    def _run_calls(self) -> None:
        """Make the calls that were queued during the last forward."""
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _submit(self, prompt: Prompt, future: asyncio.Future[Completion]) -> None:
        """Hand a prompt to the scheduler of the version that is to complete it."""
        if future.done():  # the caller of `complete` was cancelled
            return
        rival = prompt.rival
        try:
            serving = self._scheduler if rival is None else self._past_policies.scheduler(rival)
            serving.submit(prompt)
        except MageError as error:
            future.set_exception(error)
        else:
            self._completing[prompt.context] = future

    def _abort(self, context: str, future: asyncio.Future[Completion]) -> None:
        """Abort a completion, unless it has ended and the context's next prompt has begun."""
        if self._completing.get(context) is future:
            del self._completing[context]
            for scheduler in self._schedulers():
                scheduler.abort(context)

    def _release(self, context: str) -> None:
        """Forget a sequence on all schedulers."""
        future = self._completing.pop(context, None)
        if future is not None:
            settle(future, RunError(f"context {context!r} was released while it was completed"))
        for scheduler in self._schedulers():
            scheduler.release(context)

    def _post(self, call: Callable[[], None]) -> None:
        """Queue a call of schedulers, and wake `_drive`, which makes it between two forwards."""
        self._calls.append(call)
        self._has_work.set()


def _advance(schedulers: Sequence[Scheduler]) -> list[tuple[str, Completion]]:
    """Run one forward for each base; return the completions that ended, by context."""
    # Versions of the same base share its embedding, so they can share a forward. Whole weights,
    # published without adapters, share nothing.
    by_base = dict[int, list[Scheduler]]()
    for each in schedulers:
        by_base.setdefault(id(each.model.weights.embedding), []).append(each)
    return [ended for group in by_base.values() for ended in advance_together(group)]
