"""Play trials on an engine.

A `TrialInProgress` decides what to sample next; the coroutines here await the engine and the
environment.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import NamedTuple

from mage_async.environments.environment import Environment
from mage_async.errors import ContextFull, InfrastructureFault, TrialFault
from mage_async.protocol.messages import MAX_REASON_CHARS
from mage_async.results.progress import PLAYED_AGAIN
from mage_async.trajectory import FinishedEpisodes, Guidance, Task, Trial
from mage_async.trials.agent_run import AgentRun
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import TrialInProgress, begin_trial
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialStart
from mage_services.engines.engine import Engine, Sampler, complete_in_time
from mage_services.environments.call_runner import CallRunner, print_to_stderr

RETRY_PAUSE_S = 1.0
"""Seconds before the second retry of a trial; twice as long before each later one. The first retry
comes at once, as many faults are gone by then; others, such as a server that restarts, take longer.
"""
MAX_RETRY_PAUSE_S = 30.0
"""Longest pause before a retry, in seconds."""


class Retries:
    """Decide whether a trial is played again after a fault of its environment or engine.

    A fault says nothing about the agent. If every fault dropped the trial's group, faults would
    choose what is trained: long trials, which make more calls, would be lost more often than short
    ones. So the same trial (same task, seed and index, and so the same tokens under equal weights)
    is played again with fresh objects of the environment. A mistake in the user's code
    (`InfrastructureFault.mistake`) that comes back at the second try is not tried again: it would
    come back for ever, while all actors wait for its group.

    Args:
        most: Largest number of retries of a trial (`environment.retries`).
        say: Called with lines for the user.
    """

    def __init__(
        self,
        most: int = 0,
        say: Callable[[str], None] = print_to_stderr,
    ) -> None:
        self._most, self._say = most, say
        self.num_trials = 0
        """Number of trials that were played again, each counted once."""
        self._reported: set[str] = set()
        """Kinds of faults of which one was reported to the user."""

    async def wait(
        self, fault: InfrastructureFault, num_retries: int, before: InfrastructureFault | None
    ) -> None:
        """Return when the trial can be played again. Cancellation ends the wait.

        Args:
            num_retries: Retries of the trial so far.
            before: Fault of the try before; None if this was the first.

        Raises:
            InfrastructureFault: the last retry has failed, or the same mistake in the user's code
                came back. The error has the type of `fault`, and names the number of tries.
        """
        is_same = before is not None and fault.mistake and fault.mistake == before.mistake
        if num_retries == self._most or is_same:
            if not num_retries:
                raise fault
            raise type(fault)(f"after {num_retries + 1} tries: {fault}") from fault
        self._report_first(fault)
        self.num_trials += not num_retries
        if num_retries:
            await asyncio.sleep(min(RETRY_PAUSE_S * 2 ** (num_retries - 1), MAX_RETRY_PAUSE_S))

    def _report_first(self, fault: InfrastructureFault) -> None:
        """Report the first fault of each kind to the user."""
        kind = fault.kind or type(fault.__cause__ or fault).__name__
        if kind not in self._reported:
            self._reported.add(kind)
            sentence = " ".join(str(fault).split())[:MAX_REASON_CHARS]
            times = "once" if self._most == 1 else f"up to {self._most} times"
            text = f"{sentence}; {PLAYED_AGAIN} with fresh objects, {times} (environment.retries)"
            if fault.mistake and self._most > 1:
                text += ", or once if the same mistake comes back"
            self._say(text)


Begin = Callable[[], TrialInProgress]
"""Creates a trial that is ready to be played."""


Between = Callable[[TrialInProgress], Awaitable[None]]
"""Called when an episode has ended and the next one has not begun (`is_between_episodes`). Between
two episodes it may be called more than once: after the last turn, and after each call that closes
an object of the environment."""


class Played(NamedTuple):
    """Hold a trial that was played to its end."""

    run: TrialInProgress
    duration_s: float
    """Seconds of the last try."""
    num_retries: int


class Planned(NamedTuple):
    """Hold a trial that is to be played."""

    begin: Begin
    unplayed: Trial
    """The trial without a turn, cut short in its first episode: the result if `begin` fails in
    every try.
    """

    @classmethod
    def of(cls, begin: Begin, task: Task, index: int, num_episodes: int) -> "Planned":
        """Plan the trial of a task that `begin` starts, and that has this index in its group."""
        return cls(begin, Trial(task, index, num_episodes, (), (), cut_at=0))


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold what trials share (environment, settings, chat format, engine), and begin trials."""

    environment: Environment
    config: TrialConfig
    chat: ChatFormat
    engine: Engine
    workers: CallRunner = field(default_factory=CallRunner)
    """Makes the calls of environments whose methods may block."""
    retries: Retries = field(default_factory=Retries)

    def begin(
        self,
        task: Task,
        index: int,
        name: str,
        swap: Task | None = None,
        after: FinishedEpisodes | None = None,
    ) -> TrialInProgress:
        """Return a trial that is ready to be played.

        Args:
            index: Index of the trial in its group.
            name: Beginning of the names of its sequences on the engine.
            swap: Task of the last episode, for the control `swapped`; None: the same task.
            after: Finished episodes of the trial, after which it continues; None: it begins anew.
        """
        own = self.environment, task, index, self.config, self.chat
        return begin_trial(TrialStart(*own, name, swap, after))

    def plan(self, task: Task, index: int, name: str, swap: Task | None = None) -> Planned:
        """Return a trial that is to be played; see `begin`."""
        begin = partial(self.begin, task, index, name, swap)
        return Planned.of(begin, task, index, self.config.num_episodes)

    def with_horizon(self, num_episodes: int, max_turns: int) -> "Stage":
        """Return a copy with another horizon: episodes of a trial and turns of an episode."""
        config = self.config.with_horizon(self.environment, num_episodes, max_turns)
        return replace(self, config=config)

    def guided(self, guidance: Guidance | None) -> "Stage":
        """Return a copy whose trials begin with the text of a method, such as strategies of earlier
        tasks; None: without a text.
        """
        return replace(self, config=self.config.with_guidance(guidance))


async def play_trial(run: TrialInProgress, engine: Engine, workers: CallRunner) -> Trial:
    """Play a trial as `play_to_end` does, and return it. If the policy also played the opponent's
    seat, return the agent's trial.
    """
    return run.trial(await play_to_end(run, engine, workers))


async def play_to_end(
    run: TrialInProgress, engine: Sampler, workers: CallRunner, between: Between | None = None
) -> float:
    """Play a trial to its end, and return how long that took, in seconds.

    Cancellation aborts the turn being sampled. In every case the engine releases the trial's
    sequences, and the objects of its environment are closed.

    Raises:
        TurnOverdue, TurnLost: a turn was not sampled by its deadline, or the engine died.
        EnvironmentFault: a call of the environment raised, took too long, or returned a value that
            cannot be played.
        ContextFull: a context has no room for a turn that must be played.
    """
    began = time.monotonic()
    try:
        # A program that is the agent calls the policy over HTTP, while `make_calls` waits for it.
        program = run if isinstance(run, AgentRun) else None
        async with workers.gateway.serving(program, engine) if program else nullcontext():
            # Without `between`: a resumed trial begins with episodes that the learner already has.
            await make_calls(run, workers)
            while (prompt := run.next_prompt()) is not None:
                run.receive(await complete_in_time(prompt, engine))
                await make_calls(run, workers, between)
    finally:
        # `abandon` returns the calls that close open objects; after a normal end none are left.
        workers.close_in_background(run.abandon())
        for context in run.contexts():
            engine.release(context)
    return time.monotonic() - began


async def play_retried(
    begin: Begin,
    engine: Sampler,
    workers: CallRunner,
    retries: Retries,
    between: Between | None = None,
) -> Played:
    """Play a trial as `play_to_end` does, and again after each fault of its environment or engine,
    as often as `retries` allows.

    Args:
        begin: Creates the trial, with fresh objects and the same names of its sequences: the engine
            has released those of the try before.
        between: See `Between`.

    Raises:
        InfrastructureFault: the last retry has failed too.
        TrialFault: any other fault, which is not retried.
    """
    before: InfrastructureFault | None = None
    for num_retries in count():
        try:
            run = begin()
            return Played(run, await play_to_end(run, engine, workers, between), num_retries)
        except InfrastructureFault as fault:
            await retries.wait(fault, num_retries, before)
            before = fault
    raise AssertionError("`count` has no end")


async def play_or_cut(
    planned: Planned, engine: Sampler, workers: CallRunner, retries: Retries
) -> Trial:
    """Play a trial that is evaluated, as `play_retried` does, and return it.

    If the trial cannot go on, it ends there (`Trial.cut_at`): a trial that outgrows its context, or
    whose environment or engine fails in every try, must not end the evaluation of the others.
    """
    tries: list[TrialInProgress] = []

    def begin() -> TrialInProgress:
        tries.append(planned.begin())
        return tries[-1]

    try:
        played = await play_retried(begin, engine, workers, retries)
        return played.run.trial(played.duration_s)
    except TrialFault as fault:
        if not isinstance(fault, ContextFull):
            print(fault, file=sys.stderr, flush=True)
        if not tries:
            return planned.unplayed
        tries[-1].cut_short()
        return tries[-1].trial()


async def make_calls(
    run: TrialInProgress, workers: CallRunner, between: Between | None = None
) -> None:
    """Make the environment calls that a trial waits for. Cancellation abandons the current one.

    Args:
        between: See `Between`; the next episode begins when the call has returned.
    """
    while True:
        if between is not None and run.is_between_episodes:
            await between(run)
        if (call := run.next_call()) is None:
            return
        run.answer(await workers.perform(call))


async def play_all(
    plans: Sequence[Planned], stage: Stage, at_once: int, on_end: Callable[[], None] = lambda: None
) -> list[Trial]:
    """Play trials on a stage as `play_or_cut` does, at most `at_once` of them concurrently; return
    them in the order of `plans`. Cancellation aborts all of them.

    Args:
        on_end: Called after each trial.
    """
    playing_slots = asyncio.Semaphore(at_once)

    async def play_one(planned: Planned) -> Trial:
        """Play a trial once fewer than `at_once` are being played."""
        async with playing_slots:
            trial = await play_or_cut(planned, stage.engine, stage.workers, stage.retries)
        on_end()
        return trial

    async with asyncio.TaskGroup() as tasks:
        playing = [
            tasks.create_task(play_one(planned), name=f"trial {number}")
            for number, planned in enumerate(plans)
        ]
    return [task.result() for task in playing]
