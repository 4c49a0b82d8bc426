"""The weights of an SGLang engine: one version after the other, turns held back while they change.

    queue   filled by   emptied by            bounded by
    loads   add         Loaded, newest first  the actor: it waits

A process that has died is followed by another, which first loads the newest weights.
"""

import asyncio
from pathlib import Path

from mage_async.config.schema import Sglang as EngineRules
from mage_async.errors import PolicyError, RunError
from mage_services.engines.accepting import refusal
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.keeper import EVERYTHING, Keeper
from mage_services.engines.sglang.turn_queue import TurnQueue
from mage_services.engines.sglang.turns import WantedWeights, settle
from mage_services.weights.weight_group import is_manifest

PREPARED = "prepared"
"""Among answers that are owed; ids of requests are longer."""
MAX_DEATHS_OF_A_LOAD = 2
"""Weights under way in so many deaths may be their cause, and are given up."""


class WeightLoads:
    """See the module. Version 0 is the model's directory."""

    def __init__(
        self, keeper: Keeper, turns: TurnQueue, rules: EngineRules, directory: Path, name: str
    ) -> None:
        self._keeper, self._turns, self._rules, self._name = keeper, turns, rules, name
        self._loading: WantedWeights | None = None
        self._loads: list[WantedWeights] = []
        self._ready: asyncio.Future[None] | None = None
        """Done when a file that is read while turns are drawn is ready."""
        self._served = -1
        """The version the process draws with."""
        self._wanted: tuple[int, Path] = (0, directory)
        """The newest weights that were loaded."""
        self._num_loads, self._stall_s = 0, 0.0

    @property
    def interrupts_turns(self) -> bool:
        """Whether weights are being loaded, for which requests under way are aborted."""
        return self._loading is not None and self._rules.in_flight == "interrupt"

    async def have_ready(self, version: int, path: Path) -> None:
        """Have a file read while turns are drawn, so that new ones wait less. Weights that are sent
        are not: who asks for them has to take them. Returns too when the process dies meanwhile.

        Cancellation leaves them read in vain.
        """
        if not self._turns.is_open or self._ready is not None or is_manifest(path):
            return
        self._ready = asyncio.get_running_loop().create_future()
        self._keeper.owe(PREPARED, self._rules.turn_deadline_s)
        self._keeper.send(say.Prepare(version=version, path=str(path)))
        await asyncio.shield(self._ready)

    def add(self, weights: WantedWeights) -> None:
        """Load these weights as soon as that is possible, unless newer ones come first."""
        self._loads.append(weights)
        self._go_on()

    def serve(self) -> None:
        """A new process serves version 0."""
        self._served = 0
        self._go_on()

    def take_ready(self) -> None:
        """What was being read is there."""
        self._keeper.paid(PREPARED)
        self._settle_ready()

    def take_loaded(self, message: say.Loaded) -> None:
        """Settle the newest load and those before it: nobody wants older weights any more.

        Raises:
            RunError: the weights that were drawn with are gone.
        """
        weights, self._loading = self._loading, None
        assert weights is not None
        self._keeper.paid(EVERYTHING)
        self._served = message.version
        index = self._loads.index(weights) + 1 if weights in self._loads else 0
        settled, self._loads = [weights, *self._loads[:index]], self._loads[index:]
        if message.error and not index:
            raise RunError(f"the weights of version {weights.version} are gone: {message.error}")
        if not message.error:
            self._wanted = weights.version, weights.path
            self._num_loads += 1
            self._stall_s += message.stall_s
        error = self._error_of(message, weights)
        for one in settled:
            settle(one.future, error, message.receipt if one is weights else None)
        self._go_on()

    def die(self) -> int:
        """The process has ended; the version that the next one draws with.

        Weights under way in `MAX_DEATHS_OF_A_LOAD` deaths are given up; nobody else asks for them
        any more.
        """
        weights, self._loading = self._loading, None
        if weights is not None and weights in self._loads:
            weights.num_deaths += 1
            if weights.num_deaths == MAX_DEATHS_OF_A_LOAD:
                self._loads.remove(weights)
                reason = f"{weights.path}: SGLang died {weights.num_deaths} times as it loaded them"
                settle(weights.future, PolicyError(reason))
        self._settle_ready()
        self._served = -1
        return self._loads[-1].version if self._loads else self._wanted[0]

    def fail(self, reason: BaseException) -> None:
        """Fail every load: the engine has ended."""
        for weights in self._loads:
            settle(weights.future, reason)

    def totals(self) -> dict[str, float]:
        """What was loaded so far."""
        return {"num_loads": self._num_loads, "stall_s": self._stall_s}

    def _error_of(self, message: say.Loaded, weights: WantedWeights) -> PolicyError | None:
        if message.is_refused:
            return refusal(self._name, weights.version, weights.path, message.error)
        return PolicyError(message.error) if message.error else None

    def _go_on(self) -> None:
        """Load what is to be loaded, or else let turns be drawn."""
        if self._served < 0 or self._loading is not None:
            return
        if self._loads:
            self._begin(self._loads[-1])
        elif self._served != self._wanted[0]:
            future = asyncio.get_running_loop().create_future()
            self._begin(WantedWeights(*self._wanted, future))
        elif not self._turns.is_open:
            self._turns.open(self._served)

    def _begin(self, weights: WantedWeights) -> None:
        self._turns.hold_back()
        self._loading = weights
        self._keeper.owe(EVERYTHING, self._rules.turn_deadline_s)
        self._keeper.send(
            say.Load(
                version=weights.version,
                path=str(weights.path),
                interrupts=self._rules.in_flight == "interrupt",
            )
        )

    def _settle_ready(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            settle(ready, None)
