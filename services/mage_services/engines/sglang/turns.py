"""Queue the turns of an SGLang engine.

    queue      filled by                            emptied by           bounded by
    held       request, during a load               resume               trials
    waiting    request, while an equal prompt is    `Began` or `Drew`    trials
               computed                             of the first

A turn consists of one request or more, or of none if all its tokens are forced. After a death of
SGLang's process, the next one samples the interrupted turns again from their prompts.
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
from mage_services.engines.engine import settle
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.messages import Draw, Drew
from mage_services.engines.sglang.watchdog import EngineWatchdog


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn, and the future of its completion."""

    turn: TurnRequests
    future: asyncio.Future[Completion]
    opened: Opened | None = None
    """None until its first request is sent."""
    key_version: int = 0
    rid: str = ""
    """Id of the request under way; empty while there is none."""
    is_warm: bool = False
    """Whether an equal prompt has been computed since it was queued."""
    num_deaths: int = 0
    """Number of processes that died while its request was under way."""

    @property
    def is_cold(self) -> bool:
        """Whether the prompt begins a sequence, and no equal one is known to be in the cache."""
        return not self.is_warm and self.opened is not None and not self.opened.num_known

    def cache_key(self) -> tuple[int, bytes]:
        """Return the key under which its prompt is cached: key version and tokens."""
        return self.key_version, self.turn.prompt.tokens.tobytes()

    def name(self) -> str:
        """Name the turn in an error."""
        return f"context {self.turn.prompt.context!r}"

    def next_draw(self, *, says_when_it_began: bool) -> Draw:
        """Make the message that starts its next request."""
        prompt, allowed = self.turn.prompt, self.turn.allowed()
        return Draw(
            rid=self.rid,
            tokens=self.turn.tokens().astype(np.int32).tobytes(),
            key=f"v{self.key_version}",
            max_tokens=self.turn.budget(),
            temperature=prompt.sampling.temperature,
            top_p=prompt.sampling.top_p,
            top_k=prompt.sampling.top_k,
            stop_tokens=prompt.sampling.stop_tokens,
            seed=prompt.seed,
            says_when_it_began=says_when_it_began,
            allowed=b"" if allowed is None else allowed.astype(np.int32).tobytes(),
        )


@dataclass(slots=True, eq=False)
class PendingLoad:
    """A version to be loaded, and the future of its receipt."""

    version: int
    path: Path
    future: asyncio.Future[AcceptedWeights | None]
    num_deaths: int = 0
    """Number of processes that died while they loaded it."""


def piece_of(message: Drew, key_version: int) -> Piece:
    """Decode the result of a request, with the policy and key version of each token."""
    runs = tuple(
        VersionRun(start, version, min(key_version, version), message.provenance)
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
"""A turn during which the process died this often may be the cause, and is lost."""


class TurnQueue:
    """The turns that are held back, wait for an equal prompt, or are under way.

    Args:
        silence_s: time limit for the answer to an abort; a process that exceeds it hangs.
    """

    def __init__(self, watchdog: EngineWatchdog, *, silence_s: float) -> None:
        self._watchdog, self._silence_s = watchdog, silence_s
        self.contexts = ServerPrefixes()
        self.is_open, self._version = False, 0
        """Whether requests may be sent, because a process serves and no load is under way; and the
        version that they are sampled with."""
        self._held: list[PendingTurn] = []
        self._running: dict[str, PendingTurn] = {}
        self._waiting: dict[tuple[int, bytes], list[PendingTurn]] = {}
        """Turns that wait for an equal prompt, by its cache key. A server that got equal prompts at
        the same moment would compute each of them. So of the trials of a group, whose first prompts
        are equal, one goes first, and the others find its keys in the cache."""
        self.totals = Statistics()
        self._busy_since = 0.0

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

    def take_began(self, rid: str) -> None:
        """Handle `Began`: the keys of a request's prompt are in the cache."""
        self._release_waiting(self._running.get(rid), is_warm=True)

    def take_drew(self, message: say.Drew, *, may_abort: bool) -> None:
        """Handle `Drew`: deliver the turn's completion, or send its next request.

        Args:
            may_abort: a load is under way that aborts requests.
        """
        pending = self._end(message.rid)
        if pending is None:
            return
        if message.is_aborted and not may_abort:
            settle(pending.future, RunError(f"{pending.name()}: SGLang gave the request up"))
            return
        try:
            pending.turn.receive(piece_of(message, pending.key_version))
            pending.is_warm = True
        except RunError as error:
            settle(pending.future, error)
            return
        if pending.turn.is_done:
            self._deliver(pending)
        else:
            self.request(pending)

    def take_refused(self, message: say.Refused) -> None:
        """Handle `Refused`: fail the turn."""
        pending = self._end(message.rid)
        if pending is not None:
            settle(
                pending.future, RunError(f"{pending.name()}: SGLang refuses it: {message.reason}")
            )

    def abort(self, pending: PendingTurn) -> None:
        """Abort a turn whose caller was cancelled."""
        if pending in self._held:
            self._held.remove(pending)
        if pending.rid:
            rid = pending.rid
            del self._running[rid]
            self._note_idle()
            self._watchdog.expect(rid, self._silence_s)
            self._watchdog.send(say.Abort(rid=rid))
            self._release_waiting(pending, is_warm=False)

    def take_death(self, newest: int) -> None:
        """Handle the process's death: all keys and all requests under way are lost.

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
                    f"{pending.name()}: SGLang died {pending.num_deaths} times while it was drawn"
                )
                settle(pending.future, TurnLost(reason))
        self._held = [*interrupted, *waiting, *self._held]
        for pending in self._held:
            pending.turn.restart()
            pending.rid, pending.is_warm = "", False
        self._running.clear()
        self._waiting.clear()
        self.contexts.lose_keys(newest)

    def statistics(self) -> Statistics:
        """Return the statistics up to now; `forward_s` is the time with a request under way."""
        running_s = time.perf_counter() - self._busy_since if self._running else 0.0
        return replace(
            self.totals,
            num_contexts=len(self.contexts),
            num_waiting=len(self._held),
            forward_s=self.totals.forward_s + running_s,
        )

    def _submit(self, pending: PendingTurn) -> None:
        """Send a turn's next request, unless an equal prompt is being computed."""
        if pending.future.done():
            return
        self._set_key_version(pending)
        if pending.turn.is_done:  # all of its tokens are forced
            self._deliver(pending)
            return
        is_cold, cache_key = pending.is_cold, pending.cache_key()
        if is_cold and cache_key in self._waiting:
            self._waiting[cache_key].append(pending)
            return
        if is_cold:
            self._waiting[cache_key] = []
        pending.rid = uuid4().hex
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running[pending.rid] = pending
        self._watchdog.send(pending.next_draw(says_when_it_began=is_cold))

    def _set_key_version(self, pending: PendingTurn) -> None:
        prompt = pending.turn.prompt
        if pending.opened is None:
            pending.opened = self.contexts.open(prompt, self._version)
            pending.key_version = pending.opened.key_version
        else:
            pending.key_version = self.contexts.reopen(prompt, self._version)

    def _end(self, rid: str) -> PendingTurn | None:
        """Remove a request that has ended, and return its turn."""
        self._watchdog.answered(rid)
        pending = self._running.pop(rid, None)
        if pending is not None:
            self._note_idle()
            self._release_waiting(pending, is_warm=True)
            pending.rid = ""
        return pending

    def _note_idle(self) -> None:
        """If no request is under way any more, add the busy time until now."""
        if not self._running:
            self.totals.forward_s += time.perf_counter() - self._busy_since

    def _release_waiting(self, pending: PendingTurn | None, *, is_warm: bool) -> None:
        """Send the turns that waited for this one's prompt."""
        if pending is None:
            return
        for other in self._waiting.pop(pending.cache_key(), []):
            other.is_warm = is_warm
            self.request(other)

    def _deliver(self, pending: PendingTurn) -> None:
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
