"""Adapt a user's class with `reset` and `step` to `Environment`; everything else has a default.

Optional parts are declared on the class itself: `words` and numbers, such as `max_turns`, as
attributes, the others as an attribute or a method. Those that change within an episode, such as
`legal_actions`, may also be attributes that the object's methods set.
`docs/your_environment.md` lists what each part switches on.
"""

import difflib
import inspect
import numbers
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2s
from typing import Any

import numpy as np
from msgspec import structs

from mage_async.environments.environment import (
    Belief,
    Chance,
    Environment,
    Facts,
    Outcome,
    Play,
    Script,
    Split,
    is_finite,
    observation_fault,
    reward_fault,
    short_value,
)
from mage_async.environments.interchangeable_words import FORM, Exchange, WordSets, fault_of
from mage_async.environments.legal_pattern import matching_texts, pattern_fault
from mage_async.environments.user_calls import (
    Call,
    Callee,
    Method,
    MethodResult,
    Origin,
    Request,
    SlowPlay,
    as_config_error,
    info_text,
    says_no_room,
)
from mage_async.errors import CallFault, ConfigError, has_lone_surrogate, in_utf8
from mage_async.trajectory import Task
from mage_async.user_modules import attribute_names, place_of

NUM_TASKS: dict[Split, int] = {"train": 1024, "heldout": 256}
"""Number of tasks of a class without `members`, which are whole numbers: 0 to 1023 to train on, and
the 256 after them held out.
"""
MAX_TURNS = 32
"""Largest number of steps of an episode of a class without `max_turns`."""
SPLITS: tuple[Split, Split] = ("train", "heldout")

INVALID = "invalid"
"""Observation after a refused action, in an environment with a closed vocabulary."""
_NO_ACTION = "No action was found: write one between <action> and </action>."
_MOST_ANCHOR_CHARS = 200
"""Largest number of characters of an anchor; a longer one is shortened by a digest."""
_MOST_WORD_CHARS = 60
"""Largest number of characters of a word that stays in a shortened anchor."""
_MOST_SHOWN = 20
"""Largest number of legal actions that are listed when another action is refused."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
"""Address in memory, as the default text of objects and functions has it."""
_OWN_KEYS = ("is_valid", "tool_answers")
"""Keys of `info` that the record of a turn stores in fields of their own."""
_ORDER = "observation, reward, terminated[, truncated, info]"
"""Order of the values that `step` returns, for errors."""
_RESET = ("seed", "task", "episode")
"""Names of the parameters of `reset`, in the order in which they are passed."""
_PARAMETERS = {
    "members": ("split",),
    "script": ("source",),
    "family": ("task",),
    "swaps": ("task", "split"),
    "references": ("split", "num_episodes"),
    "belief": ("split",),
    "is_probe": ("action",),
}
"""Names of the parameters of optional methods, in the order in which they are passed."""
_CHANGING_PARTS = ("legal_actions", "legal_pattern", "anchor")
"""Optional parts that an object's methods may set."""
_WINS = ("wins_above", "loses_below", "win_reward")
"""Optional parts that say which episodes are won and lost."""
OPTIONAL_PARTS = (
    *_CHANGING_PARTS,
    *("words", "script", "members", "max_turns", "rules", "references", "min_return", "max_return"),
    *("family", "swaps", "belief", "ladders", "close", "units", "is_probe"),
    "interchangeable",
    *_WINS,
)
"""Optional parts of a class."""
_LIKENESS = 0.85
"""Smallest ratio of `difflib` at which a name is a misspelt part: `max_turn` and `maxturns` are,
`world` (for `words`) and `clone` (for `close`) are not.
"""


class ResetStepPlay(SlowPlay):
    """Play one episode of a user's class."""

    def __init__(self, environment: "ResetStep", task: Task, episode: int) -> None:
        self._environment = environment
        self.chance = Chance(task.seed, episode)
        self.history: list[tuple[str, str]] = []
        """Actions, each with the observation that followed it."""
        facts, seed = environment.facts, environment.seed_of(task)
        self.exchange = environment.exchange_of(seed)
        """Words that this trial reads and writes instead of the class's own; None: the same."""
        super().__init__(UserObject(environment), facts.name, task, episode, seed, facts.max_turns)

    @property
    def last(self) -> str:
        """The last observation."""
        return self.history[-1][1] if self.history else self._observation

    def own(self, text: str) -> str:
        """Return a text that the agent reads or writes in the class's own words."""
        return text if self.exchange is None else self.exchange.to_own(text)

    def own_last(self) -> str:
        """Return the last observation in the class's own words."""
        return self.own(self.last)

    def own_history(self) -> list[tuple[str, str]]:
        """Return `history` in the class's own words."""
        return [(self.own(action), self.own(seen)) for action, seen in self.history]

    @property
    def anchor(self) -> str:
        """The class's own `anchor`, or the last observation. If it is long, a digest replaces all
        between its first and its last word.
        """
        text = self.last if self._last_result.anchor is None else self._last_result.anchor
        if len(text) <= _MOST_ANCHOR_CHARS:
            return text
        # Win-stay, lose-shift compares states by these words too (`win_stay.py`).
        words, digest = text.split() or [""], blake2s(text.encode()).hexdigest()
        return f"{words[0]:.{_MOST_WORD_CHARS}} {digest} {words[-1]:.{_MOST_WORD_CHARS}}"

    def legal_actions(self) -> Sequence[str]:
        """Return the class's own legal actions, or texts that match its pattern (`matching_texts`);
        empty if it declares neither, or the episode is done.
        """
        if self.is_done:
            return ()
        if self.legal_pattern is not None:
            return matching_texts(self.legal_pattern, self._environment.facts.words)
        return self._last_result.legal_actions or ()

    @property
    def legal_pattern(self) -> str | None:
        """The regular expression that the class's legal actions match now; `None` if it declares
        none.
        """
        return self._last_result.legal_pattern

    def next_call(self) -> Call | None:
        """Return the call that the play waits for. If the environment has a listener, it sees the
        result before the play does.
        """
        call, listener = super().next_call(), self._environment.listener
        if call is None or listener is None:
            return call
        return replace(call, take=partial(_show_and_take, listener, call))

    def act(self, action: str) -> Outcome:
        """Request a step. An empty action, or an action that is not among known legal ones, is
        refused here without a call, and uses up the turn.
        """
        if not (refusal := self.refusal(action)):
            return super().act(self.own(action))
        self._num_turns += 1
        self.is_done = self._num_turns == self._max_turns
        self.history.append((action, refusal))
        return Outcome(refusal, 0.0, is_valid=False, is_done=self.is_done)

    def _take_reset(self, result: MethodResult) -> None:
        super()._take_reset(self._shown(result))
        self._check_can_go_on()

    def _take_step(self, action: str, result: MethodResult) -> Outcome:
        if self.exchange is not None:
            action, result = self.exchange.to_shown(action), self._shown(result)
        self.history.append((action, result.outcome.observation))
        outcome = super()._take_step(action, result)
        self._check_can_go_on()
        return outcome

    def _shown(self, result: MethodResult) -> MethodResult:
        """Return a result of the class in the words that the agent reads."""
        if self.exchange is None:
            return result
        to_shown, outcome, legal = self.exchange.to_shown, result.outcome, result.legal_actions
        if legal:
            # Not in the class's order: the place of an action would tell the word of the class.
            shown = set(map(to_shown, legal))
            kept = [action for action in legal if action in shown]
            legal = (*kept, *sorted(shown.difference(kept)))
        outcome = replace(
            outcome,
            observation=to_shown(outcome.observation),
            tool_answers=tuple(map(to_shown, outcome.tool_answers)),
        )
        return structs.replace(result, outcome=outcome, legal_actions=legal)

    def _check_can_go_on(self) -> None:
        """Raise a `CallFault` if the class lists no action for the next turn of an episode."""
        if not self.is_done and self._last_result.legal_actions == ():
            kind = self._environment.kind
            raise CallFault(
                f"{self._where}, turn {self._num_turns + 1}: {kind.__name__}."
                "legal_actions lists no action, and the episode is not over: list one, end the "
                f"episode, or return None where any text is an action{place_of(kind)}"
            )

    def refusal(self, action: str) -> str:
        """Return why an action is not passed to `step`; "" if it is."""
        legal, pattern = self._last_result.legal_actions or (), self.legal_pattern
        if pattern is not None:
            is_legal = re.fullmatch(pattern, action) is not None
        else:
            is_legal = bool(action) and (not legal or action in legal)
        # With tools, any text is an action: calls of tools, or the answer that ends the episode.
        if self._environment.tools or is_legal:
            return ""
        # A sentence would have words that are not in a closed vocabulary.
        if self._environment.facts.words:
            return INVALID
        if pattern is not None:
            return f"{action!r:.60} cannot be done now; it must match {pattern}"
        shown = ", ".join(legal[:_MOST_SHOWN]) + (", …" if len(legal) > _MOST_SHOWN else "")
        return f"{action!r:.60} cannot be done now; these can: {shown}" if legal else _NO_ACTION


def _show_and_take(
    listener: Callable[[Call, MethodResult], None], call: Call, result: MethodResult
) -> Outcome | None:
    """Show a call and its result to a listener, and hand the result to the play."""
    listener(call, result)
    return call.take(result)


class UserObject(Callee):
    """Hold an object of a user's class. The first call creates the object, because a constructor
    may be as slow as a step.

    The object is closed exactly once, in one of three ways:

    - by the call `close`;
    - after `reset`, if `close` was requested before `reset` had returned;
    - by `late_close`, if the last call left the object open: a plain call cannot await a `close`
      that is a coroutine function, and a call may raise after `close` was requested.
    """

    def __init__(self, environment: "ResetStep") -> None:
        self.environment = environment
        self._object: Any = None
        self._last_legal: tuple[str, ...] | None = None
        """Legal actions after the last call."""
        # Holds the object until it is closed. `pop` is atomic, so only one of two threads that
        # close the object at the same time calls its `close`.
        self._to_close: list[Any] = []
        self._is_over = False
        """Whether `close` was called."""

    def is_async(self, method: Method) -> bool:
        """Return whether the class's method is a coroutine function."""
        return inspect.iscoroutinefunction(getattr(self.environment.kind, method, None))

    def perform(self, request: Request) -> Any:
        """Make a call; see `Callee.perform`."""
        if self.is_async(request.method):
            return self._perform_async(request)
        try:
            value = self._call(request)
        except Exception as error:  # the border to foreign code; raised again
            if says_no_room(error):
                self._close_unless_async()
                self._object = None  # `reset` is tried again with a new object
            raise
        if self._is_over:
            self._close_unless_async()
        return self._checked_result(request, value)

    async def _perform_async(self, request: Request) -> MethodResult:
        """Make a call whose method is a coroutine function."""
        try:
            value = await _awaited(self._call(request))
        except Exception as error:  # the border to foreign code; raised again
            if says_no_room(error):
                await self._close_if_open()
                self._object = None
            raise
        if self._is_over:
            await self._close_if_open()
        return self._checked_result(request, value)

    def late_close(self) -> Callable[[], Any] | None:
        """Return a coroutine function that closes the object, if the last call has left it open;
        otherwise None.
        """
        is_left_open = bool(self._to_close) and (self._is_over or self._object is None)
        return self._close_if_open if is_left_open else None

    async def _close_if_open(self) -> None:
        """Close the object, if it is open."""
        await _awaited(self._close_object())

    def _close_unless_async(self) -> None:
        """Close the object, unless only an event loop can."""
        if not self.is_async("close"):
            self._close_object()

    def _call(self, request: Request) -> Any:
        """Call the user's method; create the object first, if there is none."""
        if request.method == "close":
            self._is_over = True
            return self._close_object()
        if self._object is None:
            self._object = self.environment.make()
            if callable(getattr(self._object, "close", None)):
                self._to_close.append(self._object)
        if request.method == "step":
            self._check_still_legal(request)
            return self._object.step(request.action)
        arguments = [request.seed, self.environment.value_of(request.member)]
        if self.environment.wants_episode:
            arguments.append(request.episode)
        return self._object.reset(*arguments)

    def _check_still_legal(self, request: Request) -> None:
        """Raise a `CallFault` if an action is not legal any more that was legal after the last
        call.
        """
        before, now = self._last_legal, self._legal_actions(request.place)
        if before and request.action in before and now and request.action not in now:
            raise CallFault(
                f"{request.place}: legal_actions listed {request.action!r:.60} when the action was "
                f"requested, and {now!r:.100} when `step` was called: change the list only in "
                "`reset` and `step`"
            )

    def _close_object(self) -> Any:
        """Call `close` if there is an object to close; return its result."""
        try:
            own = self._to_close.pop()
        except IndexError:
            return None
        return own.close()

    def _checked_result(self, request: Request, value: Any) -> MethodResult:
        """Check the result of a method, and convert it to plain data."""
        if request.method == "close":
            return MethodResult()
        try:
            return self._converted(request, value)
        except CallFault as fault:
            line = place_of(getattr(self.environment.kind, request.method))
            wrong = str(fault).removeprefix(request.place).strip()
            raise CallFault(f"{fault}{line}", fault.kind, wrong) from fault

    def _converted(self, request: Request, value: Any) -> MethodResult:
        """Convert the result of `reset` or `step` to plain data.

        Raises:
            CallFault: the result does not follow the protocol.
        """
        if request.method == "reset":
            observation, reward, is_done = _reset_value(request.place, value), 0.0, False
            info: Mapping[str, Any] = {}
        else:
            observation, reward, is_done, info = _step_value(request.place, value)
        is_valid = bool(info.get("is_valid", True))
        # The `step` of a class with tools is made by `tools.py` and always returns this key. After
        # `reset` there is no `info`.
        tool_answers = tuple(info["tool_answers"]) if self.environment.tools and info else ()
        text = info_text({key: each for key, each in info.items() if key not in _OWN_KEYS})
        anchor = None if is_done else self._optional("anchor")
        self._last_legal = None if is_done else self._legal_actions(request.place)
        return MethodResult(
            Outcome(observation, reward, is_valid, is_done, tool_answers, text),
            None if anchor is None else in_utf8(str(anchor)),
            self._last_legal,
            None if is_done else self._legal_pattern(request.place),
        )

    def _legal_pattern(self, place: str) -> str | None:
        """Return the pattern of the actions that are legal now; None if there is none.

        Raises:
            CallFault: the pattern is no regular expression, actions cannot be sampled from it, or
                the class lists legal actions too.
        """
        if (pattern := self._optional("legal_pattern")) is None:
            return None
        what = (
            f"{place} must be followed by a legal_pattern that is a regular expression or None, "
            f"got {pattern!r:.60}"
        )
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        # `re` compiles bytes too.
        if not isinstance(text, str):
            raise CallFault(f"{what}: give it as a text")
        try:
            flags = re.compile(text).flags
        except re.error as error:
            raise CallFault(f"{what}: {error}") from error
        # Only the text is sent to the sampler; other flags of a compiled pattern would be lost.
        if isinstance(pattern, re.Pattern) and pattern.flags != flags:
            raise CallFault(f"{what}: write its flags into the text, such as (?i)")
        if fault := pattern_fault(text):
            raise CallFault(f"{place}: {fault}")
        if self._last_legal:
            raise CallFault(
                f"{place} is followed by both legal_actions, such as {self._last_legal[0]!r:.60}, "
                f"and the legal_pattern {text!r:.60}, of which only one can hold: leave one out, "
                "or let it be None for this turn"
            )
        return text

    def _legal_actions(self, place: str) -> tuple[str, ...] | None:
        """Return the actions that the class lists now; None if it has no list of legal actions.

        Raises:
            CallFault: the class's `legal_actions` are no list of texts.
        """
        listed = self._optional("legal_actions")
        if listed is None:
            return None
        what = f"{place} must be followed by legal_actions that are a list of texts or None"
        # A text is also a sequence of texts, its letters.
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise CallFault(f"{what}, got {listed!r:.60}")
        # A property or a method may give a new iterator each time; an attribute cannot.
        # `getattr_static` is asked last, because it takes longer than all else of a call.
        if isinstance(listed, Iterator) and isinstance(
            inspect.getattr_static(self._object, "legal_actions", None), Iterator
        ):
            raise CallFault(f"{what}, got an iterator, which can be read only once: write a tuple")
        actions = tuple(listed)
        if wrong := [each for each in actions if not isinstance(each, str)]:
            raise CallFault(f"{what}, got {wrong[0]!r:.60} among them")
        if has_lone_surrogate("".join(actions)):
            first = next(filter(has_lone_surrogate, actions))
            raise CallFault(
                f"{what}, got {first!r:.60}, which has half of a surrogate pair: no tokenizer "
                "reads it"
            )
        if isinstance(listed, set | frozenset):  # its order differs between processes
            actions = tuple(sorted(actions))
        # A subclass, such as NumPy's, becomes a plain `str`. Each action is listed once: an
        # inventory may hold two equal things, and random play would draw their action twice as
        # often.
        return tuple(dict.fromkeys(map(str, actions)))

    def _optional(self, name: str) -> Any:
        """Return an optional attribute, property or method result; None if there is none."""
        found = getattr(self._object, name, None)
        return found() if callable(found) else found


async def _awaited(value: Any) -> Any:
    """Return a value or, if it is awaitable, its result."""
    return await value if inspect.isawaitable(value) else value


# The functions below check the values of `reset` and `step`: Gymnasium's order, text as
# observation.


def _reset_value(place: str, value: Any) -> str:
    """Return the observation from `observation` or `(observation, info)`.

    Raises:
        CallFault: the value is neither.
    """
    return _text(place, value[0] if isinstance(value, tuple) and len(value) == 2 else value)


def _step_value(place: str, value: Any) -> tuple[str, float, bool, Mapping[str, Any]]:
    """Return observation, reward, whether the episode is done, and info from the value of `step`.

    A truncated episode is done, like a terminated one: the rewards that were cut off are not
    estimated in its return.

    Raises:
        CallFault: the value is not `observation, reward, terminated[, truncated, info]`.
    """
    if not isinstance(value, tuple) or not 3 <= len(value) <= 5:
        got = f"{len(value)} values" if isinstance(value, tuple) else short_value(value)
        raise CallFault(f"{place} must return {_ORDER}, got {got}")
    # NumPy's `bool_` is neither a number nor a `bool`.
    plain: list[Any] = [each.item() if isinstance(each, np.generic) else each for each in value]
    observation, reward, terminated, *rest = plain
    if len(rest) == 1 and isinstance(rest[0], Mapping):
        raise CallFault(
            f"{place} must return {_ORDER}, got the four values of old Gym, of which the last is "
            "info: put False as truncated before info, or leave info out"
        )
    # `truncated` and `info` may be left out.
    truncated = rest[0] if rest else False
    info = rest[1] if len(rest) == 2 else {}
    if fault := reward_fault(reward):
        raise CallFault(f"{place} {fault}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool):
            raise CallFault(f"{place} must return True or False as {name}, got {flag!r:.60}")
    if not isinstance(info, Mapping):
        raise CallFault(f"{place} must return a dictionary as info, got {short_value(info)}")
    return _text(place, observation), float(reward), bool(terminated) or bool(truncated), info


def _text(place: str, value: Any) -> str:
    """Return an observation without spaces at its ends; raise a `CallFault` if it is no valid
    one.
    """
    if fault := observation_fault(value):
        raise CallFault(f"{place} {fault}")
    return str(value).strip()


def _example(listed: Any) -> str:
    """Return the first action of a list that a class declares as an attribute; "" without one."""
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str) and bool(listed)
    return str(listed[0]) if is_list else ""


# The functions below find misspelt names of optional parts.


def _misspelt_parts(kind: type) -> Iterator[tuple[str, str]]:
    """Yield misspelt optional parts: attributes that nothing in the class's module reads, each with
    the part of almost the same name that the class lacks.
    """
    # Base classes of a library have attributes for other purposes.
    own = [each for each in kind.__mro__ if each.__module__ == kind.__module__]
    declared = {
        name
        for each in own
        for name, value in vars(each).items()
        if not name.startswith("_")
        and not hasattr(getattr(value, "__func__", value), "is_offered_tool")
    }
    module = sys.modules.get(kind.__module__, kind)
    others = [each for each in vars(module).values() if inspect.isclass(each)]
    owners = {*own, *(each for each in others if each.__module__ == kind.__module__)}
    read, stored = (attribute_names((*owners, module), action) for action in ("LOAD", "STORE"))
    known = {*read, *OPTIONAL_PARTS, "reset", "step"}
    for names, parts in ((declared, OPTIONAL_PARTS), (stored - declared, _CHANGING_PARTS)):
        for name in sorted(names - known):
            for meant in difflib.get_close_matches(name, parts, n=1, cutoff=_LIKENESS):
                # A part that a method sets is not missing.
                if meant not in stored and _is_missing(meant, name, kind, own):
                    yield name, meant


def _is_missing(part: str, name: str, kind: type, own: Iterable[type]) -> bool:
    """Return whether a class lacks an optional part.

    Args:
        part: The optional part.
        name: An attribute of the class, with almost the same name.
        own: The class `kind`, and the base classes that are defined in the same module.
    """
    declaring = [each for each in own if part in vars(each)]
    if not declaring:
        # A part that a class of a library declares is left alone: it may mean something else there.
        return not hasattr(kind, part)
    # If one class declares the part and the attribute, the attribute is no misspelling. If a base
    # class declares the part, and a subclass the attribute, the subclass may have meant to replace
    # the part.
    return all(name not in vars(each) for each in declaring)


@dataclass(slots=True)
class _Script:
    """Run a user's script, which sees only the observations of the agent."""

    choose_action: Any
    wants_ended: bool
    """Whether the script has a parameter `ended`, for the last observation of the previous episode.
    No action follows that observation, so the script would not see it otherwise."""
    _play: ResetStepPlay | None = None
    """Play for which the latest action was chosen."""

    def choose(self, play: Play) -> str:
        """Return the next action."""
        assert isinstance(play, ResetStepPlay)
        previous, self._play = self._play, play
        if not self.wants_ended:
            action: str = self.choose_action(play.own_last())
        else:
            # The first call of an episode gets the last observation of the previous episode.
            ended = "" if previous is None or previous is play else previous.own_last()
            action = self.choose_action(play.own_last(), ended=ended)
        # Anything but text is left to the caller, which refuses it.
        if play.exchange is None or not isinstance(action, str):
            return action
        return play.exchange.to_shown(action)


def _takes_ended(function: Any) -> bool:
    """Return whether a function has a parameter `ended`."""
    with suppress(ValueError):  # a function of C without a signature
        return "ended" in inspect.signature(function).parameters
    return False


def _believed(own: Any, plays: Sequence[Play]) -> Mapping[str, float]:
    """Return the posterior of a user's Bayes filter, which reads the plays' histories."""
    histories = [play.own_history() for play in plays if isinstance(play, ResetStepPlay)]
    return {str(member): probability for member, probability in own(histories).items()}


class ResetStep(Environment):
    """Adapt a user's class to the protocol of environments.

    Args:
        kind: The class.
        options: Arguments of its constructor.
        origin: Name and options with which another process loads the same class; None if it cannot.

    Raises:
        ConfigError: a declaration has the wrong type.
    """

    def __init__(
        self, kind: type, options: Mapping[str, Any], origin: Origin | None = None
    ) -> None:
        self.kind, self.options, self.origin = kind, options, origin
        self.make = partial(kind, **options)
        self.listener: Callable[[Call, MethodResult], None] | None = None
        """Called with each call of a trial that has returned, and its result."""
        declared = partial(getattr, kind)
        reset = declared("reset", None)
        self.wants_episode = bool(reset) and "episode" in inspect.signature(reset).parameters
        """Whether `reset` takes the number of the episode too."""
        self._name = str(declared("name", kind.__name__.lower()))
        self._check_methods()
        self._check_attributes()
        words = self._checked_words(declared("words", ()))
        self.interchangeable = self._checked_exchange(declared("interchangeable", None), words)
        """Sets of words that training exchanges; see `interchangeable_words.py`."""
        self.tools = declared("offered_tools", ())
        self.ladders = declared("ladders", {})
        self.facts = Facts(
            name=self._name,
            max_turns=self._count("max_turns", MAX_TURNS),
            min_return=self._number("min_return", None),
            max_return=self._number("max_return", None),
            units=self._count("units", 1),
            has_chance=True,
            words=(*words, INVALID) if words else (),
            example=_example(declared("legal_actions", ())),
            # Results of tools, and errors about calls of them, are sentences.
            has_open_text=not words or bool(self.tools),
            has_wins=any(declared(each, None) is not None for each in _WINS),
            wins_above=self._number("wins_above", 0.0),
            loses_below=self._number("loses_below", 0.0),
            win_reward=self._number("win_reward", None),
        )

    @cached_property
    def values(self) -> dict[Split, dict[str, Any]]:
        """For each split, the argument of `reset` for each task name."""
        found = dict[Split, dict[str, Any]]()
        for split in SPLITS:
            with as_config_error(self._name, f"members({split!r})"):
                found[split] = self._tasks(split)
        return found

    def value_of(self, member: str) -> Any:
        """Return the task argument of `reset` for a task's name."""
        train, heldout = (self.values[split] for split in SPLITS)
        return train[member] if member in train else heldout[member]

    def seed_of(self, task: Task) -> int:
        """Return the seed for `reset`: 31 bits, computed from the task's seed and name. The lowest
        bit is 1 for held-out tasks, so the two splits share no seed.
        """
        mixed = blake2s(f"{task.seed}/{task.member}".encode(), digest_size=8).digest()
        is_heldout = task.member in self.values["heldout"]
        return (int.from_bytes(mixed, "big") % 2**30) * 2 + is_heldout

    def exchange_of(self, seed: int) -> Exchange | None:
        """Return the words that the trials of a training task read and write; None for held-out
        tasks, and if no words are interchangeable.

        Args:
            seed: The seed that `seed_of` returns.
        """
        if seed % 2 or not self.interchangeable:  # held-out tasks have the odd seeds
            return None
        return Exchange(self.interchangeable, seed)

    def members(self, split: Split) -> tuple[str, ...]:
        """Return the class's tasks, or whole numbers that differ between the splits."""
        return tuple(self.values[split])

    def family(self, member: str) -> str:
        """Return the class's own kind of a task; without it, all tasks are of one kind."""
        return str(self._optional("family", "task", self.value_of(member)))

    def seats(self) -> tuple[int, ...]:
        """Return the only seat."""
        return (0,)

    def rules(self) -> str:
        """Return the class's `rules`, a text or a method, or without them its docstring.

        Raises:
            ConfigError: the class has neither `rules` nor a docstring.
        """
        own = self._optional("rules", None)
        text = inspect.cleandoc(str(own if own is not None else inspect.getdoc(self.kind) or ""))
        if not text:
            raise ConfigError(
                f"environment {self._name!r} does not say its rules: write a docstring, or `rules`"
            )
        return text

    def begin(self, task: Task, episode: int) -> ResetStepPlay:
        """Create an episode; its first call is `reset`, with the same seed in every episode."""
        return ResetStepPlay(self, task, episode)

    def script(self, source: random.Random) -> Script | None:
        """Return a script that calls the function which the class's `script(source)` returns. The
        function maps the last observation to the next action; see `_Script` for `ended`.

        Raises:
            ConfigError: the class's `script` returns something else.
        """
        choose = self._optional("script", None, source)
        if choose is not None and not callable(choose):
            expected = "a function from the last observation to the next action, or None"
            raise self._wrong_result("script(source)", expected, choose)
        return None if choose is None else _Script(choose, _takes_ended(choose))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return `swaps(task, split)`, or all other tasks of the split."""
        own = self._optional("swaps", None, self.value_of(member), split)
        if own is not None:
            return tuple(str(each) for each in own)
        return tuple(each for each in self.values[split] if each != member)

    def is_probe(self, action: str) -> bool:
        """Return whether an action only buys information, if the class declares that."""
        return bool(self._optional("is_probe", False, action))

    def belief(self, split: Split) -> Belief | None:
        """Return `belief(split)`, a function from the episodes of a trial, each a list of actions
        and the observations that followed them, to the probability of each task.
        """
        own = self._optional("belief", None, split)
        return None if own is None else partial(_believed, own)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return the returns that the class declares as known; {} if it declares none.

        Raises:
            ConfigError: the class's `references` are no numbers by name.
        """
        own = self._optional("references", {}, split, num_episodes)
        call = f"references({split!r}, {num_episodes})"
        if not isinstance(own, Mapping):
            raise self._wrong_result(call, "a dictionary", own)
        known: dict[str, tuple[float, ...]] = {}
        for name, values in own.items():
            found = tuple(values) if isinstance(values, Iterable) else (values,)
            if len(found) != num_episodes or not all(map(is_finite, found)):
                expected = f"{num_episodes} numbers, one per episode"
                raise self._wrong_result(f"{call}[{name!r}]", expected, values)
            known[str(name)] = tuple(map(float, found))  # NumPy's become plain ones
        return known

    @cached_property
    def set_by_methods(self) -> set[str]:
        """Names of the optional parts that methods of the class set on its objects, such as
        `self.legal_actions`. The class itself may lack them.
        """
        return attribute_names(self.kind.__mro__, "STORE") & {*_CHANGING_PARTS}

    @cached_property
    def actions_of_every_turn(self) -> tuple[str, ...] | str | None:
        """The legal actions, or a pattern of them, that the class declares as an attribute and that
        none of its methods sets; `None` if they may change from turn to turn, or if any text is an
        action.
        """
        stored = self.set_by_methods
        for name in ("legal_pattern", "legal_actions"):
            found = getattr(self.kind, name, None)
            if found is None and name not in stored:
                continue
            if name in stored or self.tools:
                return None
            if isinstance(found, re.Pattern):
                return str(found.pattern)
            if isinstance(found, str):
                return found
            return tuple(map(str, found)) if isinstance(found, list | tuple) else None
        return None

    def _optional(self, name: str, default: Any, *given: Any) -> Any:
        """Return the result of an optional method of the class, or an optional attribute."""
        if not hasattr(self.kind, name):
            return default
        found = getattr(self._declaring_object, name)
        if found is None:  # a subclass sets a part of its base class to None to be without it
            return default
        return found(*given) if callable(found) else found

    @cached_property
    def _declaring_object(self) -> Any:
        """Object whose optional attributes and methods are read; it plays no episode."""
        # The object is never closed, because its `close` may rely on a `reset` before it.
        return self.make()

    def _check_methods(self) -> None:
        """Check the parameters of the class's methods.

        Raises:
            ConfigError: a method cannot take the arguments that a trial passes.
        """
        self._check_takes("reset", _RESET[:2], _RESET)
        self._check_takes("step", ("action",))
        for part, names in _PARAMETERS.items():
            if hasattr(self.kind, part):
                self._check_takes(part, names)

    def _check_takes(self, method: str, *parameter_lists: tuple[str, ...]) -> None:
        """Check that a method can be called with the arguments that a trial passes.

        Args:
            parameter_lists: Possible lists of the method's parameters, without `self`. Only `reset`
                has two: without and with `episode`.

        Raises:
            ConfigError: the method cannot be called so; the message has the signature to write.
        """
        own = getattr(self.kind, method)
        if not inspect.isfunction(inspect.getattr_static(self.kind, method, None)):
            return  # a static method, or a callable object: a wrong call raises its own error
        signature = inspect.signature(own)
        is_longer = method == "reset" and self.wants_episode
        names = parameter_lists[-1] if is_longer else parameter_lists[0]
        declared = [*signature.parameters][1:]  # without `self`, which may have been forgotten
        # Whether a parameter has the name of another one, as in `reset(self, task, seed)`.
        is_swapped = any(
            own_name != name and own_name in parameter_lists[-1]
            for own_name, name in zip(declared, names, strict=False)
        )
        # `bind` calls nothing, so any object serves as the instance, and a name as each argument.
        try:
            if is_swapped:
                raise TypeError
            signature.bind(self, *names)
        except TypeError:
            line = " or ".join(f"def {method}(self, {', '.join(each)})" for each in parameter_lists)
            raise ConfigError(
                f"environment {self._name!r}: {method}{signature} of {self.kind.__name__} must be "
                f"{line}{place_of(own)}"
            ) from None

    def _check_attributes(self) -> None:
        """Check that no attribute has the misspelt name of an optional part.

        Raises:
            ConfigError: an attribute has such a name, and neither the class nor its module reads
                it.
        """
        # Without this check a misspelt part would be ignored silently. If it was `legal_actions`,
        # any text would be an action.
        for name, meant in _misspelt_parts(self.kind):
            raise ConfigError(
                f"environment {self._name!r}: nothing reads {self.kind.__name__}.{name} (did you "
                f"mean `{meant}`?); begin the name with an underscore if it is your own"
            )

    def _count(self, name: str, default: int) -> int:
        """Return a declared count; raise a `ConfigError` if it is no whole number from 1."""
        value = getattr(self.kind, name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, "a whole number from 1", value)
        return value

    def _number(self, name: str, default: float | None) -> Any:
        """Return a declared number; raise a `ConfigError` if it is none. If the default is None,
        the class may declare None too.
        """
        value = getattr(self.kind, name, default)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number and (value is not None or default is not None):
            raise self._wrong(
                name, "a number" if default is not None else "a number or None", value
            )
        return value

    def _wrong(self, name: str, expected: str, value: Any, cure: str = "") -> ConfigError:
        """Return the error about a part that is declared with a value of another type."""
        got = f"{value!r:.60}"
        if callable(value) or isinstance(value, property | cached_property):
            got = f"a method: the class itself is read, so write `{name} = ...` with the value"
        return ConfigError(
            f"environment {self._name!r}: `{name}` must be {expected}, got {got}{cure}"
            f"{place_of(self.kind)}"
        )

    def _wrong_result(self, call: str, expected: str, value: Any) -> ConfigError:
        """Return the error about the result of a method of the class."""
        got = f"{value!r:.60}"
        return ConfigError(f"environment {self._name!r}: {call} must be {expected}, got {got}")

    def _checked_words(self, words: Any) -> tuple[str, ...]:
        """Return the declared words; raise a `ConfigError` if they are no words."""
        if isinstance(words, str) or not isinstance(words, Sequence):
            raise self._wrong("words", "a tuple of words", words)
        for word in words:
            if not isinstance(word, str) or word.split() != [word]:
                several = " and ".join(map(repr, str(word).split()))
                cure = f": list {several} in its place" if several else ""
                raise self._wrong("words", "words without spaces", word, cure)
            if has_lone_surrogate(word):
                raise self._wrong("words", "words without half of a surrogate pair", word)
        return tuple(words)

    def _checked_exchange(self, sets: Any, words: tuple[str, ...]) -> WordSets:
        """Return the declared sets of interchangeable words; raise a `ConfigError` if they cannot
        be exchanged.
        """
        if sets is None:
            return ()
        if not isinstance(sets, list | tuple):
            raise self._wrong("interchangeable", FORM, sets)
        if fault := fault_of(sets, words):
            raise ConfigError(
                f"environment {self._name!r}: `interchangeable` {fault}{place_of(self.kind)}"
            )
        pattern = getattr(self.kind, "legal_pattern", None)
        if pattern is not None or "legal_pattern" in self.set_by_methods:
            raise ConfigError(
                f"environment {self._name!r}: `interchangeable` words cannot be exchanged in a "
                f"`legal_pattern`: list `legal_actions`, or leave one out{place_of(self.kind)}"
            )
        return tuple(map(tuple, sets))

    def _tasks(self, split: Split) -> dict[str, Any]:
        """Return the tasks of a split: those of the class, or whole numbers. The text of a task is
        its name.

        Raises:
            ConfigError: `members` returns no list, two tasks have the same text, or the text of a
                task has an address in memory, which differs between processes.
        """
        first = 0 if split == "train" else NUM_TASKS["train"]
        own = self._optional("members", range(first, first + NUM_TASKS[split]), split)
        if isinstance(own, str) or not isinstance(own, Iterable):
            raise self._wrong_result(f"members({split!r})", "a list of tasks", own)
        if isinstance(own, set | frozenset):  # its order differs between processes
            own = sorted(own, key=str)
        tasks: dict[str, Any] = {}
        for each in own:
            name = str(each)
            where = f"environment {self._name!r}: members({split!r}) lists"
            if _ADDRESS.search(name):
                raise ConfigError(
                    f"{where} {name:.60}, whose text has its address in memory, which other "
                    "processes do not know: give its class a `__str__`, or list texts"
                )
            if name in tasks:
                raise ConfigError(
                    f"{where} {tasks[name]!r:.60} and {each!r:.60}, which have the same text: a "
                    "run knows a task by its text, so list each text once"
                )
            tasks[name] = each
        return tasks
