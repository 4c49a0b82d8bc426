"""A duel as each side sees it."""

from collections.abc import Sequence

from mage_async.environments.environment import PENDING, Duel, Environment, Outcome, Play, Side
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task
from mage_async.trials.environment_faults import environment_speaking


def duel_of(environment: Environment, task: Task, episode: int) -> Duel:
    """An episode in which both sides are asked.

    Raises:
        EnvironmentFault: there is no seat for a rival.
    """
    with environment_speaking(task):
        duel = environment.duel(task, episode)
    if duel is None:
        raise EnvironmentFault(f"{task.environment}: nobody can play the opponent's seat")
    return duel


def fault_of_silence(task: Task, side: str) -> EnvironmentFault:
    """An episode was over before a side could act, so nothing of it can be credited to that side.

    Args:
        side: `the agent` or `the other seat`.
    """
    return EnvironmentFault(
        f"{task.environment}, seed {task.seed}: an episode against {task.member!r} was over before "
        f"{side} could act"
    )


class SidePlay(Play):
    """A duel as one side's `Play`."""

    def __init__(self, duel: Duel, side: Side) -> None:
        self._duel, self._side, self.chance = duel, side, duel.chance

    @property
    def observation(self) -> str:
        """What the side was told before its first action; it is told once."""
        return self._duel.hear(self._side).observation

    @property
    def anchor(self) -> str:
        return self._duel.anchor(self._side)

    def legal_actions(self) -> Sequence[str]:
        return self._duel.legal_actions() if self._duel.turn == self._side else ()

    def act(self, action: str) -> Outcome:
        """The answer comes when it is this side's turn again, or all is done."""
        self._duel.act(action)
        return PENDING
