"""Programs that go wrong, each fault 20 times: what it costs, and how soon its reason is named.

    python -m bench.chaos.programs --name chaos_programs      2 minutes

For each fault, four times five trials whose program goes wrong are played at once with five others,
on a scripted engine and without retries. "late" is a program that calls with the key of an episode
that is over; "server" and "command" are a server of the user's that answers with status 500, and a
command that is killed. The last line is the verdict; the exit status is 1 if a fault cost another
trial, an answer that a program has received is no turn of its trial, a late call was answered, or a
reason took over 10 s.
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
PATIENT_S = 60.0
"""Deadline of an episode where no program hangs: that of the default configuration."""
KILLED = f'{sys.executable} -c "import os; os.kill(os.getpid(), 9) # {{task}}"'


@dataclass
class Row:
    """What a fault did to the trials."""

    why: str
    reasons: Counter[bool] = field(default_factory=Counter)
    """Whether a faulty trial failed with the expected reason."""
    seconds: list[float] = field(default_factory=list)
    """From a faulty trial's begin to its reason."""
    others_failed: int = 0
    lost: int = 0
    """Answers that a program of another trial has received and that are no turn of its trial."""
    late_answered: int = 0

    def is_met(self) -> bool:
        """Whether the bounds are met."""
        is_named = set(self.reasons) == {True} and max(self.seconds) <= SOON_S
        return is_named and not (self.others_failed or self.lost or self.late_answered)


class Site:
    """Plays good programs and faulty ones at once."""

    def __init__(self, chat: ChatFormat, fault: str, row: Row) -> None:
        self._chat, self._fault, self._row = chat, fault, row
        self._answered: Counter[int] = Counter()
        self._old: dict[int, str] = {}

    async def play(self, environment: AgentTasks | None = None) -> None:
        """Play; faulty tasks are even, the task above each is good.

        Args:
            environment: of the faulty trials; None: functions, of one environment with the others.
        """
        good = tasks_of(self._runner())
        engine = scripted(self._chat, " rock")
        async with CallRunner(DEADLINE_S if self._fault == "hang" else PATIENT_S) as workers:
            await asyncio.gather(
                *(
                    self._one(
                        good if number % 2 or not environment else environment,
                        number,
                        engine,
                        workers,
                    )
                    for number in range(2 * AT_ONCE)
                )
            )

    async def _one(
        self, environment: AgentTasks, number: int, engine: Drawn, workers: CallRunner
    ) -> None:
        stage = stage_of(environment, self._chat, engine)
        began = time.monotonic()
        run = stage.begin(Task("own", str(number), 7), 0, f"{number}.0")
        try:
            trial: Trial | CallFault = await play_trial(run, engine, workers)
        except CallFault as fault:
            trial = fault
        seconds = time.monotonic() - began
        row = self._row
        if number % 2 == 0 and self._fault != "late":
            is_named = isinstance(trial, CallFault) and row.why in str(trial)
            row.reasons[is_named and f"task {number}," in str(trial)] += 1
            row.seconds.append(seconds)
        elif isinstance(trial, CallFault):
            row.others_failed += 1
        else:
            row.lost += self._answered[number] - len(trial.turns)

    def _runner(self) -> Any:
        async def run(self_: Any, task: int, episode: int, seed: int, url: str, key: str) -> float:
            KEYS[task] = url, key
            if task % 2 == 0 and self._fault in FAULTS:
                return await FAULTS[self._fault][0](task, url, key)
            if task % 2 == 0 and self._fault == "late" and episode:
                await self._call_late(task)
            self._old[task] = url
            for _ in range(3):
                if not isinstance(await asked(url, said("a")), tuple):
                    self._answered[task] += 1
                await asyncio.sleep(0.3)
            return 1.0

        return run

    async def _call_late(self, task: int) -> None:
        began = time.monotonic()
        answer = await post(self._old[task], "chat/completions", {"messages": said("late")})
        self._row.seconds.append(time.monotonic() - began)
        is_refused = isinstance(answer, tuple) and answer[0] == 410
        self._row.reasons[is_refused and self._row.why in str(answer[1])] += 1
        self._row.late_answered += not is_refused


async def with_server(site: Site) -> None:
    """Play with a server that answers each episode with status 500."""

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
    await site.play(load("agent:url", url=f"http://127.0.0.1:{port}/"))
    await runner.cleanup()


def measure(chat: ChatFormat) -> dict[str, Row]:
    """Make each fault `ROUNDS` times `AT_ONCE` times."""
    rows = {name: Row(why) for name, (_, why) in FAULTS.items()}
    rows["late"] = Row("this episode is over")
    rows["server"] = Row("answered with status 500: no luck")
    rows["command"] = Row("ended with code -9")
    for name, row in rows.items():
        for _ in range(ROUNDS):
            site = Site(chat, name, row)
            KEYS.clear()
            match name:
                case "server":
                    asyncio.run(with_server(site))
                case "command":
                    asyncio.run(site.play(load("agent:command", command=KILLED)))
                case _:
                    asyncio.run(site.play())
        print(
            f"{name:14} {row.reasons[True]:3} of {row.reasons.total()} named, the last after "
            f"{max(row.seconds):4.1f} s; other trials failed {row.others_failed}, answers lost "
            f"{row.lost}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, print and judge."""
    parser = option_parser(__doc__)
    parser.add_argument("--name", help="write the figures as this baseline")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(small_chat(Path(folder)))
    if given.name:
        figures = {
            name: {
                "times": row.reasons.total(),
                "named": row.reasons[True],
                "slowest_s": max(row.seconds),
                "others_failed": row.others_failed,
                "answers_lost": row.lost,
            }
            for name, row in rows.items()
        }
        write_baseline(given.name, {"faults": figures})
    missed = [name for name, row in rows.items() if not row.is_met()]
    print(f"missed: {', '.join(missed)}" if missed else "each fault cost its own trial alone")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
