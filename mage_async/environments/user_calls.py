"""Make calls into users' code, which may be slow, and define the plays that consist of such calls.

A trial never waits for a user's method. Its play hands out the `Call` that it needs; the process
that plays the trial makes the call, in a thread, as a coroutine or in a worker process, and passes
the result back. Fast environments (`called = "at_once"`) need no `Call`: the trial calls their
methods directly.

The process that makes a call also reads and checks the attributes of the user's object, because a
property may be slow too. The result (`MethodResult`) is plain data, which can be sent to another
process. A class that implements the whole protocol is an exception: the trial reads its legal
actions and its random source from the play itself (`WholePlay`).
"""

import math
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import msgspec
import numpy as np

from mage_async import user_modules
from mage_async.environments.environment import PENDING, Chance, Environment, Outcome, Play
from mage_async.environments.mix import component_of
from mage_async.errors import CallFault, NoRoom, error_text, in_utf8
from mage_async.trajectory import Task

Method = Literal["reset", "step", "close"]

_PLAY = ("chance", "observation", "anchor", "legal_actions", "act")
"""Names of the attributes of a play."""
_NO_ROOM = ("CapacityReached", "CapacityError")
"""Names of the exceptions by which a class reports that it has no room for another object."""
_FAULT = ("Fault",)
"""Names of the exceptions by which a class reports a fault of its infrastructure."""

WAITS = "a coroutine that waits"
"""Kind of a fault: the method is a coroutine that waits, and there is no event loop to run it."""
_MOST_CODE_CHARS = 100
"""Largest number of characters of the line of code that an error message shows."""
_MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, FloatingPointError, ImportError, IndexError),
    *(KeyError, LookupError, ModuleNotFoundError, NameError, NotImplementedError, OverflowError),
    *(RecursionError, SystemExit, TypeError, UnboundLocalError, ValueError, ZeroDivisionError),
)
"""Classes of exceptions that count as mistakes in the user's code. `SystemExit` is among them: the
code tries to end the process. An exception's class must be one of these itself; a class that
inherits from one does not count. Other exceptions, such as `OSError` and `RuntimeError`, may come
from a server or a network, and a later try may succeed.
"""


class Request(msgspec.Struct, frozen=True):
    """Describe one call by plain values."""

    method: Method
    place: str
    """Environment, task, episode, turn and function; every error message begins with it."""
    seed: int = 0
    member: str = ""
    episode: int = 0
    action: str = ""


class MethodResult(msgspec.Struct, frozen=True):
    """Hold the result of a call, with the state of the called object after it."""

    outcome: Outcome = PENDING
    """Outcome of a step. For a `reset`, only its observation is used."""
    anchor: str | None = None
    """Anchor that the class declares; None if it declares none, or the episode is done."""
    legal_actions: tuple[str, ...] | None = None
    """Legal actions that the class lists; None if it lists none, or the episode is done."""
    legal_pattern: str | None = None
    """Regular expression of legal actions that the class declares; None if it declares none, or the
    episode is done.
    """


@dataclass(frozen=True, slots=True)
class Origin:
    """Hold the name and the options with which another process loads the same class."""

    name: str
    """Name as in the configuration."""
    options: Mapping[str, Any]


class Callee:
    """Hold the user's object to which the calls of one episode are made, in the process that makes
    them.

    `user_class.UserObject` holds an object of a class with `reset` and `step`, `UserPlay` a play of
    a class that implements the whole `Environment` protocol.
    """

    serial_group = ""
    """Name of a group of callees whose calls are made one after another; if it is "", calls of
    different callees may be concurrent.
    """

    def is_async(self, method: Method) -> bool:
        """Return whether the user's method is a coroutine function."""
        return False

    def method_name(self, method: Method) -> str:
        """Return the user's name of a method; "" if there is nothing to call."""
        return method

    def perform(self, request: Request) -> Any:
        """Make a call and return its result, a `MethodResult`; if the method is async, return a
        coroutine with this result.

        Raises:
            CallFault: the method's value does not follow the protocol.
            Exception: raised by the class.
        """
        raise NotImplementedError

    def circumstance(self) -> str:
        """Return a clause on the likely cause of an exception of a call; "" if none is known."""
        return ""

    def late_close(self) -> Callable[[], Any] | None:
        """Return a coroutine function that closes the user's object, if the last call has left it
        open; otherwise None.
        """
        return None


class UserPlay(Callee):
    """Call a play of a class that implements the whole `Environment` protocol, whose methods may
    block. The first call creates the play.

    Args:
        begin: Creates the play.
        serial_group: See `Callee`.
    """

    def __init__(self, begin: Callable[[], Play], serial_group: str) -> None:
        self._begin, self.serial_group = begin, serial_group
        self._play: Play | None = None

    @property
    def play(self) -> Play:
        """The play itself, once it has begun."""
        assert self._play is not None, "the play has begun"
        return self._play

    def method_name(self, method: Method) -> str:
        """Return the name in the protocol, which has no `close`."""
        return {"reset": "begin", "step": "act", "close": ""}[method]

    def perform(self, request: Request) -> MethodResult:
        """Make a call; see `Callee.perform`."""
        if request.method == "close":
            return MethodResult()
        if request.method == "reset":
            play = self._begin()
            if missing := [each for each in _PLAY if not hasattr(play, each)]:
                raise CallFault(
                    f"{request.place} must be a `Play`, with {', '.join(_PLAY)}, got "
                    f"{_kind(play)} without {' and '.join(missing)}"
                )
            self._play = play
            return MethodResult(Outcome(play.observation, 0.0), play.anchor)
        outcome = self.play.act(request.action)
        if not isinstance(outcome, Outcome):
            raise CallFault(f"{request.place} must be an `Outcome`, got {_kind(outcome)}")
        return MethodResult(outcome, None if outcome.is_done else self.play.anchor)


def _kind(value: object) -> str:
    """Return the type of a value, for the end of an error message."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def says_no_room(error: BaseException) -> bool:
    """Return whether an exception says that there is no room for another object."""
    return _is_named(error, _NO_ROOM)


def _is_named(error: BaseException, names: Sequence[str]) -> bool:
    """Return whether an exception, or a base of its class, has one of these names.

    Names are compared, not classes, so that a class need not import this package.
    """
    return any(kind.__name__ in names for kind in type(error).__mro__)


Take = Callable[[MethodResult], Outcome | None]
"""Receives the result of a call; returns the outcome if the call was a step, else None."""


@dataclass(frozen=True, slots=True)
class Call:
    """Describe one call that a play waits for."""

    callee: Callee
    """Object to call, if the call is made in this process."""
    request: Request
    take: Take = lambda result: None
    """Hands the result to the play that waits for it."""

    @property
    def place(self) -> str:
        """Environment, task, episode, turn and function."""
        return self.request.place

    @property
    def name(self) -> str:
        """Name of the user's method; "" if there is nothing to call."""
        return self.callee.method_name(self.request.method)

    @property
    def is_async(self) -> bool:
        """Whether `function()` returns a coroutine, because the user's method is `async`."""
        return self.callee.is_async(self.request.method)

    def function(self) -> Any:
        """Make the call; a thread or an event loop may wait for it."""
        return self.callee.perform(self.request)

    def now(self) -> Any:
        """Make the call in this thread, without the caller's event loop, and return its result.

        Raises:
            CallFault: the user's method raised, or it is a coroutine that has to wait, and this
                thread has no event loop to run it (`run_coroutine`).
        """
        waits_fault = CallFault(
            f"{self.place} waits, which only actors and evaluators can do: a script makes calls "
            "without an event loop, so coroutines must not wait; set warm_start.steps = 0",
            kind=WAITS,
        )
        made_now[id(self)] = self
        try:
            value = self.function()
            if not self.is_async:
                return value
            if (run := run_coroutine.get()) is not None:
                value, failure = run(value)
                if failure is not None:  # such as a `CancelledError`, which is no `Exception`
                    raise self.fault(failure) from failure
                return value
            # A coroutine that does not wait ends at its first step, with its result.
            try:
                value.send(None)
            except StopIteration as end:
                return end.value
            value.close()
        except CallFault:
            raise
        except (Exception, SystemExit) as error:  # the border to foreign code
            # asyncio's message if the class has called a function that needs an event loop.
            if self.is_async and error_text(error) == "no running event loop":
                raise waits_fault from None
            raise self.fault(error) from error
        finally:
            del made_now[id(self)]
        raise waits_fault

    def overdue(self, deadline_s: float) -> CallFault:
        """Return the fault that the call took longer than the deadline."""
        return CallFault(
            f"{self.place} took longer than environment.step_deadline_s = {deadline_s:g}",
            f"{self.name}() took too long",
        )

    def fault(self, error: BaseException) -> CallFault:
        """Return the fault for an exception of the user's method."""
        if isinstance(error, CallFault):
            return error
        first_line, *_ = error_text(error).strip().splitlines() or [""]
        raised = f"raised {type(error).__name__}"
        if _is_named(error, _FAULT):
            raised = "reported a fault of its infrastructure"
        sentence, mistake = f"{self.place} {raised}: {first_line}", ""
        if (frame := user_modules.own_frame(error)) and not says_no_room(error):
            if type(error) in _MISTAKES:
                mistake = f"{type(error).__name__} in {frame.filename}, line {frame.lineno}"
            code = f": {frame.line:.{_MOST_CODE_CHARS}}" if frame.line else ""
            sentence += f" ({frame.filename}, line {frame.lineno}, in {frame.name}{code})"
        if circumstance := self.callee.circumstance():
            sentence += f"; {circumstance}"
            # A retry begins with the same seeds, so the policy would answer the same, and the same
            # exception would be raised again.
            mistake = mistake or circumstance
        fault = NoRoom if says_no_room(error) else CallFault
        return fault(in_utf8(sentence), f"{self.name}() {raised}", in_utf8(mistake))


RunCoroutine = Callable[[Coroutine[Any, Any, Any]], tuple[Any, BaseException | None]]
"""Runs a coroutine to its end, and returns its result or its exception."""
run_coroutine: ContextVar[RunCoroutine | None] = ContextVar("run_coroutine", default=None)
"""Function with which this thread runs coroutines; None if the thread has no event loop."""
made_now: dict[int, Call] = {}
"""Calls that `Call.now` has not finished, by `id`. Another thread reads them to find one that
hangs."""


class SlowPlay(Play):
    """Play an episode whose results come from calls: `act` requests a call and returns `PENDING`.

    The first call is `reset`, which creates the user's object, and the last one is `close`.

    Args:
        name: Name of the environment, for messages.
        seed: Seed that is passed to `reset`.
        max_turns: Number of steps after which the episode is done in any case.
    """

    def __init__(
        self,
        callee: Callee,
        name: str,
        task: Task,
        episode: int,
        seed: int = 0,
        max_turns: float = math.inf,
    ) -> None:
        self._callee, self._max_turns = callee, max_turns
        self._where = f"{name}, task {task.member}, seed {task.seed}, episode {episode + 1}"
        self._request_fields = seed, task.member, episode
        """Fields that all requests of the episode share."""
        self._last_result, self._observation, self._num_turns = MethodResult(), "", 0
        """Result of the latest call, first observation, and number of steps so far."""
        self.is_done = self._is_begun = self._is_closed = False
        self._call: Call | None = self._make_call("reset", self._take_reset)

    @property
    def observation(self) -> str:
        """The observation with which the episode begins."""
        return self._observation

    def act(self, action: str) -> Outcome:
        """Request a step."""
        assert not self.is_done, "the episode is done"
        self._num_turns += 1
        self._call = self._make_call("step", partial(self._take_step, action), action)
        return PENDING

    def next_call(self) -> Call | None:
        """Return the call that the play waits for; None if it waits for none, or if the call was
        returned before.
        """
        call, self._call = self._call, None
        self._is_begun = self._is_begun or call is not None
        return call

    def closing(self) -> Call | None:
        """Return the call `close`; None if it was returned before, or if no other call was."""
        if not self._is_begun or self._is_closed:
            return None
        self._is_closed = True
        return self._make_call("close")

    def _make_call(
        self, method: Method, take: Take = lambda result: None, action: str = ""
    ) -> Call:
        """Return a call, whose `place` names environment, task, episode, turn and function."""
        turn = f", turn {self._num_turns}" if self._num_turns else ""
        shown = f"{action!r:.60}" if method == "step" else ""
        place = f"{self._where}{turn}: {self._callee.method_name(method)}({shown})"
        return Call(self._callee, Request(method, place, *self._request_fields, action), take)

    def _take_reset(self, result: MethodResult) -> None:
        """Take the result of `reset`."""
        self._last_result, self._observation = result, result.outcome.observation

    def _take_step(self, action: str, result: MethodResult) -> Outcome:
        """Take the result of a step; return its outcome."""
        self._last_result = result
        self.is_done = result.outcome.is_done or self._num_turns == self._max_turns
        return replace(result.outcome, is_done=self.is_done)


Calls = Generator[Call, Any, Outcome | None]
"""Yields calls, is sent their results, and returns the outcome of the last action."""


def calls_of(play: Play) -> Calls:
    """Yield all calls that a play waits for; none if it is fast."""
    outcome = None
    while isinstance(play, SlowPlay) and (call := play.next_call()) is not None:
        outcome = call.take((yield call))
    return outcome


def make_pending_calls(play: Play) -> Outcome | None:
    """Make all calls that a play waits for, without an event loop; return the outcome of the last
    action.

    Raises:
        CallFault: see `Call.now`.
    """
    outcome = None
    while isinstance(play, SlowPlay) and (call := play.next_call()) is not None:
        outcome = call.take(call.now())
    return outcome


class WholePlay(SlowPlay):
    """Play an episode of a class that implements the whole `Environment` protocol; its `begin` and
    `act` are calls.
    """

    _callee: UserPlay

    @property
    def own(self) -> Play:
        """The environment's own play, once it has begun; the environment's scripts and Bayes
        filters expect this one.
        """
        return self._callee.play

    @property
    def chance(self) -> Chance:  # type: ignore[override]
        """The random source of the environment's play."""
        return self.own.chance

    @property
    def anchor(self) -> str:
        """The anchor of the environment's play after its last action."""
        return self._last_result.anchor or ""

    def legal_actions(self) -> Sequence[str]:
        """Return the legal actions of the environment's play."""
        return () if self.is_done else self.own.legal_actions()


def new_play(environment: Environment, task: Task, episode: int) -> Play:
    """Create a play in the environment's call mode. The play of an environment called "at_once" has
    begun when it is returned; any other play waits for its first call.
    """
    if component_of(environment, task.member).called == "at_once":
        return environment.begin(task, episode)
    return whole_play(environment, task, episode)


def whole_play(environment: Environment, task: Task, episode: int) -> WholePlay:
    """Create a play that waits for calls, even if the environment's call mode is `at_once`."""
    part = component_of(environment, task.member)
    name = part.facts.name
    serial_group = name if part.called == "in_turn" else ""
    callee = UserPlay(partial(environment.begin, task, episode), serial_group)
    return WholePlay(callee, name, task, episode)


def own_play(play: Play) -> Play:
    """Return the environment's own play, which its scripts and Bayes filters expect."""
    return play.own if isinstance(play, WholePlay) else play


def as_config_error(name: str, call: str = "") -> AbstractContextManager[None]:
    """Turn any exception of the environment called `name` into a `ConfigError` of one line.

    Args:
        call: The call that raises, for the message.
    """
    return user_modules.as_config_error(f"environment {name!r}{call and ': '}{call}")


MAX_INFO_CHARS = 4096
"""Largest number of characters of one turn's info; entries beyond it are left out, with a note."""
MAX_TRIAL_INFO_CHARS = 2**17
"""Largest number of characters of all infos of a trial together."""
TRIAL_IS_FULL = f'{{"…":"a trial keeps at most {MAX_TRIAL_INFO_CHARS:,} characters of info"}}'
"""Info that replaces a turn's info, if a trial's infos would otherwise exceed
`MAX_TRIAL_INFO_CHARS`.
"""
_NOTE_CHARS = 128
"""Number of characters reserved for the note that entries were left out."""
_MAX_ITEMS, _MAX_TEXT_CHARS, _MAX_KEY_CHARS, _MAX_VALUES, _MAX_DEPTH = 64, 1000, 64, 512, 6
"""Limits of a converted info: items of a list, characters of a text and of a key, values in all,
and levels of nesting.
"""


def info_text(info: Mapping[Any, Any]) -> str:
    """Return an environment's `info` as the text of a JSON object of at most `MAX_INFO_CHARS`
    characters; "" if there are no entries.

    Only plain data is converted: the text of a foreign object may be long or slow, or raise, so
    such an object is represented by its type. Text is cut after 1,000 characters and a list after
    64 items; a number outside JSON's range is written as text.
    """
    kept, room = dict[str, Any](), MAX_INFO_CHARS - _NOTE_CHARS
    # One budget for all entries bounds the time that nested lists take.
    budget = iter(range(_MAX_VALUES))
    for key, value in info.items():
        entry = {_key(key): _plain(value, _MAX_DEPTH, budget)}
        if (size := _size(entry)) > room:
            entry = {_key(key): f"left out: {size:,} characters"}
        if len(kept) == _MAX_ITEMS or (size := _size(entry)) > room:
            kept["…"] = f"{len(info) - len(kept)} more"
            break
        kept |= entry
        room -= size
    return msgspec.json.encode(kept).decode() if kept else ""


def _plain(value: Any, depth: int, budget: Iterator[int]) -> Any:
    """Return a value as JSON data, with at most `depth` levels of lists and dictionaries below it.

    Args:
        budget: Yields once for each value that may still be converted.
    """
    if next(budget, None) is None or depth < 0:
        return "…"
    if isinstance(value, np.generic | np.ndarray):
        if value.size > _MAX_ITEMS:
            return f"{value.dtype} {list(value.shape)}"
        found = value.tolist()  # returns a NumPy scalar if Python has no such type
        is_foreign = isinstance(found, np.generic)
        return _type_name(value) if is_foreign else _plain(found, depth, budget)
    if isinstance(value, dict):
        items = islice(value.items(), _MAX_ITEMS)
        entries = {_key(key): _plain(each, depth - 1, budget) for key, each in items}
        num_left_out = len(value) - _MAX_ITEMS
        return entries | {"…": f"{num_left_out:,} more"} if num_left_out > 0 else entries
    if isinstance(value, list | tuple | set | frozenset):
        listed = [_plain(each, depth - 1, budget) for each in islice(value, _MAX_ITEMS)]
        num_left_out = len(value) - len(listed)
        return [*listed, f"… {num_left_out:,} more"] if num_left_out else listed
    if isinstance(value, str):
        return _cut(value, _MAX_TEXT_CHARS)
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"a whole number of {value.bit_length()} bits"
    return value if value is None or isinstance(value, int | float) else _type_name(value)


def _key(key: Any) -> str:
    """Return a key of a dictionary as text."""
    is_plain = isinstance(key, str | bool | float) or (isinstance(key, int) and abs(key) < 2**63)
    return _cut(str(key) if is_plain else _type_name(key), _MAX_KEY_CHARS)


def _cut(text: str, most: int) -> str:
    """Cut a text, and replace halves of surrogate pairs, which no message can hold."""
    cut = text if len(text) <= most else f"{text[:most]}… {len(text) - most:,} more"
    return in_utf8(cut)


def _type_name(value: Any) -> str:
    """Return the type of a value, which represents it."""
    return f"<{type(value).__name__}>"


def _size(entry: dict[str, Any]) -> int:
    """Return the number of characters that an entry adds to the text of an info."""
    # Without the two braces around this entry, and with the comma after it.
    return len(msgspec.json.encode(entry).decode()) - 1
