"""One object of a user's class, where its calls are made: a thread, an event loop or a process.

All that is foreign is looked at there. What comes back is plain and checked, so an event loop never
waits for a user's property, and it can cross to another process as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Literal

import msgspec

from mage_async.environments.environment import Outcome
from mage_async.environments.hosted.info import info_text
from mage_async.environments.hosted.step_values import Step, reset_value, step_value

Method = Literal["reset", "step", "close"]
_READ_HERE = ("is_valid", "tool_answers")
"""Parts of `info` that say something to us; the record of a turn has them elsewhere."""
_NO_ROOM = ("CapacityReached", "CapacityError")


@dataclass(frozen=True, slots=True)
class Origin:
    """What another process loads to have the same class."""

    name: str
    """As the configuration says it."""
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HostedClass:
    """What all objects of a class share."""

    kind: type
    make: Callable[[], Any]
    """Makes an object of the class; every episode has its own."""
    value_of: Callable[[str], Any]
    """What `reset` is given as task, by the member's name."""
    wants_episode: bool = False
    """`reset` takes the number of the episode too."""
    has_tools: bool = False
    """A step answers calls of tools."""
    origin: Origin | None = None
    """None where the class was made in this process alone."""


class Request(msgspec.Struct, frozen=True):
    """One call, by value."""

    method: Method
    place: str
    """The environment, task, episode and turn, and what is called; every fault begins with it."""
    seed: int = 0
    member: str = ""
    episode: int = 0
    action: str = ""


class Answered(msgspec.Struct, frozen=True):
    """What a call returned, and what the object then says of itself."""

    observation: str = ""
    reward: float = 0.0
    is_valid: bool = True
    is_done: bool = False
    tool_answers: tuple[str, ...] = ()
    info: str = ""
    """A JSON object, or empty."""
    anchor: str | None = None
    """The class's own; None where it has none, or the episode is done."""
    legal_actions: tuple[str, ...] = ()

    def outcome(self, *, is_done: bool) -> Outcome:
        """What came of an action; `is_done` is the play's word, which may know a limit of turns."""
        return Outcome(
            self.observation, self.reward, self.is_valid, is_done, self.tool_answers, self.info
        )


class Hosted:
    """An object of a class, made by its first call: a constructor may be as slow as a step.

    It is closed once: by `close`, or, where that came while `reset` had not returned yet, then; by
    what is `owed`, where a plain call would have to await it.
    """

    turn_of = ""
    """Calls need not be made one after another."""

    def __init__(self, rules: HostedClass) -> None:
        self.rules = rules
        self._own: Any = None
        self._to_close: list[Any] = []
        """The object, until it is closed; taking it out is atomic."""
        self._is_over = False

    def is_async(self, method: Method) -> bool:
        """Whether the class's method is a coroutine function."""
        return iscoroutinefunction(getattr(self.rules.kind, method, None))

    def named(self, method: Method) -> str:
        """What the protocol calls a method."""
        return method

    def asked(self, request: Request) -> Answered:
        """Make a call of a plain method.

        Raises:
            CallFault: the value is not what the protocol asks for; else whatever the class raises.
        """
        try:
            value = self._called(request)
        except Exception as error:  # the border to foreign code; raised again
            if finds_no_room(error):
                self._leave()
                self._own = None  # another try makes another object
            raise
        if self._is_over:
            self._leave()
        return self._answered(request, value)

    async def awaited(self, request: Request) -> Answered:
        """As `asked`, where the method is a coroutine function."""
        try:
            value = await _awaited(self._called(request))
        except Exception as error:  # the border to foreign code; raised again
            if finds_no_room(error):
                await _awaited(self._closed())
                self._own = None
            raise
        if self._is_over:
            await _awaited(self._closed())
        return self._answered(request, value)

    def owed(self) -> Callable[[], Any] | None:
        """What has to be awaited after a plain call: the `close` of an object that the call left
        open, where that is a coroutine function. None: nothing.
        """
        has_left = bool(self._to_close) and (self._is_over or self._own is None)
        return self._close_left if has_left else None

    async def _close_left(self) -> None:
        await _awaited(self._closed())

    def _leave(self) -> None:
        """Close the object, unless only an event loop can."""
        if not self.is_async("close"):
            self._closed()

    def _called(self, request: Request) -> Any:
        if request.method == "close":
            self._is_over = True
            return self._closed()
        if self._own is None:
            self._own = self.rules.make()
            if callable(getattr(self._own, "close", None)):
                self._to_close.append(self._own)
        return getattr(self._own, request.method)(*self._given(request))

    def _closed(self) -> Any:
        """What `close` returned, where there was something to close."""
        try:
            own = self._to_close.pop()
        except IndexError:
            return None
        return own.close()

    def _given(self, request: Request) -> tuple[Any, ...]:
        if request.method == "step":
            return (request.action,)
        given = (request.seed, self.rules.value_of(request.member))
        return (*given, request.episode) if self.rules.wants_episode else given

    def _answered(self, request: Request, value: Any) -> Answered:
        if request.method == "close":
            return Answered()
        if request.method == "reset":
            return self._seen(Step(reset_value(request.place, value), 0.0, False, {}))
        return self._seen(step_value(request.place, value))

    def _seen(self, step: Step) -> Answered:
        answers = tuple(step.info["tool_answers"]) if self.rules.has_tools and step.info else ()
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
        """An optional attribute, property or method; None where there is none."""
        found = getattr(self._own, name, None)
        return found() if callable(found) else found


def finds_no_room(error: BaseException) -> bool:
    """Whether a class says that there is no room for another object, in words of its own."""
    return any(kind.__name__ in _NO_ROOM for kind in type(error).__mro__)


async def _awaited(value: Any) -> Any:
    return await value if isawaitable(value) else value
