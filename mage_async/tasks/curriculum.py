"""The curriculum: the horizon of a group, as a function of the version it is granted at.

ScalingInter-RL (AgentGym-RL, arXiv 2509.08755): the most turns an episode may take grow in stages,
`h = rounds[min(step // steps, last)]` (`StepRoundsScheduler` of its code; `rounds` 10, 20, 30 and a
stage of 100 steps for WebArena, 6, 13, 20 for BabyAI): first learn what few turns can do, then
explore. Here the number of a trial's episodes may grow by the same rule.

An episode that is cut off keeps what it has earned. The grant carries the horizon and the journal
keeps the grant, so a group that is granted again, or trained after the next stage has begun, is of
one horizon all through; and since a stage depends on the version alone, a restarted learner goes on
where it was.
"""

from dataclasses import dataclass

from mage_async.config.schema import Curriculum, TrialShape
from mage_async.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Horizon:
    """What one group is played under."""

    num_episodes: int
    max_turns: int
    """Most actions of an episode; 0: as many as the environment allows."""


def horizon(rules: Curriculum | None, version: int, num_episodes: int) -> Horizon:
    """The horizon of a group granted at `version`.

    Args:
        num_episodes: of a trial, where the curriculum says nothing of episodes.
    """
    if rules is None:
        return Horizon(num_episodes, 0)
    stage = version // rules.steps
    return Horizon(
        _at(rules.episodes, stage) if rules.episodes else num_episodes,
        _at(rules.turns, stage) if rules.turns else 0,
    )


def check(rules: Curriculum | None, shape: TrialShape) -> None:
    """Refuse a curriculum that does not grow, or not to the configured trial.

    Raises:
        ConfigError: with the key, what was got and what to write.
    """
    if rules is None:
        return
    for name, stages in (("turns", rules.turns), ("episodes", rules.episodes)):
        if sorted(stages) != stages:
            raise ConfigError(f"curriculum.{name} must not shrink from stage to stage: {stages}")
    if rules.episodes and rules.episodes[-1] != shape.episodes:
        raise ConfigError(
            f"curriculum.episodes must end with trial.episodes = {shape.episodes}, "
            f"got {rules.episodes}"
        )


def _at(stages: list[int], stage: int) -> int:
    return stages[min(stage, len(stages) - 1)]
