"""How the trials of a run are played: episodes, sampling, what is said and what is kept."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from mage_async.completion import Sampling
from mage_async.environments.environment import Environment
from mage_async.trajectory import Guidance
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.experts import Experts
from mage_async.trials.prompts import Prompts, prompts_for


@dataclass(frozen=True, slots=True)
class TrialRules:
    """How trials are played: shared by all trials of a run."""

    num_episodes: int
    sampling: Sampling
    max_reflection_tokens: int
    parser: ActionParser
    prompts: Prompts
    keeps_history: bool
    """Earlier episodes stay in the context."""
    reflects: bool
    """The agent writes a remark between episodes, which is carried into new contexts."""
    fresh_keys: Literal["never", "episode", "turn"] = "never"
    """When cached keys of older weights are recomputed: as an episode begins, or at every turn."""
    turn_deadline_s: float = math.inf
    """A turn is given up that is not drawn by then."""
    stops_on_success: bool = False
    """An episode that is won ends the trial."""
    max_turns: int = 0
    """An episode ends after so many actions, with what it has earned; 0: when it is done."""
    strategy: Literal["none", "episode", "turn"] = "none"
    """Before which actions the agent writes what it means to do: SGE (arXiv 2603.02045) writes a
    strategy before each, drawn at a higher temperature than the action it conditions.
    """
    strategy_temperature: float = 1.0
    expert: Experts | None = None
    """The expert that is asked at every action; None: no expert."""
    rivals_remember: bool = False
    """A version of the policy in the opponent's seat remembers the trial's earlier episodes."""
    separates_exploration: bool = False
    """The last episode is played by the exploiter, all before by the explorer."""
    memory: int | None = None
    """Version of the graph memory that the prompts tell strategies of; None: of none."""

    def told_by(self, environment: Environment) -> "TrialRules":
        """The same rules in the words, and with the tools, of one part of a mix."""
        said = self._said(environment, self.num_episodes)
        parser = replace(self.parser, has_tools=bool(environment.tools))
        return replace(self, prompts=said, parser=parser)

    def under(self, environment: Environment, num_episodes: int, max_turns: int) -> "TrialRules":
        """The same rules with another horizon, which is also what the agent is told."""
        if (num_episodes, max_turns) == (self.num_episodes, self.max_turns):
            return self
        said = self._said(environment, num_episodes)
        return replace(self, num_episodes=num_episodes, max_turns=max_turns, prompts=said)

    def guided(self, guidance: Guidance | None) -> "TrialRules":
        """The same rules with strategies of earlier tasks, or without any."""
        text, version = (guidance.text, guidance.version) if guidance else ("", None)
        return replace(self, prompts=replace(self.prompts, guidance=text), memory=version)

    def _said(self, environment: Environment, num_episodes: int) -> Prompts:
        said = prompts_for(environment, num_episodes, rules=bool(self.prompts.rules))
        return replace(said, guidance=self.prompts.guidance)
