"""Rollouts: trials played on an engine. The core says what to sample; this file waits for it."""

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
from mage_async.trials.duels.begin import Run, begin_trial
from mage_async.trials.trial_rules import TrialRules
from mage_services.engines.engine import Engine
from mage_services.environments.workers import Workers


@dataclass(frozen=True, slots=True)
class Stage:
    """All that trials of one kind share."""

    environment: Environment
    rules: TrialRules
    chat: ChatFormat
    engine: Engine
    workers: Workers = field(default_factory=Workers)
    """Make the calls of a slow environment."""

    def begin(self, task: Task, index: int, name: str, swap: Task | None = None) -> Run:
        """A trial about to be played; against a version of the policy where that is its member."""
        return begin_trial(
            self.environment, task, index, self.rules, self.chat, name=name, swap=swap
        )

    def under(self, num_episodes: int, max_turns: int) -> "Stage":
        """The same with another horizon."""
        rules = self.rules.under(self.environment, num_episodes, max_turns)
        return replace(self, rules=rules)

    def guided(self, guidance: Guidance | None) -> "Stage":
        """The same for trials that are told strategies of earlier tasks, or of none."""
        return replace(self, rules=self.rules.guided(guidance))


async def play_trial(run: Run, engine: Engine, workers: Workers) -> Trial:
    """Play a trial to its end.

    Cancellation aborts the turn being sampled; in every case the engine forgets the trial's
    contexts, and what its environment holds is closed.

    Raises:
        TurnOverdue: a turn was not drawn by its deadline, and aborted.
        CallFault: a slow environment raised, took too long, or returned what it may not.
    """
    began = time.monotonic()
    try:
        await _settle(run, workers)
        while (prompt := run.next_prompt()) is not None:
            run.receive(await _complete(prompt, engine))
            await _settle(run, workers)
    finally:
        workers.close_behind(run.abandon())
        for context in run.contexts():
            engine.release(context)
    return run.trial(time.monotonic() - began)


async def _settle(run: Run, workers: Workers) -> None:
    """Make the calls that a run waits for. Cancellation abandons the one under way."""
    while (call := run.next_call()) is not None:
        run.answer(await workers.perform(call))


async def _complete(prompt: Prompt, engine: Engine) -> Completion:
    """Draw a turn within its deadline. Cancellation aborts it."""
    try:
        async with asyncio.timeout(None if math.isinf(prompt.deadline_s) else prompt.deadline_s):
            return await engine.complete(prompt)
    except TimeoutError:
        raise TurnOverdue(f"a turn was not drawn within {prompt.deadline_s:g} s") from None


async def play_all(
    runs: Sequence[Run], engine: Engine, workers: Workers, at_once: int
) -> list[Trial]:
    """Play trials concurrently, at most `at_once` of them; results in the order of `runs`.

    One that outgrows the engine's context, or whose slow environment fails, ends there and says so
    (`Trial.cut_at`): it counts among the others. Cancellation aborts all of them.
    """
    room = asyncio.Semaphore(at_once)

    async def one(run: Run) -> Trial:
        async with room:
            try:
                return await play_trial(run, engine, workers)
            except ContextFull:
                run.cut_short()
                return run.trial()
            except CallFault as fault:
                print(fault, file=sys.stderr, flush=True)
                run.cut_short()
                return run.trial()

    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(one(run), name=f"trial {n}") for n, run in enumerate(runs)]
    return [task.result() for task in playing]
