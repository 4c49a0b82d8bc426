"""Adapter of a user's class with `reset` and `step` to `Environment`; everything else has a
default.

Optional parts are declared on the class itself, as an attribute or a method; attributes that
`__init__` sets are private to the object. `docs/your_environment.md` lists what each part switches
on.
"""

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2s
from typing import Any

from mage_async.environments.environment import (
    PENDING,
    Belief,
    Chance,
    Environment,
    Facts,
    Outcome,
    Play,
    Script,
    Split,
)
from mage_async.environments.user_calls import (
    Answered,
    Call,
    Hosted,
    HostedClass,
    Method,
    Origin,
    Request,
    SlowPlay,
    Take,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

NUM_TASKS: dict[Split, int] = {"train": 1024, "heldout": 256}
"""Number of tasks of a class without `members`: whole numbers, the held-out ones after the
others.
"""
MAX_TURNS = 32
"""Steps of an episode of a class without `max_turns`."""
_SPLITS: tuple[Split, Split] = ("train", "heldout")

INVALID = "invalid"
_NO_ACTION = "No action was found: write one between <action> and </action>."
_MOST_ANCHOR_CHARS = 200
_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings shared by all episodes of a class."""

    hosted: HostedClass
    name: str
    max_turns: int
    has_words: bool
    """Whether the vocabulary is closed; a refusal is then the one word `invalid`."""


class ResetStepPlay(SlowPlay):
    """One episode. Its first call creates and resets the user's object, its last call closes the
    object.

    Args:
        seed: passed to `reset`.
    """

    def __init__(self, settings: EpisodeSettings, task: Task, episode: int, seed: int) -> None:
        self.chance = Chance(task.seed, episode)
        self.history: list[tuple[str, str]] = []
        """Actions with the observations that followed them."""
        self._settings, self._task, self._episode = settings, task, episode
        self._hosted, self._seen = Hosted(settings.hosted), Answered()
        self._observation, self._num_turns = "", 0
        self.is_done = False
        self._call = self._call_of("reset", self._begun, seed=seed)

    @property
    def observation(self) -> str:
        """The observation that `reset` returned."""
        return self._observation

    @property
    def last(self) -> str:
        """The last observation."""
        return self.history[-1][1] if self.history else self._observation

    @property
    def anchor(self) -> str:
        """The class's own `anchor`, or the last observation; a digest of it if it is long."""
        text = self.last if self._seen.anchor is None else self._seen.anchor
        return text if len(text) <= _MOST_ANCHOR_CHARS else blake2s(text.encode()).hexdigest()

    def legal_actions(self) -> Sequence[str]:
        """Return the class's own legal actions; empty if it declares none, or the episode is
        done.
        """
        return () if self.is_done else self._seen.legal_actions

    def act(self, action: str) -> Outcome:
        """Request a step. An empty action, or an action that is not among known legal ones, is
        refused here without a call, and uses up the turn.
        """
        assert not self.is_done, "the episode is done"
        self._num_turns += 1
        if refusal := self._refusal(action):
            self.is_done = self._num_turns == self._settings.max_turns
            self.history.append((action, refusal))
            return Outcome(refusal, 0.0, is_valid=False, is_done=self.is_done)
        self._call = self._call_of("step", partial(self._stepped, action), action=action)
        return PENDING

    def _close(self) -> Call:
        """Return the call of `close`."""
        return self._call_of("close", lambda answered: None)

    def _call_of(self, method: Method, take: Take, seed: int = 0, action: str = "") -> Call:
        shown = f"{action!r:.60}" if method == "step" else ""
        turn = f", turn {self._num_turns}" if self._num_turns else ""
        where = f"{self._settings.name}, task {self._task.member}, seed {self._task.seed}"
        place = f"{where}, episode {self._episode + 1}{turn}: {method}({shown})"
        request = Request(method, place, seed, self._task.member, self._episode, action)
        return Call(self._hosted, request, take)

    def _begun(self, answered: Answered) -> None:
        self._seen, self._observation = answered, answered.observation

    def _stepped(self, action: str, answered: Answered) -> Outcome:
        self._seen = answered
        self.is_done = answered.is_done or self._num_turns == self._settings.max_turns
        self.history.append((action, answered.observation))
        return answered.outcome(is_done=self.is_done)

    def _refusal(self, action: str) -> str:
        """Return why an action is not passed to `step`; empty if it is."""
        legal = self.legal_actions()
        if self._settings.hosted.has_tools or (action and (not legal or action in legal)):
            return ""
        if self._settings.has_words:
            return INVALID
        shown = ", ".join(legal[:_MOST_SHOWN]) + (", …" if len(legal) > _MOST_SHOWN else "")
        return f"{action!r:.60} cannot be done now; these can: {shown}" if legal else _NO_ACTION


@dataclass(frozen=True, slots=True)
class _Script:
    """A user's script, which sees only what the agent sees."""

    choose_action: Any

    def choose(self, play: Play) -> str:
        """Return the next action."""
        assert isinstance(play, ResetStepPlay)
        return self.choose_action(play.last)


def _believed(own: Any, plays: Sequence[Play]) -> Mapping[str, float]:
    histories = [play.history for play in plays if isinstance(play, ResetStepPlay)]
    return {str(member): share for member, share in own(histories).items()}


class ResetStep(Environment):
    """The adapter of a user's class.

    Args:
        kind: the class.
        options: arguments of its constructor.
        origin: what another process loads to have the same class; `None` if it cannot.

    Raises:
        ConfigError: a declaration has the wrong type.
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
        self._settings = EpisodeSettings(self.hosted, self._name, self.facts.max_turns, bool(words))

    @cached_property
    def values(self) -> dict[Split, dict[str, Any]]:
        """For each split, the argument of `reset` for each task name."""
        return {split: self._tasks(split) for split in _SPLITS}

    def members(self, split: Split) -> tuple[str, ...]:
        """Return the class's tasks, or whole numbers that differ between the splits."""
        return tuple(self.values[split])

    def family(self, member: str) -> str:
        """Return the class's own kind of a task; without it, all tasks are of one kind."""
        return str(self._optional("family", "task", self._value(member)))

    def seats(self) -> tuple[int, ...]:
        """Return the only seat."""
        return (0,)

    def rules(self) -> str:
        """Return `rules`, text or a method, or the docstring.

        Raises:
            ConfigError: there is neither.
        """
        own = self._optional("rules", None)
        text = inspect.cleandoc(str(own if own is not None else self.kind.__doc__ or ""))
        if not text:
            raise ConfigError(
                f"environment {self._name!r} does not say its rules: write a docstring, or `rules`"
            )
        return text

    def begin(self, task: Task, episode: int) -> ResetStepPlay:
        """Create an episode; its first call is `reset`, with the same seed in every episode."""
        return ResetStepPlay(self._settings, task, episode, self._seed(task))

    def script(self, source: random.Random) -> Script | None:
        """Return `script(source)`, a function from the last observation to the next action."""
        choose = self._optional("script", None, source)
        return None if choose is None else _Script(choose)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return `swaps(task, split)`, or all other tasks of the split."""
        own = self._optional("swaps", None, self._value(member), split)
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
        """Return the class's known values, if it has some."""
        own = self._optional("references", {}, split, num_episodes)
        return {name: tuple(values) for name, values in own.items()}

    def _declared(self, name: str, default: Any) -> Any:
        return getattr(self.kind, name, default)

    def _optional(self, name: str, default: Any, *given: Any) -> Any:
        """Return the result of an optional method of the class, or an optional attribute."""
        if not hasattr(self.kind, name):
            return default
        found = getattr(self._own, name)
        return found(*given) if callable(found) else found

    @cached_property
    def _own(self) -> Any:
        """An object for optional parts; it is never reset."""
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
        own = self._optional("members", None, split)
        if own is None:
            first = 0 if split == "train" else NUM_TASKS["train"]
            own = range(first, first + NUM_TASKS[split])
        return {str(each): each for each in own}

    def _value(self, member: str) -> Any:
        values = self.values
        return values["train"][member] if member in values["train"] else values["heldout"][member]

    def _seed(self, task: Task) -> int:
        """Return 31 bits from the task's seed and name; the two splits share no seed."""
        mixed = blake2s(f"{task.seed}/{task.member}".encode(), digest_size=8).digest()
        is_heldout = task.member in self.values["heldout"]
        return (int.from_bytes(mixed, "big") % 2**30) * 2 + is_heldout
