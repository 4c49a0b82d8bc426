"""A class with `reset` and tools as one with `reset` and `step`: a step makes the calls of a turn.

What the agent may do wrong is answered: an unknown tool, arguments that do not follow the schema, a
call that cannot be read. What a tool raises is the environment's fault and costs the group.
"""

from collections.abc import Callable, Generator
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any

import msgspec

from mage_async.environments.tools.declare import Tool, tools_of
from mage_async.environments.tools.parse import NoCall, ToolCall, parse_calls, without_end
from mage_async.errors import ConfigError

MAX_CALLS = 16
"""Calls of one turn; a policy that writes more is told so."""
_OVER = "The episode is over."
StepValue = tuple[str, float, bool, bool, dict[str, Any]]
Turn = Generator[Callable[[], Any], Any, StepValue]
"""Yields what has to be called, takes what it returned, returns what a step returns."""


def with_step(kind: type) -> type:
    """A class with `step` added, and with `offered_tools`, the schemas of its tools.

    Raises:
        ConfigError: it has a `step` of its own, or no `score`.
    """
    tools = tools_of(kind)
    if callable(getattr(kind, "step", None)):
        raise ConfigError(f"{kind.__name__}: has tools and `step`; a class has one of the two")
    if not callable(getattr(kind, "score", None)):
        raise ConfigError(f"{kind.__name__}: has tools and no `score()`, which says what it earned")
    others = (getattr(kind, name, None) for name in ("score", "answer"))
    is_async = any(each.is_async for each in tools.values()) or any(map(_is_async, others))

    def step(self: Any, action: str) -> StepValue:
        turn, made = _turn(self, tools, action), None
        while True:
            try:
                call = turn.send(made)
            except StopIteration as end:
                return end.value
            made = call()

    async def async_step(self: Any, action: str) -> StepValue:
        turn, made = _turn(self, tools, action), None
        while True:
            try:
                call = turn.send(made)
            except StopIteration as end:
                return end.value
            made = call()
            made = await made if isawaitable(made) else made

    added = {
        "step": async_step if is_async else step,
        "offered_tools": tuple(each.schema for each in tools.values()),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "_earned": 0.0,
    }
    return type(kind.__name__, (kind,), added)


def _turn(own: Any, tools: dict[str, Tool], said: str) -> Turn:
    calls = parse_calls(said)
    if calls:
        answers, is_valid = yield from _answers(own, tools, calls)
        is_done, observation = _is_done(own), "\n".join(answers)
    else:
        answers, is_valid, is_done = [], True, True
        observation = yield from _final(own, without_end(said).strip())
    score = yield own.score
    reward, own._earned = score - own._earned, score
    info = {"is_valid": is_valid, "tool_answers": answers}
    return observation, reward, is_done, False, info


def _answers(
    own: Any, tools: dict[str, Tool], calls: list[ToolCall | NoCall]
) -> Generator[Callable[[], Any], Any, tuple[list[str], bool]]:
    """What each call led to, in order, and whether all could be made."""
    answers, is_valid = list[str](), True
    for number, call in enumerate(calls):
        if _is_done(own):
            answers.append(_OVER)
            continue
        wrong, function = _checked(own, tools, call)
        if number == MAX_CALLS:
            return [*answers, f"Not called: a turn has at most {MAX_CALLS} calls."], False
        if function is None:
            answers.append(wrong)
            is_valid = False
        else:
            answers.append(_text((yield function)))
    return answers, is_valid


def _checked(
    own: Any, tools: dict[str, Tool], call: ToolCall | NoCall
) -> tuple[str, Callable[[], Any] | None]:
    """What is wrong with a call, or what it calls."""
    if isinstance(call, NoCall):
        return f"Error: {call.why}.", None
    if call.name not in tools:
        return f"Error: there is no tool {call.name!r:.60}; there are {', '.join(tools)}.", None
    try:
        arguments = tools[call.name].read(call.arguments)
    except msgspec.ValidationError as error:
        return f"Error: {call.name}: {error}.", None
    return "", partial(getattr(own, call.name), **arguments)


def _final(own: Any, said: str) -> Generator[Callable[[], Any], Any, str]:
    """An answer without a call ends the episode; `answer(text)` takes it, where there is one."""
    if not callable(getattr(own, "answer", None)):
        return _OVER
    told = yield partial(own.answer, said)
    return _OVER if told is None else _text(told)


def _is_done(own: Any) -> bool:
    found = getattr(own, "is_done", False)
    return bool(found() if callable(found) else found)


def _is_async(method: Any) -> bool:
    return iscoroutinefunction(method)


def _text(value: Any) -> str:
    """Text as it is, all else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
