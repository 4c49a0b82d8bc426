"""Let the horizon of trials grow in stages: ScalingInter-RL (AgentGym-RL, arXiv 2509.08755).

An episode has at most `h = turns[min(version // steps, last)]` actions, as in the authors'
`StepRoundsScheduler` (8, 12, 15 in stages of 80 steps for WebArena; in stages of 100 steps 10, 20,
30 for SciWorld and TextCraft, 6, 13, 20 for BabyAI and 5, 8, 10 for search). The policy first
learns what few turns can do, and explores later. Here the number of episodes of a trial may grow by
the same rule. An episode that is cut off keeps what it has earned.

A stage depends on the version at the grant alone, the grant carries the horizon, and the journal
keeps the grant. So a group has one horizon even where it is granted again or trained in the next
stage, and a restarted learner goes on where it was.
"""

from typing import ClassVar

from msgspec import field

from mage_async.config.section import Count, Section
from mage_async.errors import ConfigError
from mage_async.methods.method import Horizon, Method, overriding


class Settings(Section):
    """A horizon that grows with the policy version (ScalingInter-RL, arXiv 2509.08755)."""

    steps: Count = 20
    """Steps that a stage lasts; the last stage lasts to the end of the run."""
    turns: list[Count] = field(default_factory=list)
    """Largest number of actions of an episode, by stage; []: as many as the environment allows."""
    episodes: list[Count] = field(default_factory=list)
    """Episodes of a trial, by stage; the last stage must have `trial.episodes`. []: all stages have
    `trial.episodes`."""


class ScalingInter(Method):
    """Give each group the horizon of its stage."""

    Settings = Settings
    presets: ClassVar = {
        "scaling_inter": {
            "methods.scaling_inter.turns": [8, 12, 15],
            "methods.scaling_inter.steps": 80,
        }
    }

    def check(self) -> None:
        """Check that the stages grow to the configured trial, and that no opponent remembers
        episodes that the stages would end early.

        Raises:
            ConfigError: there are no stages, they shrink, their turns limit no episode, their
                episodes do not end with `trial.episodes`, or there are turns although the opponent
                is a policy that remembers earlier episodes.
        """
        settings, num_episodes = self.settings, self.config.trial.episodes
        if not settings.turns and not settings.episodes:
            raise ConfigError(
                "methods.scaling_inter has neither turns nor episodes, so no horizon would grow: "
                "set one of them, such as methods.scaling_inter.turns=[4, 8], or leave the method "
                "out"
            )
        for name, stages in (("turns", settings.turns), ("episodes", settings.episodes)):
            if sorted(stages) != stages:
                raise ConfigError(
                    f"methods.scaling_inter.{name} must not shrink from stage to stage: {stages}"
                )
        longest = self.environment.facts.max_turns
        if settings.turns and settings.turns[0] >= longest:
            raise ConfigError(
                f"methods.scaling_inter.turns = {settings.turns} limits nothing: episodes of "
                f"{self.environment.facts.name!r} have at most {longest} turns; begin with fewer, "
                "such as half of them, or leave the key out"
            )
        if settings.episodes and settings.episodes[-1] != num_episodes:
            raise ConfigError(
                f"methods.scaling_inter.episodes must end with trial.episodes = {num_episodes}, "
                f"got {settings.episodes}"
            )
        self_playing = overriding(self.config, "self_play_share")
        if settings.turns and (self_playing or self.config.population.rivals_remember):
            others = "".join(f" and leave methods.{name} out" for name in self_playing)
            raise ConfigError(
                "methods.scaling_inter.turns ends an episode for the agent alone, but here the "
                "opponent remembers the episode and has to finish it before the next one: leave "
                f"the key out, or set population.rivals_remember = false{others}"
            )

    def horizon(self, version: int, horizon: Horizon) -> Horizon:
        """Return the horizon of the stage that a version lies in.

        Args:
            horizon: The configured horizon; a stage without a value of its own keeps it.
        """
        settings = self.settings
        stage = version // settings.steps
        return Horizon(
            _at(settings.episodes, stage) if settings.episodes else horizon.num_episodes,
            _at(settings.turns, stage) if settings.turns else horizon.max_turns,
        )


def _at(stages: list[int], stage: int) -> int:
    """Return the value of a stage; after the last stage, the last value."""
    return stages[min(stage, len(stages) - 1)]
