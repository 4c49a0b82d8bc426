"""One episode of a class with `reset` and `step`: each is a call that is waited for elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2s

from mage_async.environments.calls import Call, SlowPlay, Take
from mage_async.environments.environment import PENDING, Chance, Outcome
from mage_async.environments.hosted.user_object import (
    Answered,
    Hosted,
    HostedClass,
    Method,
    Request,
)
from mage_async.trajectory import Task

INVALID = "invalid"
_NO_ACTION = "No action was found: write one between <action> and </action>."
_MOST_ANCHOR_CHARS = 200
_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Rules:
    """What all episodes of a class share."""

    hosted: HostedClass
    name: str
    max_turns: int
    has_words: bool
    """The vocabulary is closed, so refusals are the one word `invalid`."""


class ResetStepPlay(SlowPlay):
    """An episode; its object is made by the first call, and closed once by the last.

    Args:
        seed: for `reset`.
    """

    def __init__(self, rules: Rules, task: Task, episode: int, seed: int) -> None:
        self.chance = Chance(task.seed, episode)
        self.history: list[tuple[str, str]] = []
        """Actions with what they led to."""
        self._rules, self._task, self._episode = rules, task, episode
        self._hosted, self._seen = Hosted(rules.hosted), Answered()
        self._observation, self._num_turns = "", 0
        self.is_done = False
        self._call = self._called("reset", self._begun, seed=seed)

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
        said = self.last if self._seen.anchor is None else self._seen.anchor
        return said if len(said) <= _MOST_ANCHOR_CHARS else blake2s(said.encode()).hexdigest()

    def legal_actions(self) -> Sequence[str]:
        """The class's own; empty where it has none, or the episode is done."""
        return () if self.is_done else self._seen.legal_actions

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
        self._call = self._called("step", partial(self._stepped, action), action=action)
        return PENDING

    def _close(self) -> Call:
        """`close`, where an object may have been made."""
        return self._called("close", lambda answered: None)

    def _called(self, method: Method, take: Take, seed: int = 0, action: str = "") -> Call:
        shown = f"{action!r:.60}" if method == "step" else ""
        turn = f", turn {self._num_turns}" if self._num_turns else ""
        where = f"{self._rules.name}, task {self._task.member}, seed {self._task.seed}"
        place = f"{where}, episode {self._episode + 1}{turn}: {method}({shown})"
        request = Request(method, place, seed, self._task.member, self._episode, action)
        return Call(self._hosted, request, take)

    def _begun(self, answered: Answered) -> None:
        self._seen, self._observation = answered, answered.observation

    def _stepped(self, action: str, answered: Answered) -> Outcome:
        self._seen = answered
        self.is_done = answered.is_done or self._num_turns == self._rules.max_turns
        self.history.append((action, answered.observation))
        return answered.outcome(is_done=self.is_done)

    def _refusal(self, action: str) -> str:
        """Why an action is not handed to `step`; empty where it is."""
        legal = self.legal_actions()
        if self._rules.hosted.has_tools or (action and (not legal or action in legal)):
            return ""
        if self._rules.has_words:
            return INVALID
        shown = ", ".join(legal[:_MOST_SHOWN]) + (", …" if len(legal) > _MOST_SHOWN else "")
        return f"{action!r:.60} cannot be done now; these can: {shown}" if legal else _NO_ACTION
