"""The turns of an SGLang engine: asked, held back while weights change, drawn piece by piece.

    queue      filled by                             emptied by            bounded by
    held       ask, while nothing may be asked       open                  trials
    warming    ask, where an equal prompt is being   Began or Drew of      trials
               read                                  the first

A process that has died is followed by another, which draws the interrupted turns again from their
prompts.
"""

import time
from uuid import uuid4

from mage_async.errors import RunError, TurnLost
from mage_async.inference.kv_contexts import KVContexts
from mage_async.inference.statistics import Statistics
from mage_services.engines.sglang import messages as say
from mage_services.engines.sglang.keeper import Keeper
from mage_services.engines.sglang.turns import Asked, piece_of, settle
from mage_services.engines.sglang.warming import Warming

MAX_DEATHS_OF_A_TURN = 3
"""A turn under way in so many deaths may be their cause, and is given up."""


class TurnQueue:
    """See the module.

    Args:
        silence_s: an aborted request is answered within this, or the process is taken to hang.
    """

    def __init__(self, keeper: Keeper, *, silence_s: float) -> None:
        self._keeper, self._silence_s = keeper, silence_s
        self.contexts = KVContexts()
        self._is_open, self._version = False, 0
        """Requests may be sent, which draw with this version."""
        self._held: list[Asked] = []
        self._running: dict[str, Asked] = {}
        self._warming: Warming[Asked] = Warming()
        self._totals: dict[str, float] = dict.fromkeys(Statistics.__slots__, 0)
        self._busy_since, self._busy_s = 0.0, 0.0

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent: a process serves, and loads nothing."""
        return self._is_open

    def ask(self, asked: Asked) -> None:
        """Send a turn's next request as soon as one may be sent."""
        if self._is_open:
            self._submit(asked)
        else:
            self._held.append(asked)

    def open(self, version: int) -> None:
        """Send what was held back; the process draws with this version."""
        self._is_open, self._version = True, version
        held, self._held = self._held, []
        for asked in held:
            self._submit(asked)

    def hold_back(self) -> None:
        """Send nothing until `open`: weights change."""
        self._is_open = False

    def began(self, rid: str) -> None:
        """The keys of a request's prompt are there."""
        self._lead(self._running.get(rid), is_warm=True)

    def take(self, message: say.Drew, *, may_abort: bool) -> None:
        """A request has ended: its turn is done, or goes on.

        Args:
            may_abort: a load interrupts requests.
        """
        self._keeper.paid(message.rid)
        asked = self._end(message.rid)
        if asked is None:
            return
        if message.is_aborted and not may_abort:
            settle(asked.future, RunError(f"{asked.name()}: SGLang gave the request up"))
            return
        try:
            asked.turn.receive(piece_of(message, asked.key_version))
        except RunError as error:
            settle(asked.future, error)
            return
        if asked.turn.is_done:
            self._deliver(asked)
        else:
            self.ask(asked)

    def refuse(self, message: say.Refused) -> None:
        """The process does not draw a request."""
        self._keeper.paid(message.rid)
        asked = self._end(message.rid)
        if asked is not None:
            settle(asked.future, RunError(f"{asked.name()}: SGLang refuses it: {message.reason}"))

    def give_up(self, asked: Asked) -> None:
        """Nobody waits for this turn any more."""
        if asked in self._held:
            self._held.remove(asked)
        if asked.rid:
            rid = asked.rid
            del self._running[rid]
            self._note_idle()
            self._keeper.owe(rid, self._silence_s)
            self._keeper.send(say.Abort(rid=rid))
            self._lead(asked, is_warm=False)

    def die(self, newest: int) -> None:
        """The process has ended, and with it every key and what was being drawn; the next one draws
        with the version `newest`.
        """
        self._is_open = False
        if self._running:
            self._busy_s += time.perf_counter() - self._busy_since
        interrupted, waiting = list(self._running.values()), self._warming.clear()
        for asked in interrupted:
            asked.num_deaths += 1
            if asked.num_deaths == MAX_DEATHS_OF_A_TURN:
                reason = f"{asked.name()}: SGLang died {asked.num_deaths} times while it was drawn"
                settle(asked.future, TurnLost(reason))
        self._held = [*interrupted, *waiting, *self._held]
        for asked in self._held:
            asked.turn.restart()
            asked.rid, asked.is_warm = "", False
        self._running.clear()
        self.contexts.lose_keys(newest)

    def fail(self, reason: BaseException) -> None:
        """Fail every turn: the engine has ended."""
        for asked in [*self._held, *self._running.values(), *self._warming.clear()]:
            settle(asked.future, reason)

    def totals(self) -> dict[str, float]:
        """What was drawn so far; `forward_s` is the time in which any request was under way."""
        running = time.perf_counter() - self._busy_since if self._running else 0.0
        return self._totals | {
            "num_contexts": len(self.contexts),
            "num_waiting": len(self._held),
            "forward_s": self._busy_s + running,
        }

    def _submit(self, asked: Asked) -> None:
        """Send a turn's next request, unless an equal prompt is being read."""
        if asked.future.done():
            return
        self._name_keys(asked)
        is_cold = asked.is_cold
        if is_cold and not self._warming.enter(asked.place(), asked):
            return
        asked.rid = uuid4().hex
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running[asked.rid] = asked
        self._keeper.send(asked.request(says_when_it_began=is_cold))

    def _name_keys(self, asked: Asked) -> None:
        prompt = asked.turn.prompt
        if asked.opened is None:
            asked.opened = self.contexts.open(prompt, self._version)
            asked.key_version = asked.opened.key_version
        else:
            asked.key_version = self.contexts.reopen(prompt, self._version)

    def _end(self, rid: str) -> Asked | None:
        """The turn whose request is no longer under way."""
        asked = self._running.pop(rid, None)
        if asked is not None:
            self._note_idle()
            self._lead(asked, is_warm=True)
            asked.rid = ""
        return asked

    def _note_idle(self) -> None:
        """Where no request is under way any more, count the time until now."""
        if not self._running:
            self._busy_s += time.perf_counter() - self._busy_since

    def _lead(self, asked: Asked | None, *, is_warm: bool) -> None:
        """Ask for the turns that waited for this one."""
        if asked is None:
            return
        for other in self._warming.leave(asked.place()):
            other.is_warm = is_warm
            self.ask(other)

    def _deliver(self, asked: Asked) -> None:
        assert asked.opened is not None
        completion = asked.turn.completion(asked.opened)
        self.contexts.close(asked.turn.prompt, completion.tokens)
        self._keeper.cheer()
        for name, value in {
            "num_completions": 1,
            "num_prompt_tokens": len(asked.turn.prompt.tokens),
            "num_reused_tokens": completion.num_reused,
            "num_repeated_tokens": completion.num_repeated,
            "num_extension_faults": not completion.is_extension,
            "num_generated_tokens": len(completion.tokens),
        }.items():
            self._totals[name] += value
        if not asked.future.done():
            asked.future.set_result(completion)
