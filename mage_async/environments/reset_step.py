"""A class with `reset` and `step` as an `Environment`: all else has a default.

Everything optional is declared on the class itself, as an attribute or a method; what `__init__`
sets is the object's own business. Each part switches something on, which
`docs/your_environment.md` lists.
"""

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2s
from typing import Any

from mage_async.environments.environment import (
    Belief,
    Environment,
    Facts,
    Play,
    Script,
    Split,
)
from mage_async.environments.hosted.user_object import HostedClass, Origin
from mage_async.environments.reset_step_play import INVALID, ResetStepPlay, Rules
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

NUM_TASKS: dict[Split, int] = {"train": 1024, "heldout": 256}
"""Tasks of a class without `members`: whole numbers, the held-out ones after the others."""
MAX_TURNS = 32
"""Steps of an episode, of a class without `max_turns`."""
_SPLITS: tuple[Split, Split] = ("train", "heldout")


class ResetStep(Environment):
    """The adapter of a user's class.

    Args:
        kind: the class.
        options: what its objects are made with.
        origin: what another process loads to have the same class; None: it cannot.

    Raises:
        ConfigError: what it declares is of a wrong type.
    """

    def __init__(
        self, kind: type, options: Mapping[str, Any], origin: Origin | None = None
    ) -> None:
        self.kind, self._make = kind, partial(kind, **options)
        self._name = str(self._declared("name", kind.__name__.lower()))
        words = self._words()
        self.tools = self._declared("offered_tools", ())
        self.ladders = self._declared("ladders", {})
        self.facts = Facts(
            name=self._name,
            num_seats=1,
            max_turns=self._declared("max_turns", MAX_TURNS),
            min_return=self._declared("min_return", None),
            max_return=self._declared("max_return", None),
            units=self._declared("units", 1),
            has_chance=True,
            words=(*words, INVALID) if words else (),
            has_open_text=not words,
            wins_above=self._declared("wins_above", 0.0),
            loses_below=self._declared("loses_below", 0.0),
        )
        parameters = inspect.signature(kind.reset).parameters
        self.hosted = HostedClass(
            kind,
            self._make,
            self._value,
            wants_episode="episode" in parameters,
            has_tools=bool(self.tools),
            origin=origin,
        )
        self._rules = Rules(self.hosted, self._name, self.facts.max_turns, bool(words))

    @cached_property
    def values(self) -> dict[Split, dict[str, Any]]:
        """Of each split, the tasks by name: what `reset` is given."""
        return {split: self._tasks(split) for split in _SPLITS}

    def members(self, split: Split) -> tuple[str, ...]:
        """The class's tasks, or whole numbers of which the two splits share none."""
        return tuple(self.values[split])

    def family(self, member: str) -> str:
        """The class's own kind of a task; without it all are of one."""
        return str(self._asked("family", "task", self._value(member)))

    def seats(self) -> tuple[int, ...]:
        """The agent is alone."""
        return (0,)

    def rules(self) -> str:
        """`rules`, as text or a method, or the docstring.

        Raises:
            ConfigError: there is neither.
        """
        own = self._asked("rules", None)
        said = inspect.cleandoc(str(own if own is not None else self.kind.__doc__ or ""))
        if not said:
            raise ConfigError(
                f"environment {self._name!r} does not say its rules: write a docstring, or `rules`"
            )
        return said

    def begin(self, task: Task, episode: int) -> ResetStepPlay:
        """An episode; its first call is `reset`, with the same seed in every episode."""
        return ResetStepPlay(self._rules, task, episode, self._seed(task))

    def script(self, source: random.Random) -> Script | None:
        """`script(source)`, a function from what was observed last to the next action."""
        choose = self._asked("script", None, source)
        return None if choose is None else _Script(choose)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """`swaps(task, split)`, or all other tasks of the split."""
        own = self._asked("swaps", None, self._value(member), split)
        if own is not None:
            return tuple(str(each) for each in own)
        return tuple(each for each in self.values[split] if each != member)

    def is_probe(self, action: str) -> bool:
        """Whether an action only buys information, where the class knows that."""
        return bool(self._asked("is_probe", False, action))

    def belief(self, split: Split) -> Belief | None:
        """`belief(split)`, a function from the episodes of a trial, each a list of actions with
        what was observed after them, to the probability of each task.
        """
        own = self._asked("belief", None, split)
        return None if own is None else partial(_believed, own)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Known values, where the class has some."""
        own = self._asked("references", {}, split, num_episodes)
        return {name: tuple(values) for name, values in own.items()}

    def _declared(self, name: str, default: Any) -> Any:
        return getattr(self.kind, name, default)

    def _asked(self, name: str, default: Any, *given: Any) -> Any:
        """What an optional method of the class answers, or an attribute of it."""
        if not hasattr(self.kind, name):
            return default
        found = getattr(self._own, name)
        return found(*given) if callable(found) else found

    @cached_property
    def _own(self) -> Any:
        """The object that is asked for optional parts; it is never reset."""
        return self._make()

    def _words(self) -> tuple[str, ...]:
        words = self._declared("words", ())
        if isinstance(words, str) or not isinstance(words, Sequence):
            raise ConfigError(
                f"environment {self._name!r}: `words` must be a tuple of words, got {words!r}"
            )
        for word in words:
            if not isinstance(word, str) or word.split() != [word]:
                raise ConfigError(
                    f"environment {self._name!r}: `words` must be words without spaces, "
                    f"got {word!r}"
                )
        return tuple(words)

    def _tasks(self, split: Split) -> dict[str, Any]:
        own = self._asked("members", None, split)
        if own is None:
            first = 0 if split == "train" else NUM_TASKS["train"]
            own = range(first, first + NUM_TASKS[split])
        return {str(each): each for each in own}

    def _value(self, member: str) -> Any:
        values = self.values
        return values["train"][member] if member in values["train"] else values["heldout"][member]

    def _seed(self, task: Task) -> int:
        """31 bits of the task's seed and member; no seed is one of both splits."""
        mixed = blake2s(f"{task.seed}/{task.member}".encode(), digest_size=8).digest()
        is_heldout = task.member in self.values["heldout"]
        return (int.from_bytes(mixed, "big") % 2**30) * 2 + is_heldout


@dataclass(frozen=True, slots=True)
class _Script:
    """A user's script; it sees what the agent sees."""

    choose_action: Any

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, ResetStepPlay)
        return self.choose_action(play.last)


def _believed(own: Any, plays: Sequence[Play]) -> Mapping[str, float]:
    histories = [play.history for play in plays if isinstance(play, ResetStepPlay)]
    return {str(member): share for member, share in own(histories).items()}
