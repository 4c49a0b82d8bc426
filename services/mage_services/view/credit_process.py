"""The process that computes what steps made of turns: it has torch, which the server goes without.

The server names a step of a run; the answer has of every turn of its trials the return and the
advantage, by group and trial, or says why there are none.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mage_async.errors import MageError, RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.line_process import LineProcess, ServerLines
from mage_services.processes.priority import ACTOR
from mage_services.view.index.run_reader import RunReader

if TYPE_CHECKING:
    from mage_async.config.schema import Config

Credit = dict[str, list[tuple[float, float | None]]]
"""Return and advantage of every turn in order, by "GROUP/TRIAL"."""
KEPT = 32
"""Steps whose numbers the server remembers."""


class Credits:
    """The server's side: what is known of steps so far; the rest is asked for."""

    def __init__(self, process: LineProcess, tell: Callable[[Path], None]) -> None:
        self._process, self._tell = process, tell
        self._loop = asyncio.get_running_loop()
        self._known: OrderedDict[tuple[str, int], tuple[Credit, str]] = OrderedDict()
        self._asked: set[tuple[str, int]] = set()

    def ask(self, run: RunDirectory, step: int) -> tuple[Credit, str]:
        """The numbers of a step, and why there are none yet, or at all. From any thread."""
        key = (str(run.root), step)
        if (known := self._known.get(key)) is not None:
            return known
        self._loop.call_soon_threadsafe(self._request, key)
        return {}, "Returns and advantages are being computed."

    def _request(self, key: tuple[str, int]) -> None:
        if key not in self._asked:
            self._asked.add(key)
            self._process.say({"run": key[0], "step": key[1]})

    def forget_faults(self, run: RunDirectory) -> None:
        """Ask again for what could not be computed: the index has grown."""
        for key in [key for key, (_, fault) in self._known.items() if fault]:
            if key[0] == str(run.root):
                del self._known[key]

    async def listen(self) -> None:
        """Remember answers until the process ends. Cancellation leaves the process as it is.

        Raises: RunError: the process ended badly.
        """
        async for answer in self._process.messages():
            key = (answer["run"], answer["step"])
            self._asked.discard(key)
            self._known[key] = (answer["credit"], answer["fault"])
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            self._tell(Path(answer["run"]))


def main() -> None:
    """Answer until the server ends."""
    os.nice(ACTOR)  # and its session weighs as any other: somebody waits for the answer
    server = ServerLines()
    while not server.has_ended:
        for asked in server.read(waits=True):
            server.say(asked | _answer(RunDirectory(Path(asked["run"])), asked["step"]))


def _answer(run: RunDirectory, step: int) -> dict[str, Any]:
    try:
        return {"credit": credit_of(run, step), "fault": ""}
    except MageError as error:
        return {"credit": {}, "fault": f"Without returns and advantages: {error}"}


def credit_of(run: RunDirectory, step: int) -> Credit:
    """What a step made of every turn of its trials.

    Raises:
        RunError: not all of its trials are in the journal.
        ConfigError: the credit needs the environment, which cannot be made here.
    """
    from mage_async.attribution.journal_steps import JournalStep
    from mage_async.attribution.turns import attributed
    from mage_async.config import config_file
    from mage_async.trajectory import Group

    with RunReader(run) as reader:
        config, groups = config_file.loads(reader.config_of(step)), []
        _check_code(config)
        for listed in reader.groups_of(step):
            numbers = [each.number for each in reader.trials_of([listed.number])]
            if listed.num_trials is None or len(numbers) < listed.num_trials:
                raise RunError(f"some trials of step {step} are not in the index")
            trials = [reader.load(listed.number, number) for number in numbers]
            groups.append(Group(listed.number, listed.version or 0, tuple(trials)))
    found = attributed(JournalStep(step, groups, config, is_whole=True), lambda _: "")
    return {
        f"{each.grant}/{each.trial.index}": [
            (turn.return_to_go, turn.advantage) for turn in each.turns
        ]
        for each in found
    }


def _check_code(config: "Config") -> None:
    """Refuse to load a user's environment, whose code a look at a run must not execute."""
    from mage_async.environments.catalogue import names

    name = config.environment.name
    if config.credit.information_bonus and name not in names():
        raise RunError(f"credit.information_bonus needs the environment {name}, and it is not ours")


if __name__ == "__main__":
    main()
