"""Loading weights into SGLang's process: one version at a time, while turns are held back.

    queue   filled by   emptied by            bounded by
    loads   add         Loaded, newest first  the actor, which waits

A process that is started after a death first loads the newest weights.
"""

import asyncio
from pathlib import Path

from mage_async.config.schema import Sglang as EngineConfig
from mage_async.errors import PolicyError, RunError
from mage_services.engines.engine import settle
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.turns import PendingLoad, TurnQueue
from mage_services.engines.sglang.watchdog import EVERYTHING, EngineWatchdog
from mage_services.engines.weight_acceptance import refusal
from mage_services.weights.weight_group import is_manifest

PREPARED = "prepared"
"""Name of the answer to `Prepare`, for the watchdog; different from every request id."""
MAX_DEATHS_OF_A_LOAD = 2
"""A load during which the process died this often may be the cause, and fails."""


class WeightLoads:
    """The queue of loads. Version 0 is the model's directory.

    Args:
        name: name of the actor, for errors.
    """

    def __init__(
        self,
        watchdog: EngineWatchdog,
        turns: TurnQueue,
        config: EngineConfig,
        directory: Path,
        name: str,
    ) -> None:
        self._watchdog, self._turns, self._config, self._name = watchdog, turns, config, name
        self._loading: PendingLoad | None = None
        self._loads: list[PendingLoad] = []
        self._preparation: asyncio.Event | None = None
        """Set once the file that is being prepared is ready; None if none is."""
        self._version = -1
        """Version that the process uses; -1 while there is no process."""
        self._newest: tuple[int, Path] = (0, directory)
        """Version and path of the newest weights that were loaded, by this process or an earlier
        one."""

    @property
    def interrupts_turns(self) -> bool:
        """Whether a load is under way that aborts requests."""
        return self._loading is not None and self._config.in_flight == "interrupt"

    async def prepare(self, version: int, path: Path) -> None:
        """Read a file while tokens are sampled, which shortens the pause of the load.

        Weights that the learner sends are not prepared, because an engine that requests them has to
        receive them. Returns early if the process dies. Cancellation wastes the work, nothing else.
        """
        if not self._turns.is_open or self._preparation is not None or is_manifest(path):
            return
        self._preparation = preparation = asyncio.Event()
        self._watchdog.expect(PREPARED, self._config.turn_deadline_s)
        self._watchdog.send(say.Prepare(version=version, path=str(path)))
        await preparation.wait()

    def add(self, weights: PendingLoad) -> None:
        """Queue a load; it is skipped if a newer one is queued before it begins."""
        self._loads.append(weights)
        self._begin_next()

    def take_serving(self) -> None:
        """Handle `Serving`: a new process serves version 0, and has to load the newest weights."""
        self._version = 0
        self._begin_next()

    def take_prepared(self) -> None:
        """Handle `Prepared`."""
        self._watchdog.answered(PREPARED)
        self._end_preparation()

    def take_loaded(self, message: say.Loaded) -> None:
        """Handle `Loaded`: settle this load and all older ones, which are obsolete.

        Raises:
            RunError: a new process could not load the weights that were in use before.
        """
        weights, self._loading = self._loading, None
        assert weights is not None
        self._watchdog.answered(EVERYTHING)
        self._version = message.version
        index = self._loads.index(weights) + 1 if weights in self._loads else 0
        settled, self._loads = [weights, *self._loads[:index]], self._loads[index:]
        if message.error and not index:
            raise RunError(f"the weights of version {weights.version} are gone: {message.error}")
        if not message.error:
            self._newest = weights.version, weights.path
            self._turns.totals.num_loads += 1
            self._turns.totals.stall_s += message.stall_s
        error = PolicyError(message.error) if message.error else None
        if message.is_refused:
            error = refusal(self._name, weights.version, weights.path, message.error)
        for each in settled:
            settle(each.future, error, message.receipt if each is weights else None)
        self._begin_next()

    def take_death(self) -> int:
        """Handle the process's death; return the version that the next process will use.

        A load that was under way in `MAX_DEATHS_OF_A_LOAD` deaths fails.
        """
        weights, self._loading = self._loading, None
        if weights is not None and weights in self._loads:
            weights.num_deaths += 1
            if weights.num_deaths == MAX_DEATHS_OF_A_LOAD:
                self._loads.remove(weights)
                reason = f"{weights.path}: SGLang died {weights.num_deaths} times as it loaded them"
                settle(weights.future, PolicyError(reason))
        self._end_preparation()
        self._version = -1
        return self._loads[-1].version if self._loads else self._newest[0]

    def _begin_next(self) -> None:
        """Begin the newest load; without any, load what an earlier process had, or resume turns."""
        if self._version < 0 or self._loading is not None:
            return
        if self._loads:
            self._begin(self._loads[-1])
        elif self._version != self._newest[0]:
            future = asyncio.get_running_loop().create_future()
            self._begin(PendingLoad(*self._newest, future))
        elif not self._turns.is_open:
            self._turns.resume(self._version)

    def _begin(self, weights: PendingLoad) -> None:
        self._turns.pause()
        self._loading = weights
        self._watchdog.expect(EVERYTHING, self._config.turn_deadline_s)
        self._watchdog.send(
            say.Load(
                version=weights.version,
                path=str(weights.path),
                interrupts=self._config.in_flight == "interrupt",
            )
        )

    def _end_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.set()
        self._preparation = None
