"""Queue the turns of an SGLang engine; a turn is the sampling of one completion.

    queue      a turn enters it                   a turn leaves it
    held       while weights are loaded           in `resume`
    waiting    while another turn computes an     when that turn gets `PromptCached` or
               equal prompt                       `Generated`

Neither queue grows beyond the number of trials, because a trial has one turn at a time. A turn
consists of one request or more, or of none if all its tokens are forced. If SGLang's process dies,
the next one samples the interrupted turns again from their prompts.

A turn's *KV version* is the policy version under which its cached keys and values are found
(`mage_async/inference/server_prefixes.py`).
"""

import asyncio
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from uuid import uuid4

import numpy as np

from mage_async.completion import Completion
from mage_async.errors import RunError, TurnLost
from mage_async.inference.scheduler import Statistics
from mage_async.inference.server_prefixes import Opened, Piece, ServerPrefixes, TurnRequests
from mage_async.inference.weight_fingerprint import AcceptedWeights
from mage_async.policy_version import VersionRun
from mage_services.engines.sglang.messages import Abort, Generate, Generated, Refused
from mage_services.engines.sglang.watchdog import EngineWatchdog
from mage_services.processes.child_process import settle


@dataclass(slots=True, eq=False)
class PendingTurn:
    """Hold a turn until its completion is sampled. That may take several requests and, if processes
    die, several processes.
    """

    turn: TurnRequests
    future: asyncio.Future[Completion]
    opened: Opened | None = None
    """The cached keys and values that its prompt may read; None until its first request is sent."""
    kv_version: int = 0
    """KV version of its request under way or, if there is none, of its next request."""
    rid: str = ""
    """Id of the request under way; empty while there is none."""
    is_warm: bool = False
    """Whether the cache holds an equal prompt under this KV version, computed since the turn was
    queued."""
    num_deaths: int = 0
    """Number of processes that died while its request was under way."""

    @property
    def is_first_of_its_prompt(self) -> bool:
        """Whether the prompt begins a sequence, and no equal prompt is known to be in the cache."""
        return not self.is_warm and self.opened is not None and not self.opened.num_known

    def cache_key(self) -> tuple[int, bytes]:
        """Return the key of the cached prompt on the server: KV version and tokens."""
        return self.kv_version, self.turn.prompt.tokens.tobytes()

    def name(self) -> str:
        """Name the turn, for an error."""
        return f"context {self.turn.prompt.context!r}"

    def next_request(self, *, reports_prompt: bool) -> Generate:
        """Make the message that starts its next request."""
        prompt, allowed = self.turn.prompt, self.turn.allowed()
        return Generate(
            rid=self.rid,
            tokens=self.turn.tokens().astype(np.int32).tobytes(),
            extra_key=f"v{self.kv_version}",
            sampling=replace(prompt.sampling, max_tokens=self.turn.budget()),
            seed=prompt.seed,
            reports_prompt=reports_prompt,
            allowed=b"" if allowed is None else allowed.astype(np.int32).tobytes(),
        )


@dataclass(slots=True, eq=False)
class PendingLoad:
    """Hold a version until a process has loaded it; the future gets the report that its fingerprint
    was accepted.
    """

    version: int
    path: Path
    future: asyncio.Future[AcceptedWeights | None]
    num_deaths: int = 0
    """Number of processes that died while they loaded it."""


def piece_of(message: Generated, kv_version: int) -> Piece:
    """Decode the result of a request, with the policy and KV version of each token."""
    # After a death, sequences get the KV version of the weights that the next process is to load.
    # If that load fails, an older version samples the tokens and computes the keys and values.
    runs = tuple(
        VersionRun(start, version, min(kv_version, version), message.provenance)
        for start, version in message.spans
    )
    return Piece(
        np.frombuffer(message.tokens, np.int32),
        np.frombuffer(message.logprobs, np.float32),
        runs,
        message.num_cached,
        message.is_aborted,
    )


MAX_DEATHS_OF_A_TURN = 3
"""Number of deaths during one turn after which the turn fails, because it may be their cause."""


class TurnQueue:
    """Send the requests of turns. While weights are loaded, turns are held back; of turns with an
    equal prompt, the others wait for the first one.

    Args:
        silence_s: time limit for the answer to an abort; a process that exceeds it hangs.
    """

    def __init__(self, watchdog: EngineWatchdog, *, silence_s: float) -> None:
        self._watchdog, self._silence_s = watchdog, silence_s
        self.contexts = ServerPrefixes()
        self.is_open = False
        """Whether requests may be sent, because a process serves and no load is under way."""
        self._version = 0
        """Version of the weights that sample the requests."""
        self._held: list[PendingTurn] = []
        self._running: dict[str, PendingTurn] = {}
        """Turns with a request under way, by the request's id."""
        self._waiting: dict[tuple[int, bytes], list[PendingTurn]] = {}
        """Turns that wait for an equal prompt, by its cache key. A server that got equal prompts at
        the same moment would compute each of them. The trials of a group have equal first prompts:
        one of them goes first, and the others find its keys and values in the cache."""
        self.totals = Statistics()
        self._busy_since = 0.0
        """Time at which the present busy period began: a request was sent while no other was under
        way.
        """

    def request(self, pending: PendingTurn) -> None:
        """Send a turn's next request as soon as one may be sent."""
        if self.is_open:
            self._submit(pending)
        else:
            self._held.append(pending)

    def resume(self, version: int) -> None:
        """Send the held turns; the process uses weights of this version."""
        self.is_open, self._version = True, version
        held, self._held = self._held, []
        for pending in held:
            self._submit(pending)

    def pause(self) -> None:
        """Send nothing until `resume`: weights are being loaded."""
        self.is_open = False

    def take_prompt_cached(self, rid: str) -> None:
        """Handle `PromptCached`: the KV cache holds a request's prompt."""
        if (pending := self._running.get(rid)) is not None:
            pending.is_warm = True
            self._release_waiting(pending)

    def take_generated(self, message: Generated, *, may_abort: bool) -> None:
        """Handle `Generated`: deliver the turn's completion, or send its next request.

        Args:
            may_abort: whether a load that aborts requests is under way; otherwise an aborted
                request is an error.
        """
        pending = self._end(message.rid, is_cached=bool(message.tokens))
        if pending is None:
            return
        if message.is_aborted and not may_abort:
            settle(pending.future, RunError(f"{pending.name()}: SGLang aborted the request"))
            return
        try:
            pending.turn.receive(piece_of(message, pending.kv_version))
        except RunError as error:
            settle(pending.future, error)
            return
        if pending.turn.is_done:
            self._deliver(pending)
        else:
            self.request(pending)

    def take_refused(self, message: Refused) -> None:
        """Handle `Refused`: fail the turn."""
        pending = self._end(message.rid, is_cached=False)
        if pending is not None:
            settle(
                pending.future, RunError(f"{pending.name()}: SGLang refuses it: {message.reason}")
            )

    def abort(self, pending: PendingTurn) -> None:
        """Abort a turn whose caller was cancelled.

        A turn that waits for an equal prompt is discarded in `_submit`, when its time comes.
        """
        if pending in self._held:
            self._held.remove(pending)
        if pending.rid:
            rid = pending.rid
            del self._running[rid]
            self._note_idle()
            self._watchdog.expect(rid, self._silence_s)
            self._watchdog.send(Abort(rid=rid))
            self._release_waiting(pending)

    def take_death(self, newest: int) -> None:
        """Handle the process's death: the KV cache and all requests under way are lost.

        Args:
            newest: version that the next process will use.
        """
        self.is_open = False
        if self._running:
            self.totals.forward_s += time.perf_counter() - self._busy_since
        interrupted, waiting = list(self._running.values()), chain(*self._waiting.values())
        for pending in interrupted:
            pending.num_deaths += 1
            if pending.num_deaths == MAX_DEATHS_OF_A_TURN:
                reason = (
                    f"{pending.name()}: SGLang died {pending.num_deaths} times while this turn was "
                    "sampled"
                )
                settle(pending.future, TurnLost(reason))
        self._held = [*interrupted, *waiting, *self._held]
        for pending in self._held:
            pending.turn.restart()
            pending.rid, pending.is_warm = "", False
        self._running.clear()
        self._waiting.clear()
        self.contexts.discard_kv(newest)

    def statistics(self) -> Statistics:
        """Return the statistics up to now; `forward_s` is the time with a request under way."""
        running_s = time.perf_counter() - self._busy_since if self._running else 0.0
        return replace(
            self.totals,
            num_contexts=len(self.contexts),
            forward_s=self.totals.forward_s + running_s,
        )

    def _submit(self, pending: PendingTurn) -> None:
        """Send a turn's next request, unless an equal prompt is being computed."""
        if pending.future.done():
            return
        self._set_kv_version(pending)
        if pending.turn.is_done:  # all of its tokens are forced
            self._deliver(pending)
            return
        is_first, cache_key = pending.is_first_of_its_prompt, pending.cache_key()
        if is_first and cache_key in self._waiting:
            self._waiting[cache_key].append(pending)
            return
        if is_first:
            self._waiting[cache_key] = []
        pending.rid = uuid4().hex
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running[pending.rid] = pending
        self._watchdog.send(pending.next_request(reports_prompt=is_first))

    def _set_kv_version(self, pending: PendingTurn) -> None:
        """Choose the KV version of the turn's next request."""
        prompt = pending.turn.prompt
        if pending.opened is None:
            pending.opened = self.contexts.open(prompt, self._version)
            pending.kv_version = pending.opened.kv_version
        elif (kv_version := self.contexts.reopen(prompt, self._version)) != pending.kv_version:
            pending.kv_version, pending.is_warm = kv_version, False

    def _end(self, rid: str, *, is_cached: bool) -> PendingTurn | None:
        """Remove a request that has ended, and return its turn.

        Args:
            is_cached: whether the request sampled a token, so that the KV cache holds its prompt.
        """
        self._watchdog.answered(rid)
        pending = self._running.pop(rid, None)
        if pending is not None:
            self._note_idle()
            pending.is_warm = pending.is_warm or is_cached
            self._release_waiting(pending)
            pending.rid = ""
        return pending

    def _note_idle(self) -> None:
        """If no request is under way any more, add the busy period that ends now to the total."""
        if not self._running:
            self.totals.forward_s += time.perf_counter() - self._busy_since

    def _release_waiting(self, pending: PendingTurn) -> None:
        """Send the turns that waited for this turn's prompt. If the prompt did not get into the
        cache, only the first of them is sent, and the others wait for it.
        """
        for other in self._waiting.pop(pending.cache_key(), []):
            other.is_warm = pending.is_warm
            self.request(other)

    def _deliver(self, pending: PendingTurn) -> None:
        """Hand the finished completion to the turn's caller, and count it."""
        assert pending.opened is not None
        turn = pending.turn
        completion = turn.completion(pending.opened, self._version)
        self.contexts.close(turn.prompt, completion.tokens, turn.num_computed)
        self._watchdog.reset_deaths()
        totals = self.totals
        totals.num_completions += 1
        totals.num_prompt_tokens += len(turn.prompt.tokens)
        totals.num_reused_tokens += completion.num_reused
        totals.num_repeated_tokens += completion.num_repeated
        totals.num_extension_faults += not completion.is_extension
        totals.num_generated_tokens += len(completion.tokens)
        settle(pending.future, None, completion)
