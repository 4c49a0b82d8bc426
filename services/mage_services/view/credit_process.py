"""Compute the returns and advantages of a step's turns, in a child process of `mage view`.

Advantages need torch, which the web server does not import. `CreditCache` runs in the server, and
requests the credit of a step from the child process, which runs `main` and the functions after it.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mage_async.errors import MageError, RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.processes.child_process import ChildProcess, channel_to_parent
from mage_services.processes.cores_and_memory import ACTOR
from mage_services.view.index import RunReader

if TYPE_CHECKING:
    from mage_async.config.schema import Config

Credit = dict[str, list[tuple[float, float | None]]]
"""Return and advantage of each turn in order, by trial ("GROUP/TRIAL")."""
MODULE = "mage_services.view.credit_process"
"""This module, which the process runs."""
MAX_KEPT = 32
"""Number of steps whose credit the server keeps."""


class CreditRequest(msgspec.Struct, frozen=True):
    """Ask the process for the credit of a step."""

    run: str
    """Path of the run's directory."""
    step: int


class StepCredit(msgspec.Struct, frozen=True):
    """Return the credit of the turns of a step, the answer to a `CreditRequest`."""

    run: str
    step: int
    credit: Credit
    fault: str
    """Why there is no credit; "" if there is."""


class CreditCache:
    """Keep the credit of the newest requested steps in the server, and request further ones from
    the process.
    """

    def __init__(self, process: ChildProcess[StepCredit], notify: Callable[[Path], None]) -> None:
        self._process, self._notify = process, notify
        self._loop = asyncio.get_running_loop()
        self._known: dict[tuple[str, int], tuple[Credit, str]] = {}
        self._requested: set[tuple[str, int]] = set()

    def get(self, run: RunDirectory, step: int) -> tuple[Credit, str]:
        """Return the credit of a step, and the reason if there is none, or none yet.
        Thread-safe.
        """
        key = (str(run.root), step)
        if (known := self._known.get(key)) is not None:
            return known
        self._loop.call_soon_threadsafe(self._request, key)
        return {}, "Returns and advantages are being computed."

    def _request(self, key: tuple[str, int]) -> None:
        """Request a step once; runs on the event loop."""
        if key not in self._requested:
            self._requested.add(key)
            self._process.send(CreditRequest(*key))

    def forget_faults(self, run: RunDirectory) -> None:
        """Forget the failures of a run, so that `get` requests these steps again: the run's index
        has grown.
        """
        failed = [key for key, (_, fault) in self._known.items() if fault]
        for root, step in failed:
            if root == str(run.root):
                del self._known[root, step]

    async def listen(self) -> None:
        """Keep answers until the process ends. Cancellation leaves the process as it is.

        Raises:
            RunError: the process failed.
        """
        async for answer in self._process.messages(MODULE):
            key = (answer.run, answer.step)
            self._requested.discard(key)
            self._known[key] = (answer.credit, answer.fault)
            while len(self._known) > MAX_KEPT:
                del self._known[next(iter(self._known))]  # the oldest one
            self._notify(Path(answer.run))


def main() -> None:
    """Answer requests until the server ends."""
    # The priority of an actor, not the lower one of a watcher: somebody waits for the answer.
    os.nice(ACTOR)
    server = channel_to_parent(CreditRequest)
    for request in server.messages():
        credit, fault = {}, ""
        try:
            credit = credit_of(RunDirectory(Path(request.run)), request.step)
        except MageError as error:
            fault = f"Without returns and advantages: {error}"
        server.send(StepCredit(request.run, request.step, credit, fault))


def credit_of(run: RunDirectory, step: int) -> Credit:
    """Compute the returns and advantages of a step's turns.

    Raises:
        RunError: not all trials of the step are in the journal.
        ConfigError: the credit needs the environment, which cannot be made here.
    """
    from mage_async.attribution import JournalStep, attributed
    from mage_async.config import config_file
    from mage_async.trajectory import Group

    with RunReader(run) as reader:
        config, groups = config_file.loads(reader.config_of(step), imports=False), []
        _check_code(config)
        for listed in reader.groups_of(step):
            numbers = [each.number for each in reader.trials_of([listed.number])]
            if listed.num_trials is None or len(numbers) < listed.num_trials:
                raise RunError(f"some trials of step {step} are not in the index")
            trials = [reader.load(listed.number, number) for number in numbers]
            groups.append(Group(listed.number, listed.version or 0, tuple(trials)))
    # Texts are not needed here, so no tokenizer is loaded: all tokens decode to "".
    found = attributed(JournalStep(step, groups, config, is_whole=True), lambda _: "")
    return {
        f"{each.grant}/{each.trial.index}": [
            (turn.return_to_go, turn.advantage) for turn in each.turns
        ]
        for each in found
    }


def _check_code(config: "Config") -> None:
    """Refuse to load a user's own classes: a page of a run must not execute their code."""
    from mage_async.environments.catalogue import names
    from mage_async.methods.catalogue import METHODS
    from mage_async.methods.method import Methods

    for name in config.methods:
        if name not in METHODS:
            raise RunError(f"the method {name} may change them, and its code is not run here")
    name = config.environment.name
    if name not in names() and any(each.rewards_need_environment for each in Methods(config)):
        raise RunError(f"a method needs the environment {name}, whose code is not run here")
    for component in (config.credit, config.advantage):
        if ":" in component.kind:
            raise RunError(f"they need the class {component.kind}, whose code is not run here")


if __name__ == "__main__":
    main()
