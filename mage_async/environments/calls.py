"""Calls into a class of the user's that may take long, and plays that are made of them.

A trial never waits: it says which call it needs, and the process that plays the trial makes the
call, in a thread or as a coroutine, and hands over what came back. Fast environments make no calls.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from mage_async.environments.environment import Outcome, Play
from mage_async.environments.hosted.hosted_play import HostedPlay
from mage_async.environments.hosted.user_object import (
    Answered,
    Hosted,
    Request,
    finds_no_room,
)
from mage_async.errors import CallFault, CapacityFault

Callee = Hosted | HostedPlay
"""What is called: an object of a class with `reset` and `step`, or a play of the whole protocol."""
Take = Callable[[Answered], Outcome | None]
"""Takes what a call returned: an outcome where an action was answered."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a play waits for."""

    hosted: Callee
    """What is called, where the call is made in this process."""
    request: Request
    take: Take

    @property
    def place(self) -> str:
        """The environment, task, episode and turn, and what is called."""
        return self.request.place

    @property
    def name(self) -> str:
        """Of what is called; empty where that is nothing."""
        return self.hosted.named(self.request.method)

    @property
    def is_async(self) -> bool:
        """`function` is a coroutine function."""
        return self.hosted.is_async(self.request.method)

    def function(self) -> Any:
        """Make the call, where a thread or an event loop may wait for it."""
        if isinstance(self.hosted, Hosted) and self.is_async:
            return self.hosted.awaited(self.request)
        return self.hosted.asked(self.request)

    def now(self) -> Any:
        """Make the call here and wait for it, where there is no event loop; what it returned.

        Raises:
            CallFault: the function raised, or is a coroutine that has to wait.
        """
        try:
            value = self.function()
            return self._without_waiting(value) if self.is_async else value
        except CallFault:
            raise
        except (Exception, SystemExit) as error:  # the border to foreign code
            if self.is_async and str(error) == "no running event loop":
                raise self._waits() from None
            raise self.fault(error) from error

    def fault(self, error: BaseException) -> CallFault:
        """The function raised; what is a fault already says so itself."""
        if isinstance(error, CallFault):
            return error
        said, *_ = str(error).splitlines() or [""]
        kind = CapacityFault if finds_no_room(error) else CallFault
        return kind(f"{self.place} raised {type(error).__name__}: {said}")

    def overdue(self, deadline_s: float) -> CallFault:
        """The function has not returned by its deadline."""
        return CallFault(
            f"{self.place} took longer than environment.step_deadline_s = {deadline_s:g}"
        )

    def _without_waiting(self, coroutine: Any) -> Any:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        coroutine.close()
        raise self._waits()

    def _waits(self) -> CallFault:
        return CallFault(
            f"{self.place} waits, which only actors and evaluators can do: a script can play a "
            "coroutine that does not wait; set warm_start.steps = 0"
        )


class SlowPlay(Play):
    """A play whose answers come from calls; its `act` returns `PENDING` where one is needed.

    A subclass puts what has to be called next into `_call`, from its construction on.
    """

    is_done: bool
    _call: Call | None
    _is_begun = _is_closed = False

    def next_call(self) -> Call | None:
        """What has to be called before the play can go on; each call is given once."""
        call, self._call = self._call, None
        self._is_begun = self._is_begun or call is not None
        return call

    def closing(self) -> Call | None:
        """What has to be called once nothing else is asked of the play; given once, and not where
        nothing was ever called.
        """
        if not self._is_begun or self._is_closed:
            return None
        self._is_closed = True
        return self._close()

    def _close(self) -> Call:
        """The call that ends the episode."""
        raise NotImplementedError


Calls = Generator[Call, Any, Outcome | None]
"""Yields the calls that are needed, takes their values, returns the outcome of the last action."""


def calls_of(play: Play) -> Calls:
    """All calls that a play waits for; none where it is fast."""
    outcome = None
    while isinstance(play, SlowPlay) and (call := play.next_call()) is not None:
        outcome = call.take((yield call))
    return outcome


def settled(play: Play) -> Outcome | None:
    """Make all calls that a play waits for, here and now; the outcome of the last action.

    Raises:
        CallFault: as `Call.now`.
    """
    outcome = None
    while isinstance(play, SlowPlay) and (call := play.next_call()) is not None:
        outcome = call.take(call.now())
    return outcome
