"""Calls into a user's class, which may be slow, and plays that consist of such calls.

A trial never waits. Its play yields the `Call` that it needs; the process that plays the trial
makes the call, in a thread, as a coroutine or in a worker process, and passes the result back. Fast
environments make no calls. All foreign objects are inspected where the call is made: the result
(`Answered`) is plain and checked, so an event loop never waits for a user's property, and the
result can cross to another process.
"""

import math
import numbers
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from mage_async import registry
from mage_async.environments.environment import (
    PENDING,
    Chance,
    Environment,
    Outcome,
    Play,
    observation_fault,
)
from mage_async.environments.mix import component_of
from mage_async.errors import CallFault, CapacityFault
from mage_async.trajectory import Task

Method = Literal["reset", "step", "close"]

PLAY = ("chance", "observation", "anchor", "legal_actions", "act")
"""Attributes of a play."""
_READ_HERE = ("is_valid", "tool_answers")
"""Keys of `info` with a meaning of their own, which the record of a turn stores elsewhere."""
_NO_ROOM = ("CapacityReached", "CapacityError")
"""Names of the exceptions by which a class reports that it has no room for another object."""


class Request(msgspec.Struct, frozen=True):
    """One call, by value."""

    method: Method
    place: str
    """Environment, task, episode, turn and function; every error message begins with it."""
    seed: int = 0
    member: str = ""
    episode: int = 0
    action: str = ""


class Answered(msgspec.Struct, frozen=True):
    """Result of a call, with the state of the object after it."""

    observation: str = ""
    reward: float = 0.0
    is_valid: bool = True
    is_done: bool = False
    tool_answers: tuple[str, ...] = ()
    info: str = ""
    """A JSON object, or empty."""
    anchor: str | None = None
    """The class's own; `None` if it has none, or the episode is done."""
    legal_actions: tuple[str, ...] = ()

    def outcome(self, *, is_done: bool) -> Outcome:
        """Return the outcome of an action; `is_done` comes from the play, which may know a limit of
        turns.
        """
        return Outcome(
            self.observation, self.reward, self.is_valid, is_done, self.tool_answers, self.info
        )


Take = Callable[[Answered], Outcome | None]
"""Receives the result of a call; returns the outcome if the call answered an action."""


class Step(NamedTuple):
    """The checked value of `step`."""

    observation: str
    reward: float
    is_done: bool
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """What another process loads to have the same class."""

    name: str
    """As in the configuration."""
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HostedClass:
    """Properties shared by all objects of a class."""

    kind: type
    make: Callable[[], Any]
    """Creates an object; every episode has its own."""
    value_of: Callable[[str], Any]
    """Maps a task variant's name to the task argument of `reset`."""
    wants_episode: bool = False
    """Whether `reset` also takes the number of the episode."""
    has_tools: bool = False
    """Whether a step answers tool calls."""
    origin: Origin | None = None
    """`None` if the class was created in this process."""


class Hosted:
    """An object of a user's class. The first call creates it, as a constructor may be as slow as a
    step.

    The object is closed exactly once: by `close`; if `close` came before `reset` had returned,
    after that; or by `owed`, if `close` is a coroutine function and the last call was a plain one.
    """

    turn_of = ""
    """Empty: calls of different objects may run concurrently."""

    def __init__(self, hosted_class: HostedClass) -> None:
        self.hosted_class = hosted_class
        self._own: Any = None
        self._to_close: list[Any] = []
        """Holds the object until it is closed; removing it is atomic."""
        self._is_over = False

    def is_async(self, method: Method) -> bool:
        """Return whether the class's method is a coroutine function."""
        return iscoroutinefunction(getattr(self.hosted_class.kind, method, None))

    def method_name(self, method: Method) -> str:
        """Return the user-visible name of a method."""
        return method

    def perform(self, request: Request) -> Answered:
        """Make a call of a plain method.

        Raises:
            CallFault: the value does not follow the protocol; otherwise whatever the class raises.
        """
        try:
            value = self._call(request)
        except Exception as error:  # the border to foreign code; raised again
            if finds_no_room(error):
                self._close_unless_async()
                self._own = None  # another try makes another object
            raise
        if self._is_over:
            self._close_unless_async()
        return self._result(request, value)

    async def perform_async(self, request: Request) -> Answered:
        """Make a call of a coroutine function; see `perform`."""
        try:
            value = await _awaited(self._call(request))
        except Exception as error:  # the border to foreign code; raised again
            if finds_no_room(error):
                await _awaited(self._close_own())
                self._own = None
            raise
        if self._is_over:
            await _awaited(self._close_own())
        return self._result(request, value)

    def owed(self) -> Callable[[], Any] | None:
        """Return a coroutine function to await after a plain call, or `None`: it closes an object
        that the call left open, if `close` is a coroutine function.
        """
        is_left_open = bool(self._to_close) and (self._is_over or self._own is None)
        return self._close_left if is_left_open else None

    async def _close_left(self) -> None:
        await _awaited(self._close_own())

    def _close_unless_async(self) -> None:
        """Close the object, unless only an event loop can."""
        if not self.is_async("close"):
            self._close_own()

    def _call(self, request: Request) -> Any:
        if request.method == "close":
            self._is_over = True
            return self._close_own()
        if self._own is None:
            self._own = self.hosted_class.make()
            if callable(getattr(self._own, "close", None)):
                self._to_close.append(self._own)
        return getattr(self._own, request.method)(*self._arguments(request))

    def _close_own(self) -> Any:
        """Call `close` if there is an object to close; return its result."""
        try:
            own = self._to_close.pop()
        except IndexError:
            return None
        return own.close()

    def _arguments(self, request: Request) -> tuple[Any, ...]:
        if request.method == "step":
            return (request.action,)
        given = (request.seed, self.hosted_class.value_of(request.member))
        return (*given, request.episode) if self.hosted_class.wants_episode else given

    def _result(self, request: Request, value: Any) -> Answered:
        if request.method == "close":
            return Answered()
        if request.method == "reset":
            return self._step_result(Step(reset_value(request.place, value), 0.0, False, {}))
        return self._step_result(step_value(request.place, value))

    def _step_result(self, step: Step) -> Answered:
        answers = (
            tuple(step.info["tool_answers"]) if self.hosted_class.has_tools and step.info else ()
        )
        return Answered(
            step.observation,
            step.reward,
            bool(step.info.get("is_valid", True)),
            step.is_done,
            answers,
            info_text({key: each for key, each in step.info.items() if key not in _READ_HERE}),
            None if step.is_done else self._anchor(),
            () if step.is_done else self._legal_actions(),
        )

    def _anchor(self) -> str | None:
        own = self._attribute("anchor")
        return None if own is None else str(own)

    def _legal_actions(self) -> tuple[str, ...]:
        own = self._attribute("legal_actions")
        return () if own is None else tuple(map(str, own))

    def _attribute(self, name: str) -> Any:
        """Return an optional attribute, property or method result; `None` if there is none."""
        found = getattr(self._own, name, None)
        return found() if callable(found) else found


def finds_no_room(error: BaseException) -> bool:
    """Return whether an exception says that there is no room for another object."""
    return any(kind.__name__ in _NO_ROOM for kind in type(error).__mro__)


async def _awaited(value: Any) -> Any:
    return await value if isawaitable(value) else value


class HostedPlay:
    """A play of a whole `Environment` that is called in a thread; the first call creates it.

    Args:
        begin: creates the play.
        turn_of: calls of all plays with this name are made one after another, unless it is empty.
    """

    def __init__(self, begin: Callable[[], Play], turn_of: str = "") -> None:
        self._begin, self._play, self.turn_of = begin, None, turn_of

    @property
    def play(self) -> Play:
        """The play itself, once it has begun."""
        assert self._play is not None, "begun"
        return self._play

    def is_async(self, method: Method) -> bool:
        """Return false: no method of the whole protocol is a coroutine function."""
        return False

    def method_name(self, method: Method) -> str:
        """Return the user-visible name of a method; empty if there is nothing to call."""
        return {"reset": "begin", "step": "act", "close": ""}[method]

    def owed(self) -> None:
        """Return `None`: a play is never closed by a coroutine."""

    def perform(self, request: Request) -> Answered:
        """Make a call.

        Raises:
            CallFault: the value does not follow the protocol; otherwise whatever the class raises.
        """
        if request.method == "close":
            return Answered()
        if request.method == "reset":
            return self._begin_play(request.place)
        return self._act(request)

    def _begin_play(self, place: str) -> Answered:
        play = self._begin()
        if not all(hasattr(play, each) for each in PLAY):
            raise CallFault(f"{place} must be a `Play`, with {', '.join(PLAY)}, got {_kind(play)}")
        self._play = play
        return Answered(play.observation, anchor=play.anchor)

    def _act(self, request: Request) -> Answered:
        outcome = self.play.act(request.action)
        if not isinstance(outcome, Outcome):
            raise CallFault(f"{request.place} must be an `Outcome`, got {_kind(outcome)}")
        return Answered(
            outcome.observation,
            outcome.reward,
            outcome.is_valid,
            outcome.is_done,
            outcome.tool_answers,
            outcome.info,
            None if outcome.is_done else self.play.anchor,
        )


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


Callee = Hosted | HostedPlay
"""What is called: an object of a class with `reset` and `step`, or a play of the whole protocol."""


# Calls and the plays that wait for them.


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a play waits for."""

    hosted: Callee
    """The object to call, if the call is made in this process."""
    request: Request
    take: Take

    @property
    def place(self) -> str:
        """Environment, task, episode, turn and function."""
        return self.request.place

    @property
    def name(self) -> str:
        """Name of the function; empty if there is nothing to call."""
        return self.hosted.method_name(self.request.method)

    @property
    def is_async(self) -> bool:
        """Whether `function` is a coroutine function."""
        return self.hosted.is_async(self.request.method)

    def function(self) -> Any:
        """Make the call; a thread or an event loop may wait for it."""
        if isinstance(self.hosted, Hosted) and self.is_async:
            return self.hosted.perform_async(self.request)
        return self.hosted.perform(self.request)

    def now(self) -> Any:
        """Make the call without an event loop, and return its result.

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
        """Return the fault for an exception of the function."""
        if isinstance(error, CallFault):
            return error
        first_line, *_ = str(error).splitlines() or [""]
        kind = CapacityFault if finds_no_room(error) else CallFault
        return kind(f"{self.place} raised {type(error).__name__}: {first_line}")

    def overdue(self, deadline_s: float) -> CallFault:
        """Return the fault for a function that has not returned by its deadline."""
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
    """A play whose results come from calls; its `act` returns `PENDING` if one is needed.

    A subclass stores the next call in `_call`, from its construction on.
    """

    is_done: bool
    _call: Call | None
    _is_begun = _is_closed = False

    def next_call(self) -> Call | None:
        """Return the call that the play waits for, or `None`; each call is returned once."""
        call, self._call = self._call, None
        self._is_begun = self._is_begun or call is not None
        return call

    def closing(self) -> Call | None:
        """Return the call that ends the play; only once, and only if a call was ever made."""
        if not self._is_begun or self._is_closed:
            return None
        self._is_closed = True
        return self._close()

    def _close(self) -> Call:
        """Return the call that ends the episode."""
        raise NotImplementedError


Calls = Generator[Call, Any, Outcome | None]
"""Yields the needed calls, receives their results, returns the outcome of the last action."""


def calls_of(play: Play) -> Calls:
    """Yield all calls that a play waits for; none if it is fast."""
    outcome = None
    while isinstance(play, SlowPlay) and (call := play.next_call()) is not None:
        outcome = call.take((yield call))
    return outcome


def settled(play: Play) -> Outcome | None:
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
    """An episode of a whole `Environment` whose `begin` and `act` are calls.

    Args:
        name: of the environment, for messages.
    """

    def __init__(self, hosted: HostedPlay, name: str, task: Task, episode: int) -> None:
        self._hosted, self._seen, self._observation = hosted, Answered(), ""
        self._where = f"{name}, task {task.member}, seed {task.seed}, episode {episode + 1}"
        self._num_turns = 0
        self.is_done = False
        self._call = self._called("reset", "begin()", self._begun)

    @property
    def own(self) -> Play:
        """The environment's play, which its scripts and filters know; available once it has
        begun.
        """
        return self._hosted.play

    @property
    def chance(self) -> Chance:  # type: ignore[override]
        """That of the environment's play."""
        return self.own.chance

    @property
    def observation(self) -> str:
        """The first observation."""
        return self._observation

    @property
    def anchor(self) -> str:
        """The play's own, after its last action."""
        return self._seen.anchor or ""

    def legal_actions(self) -> Sequence[str]:
        """Return the play's own."""
        return () if self.is_done else self.own.legal_actions()

    def act(self, action: str) -> Outcome:
        """Request the action."""
        assert not self.is_done, "the episode is done"
        self._num_turns += 1
        self._call = self._called("step", f"act({action!r:.60})", self._acted, action)
        return PENDING

    def _close(self) -> Call:
        """Return the call that ends the play."""
        return self._called("close", "close()", lambda answered: None)

    def _called(self, method: Method, shown: str, take: Take, action: str = "") -> Call:
        turn = f", turn {self._num_turns}" if self._num_turns else ""
        place = f"{self._where}{turn}: {shown}"
        return Call(self._hosted, Request(method, place, action=action), take)

    def _begun(self, answered: Answered) -> None:
        self._seen, self._observation = answered, answered.observation

    def _acted(self, answered: Answered) -> Outcome:
        self._seen, self.is_done = answered, answered.is_done
        return answered.outcome(is_done=self.is_done)


def begun(environment: Environment, task: Task, episode: int) -> Play:
    """Create a play in the environment's call mode: a fast play has begun, the others wait for
    calls.
    """
    if component_of(environment, task.member).called == "at_once":
        return environment.begin(task, episode)
    return whole_play(environment, task, episode)


def whole_play(environment: Environment, task: Task, episode: int) -> WholePlay:
    """Create a play that waits for calls, whatever the environment's call mode is."""
    part = component_of(environment, task.member)
    name = part.facts.name
    hosted = HostedPlay(
        partial(environment.begin, task, episode), name if part.called == "in_turn" else ""
    )
    return WholePlay(hosted, name, task, episode)


def own_play(play: Play) -> Play:
    """Return a play as the environment knows it, for its scripts and filters."""
    return play.own if isinstance(play, WholePlay) else play


def own_code(name: str) -> AbstractContextManager[None]:
    """Turn any exception of the environment called `name` into a `ConfigError` of one line."""
    return registry.own_code(f"environment {name!r}")


# Checks of what `reset` and `step` return: Gymnasium's order, text as observation.


_ORDER = "observation, reward, terminated[, truncated, info]"


def reset_value(place: str, value: Any) -> str:
    """Return the observation from `observation` or `(observation, info)`.

    Raises:
        CallFault: the value is neither.
    """
    if isinstance(value, tuple) and len(value) == 2:
        value, _ = value
    return _text(place, value)


def step_value(place: str, value: Any) -> Step:
    """Return the parts of `observation, reward, terminated[, truncated, info]`.

    Raises:
        CallFault: the value has another form.
    """
    if not isinstance(value, tuple) or not 3 <= len(value) <= 5:
        raise CallFault(f"{place} must return {_ORDER}, got {_short(value)}")
    observation, reward, terminated, *rest = value
    truncated = rest[0] if rest else False
    info = rest[1] if len(rest) == 2 else {}
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise CallFault(f"{place} must return a finite reward, got {_short(reward)}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not _is_flag(flag):
            raise CallFault(f"{place} must return True or False as {name}, got {flag!r:.60}")
    if not isinstance(info, Mapping):
        raise CallFault(f"{place} must return a dictionary as info, got {_short(info)}")
    return Step(_text(place, observation), float(reward), bool(terminated) or bool(truncated), info)


def _text(place: str, value: Any) -> str:
    if fault := observation_fault(value):
        raise CallFault(f"{place} {fault}")
    return str(value).strip()


def _is_flag(value: Any) -> bool:
    """Return whether a value is a `bool` or numpy's, which is no subclass."""
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _short(value: Any) -> str:
    """Return a number as text, and of anything else the type: its text may be long, or raise."""
    is_number = isinstance(value, numbers.Real)
    return str(value) if is_number else f"a value of type {type(value).__name__}"


# An environment's `info` as bounded JSON text.


MAX_INFO_CHARS = 4096
"""Largest length of one turn's info; what exceeds it is left out, with a note."""
MAX_TRIAL_INFO_CHARS = 2**17
"""Largest total length of the infos of a trial."""
TRIAL_IS_FULL = f'{{"…":"a trial keeps at most {MAX_TRIAL_INFO_CHARS:,} characters of info"}}'
"""Replaces an info that would exceed the trial's total."""
_SPARE = 128
"""Characters reserved for the note."""
_MOST_ITEMS, _MOST_CHARS, _MOST_KEY_CHARS, _MOST_VALUES, _MOST_DEPTH = 64, 1000, 64, 512, 6


def info_text(info: Mapping[Any, Any]) -> str:
    """Return an environment's `info` as a JSON object of at most `MAX_INFO_CHARS` characters; empty
    if it is empty.

    Only plain data is converted: the text of a foreign object may be long or slow, or raise, so
    such an object is represented by its type. Text is cut after 1,000 characters and a list after
    64 items; a number outside JSON's range is written as text.
    """
    reader, kept, room = _Reader(), dict[str, Any](), MAX_INFO_CHARS - _SPARE
    for key, value in info.items():
        entry = {_key(key): reader.plain(value, _MOST_DEPTH)}
        if (size := _size(entry)) > room:
            entry = {_key(key): f"left out: {size:,} characters"}
        if len(kept) == _MOST_ITEMS or (size := _size(entry)) > room:
            kept["…"] = f"{len(info) - len(kept)} more"
            break
        kept |= entry
        room -= size
    return msgspec.json.encode(kept).decode() if kept else ""


class _Reader:
    """Converts one `info`, with a limit on the number of values."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def plain(self, value: Any, depth: int) -> Any:
        """Return a value as JSON data."""
        self._left -= 1
        if self._left < 0 or depth < 0:
            return "…"
        if isinstance(value, np.generic | np.ndarray):
            return self._array(value, depth)
        if value is None or isinstance(value, bool | int | float | str):
            return _scalar(value)
        if isinstance(value, dict):
            items = islice(value.items(), _MOST_ITEMS)
            return {_key(key): self.plain(each, depth - 1) for key, each in items}
        if isinstance(value, list | tuple | set | frozenset):
            return self._items(value, len(value), depth)
        return _kind_in_brackets(value)

    def _array(self, value: Any, depth: int) -> Any:
        if value.size > _MOST_ITEMS:
            return f"{value.dtype} {list(value.shape)}"
        found = value.tolist()
        return (
            _kind_in_brackets(value) if isinstance(found, np.generic) else self.plain(found, depth)
        )

    def _items(self, values: Iterable[Any], count: int, depth: int) -> list[Any]:
        items = [self.plain(each, depth - 1) for each in islice(values, _MOST_ITEMS)]
        return [*items, f"… {count - len(items):,} more"] if count > len(items) else items


def _scalar(value: Any) -> Any:
    if isinstance(value, str):
        return _readable(value, _MOST_CHARS)
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    is_long = isinstance(value, int) and not -(2**63) <= value < 2**63
    return f"a whole number of {value.bit_length()} bits" if is_long else value


def _key(key: Any) -> str:
    plain = isinstance(key, str | bool | float) or (isinstance(key, int) and abs(key) < 2**63)
    return _readable(str(key) if plain else _kind_in_brackets(key), _MOST_KEY_CHARS)


def _readable(text: str, most: int) -> str:
    """Cut a text, and replace halves of surrogate pairs, which no message can hold."""
    cut = text if len(text) <= most else f"{text[:most]}… {len(text) - most:,} more"
    return cut.encode("utf-8", "replace").decode()


def _kind_in_brackets(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _size(entry: dict[str, Any]) -> int:
    """Return the length of an entry in the text, without the braces and with a comma."""
    return len(msgspec.json.encode(entry).decode()) - 1
