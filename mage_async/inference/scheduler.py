"""Continuous batching: prompts come in at any time, each `advance` is one forward for all.

    submit ──> waiting ──(a lane, room in the forward)──> running ──(last token)──> Completion
                  ^ new contexts stay here while every lane is busy

A forward computes what is new in each running context: the rest of a prompt, or the token drawn
last. A forward takes a bounded number of tokens, rows with few of them first, so that a long prompt
delays no decoding for long.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from mage_async.completion import (
    Completion,
    FinishReason,
    Prompt,
    check_prompt,
    with_roles,
    without_roles,
)
from mage_async.errors import RunError
from mage_async.inference.architecture import Architecture
from mage_async.inference.arithmetic import Arithmetic
from mage_async.inference.contexts import Contexts, Opened
from mage_async.inference.forward_plan import Plan
from mage_async.inference.model import Model
from mage_async.inference.ragged import Rows, packed_positions
from mage_async.inference.sampling import Rules, draw, uniforms
from mage_async.inference.statistics import Statistics
from mage_async.inference.weights import Weights, read_weights
from mage_async.policy_version import VersionRun, append_run

FORWARD_TOKENS = 2048
_MASK_64 = 2**64 - 1

_run = lru_cache(maxsize=1024)(VersionRun)
"""Runs are immutable and few: one looked up is one not made."""


@dataclass(slots=True)
class Running:
    """A prompt that holds a lane."""

    prompt: Prompt
    opened: Opened
    num_limit: int
    """The completion ends when the context has so many tokens."""
    runs: list[VersionRun] = field(default_factory=list)


class Scheduler:
    """Serves completions from a model; used by one thread at a time.

    Args:
        model: its lanes are how many contexts keep their keys and values; the least recently used
            idle one makes room. Its `max_tokens` bounds prompt and completion together.
        forward_tokens: most tokens of one forward; never fewer than there are lanes.
        interrupts: a running prompt that wanted fresh keys gets them again when weights change.
        now: a clock, for the time spent computing; without one it is 0.
    """

    def __init__(
        self,
        model: Model,
        *,
        forward_tokens: int = FORWARD_TOKENS,
        interrupts: bool = False,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        lanes, max_tokens = model.lanes, model.max_tokens
        self._model, self._max_tokens, self._now = model, max_tokens, now
        self._forward_tokens, self._interrupts = max(forward_tokens, lanes), interrupts
        self._contexts = Contexts(lanes, max_tokens)
        self._waiting: dict[str, Prompt] = {}
        self._running: dict[int, Running] = {}
        self._temperature = np.zeros(lanes, np.float32)
        self._top_p = np.ones(lanes, np.float32)
        self._top_k = np.zeros(lanes, np.int64)
        self._seeds = np.zeros(lanes, np.uint64)
        self._num_prompt = np.zeros(lanes, np.int64)
        self._exploits = np.zeros(lanes, bool)
        self._logprobs = np.zeros((lanes, max_tokens), np.float32)
        self._statistics = Statistics(cache_bytes=model.cache_bytes())

    @property
    def is_idle(self) -> bool:
        """Nothing waits or runs."""
        return not self._waiting and not self._running

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt for the next forward.

        Raises:
            RunError: it cannot be served, now or ever; the text says why.
        """
        if prompt.context in self._waiting or self._contexts.lane(prompt.context) in self._running:
            raise RunError(
                f"context {prompt.context!r} has a prompt already; a context has one at a time"
            )
        vocabulary = self._model.architecture.vocabulary
        check_prompt(prompt, max_tokens=self._max_tokens, vocabulary=vocabulary)
        self._waiting[prompt.context] = prompt

    def advance(self) -> list[tuple[str, Completion]]:
        """Compute one forward for all that waits or runs; returns what it ended, by context."""
        began = self._now()
        plan = self._plan()
        if not plan.lanes:
            return []
        rows = plan.rows()
        row, positions = packed_positions(rows)
        tokens = self._contexts.tokens[rows.lanes[row], positions]
        known = np.array([self._contexts.num_known[lane] for lane in rows.lanes.tolist()])
        wanted = np.flatnonzero(rows.starts + rows.counts == known)
        logits = self._model.forward(tokens, rows, plan.prefix_copies(), wanted)
        finished = self._draw(logits, rows.lanes[wanted], known[wanted]) if len(wanted) else []
        self._book(finished, rows, len(wanted), self._now() - began)
        return [(running.prompt.context, completion) for running, completion in finished]

    def release(self, context: str) -> None:
        """Forget a context, and abort what it was asked."""
        self.abort(context)
        self._contexts.release(context)

    def abort(self, context: str) -> None:
        """Drop a context's prompt, if there is one; what was computed is kept."""
        self._waiting.pop(context, None)
        lane = self._contexts.lane(context)
        if lane in self._running:
            running = self._running.pop(lane)
            self._contexts.take_back(lane, len(running.prompt.tokens))

    def load(self, version: int, path: Path) -> None:
        """Draw every further token with the weights of a safetensors file or model directory.

        Raises:
            PolicyError: the file cannot be used; the weights are the old ones.
        """
        self.swap(version, read_weights(path, self._model.architecture, self._model.arithmetic))

    def swap(self, version: int, weights: Weights) -> None:
        """The same with weights that have been read; takes no time."""
        began = self._now()
        self._model.weights = weights
        self._contexts.load(version)
        past = self._statistics
        stall_s = past.stall_s + self._now() - began
        self._statistics = replace(past, num_loads=past.num_loads + 1, stall_s=stall_s)
        if self._interrupts:
            self._refresh_running()

    def _refresh_running(self) -> None:
        """Let running prompts that wanted fresh keys compute all of theirs again."""
        for lane, running in self._running.items():
            if running.prompt.fresh_keys:
                repeated = running.opened.num_repeated + self._contexts.lose_keys(lane)
                running.opened = running.opened._replace(num_repeated=repeated)

    @property
    def architecture(self) -> Architecture:
        """Architecture of the served model."""
        return self._model.architecture

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic of the served model; weights for `swap` are read for it."""
        return self._model.arithmetic

    def statistics(self) -> Statistics:
        """What was done so far."""
        return replace(
            self._statistics,
            num_evictions=self._contexts.num_evictions,
            num_contexts=self._contexts.num_contexts,
            num_waiting=len(self._waiting),
        )

    def describe(self) -> str:
        """Model and memory in one line."""
        return self._model.describe()

    def _plan(self) -> Plan:
        """What is to be computed next.

        Contexts that hold a lane go first, so that none is evicted while its own prompt waits.
        """
        contexts = self._contexts
        contexts.begin()
        plan = Plan(self._forward_tokens)
        for lane in sorted(self._running, key=contexts.num_to_compute):
            self._add(plan, lane)
        for prompt in sorted(
            self._waiting.values(), key=lambda one: contexts.lane(one.context) is None
        ):
            if plan.room:
                self._admit(plan, prompt)
        return plan

    def _admit(self, plan: Plan, prompt: Prompt) -> None:
        """Give a waiting prompt a lane, if it can have one."""
        tokens = with_roles(prompt.tokens, prompt.exploits_from)
        opened = self._contexts.open(prompt.context, tokens, is_fresh=prompt.fresh_keys)
        if opened is None:
            return
        del self._waiting[prompt.context]
        self._remember(opened.lane, prompt)
        limit = min(len(prompt.tokens) + prompt.sampling.max_tokens, self._max_tokens)
        self._running[opened.lane] = Running(prompt, opened, limit)
        if opened.source != opened.lane:
            plan.copy_prefix(opened.source, opened.lane, opened.num_reused)
        self._add(plan, opened.lane)

    def _remember(self, lane: int, prompt: Prompt) -> None:
        """How to draw for a lane."""
        sampling = prompt.sampling
        self._num_prompt[lane] = len(prompt.tokens)
        self._exploits[lane] = prompt.exploits_from is not None
        self._seeds[lane] = prompt.seed & _MASK_64
        self._temperature[lane] = sampling.temperature
        self._top_p[lane], self._top_k[lane] = sampling.top_p, sampling.top_k

    def _add(self, plan: Plan, lane: int) -> None:
        """Let the forward compute what it has room for of a lane's new tokens."""
        count = min(self._contexts.num_to_compute(lane), plan.room)
        if count:
            plan.add(lane, self._contexts.num_computed[lane], count)
            self._contexts.compute(lane, count)

    def _draw(
        self, logits: torch.Tensor, lanes: np.ndarray, known: np.ndarray
    ) -> list[tuple[Running, Completion]]:
        """Draw a token for each lane, of which `known` are known; returns what that finished."""
        rules = Rules(self._temperature[lanes], self._top_p[lanes], self._top_k[lanes])
        chances = uniforms(self._seeds[lanes], known - self._num_prompt[lanes])
        tokens, logprobs = draw(logits, rules, chances, self._model.arithmetic)
        self._logprobs[lanes, known] = logprobs
        self._contexts.tokens[lanes, known] = np.where(self._exploits[lanes], ~tokens, tokens)
        drawn = zip(lanes.tolist(), tokens.tolist(), known.tolist(), strict=True)
        ended = [(lane, self._append(lane, token, place)) for lane, token, place in drawn]
        return [self._finish(lane, reason) for lane, reason in ended if reason is not None]

    def _append(self, lane: int, token: int, place: int) -> FinishReason | None:
        """Note a drawn token; says whether the completion ends with it."""
        running = self._running[lane]
        self._contexts.num_known[lane] = place + 1
        kv, policy = self._contexts.oldest[lane], self._contexts.versions[-1]
        append_run(running.runs, _run(place - len(running.prompt.tokens), policy, kv))
        if token in running.prompt.sampling.stop_tokens:
            return "stop"
        return "length" if place + 1 == running.num_limit else None

    def _finish(self, lane: int, reason: FinishReason) -> tuple[Running, Completion]:
        running = self._running.pop(lane)
        drawn = slice(len(running.prompt.tokens), self._contexts.num_known[lane])
        self._contexts.close(lane)
        return running, Completion(
            without_roles(self._contexts.tokens[lane, drawn]),
            self._logprobs[lane, drawn].copy(),
            tuple(running.runs),
            reason,
            running.opened.num_reused,
            running.opened.num_repeated,
            running.opened.is_extension,
        )

    def _book(
        self,
        finished: list[tuple[Running, Completion]],
        rows: Rows,
        num_drawn: int,
        seconds: float,
    ) -> None:
        past, opened = self._statistics, [running.opened for running, _ in finished]
        self._statistics = replace(
            past,
            num_completions=past.num_completions + len(finished),
            num_prompt_tokens=past.num_prompt_tokens
            + sum(len(running.prompt.tokens) for running, _ in finished),
            num_reused_tokens=past.num_reused_tokens + sum(found.num_reused for found in opened),
            num_repeated_tokens=past.num_repeated_tokens
            + sum(found.num_repeated for found in opened),
            num_extension_faults=past.num_extension_faults
            + sum(not found.is_extension for found in opened),
            num_generated_tokens=past.num_generated_tokens + num_drawn,
            num_forwards=past.num_forwards + 1,
            num_rows=past.num_rows + len(rows.lanes),
            num_computed_tokens=past.num_computed_tokens + int(rows.counts.sum()),
            forward_s=past.forward_s + seconds,
        )
