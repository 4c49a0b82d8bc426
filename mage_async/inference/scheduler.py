"""Batch continuously: prompts may arrive at any time, and each `advance` is one forward for all.

    submit ──> waiting ──(a KV slot, tokens left)──> running ──(last token)──> Completion
                  ^ a new sequence stays here while every slot is busy

A forward computes the new tokens of each running sequence: the rest of its prompt, or the token
sampled last. The number of tokens in a forward is bounded, and sequences with few new tokens go
first, so that a long prompt does not delay decoding for long.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

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
from mage_async.inference.model import (
    Model,
    Plan,
    PolicyForward,
    forward_together,
    packed_positions,
)
from mage_async.inference.prefix_cache import Opened, PrefixCache
from mage_async.inference.sampling import SamplingParameters, draw, uniforms
from mage_async.inference.weights import Weights
from mage_async.policy_version import VersionRun, append_run
from mage_async.trajectory import Trial
from mage_async.trials.duels import TrialInProgress, make_calls


@dataclass(slots=True)
class Statistics:
    """Count what an engine has done: totals since its start, except for fields that describe the
    present.
    """

    num_completions: int = 0
    """Number of completions. Those with a single legal action are counted here, but not in the
    fields below, because nothing is computed for them.
    """
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    """Number of prompt tokens whose keys and values were in the cache."""
    num_repeated_tokens: int = 0
    """Number of prompt tokens that had to be computed again, because their keys and values were
    lost.
    """
    num_extension_faults: int = 0
    """Number of prompts that did not begin with all earlier tokens of their sequence."""
    num_generated_tokens: int = 0
    num_forwards: int = 0
    num_rows: int = 0
    """Number of sequences in a forward, summed over forwards."""
    num_computed_tokens: int = 0
    forward_s: float = 0.0
    """Time spent in forwards and sampling, in seconds."""
    num_loads: int = 0
    """Number of weight updates."""
    stall_s: float = 0.0
    """Time in which weights were exchanged and nothing could be sampled, in seconds."""
    num_evictions: int = 0
    """Number of sequences that lost their KV slot to another one."""
    num_contexts: int = 0
    """Number of sequences that hold a KV slot now."""
    cache_bytes: int = 0
    """Memory of the KV cache, in bytes; constant."""

    def counters(self) -> dict[str, float]:
        """Return every field by name, for a heartbeat."""
        return {name: getattr(self, name) for name in self.__slots__}


FORWARD_TOKENS = 2048
"""Default bound on the number of tokens of a forward."""
_MASK_64 = 2**64 - 1
"""Mask of the lowest 64 bits."""

# Version runs are immutable, and few differ, so equal ones are made only once.
_version_run = lru_cache(maxsize=1024)(VersionRun)


@dataclass(slots=True)
class Running:
    """Describe a prompt that is being completed, and therefore holds a KV slot."""

    prompt: Prompt
    opened: Opened
    """The prompt's slot, and how many of its tokens were cached."""
    max_length: int
    """Length of prompt and completion, in tokens, at which the completion ends."""
    runs: list[VersionRun] = field(default_factory=list)
    """`Completion.versions` so far."""
    node: int = 0
    """Node of the trie of a restricted prompt that the completion has reached."""
    allowed: np.ndarray | None = None
    """Tokens that the next one is sampled from; None for all or, with a restriction, at its end."""
    drawn_from: list[np.ndarray | None] = field(default_factory=list)
    """See `Completion.drawn_from`; empty for a prompt without restriction."""


class Scheduler:
    """Serve completions from a model; used by one thread at a time.

    Args:
        model: Model with a KV slot for each sequence whose keys and values are kept, and with
            `max_tokens`, the bound on prompt and completion together. If all slots are taken, the
            least recently used idle one is given to the next sequence.
        forward_tokens: Largest number of tokens of one forward; at least one for each slot is
            allowed anyway.
        interrupts: Whether a change of weights discards the keys and values of running prompts with
            `refresh_kv`, which are then computed again.
        now: Clock in seconds, for the time statistics; without it they stay 0.
    """

    def __init__(
        self,
        model: Model,
        *,
        forward_tokens: int = FORWARD_TOKENS,
        interrupts: bool = False,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        slots, max_tokens = model.slots, model.max_tokens
        self.model, self._max_tokens, self._now = model, max_tokens, now
        self._forward_tokens, self._interrupts = max(forward_tokens, slots), interrupts
        self._cache = PrefixCache(slots, max_tokens)
        self._waiting: dict[str, Prompt] = {}
        self._running: dict[int, Running] = {}
        """Running prompts by slot; the arrays below have an element or a row for each slot."""
        self._parameters = SamplingParameters(
            np.zeros(slots, np.float32), np.ones(slots, np.float32), np.zeros(slots, np.int64)
        )
        self._seeds = np.zeros(slots, np.uint64)
        self._num_prompt = np.zeros(slots, np.int64)
        """Number of tokens of the prompt."""
        self._is_second_role = np.zeros(slots, bool)
        """Whether the completion belongs to the second role: the prompt has an odd number of role
        changes.
        """
        self._logprobs = np.zeros((slots, max_tokens), np.float32)
        """Log-prob of each sampled token, by its index in the context."""
        self._totals = Statistics(cache_bytes=model.cache_bytes())

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._running

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt for the next forward.

        Raises:
            ContextFull: the prompt leaves no room for a completion.
            RunError: the prompt cannot be served; the message says why.
        """
        if prompt.context in self._waiting or self._cache.slot(prompt.context) in self._running:
            raise RunError(
                f"context {prompt.context!r} has a prompt already; a context has one at a time"
            )
        vocabulary = self.model.architecture.vocabulary
        check_prompt(prompt, max_tokens=self._max_tokens, vocabulary=vocabulary)
        self._waiting[prompt.context] = prompt

    def advance(self) -> list[tuple[str, Completion]]:
        """Compute one forward; return the completions that it ended, by context."""
        return advance_together([self])

    def _next_forward(self) -> PolicyForward | None:
        """Plan a forward; return what it computes, None if there is nothing to compute."""
        plan = self._plan()
        if not plan.slots:
            return None
        rows = plan.rows()
        row, positions = packed_positions(rows)
        tokens = self._cache.tokens[rows.slots[row], positions]
        # Only a sequence whose last known token is in this forward needs logits; a prompt of which
        # this forward computes only a part does not.
        known = np.array([self._cache.num_known[slot] for slot in rows.slots.tolist()])
        logit_rows = np.flatnonzero(rows.starts + rows.counts == known)
        sampling_slots = rows.slots[logit_rows].tolist()
        allowed = [self._running[slot].allowed for slot in sampling_slots]
        columns = _columns(allowed, self.model.architecture.vocabulary)
        return PolicyForward(self.model, tokens, rows, plan.copies, logit_rows, columns)

    def _sample(
        self, computed: PolicyForward, logits: torch.Tensor
    ) -> list[tuple[str, Completion]]:
        """Sample from the logits of a forward; return the completions that it ended."""
        rows, columns, totals = computed.rows, computed.columns, self._totals
        slots = rows.slots[computed.logit_rows]
        totals.num_generated_tokens += len(slots)
        totals.num_forwards += 1
        totals.num_rows += len(rows.slots)
        totals.num_computed_tokens += int(rows.counts.sum())
        if not len(slots):
            return []
        known = (rows.starts + rows.counts)[computed.logit_rows]  # tokens of each sequence so far
        allowed: Sequence[np.ndarray | None]
        allowed = [self._running[slot].allowed for slot in slots.tolist()]
        uniform = uniforms(self._seeds[slots], known - self._num_prompt[slots])
        if columns is not None:
            allowed = _column_indices(allowed, columns)
        parameters, arithmetic = self._parameters.rows(slots), self.model.arithmetic
        tokens, logprobs = draw(logits, parameters, uniform, arithmetic, allowed)
        if columns is not None:
            tokens = columns[tokens]
        self._logprobs[slots, known] = logprobs
        # A token of the second role is stored as its bitwise complement, so that sequences of
        # different roles never share keys and values.
        self._cache.tokens[slots, known] = np.where(self._is_second_role[slots], ~tokens, tokens)
        drawn = zip(slots.tolist(), tokens.tolist(), known.tolist(), strict=True)
        ended = [(slot, self._append(slot, token, place)) for slot, token, place in drawn]
        return [self._finish(slot, reason) for slot, reason in ended if reason is not None]

    def release(self, context: str) -> None:
        """Forget a sequence, and abort its prompt."""
        self.abort(context)
        self._cache.release(context)

    def abort(self, context: str) -> None:
        """Cancel a sequence's completion, if there is one; the keys and values of its prompt stay
        cached.
        """
        self._waiting.pop(context, None)
        slot = self._cache.slot(context)
        if slot in self._running:
            running = self._running.pop(slot)
            self._cache.take_back(slot, len(running.prompt.tokens))

    def swap(self, version: int, weights: Weights) -> None:
        """Use weights that have been read already: exchanges a reference, so sampling does not
        pause.
        """
        began = self._now()
        self.model.weights = weights
        self._cache.versions.append(version)
        self._totals.num_loads += 1
        self._totals.stall_s += self._now() - began
        if self._interrupts:
            self._refresh_running()

    def _refresh_running(self) -> None:
        """Discard the keys and values of running prompts with `refresh_kv`."""
        for slot, running in self._running.items():
            if running.prompt.refresh_kv:
                repeated = running.opened.num_repeated + self._cache.discard_kv(slot)
                running.opened = running.opened._replace(num_repeated=repeated)

    def trim(self) -> None:
        """Give the memory of the KV cache back to the system, unless a sequence holds a slot.

        Later sequences cannot copy a prefix of those that were released before.
        """
        if not self._cache.num_contexts:
            self._cache.discard_released()
            self.model.discard_cache()

    def statistics(self) -> Statistics:
        """Return the statistics up to now."""
        return replace(
            self._totals,
            num_evictions=self._cache.num_evictions,
            num_contexts=self._cache.num_contexts,
        )

    def _plan(self) -> Plan:
        """Choose the tokens of the next forward, and admit waiting prompts.

        Sequences that hold a slot are admitted first, so that none is evicted while its own prompt
        waits.
        """
        cache = self._cache
        cache.begin()
        plan = Plan(self._forward_tokens)
        for slot in sorted(self._running, key=cache.num_to_compute):
            self._add(plan, slot)
        for prompt in sorted(
            self._waiting.values(), key=lambda each: cache.slot(each.context) is None
        ):
            if plan.num_left:
                self._admit(plan, prompt)
        return plan

    def _take_forced(self) -> list[tuple[str, Completion]]:
        """Complete the waiting prompts with a single legal action; they need no slot or forward."""
        forced = [
            (each, tokens)
            for each in self._waiting.values()
            if (tokens := _only_completion(each)) is not None
        ]
        for prompt, _ in forced:
            del self._waiting[prompt.context]
        self._totals.num_completions += len(forced)
        version = self._cache.versions[-1]
        return [
            (
                prompt.context,
                Completion(
                    np.array(tokens, np.int32),
                    np.zeros(len(tokens), np.float32),
                    (_version_run(0, version, version),),
                    "stop",
                    num_reused=len(prompt.tokens),  # none had to be computed
                    drawn_from=(None,) * len(tokens),
                ),
            )
            for prompt, tokens in forced
        ]

    def _admit(self, plan: Plan, prompt: Prompt) -> None:
        """Give a waiting prompt a slot, if one is available."""
        tokens = with_roles(prompt.tokens, prompt.role_changes)
        opened = self._cache.open(prompt.context, tokens, is_fresh=prompt.refresh_kv)
        if opened is None:
            return
        del self._waiting[prompt.context]
        slot, sampling = opened.slot, prompt.sampling
        self._num_prompt[slot] = len(prompt.tokens)
        self._is_second_role[slot] = len(prompt.role_changes) % 2 == 1
        self._seeds[slot] = prompt.seed & _MASK_64
        self._parameters.temperature[slot] = sampling.temperature
        self._parameters.top_p[slot] = sampling.top_p
        self._parameters.top_k[slot] = sampling.top_k
        max_length = min(len(prompt.tokens) + sampling.max_tokens, self._max_tokens)
        self._running[slot] = running = Running(prompt, opened, max_length)
        self._append_forced(running, slot)
        # Slots that copy the same prefix of the same slot are listed together.
        if opened.source != slot:
            plan.copies.setdefault((opened.source, opened.num_reused), []).append(slot)
        self._add(plan, slot)

    def _add(self, plan: Plan, slot: int) -> None:
        """Add as many of a slot's new tokens to the forward as fit."""
        count = min(self._cache.num_to_compute(slot), plan.num_left)
        if count:
            plan.add(slot, self._cache.num_computed[slot], count)
            self._cache.compute(slot, count)

    def _append(self, slot: int, token: int, place: int) -> FinishReason | None:
        """Record a sampled token; return a reason if the completion ends with it."""
        running = self._running[slot]
        self._cache.num_known[slot] = place + 1
        start = place - len(running.prompt.tokens)
        sampler, oldest_keys = self._cache.versions[-1], self._cache.oldest[slot]
        append_run(running.runs, _version_run(start, sampler, oldest_keys))
        if (trie := running.prompt.restriction) is not None:
            running.drawn_from.append(running.allowed)
            running.node = trie.after(running.node, token)
            self._append_forced(running, slot)
            return "stop" if running.allowed is None else None
        if token in running.prompt.sampling.stop_tokens:
            return "stop"
        return "length" if place + 1 == running.max_length else None

    def _append_forced(self, running: Running, slot: int) -> None:
        """Append the tokens that follow in a restricted completion without a choice."""
        trie = running.prompt.restriction
        if trie is None:
            return
        tokens, running.node = trie.forced(running.node)
        running.allowed = None if trie.is_end(running.node) else trie.allowed(running.node)
        if not tokens:
            return
        running.drawn_from += [None] * len(tokens)
        start = self._cache.num_known[slot]
        stop = self._cache.num_known[slot] = start + len(tokens)
        forced = np.array(tokens, np.int64)
        self._cache.tokens[slot, start:stop] = ~forced if self._is_second_role[slot] else forced
        self._logprobs[slot, start:stop] = 0.0

    def _finish(self, slot: int, reason: FinishReason) -> tuple[str, Completion]:
        """Return the completion of a slot, by its context, and count it."""
        running = self._running.pop(slot)
        prompt, opened, totals = running.prompt, running.opened, self._totals
        drawn = slice(len(prompt.tokens), self._cache.num_known[slot])
        self._cache.close(slot)
        if running.runs[0].start:
            # Forced tokens before the first sampled one belong to the version that sampled it.
            running.runs[0] = replace(running.runs[0], start=0)
        totals.num_completions += 1
        totals.num_prompt_tokens += len(prompt.tokens)
        totals.num_reused_tokens += opened.num_reused
        totals.num_repeated_tokens += opened.num_repeated
        totals.num_extension_faults += not opened.is_extension
        return prompt.context, Completion(
            without_roles(self._cache.tokens[slot, drawn]),
            self._logprobs[slot, drawn].copy(),
            tuple(running.runs),
            reason,
            opened.num_reused,
            opened.num_repeated,
            opened.is_extension,
            tuple(running.drawn_from) if prompt.restriction else None,
        )


def advance_together(schedulers: Sequence[Scheduler]) -> list[tuple[str, Completion]]:
    """Compute one forward for several schedulers; return the completions that it ended, by context.

    The first scheduler's statistics get the time of the forward.

    Args:
        schedulers: Schedulers whose models can share a forward (`forward_together`).
    """
    began = schedulers[0]._now()
    ended = [one for each in schedulers for one in each._take_forced()]
    planned = [
        (each, computed) for each in schedulers if (computed := each._next_forward()) is not None
    ]
    if not planned:
        return ended
    logits = forward_together([computed for _, computed in planned])
    for (each, computed), own in zip(planned, logits, strict=True):
        ended += each._sample(computed, own)
    schedulers[0]._totals.forward_s += schedulers[0]._now() - began
    return ended


MAX_COLUMNS_SHARE = 0.25
"""Share of the vocabulary up to which only the LM head's rows of allowed tokens are multiplied."""


def _columns(allowed: Sequence[np.ndarray | None], vocabulary: int) -> np.ndarray | None:
    """Return the tokens that any of the rows may sample, int64 ascending; None if these are too
    many (`MAX_COLUMNS_SHARE`).
    """
    # Rows often share one array of allowed tokens; each array is looked at once.
    sets = {id(each): each for each in allowed}.values()
    most = MAX_COLUMNS_SHARE * vocabulary
    if not sets or any(each is None or len(each) > most for each in sets):
        return None
    columns = np.unique(np.concatenate([each for each in sets if each is not None]))
    return columns.astype(np.int64) if len(columns) <= most else None


def _column_indices(
    allowed: Sequence[np.ndarray | None], columns: np.ndarray
) -> Sequence[np.ndarray | None]:
    """Return the tokens that each row may sample, as indices into `columns`; () if every row
    samples from all of `columns`.
    """
    # Rows often share one array of allowed tokens; each array is looked up once.
    sets = {id(each): each for each in allowed if each is not None}
    if len(sets) == 1:
        return ()
    indices = {key: np.searchsorted(columns, each) for key, each in sets.items()}
    return [indices[id(each)] for each in allowed]


def _only_completion(prompt: Prompt) -> list[int] | None:
    """Return the tokens of a prompt's only possible completion; `None` if there are others."""
    if prompt.restriction is None:
        return None
    tokens, node = prompt.restriction.forced(0)
    return tokens if prompt.restriction.is_end(node) else None


def play_trials(
    trials: Sequence[TrialInProgress],
    engine: Scheduler,
    past_policies: Mapping[int, Scheduler] | None = None,
) -> list[Trial]:
    """Play trials to their end in this process, as many at a time as the engine has KV slots.

    Args:
        past_policies: Engines of the past policies in the opponents' seats, by version.

    Raises:
        CallFault: a call of the environment failed, or has to wait.
        EnvironmentFault: the environment returned something that cannot be played.
        ContextFull: a trial outgrew the engine's longest context.
        RunError: an engine cannot serve a prompt.
    """
    by_version: dict[int | None, Scheduler] = {None: engine}
    # Pairs, because a type checker takes no mapping of `int` for one of `int | None`.
    by_version.update((version, each) for version, each in (past_policies or {}).items())
    waiting, playing = list(reversed(trials)), dict[str, TrialInProgress]()

    def go_on(trial: TrialInProgress) -> None:
        """Submit the next prompt of a trial, or free the contexts of a trial that is over."""
        make_calls(trial)
        if (prompt := trial.next_prompt()) is not None:
            by_version[prompt.rival].submit(prompt)
            playing[prompt.context] = trial
            return
        for context in trial.contexts():
            for each in by_version.values():
                each.release(context)

    while waiting or playing:
        while waiting and len(playing) < engine.model.slots:
            go_on(waiting.pop())
        for each in by_version.values():
            for context, completion in each.advance():
                trial = playing.pop(context)
                trial.receive(completion)
                go_on(trial)
    return [finished for trial in trials for finished in trial.trials()]
