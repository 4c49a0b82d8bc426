"""Play agent programs with faults, 20 of each kind: what do they cost, and how soon are they named?

    python -m bench.chaos.programs --name chaos_programs      2 minutes

An agent program calls the policy over HTTP in its own loop. For each kind of fault, five trials
whose program has it and five others are played concurrently, four times, on a scripted engine and
without retries. The kinds are those of `tests/helpers/faulty_programs.py`, and

    late       a program calls the address of an episode that is over
    server     the user's server answers with status 500
    command    the user's command is killed

The last line is the verdict. The exit status is 1 if a fault made another trial fail, an answer
that a program received is missing among its trial's turns, a late call was answered, or a reason
took over 10 s.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments.agent import AgentTasks
from mage_async.environments.catalogue import load
from mage_async.errors import CallFault
from mage_async.trajectory import Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.rollout import play_trial
from mage_services.environments.call_runner import CallRunner
from tests.helpers.agent_site import (
    Drawn,
    asked,
    post,
    said,
    scripted,
    small_chat,
    stage_of,
    tasks_of,
)
from tests.helpers.faulty_programs import DEADLINE_S, FAULTS, KEYS

AT_ONCE, ROUNDS, SOON_S = 5, 4, 10.0
"""Trials with a fault in a round, rounds of a fault, and most seconds until its reason is named."""
PATIENT_S = 60.0
"""Deadline of an episode if no program hangs, as in the default configuration."""
# A command that kills itself; a command must have `{task}` in it, here in a comment.
KILLED = f'{sys.executable} -c "import os; os.kill(os.getpid(), 9) # {{task}}"'


@dataclass
class FaultResult:
    """Count what one kind of fault did to trials."""

    reason: str
    """Text that the failure of a faulty trial must contain."""
    reasons: Counter[bool] = field(default_factory=Counter)
    """Number of faulty trials that failed with the expected reason (True), and of others."""
    seconds: list[float] = field(default_factory=list)
    """Seconds from the beginning of each faulty trial to its failure."""
    others_failed: int = 0
    lost: int = 0
    """Number of answers that programs without a fault received and that are no turns of a trial."""
    late_answered: int = 0
    """Number of calls of an ended episode that were answered."""

    def is_met(self) -> bool:
        """Return whether the fault met all bounds."""
        is_named = set(self.reasons) == {True} and max(self.seconds) <= SOON_S
        return is_named and not (self.others_failed or self.lost or self.late_answered)


class FaultyTrials:
    """Play trials of programs with and without a fault concurrently."""

    def __init__(self, chat: ChatFormat, fault: str, result: FaultResult) -> None:
        self._chat, self._fault, self._result = chat, fault, result
        self._answered: Counter[int] = Counter()
        """Number of answers that a program has received, by task."""
        self._old_urls: dict[int, str] = {}
        """Address of each task's latest episode."""

    async def play(self, environment: AgentTasks | None = None) -> None:
        """Play all trials, and count their results. Tasks with even numbers have the fault.

        Args:
            environment: Environment of the faulty trials; None: the same program for all trials,
                which has the fault itself in even tasks.
        """
        own = tasks_of(self._runner())
        engine = scripted(self._chat, " rock")
        async with CallRunner(
            EnvironmentConfig(step_deadline_s=DEADLINE_S if self._fault == "hang" else PATIENT_S)
        ) as workers:
            await asyncio.gather(
                *(
                    self._play_one(
                        own if number % 2 or not environment else environment,
                        number,
                        engine,
                        workers,
                    )
                    for number in range(2 * AT_ONCE)
                )
            )

    async def _play_one(
        self, environment: AgentTasks, number: int, engine: Drawn, workers: CallRunner
    ) -> None:
        """Play one trial, and count how it ends."""
        stage = stage_of(environment, self._chat, engine)
        began = time.monotonic()
        run = stage.begin(Task("own", str(number), 7), 0, f"{number}.0")
        try:
            trial: Trial | CallFault = await play_trial(run, engine, workers)
        except CallFault as fault:
            trial = fault
        seconds = time.monotonic() - began
        result = self._result
        if number % 2 == 0 and self._fault != "late":
            is_named = isinstance(trial, CallFault) and result.reason in str(trial)
            result.reasons[is_named and f"task {number}," in str(trial)] += 1
            result.seconds.append(seconds)
        elif isinstance(trial, CallFault):
            result.others_failed += 1
        else:
            result.lost += self._answered[number] - len(trial.turns)

    def _runner(self) -> Any:
        """Return a program's `run`: three calls of the policy, or the fault in even tasks."""

        async def run(self_: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
            KEYS[task] = url, key
            if task % 2 == 0 and self._fault in FAULTS:
                return await FAULTS[self._fault][0](task, url, key)
            if task % 2 == 0 and self._fault == "late" and episode:
                await self._call_late(task)
            self._old_urls[task] = url
            for _ in range(3):
                if not isinstance(await asked(url, said("a")), tuple):
                    self._answered[task] += 1
                await asyncio.sleep(0.3)
            return 1.0

        return run

    async def _call_late(self, task: int) -> None:
        """Call the address of the task's episode before, which must refuse with status 410."""
        began = time.monotonic()
        answer = await post(self._old_urls[task], "chat/completions", {"messages": said("late")})
        self._result.seconds.append(time.monotonic() - began)
        is_refused = isinstance(answer, tuple) and answer[0] == 410
        self._result.reasons[is_refused and self._result.reason in str(answer[1])] += 1
        self._result.late_answered += not is_refused


async def with_server(trials: FaultyTrials) -> None:
    """Play faulty trials on a server that answers each episode with status 500."""

    async def fail(request: web.Request) -> web.Response:
        given = await request.json()
        await asked(given["base_url"], said("a"))
        return web.Response(status=500, text="no luck")

    application = web.Application()
    application.add_routes([web.post("/", fail)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    await trials.play(load("agent:url", url=f"http://127.0.0.1:{port}/"))
    await runner.cleanup()


def measure(chat: ChatFormat) -> dict[str, FaultResult]:
    """Play each fault in `ROUNDS` rounds of `AT_ONCE` trials; return the results by fault."""
    results = {name: FaultResult(reason) for name, (_, reason) in FAULTS.items()}
    results["late"] = FaultResult("this episode is over")
    results["server"] = FaultResult("answered with status 500: no luck")
    results["command"] = FaultResult("was killed by SIGKILL")
    for name, result in results.items():
        for _ in range(ROUNDS):
            trials = FaultyTrials(chat, name, result)
            KEYS.clear()
            match name:
                case "server":
                    asyncio.run(with_server(trials))
                case "command":
                    asyncio.run(trials.play(load("agent:command", command=KILLED)))
                case _:
                    asyncio.run(trials.play())
        print(
            f"{name:14} {result.reasons[True]:3} of {result.reasons.total()} named, the last "
            f"after {max(result.seconds):4.1f} s; other trials failed {result.others_failed}, "
            f"answers lost {result.lost}",
            flush=True,
        )
    return results


def main() -> None:
    """Measure, print, and exit with 1 if a fault missed its bounds."""
    parser = option_parser(__doc__)
    parser.add_argument("--name", help="write the figures as this baseline")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(small_chat(Path(folder)))
    if given.name:
        figures = {
            name: {
                "times": result.reasons.total(),
                "named": result.reasons[True],
                "slowest_s": max(result.seconds),
                "others_failed": result.others_failed,
                "answers_lost": result.lost,
            }
            for name, result in results.items()
        }
        write_baseline(given.name, {"faults": figures})
    missed = [name for name, result in results.items() if not result.is_met()]
    print(f"missed: {', '.join(missed)}" if missed else "each fault cost its own trial alone")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
