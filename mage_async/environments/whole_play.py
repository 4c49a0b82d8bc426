"""Plays of the whole protocol whose `begin` and `act` are calls that are waited for elsewhere."""

from collections.abc import Sequence
from functools import partial

from mage_async.environments.calls import Call, SlowPlay, Take
from mage_async.environments.environment import PENDING, Chance, Environment, Outcome, Play
from mage_async.environments.hosted.hosted_play import HostedPlay
from mage_async.environments.hosted.user_object import Answered, Method, Request
from mage_async.environments.mix.parts import part_of
from mage_async.trajectory import Task


class WholePlay(SlowPlay):
    """An episode; its first call begins the play, and the others are its actions.

    Args:
        name: of the environment, for people.
    """

    def __init__(self, hosted: HostedPlay, name: str, task: Task, episode: int) -> None:
        self._hosted, self._seen, self._observation = hosted, Answered(), ""
        self._where = f"{name}, task {task.member}, seed {task.seed}, episode {episode + 1}"
        self._num_turns = 0
        self.is_done = False
        self._call = self._called("reset", "begin()", self._begun)

    @property
    def own(self) -> Play:
        """The environment's play, which its scripts and filters know; once it has begun."""
        return self._hosted.play

    @property
    def chance(self) -> Chance:  # type: ignore[override]
        """That of the environment's play."""
        return self.own.chance

    @property
    def observation(self) -> str:
        """What the agent sees first."""
        return self._observation

    @property
    def anchor(self) -> str:
        """The play's own, after its last action."""
        return self._seen.anchor or ""

    def legal_actions(self) -> Sequence[str]:
        """The play's own."""
        return () if self.is_done else self.own.legal_actions()

    def act(self, action: str) -> Outcome:
        """Ask for the action."""
        assert not self.is_done, "the episode is done"
        self._num_turns += 1
        self._call = self._called("step", f"act({action!r:.60})", self._acted, action)
        return PENDING

    def _close(self) -> Call:
        """The end of the play's lease."""
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
    """A play as its environment wants to be called; a fast one has begun, others wait for calls."""
    if part_of(environment, task.member).called == "at_once":
        return environment.begin(task, episode)
    return whole_play(environment, task, episode)


def whole_play(environment: Environment, task: Task, episode: int) -> WholePlay:
    """A play whose calls are waited for elsewhere, however its environment wants to be called."""
    part = part_of(environment, task.member)
    name = part.facts.name
    hosted = HostedPlay(
        partial(environment.begin, task, episode), name if part.called == "in_turn" else ""
    )
    return WholePlay(hosted, name, task, episode)


def own_play(play: Play) -> Play:
    """A play as the environment knows it, for a script or a filter of its own."""
    return play.own if isinstance(play, WholePlay) else play
