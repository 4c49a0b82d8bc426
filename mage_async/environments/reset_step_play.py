"""One episode of a class with `reset` and `step`: each is a call that is waited for elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2s
from inspect import iscoroutinefunction
from typing import Any

from mage_async.environments.calls import Call, SlowPlay
from mage_async.environments.environment import PENDING, Chance, Outcome
from mage_async.environments.info import info_text
from mage_async.environments.step_values import reset_value, step_value
from mage_async.trajectory import Task

INVALID = "invalid"
_NO_ACTION = "No action was found: write one between <action> and </action>."
_MOST_ANCHOR_CHARS = 200
_MOST_SHOWN = 20
_READ_HERE = ("is_valid", "tool_answers")
"""Parts of `info` that say something to us; the record of a turn has them elsewhere."""
Take = Callable[[str, Any], Outcome | None]
"""Takes the place of a call and what it returned."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What all episodes of a class share."""

    kind: type
    make: Callable[[], Any]
    """Makes an object of the class; every episode has its own."""
    name: str
    max_turns: int
    has_words: bool
    """The vocabulary is closed, so refusals are the one word `invalid`."""
    wants_episode: bool
    """`reset` takes the number of the episode too."""
    has_tools: bool = False
    """A step reads calls of tools in all that was said, whatever it is."""


class ResetStepPlay(SlowPlay):
    """An episode; its object is made by the first call, and closed once by the last.

    Args:
        seed: for `reset`.
        value: of the task, for `reset`.
    """

    def __init__(self, rules: Rules, task: Task, episode: int, seed: int, value: Any) -> None:
        self.chance = Chance(task.seed, episode)
        self.history: list[tuple[str, str]] = []
        """Actions with what they led to."""
        self._rules, self._task, self._episode = rules, task, episode
        self._own: Any = None
        self._observation, self._num_turns = "", 0
        self.is_done = self._is_closed = False
        given = (seed, value, episode) if rules.wants_episode else (seed, value)
        self._call: Call | None = self._called("reset", given, self._begun)

    @property
    def observation(self) -> str:
        """What `reset` returned."""
        return self._observation

    @property
    def last(self) -> str:
        """What was observed last."""
        return self.history[-1][1] if self.history else self._observation

    @property
    def anchor(self) -> str:
        """The class's own `anchor`, or what was observed last; a digest of it where it is long."""
        own = _attribute(self._own, "anchor")
        said = self.last if own is None else str(own)
        return said if len(said) <= _MOST_ANCHOR_CHARS else blake2s(said.encode()).hexdigest()

    def legal_actions(self) -> Sequence[str]:
        """The class's own; empty where it has none, or the episode is done."""
        return () if self.is_done else tuple(_attribute(self._own, "legal_actions") or ())

    def act(self, action: str) -> Outcome:
        """Ask for a step. What is no action, or no legal one where those are known, is answered
        here: it uses up the turn.
        """
        assert not self.is_done, "the episode is done"
        self._num_turns += 1
        if refusal := self._refusal(action):
            self.is_done = self._num_turns == self._rules.max_turns
            self.history.append((action, refusal))
            return Outcome(refusal, 0.0, is_valid=False, is_done=self.is_done)
        self._call = self._called("step", (action,), partial(self._stepped, action))
        return PENDING

    def next_call(self) -> Call | None:
        """`reset`, or `step` after an action."""
        call, self._call = self._call, None
        return call

    def closing(self) -> Call | None:
        """`close`, where the class has it and an object was made."""
        is_open = self._own is not None and not self._is_closed
        if not is_open or not callable(getattr(self._own, "close", None)):
            return None
        self._is_closed = True
        return self._called("close", (), lambda place, value: None)

    def _called(self, method: str, given: tuple[Any, ...], take: Take) -> Call:
        shown = f"{given[0]!r:.60}" if method == "step" else ""
        turn = f", turn {self._num_turns}" if self._num_turns else ""
        where = f"{self._rules.name}, task {self._task.member}, seed {self._task.seed}"
        place = f"{where}, episode {self._episode + 1}{turn}: {method}({shown})"
        is_async = iscoroutinefunction(getattr(self._rules.kind, method))
        ask = self._awaited if is_async else self._asked
        return Call(place, method, partial(ask, method, *given), is_async, partial(take, place))

    def _asked(self, method: str, *given: Any) -> Any:
        return getattr(self._object(), method)(*given)

    async def _awaited(self, method: str, *given: Any) -> Any:
        return await getattr(self._object(), method)(*given)

    def _object(self) -> Any:
        """Made where it is used first: a constructor may be as slow as a step."""
        if self._own is None:
            self._own = self._rules.make()
        return self._own

    def _begun(self, place: str, value: Any) -> None:
        self._observation = reset_value(place, value)

    def _stepped(self, action: str, place: str, value: Any) -> Outcome:
        step = step_value(place, value)
        self.is_done = step.is_done or self._num_turns == self._rules.max_turns
        self.history.append((action, step.observation))
        is_valid = bool(step.info.get("is_valid", True))
        answers = tuple(step.info["tool_answers"]) if self._rules.has_tools else ()
        info = {key: value for key, value in step.info.items() if key not in _READ_HERE}
        said = info_text(info)
        return Outcome(step.observation, step.reward, is_valid, self.is_done, answers, said)

    def _refusal(self, action: str) -> str:
        """Why an action is not handed to `step`; empty where it is."""
        legal = self.legal_actions()
        if self._rules.has_tools or (action and (not legal or action in legal)):
            return ""
        if self._rules.has_words:
            return INVALID
        shown = ", ".join(legal[:_MOST_SHOWN]) + (", …" if len(legal) > _MOST_SHOWN else "")
        return f"{action!r:.60} cannot be done now; these can: {shown}" if legal else _NO_ACTION


def _attribute(own: Any, name: str) -> Any:
    """An optional attribute, property or method of an object; None where there is none."""
    found = getattr(own, name, None)
    return found() if callable(found) else found
