"""Rollouts: trials played on an engine.

A `TrialInProgress` decides what to sample next; the coroutines here await the engine and the
environment.
"""

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import Environment
from mage_async.errors import CallFault, ContextFull, TurnOverdue
from mage_async.trajectory import Guidance, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import TrialInProgress, begin_trial
from mage_async.trials.trial_config import TrialConfig
from mage_services.engines.engine import Engine
from mage_services.environments.call_runner import CallRunner


@dataclass(frozen=True, slots=True)
class Stage:
    """What trials of one kind share: environment, settings, chat format, engine."""

    environment: Environment
    config: TrialConfig
    chat: ChatFormat
    engine: Engine
    workers: CallRunner = field(default_factory=CallRunner)
    """Makes the calls of environments whose methods may block."""

    def begin(self, task: Task, index: int, name: str, swap: Task | None = None) -> TrialInProgress:
        """Return a trial that is ready to be played.

        Args:
            index: of the trial in its group.
            name: begins the names of its sequences on the engine.
            swap: the task from the last episode on, for the `swapped` control.
        """
        return begin_trial(
            self.environment, task, index, self.config, self.chat, name=name, swap=swap
        )

    def under(self, num_episodes: int, max_turns: int) -> "Stage":
        """Return a copy with another horizon: episodes of a trial and turns of an episode."""
        config = self.config.with_horizon(self.environment, num_episodes, max_turns)
        return replace(self, config=config)

    def guided(self, guidance: Guidance | None) -> "Stage":
        """Return a copy whose prompts hold strategies of earlier tasks; None: no strategies."""
        return replace(self, config=self.config.with_guidance(guidance))


async def play_trial(run: TrialInProgress, engine: Engine, workers: CallRunner) -> Trial:
    """Play a trial as `play_to_end` does, and return it; of both seats, that of the agent."""
    return run.trial(await play_to_end(run, engine, workers))


async def play_to_end(run: TrialInProgress, engine: Engine, workers: CallRunner) -> float:
    """Play a trial to its end, and return how long that took, in seconds.

    Cancellation aborts the turn being sampled. In every case the engine releases the trial's
    sequences, and the objects of its environment are closed.

    Raises:
        TurnOverdue: a turn was not sampled by its deadline, and was aborted.
        CallFault: a call of the environment raised, took too long, or returned a wrong value.
    """
    began = time.monotonic()
    try:
        await make_calls(run, workers)
        while (prompt := run.next_prompt()) is not None:
            run.receive(await _complete(prompt, engine))
            await make_calls(run, workers)
    finally:
        # After a normal end nothing is left to abandon.
        workers.close_in_background(run.abandon())
        for context in run.contexts():
            engine.release(context)
    return time.monotonic() - began


async def make_calls(run: TrialInProgress, workers: CallRunner) -> None:
    """Make the environment calls that a trial waits for. Cancellation abandons the current one."""
    while (call := run.next_call()) is not None:
        run.answer(await workers.perform(call))


async def _complete(prompt: Prompt, engine: Engine) -> Completion:
    """Sample a turn within its deadline. Cancellation aborts it."""
    try:
        async with asyncio.timeout(None if math.isinf(prompt.deadline_s) else prompt.deadline_s):
            return await engine.complete(prompt)
    except TimeoutError:
        raise TurnOverdue(f"a turn was not drawn within {prompt.deadline_s:g} s") from None


async def play_all(
    runs: Sequence[TrialInProgress], engine: Engine, workers: CallRunner, at_once: int
) -> list[Trial]:
    """Play trials concurrently, at most `at_once` of them; return them in the order of `runs`.

    A trial that outgrows the engine's context, or whose environment fails, ends there
    (`Trial.cut_at`) and is returned like the others. Cancellation aborts all of them.
    """
    room = asyncio.Semaphore(at_once)

    async def one(run: TrialInProgress) -> Trial:
        async with room:
            try:
                return await play_trial(run, engine, workers)
            except (ContextFull, CallFault) as fault:
                if isinstance(fault, CallFault):
                    print(fault, file=sys.stderr, flush=True)
                run.cut_short()
                return run.trial()

    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(one(run), name=f"trial {n}") for n, run in enumerate(runs)]
    return [task.result() for task in playing]
