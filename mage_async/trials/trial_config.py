"""Define the settings of trials: episodes, sampling, and what stays in the context."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from mage_async.completion import Sampling
from mage_async.environments.environment import Environment, Facts
from mage_async.methods.method import Advisers
from mage_async.trajectory import Guidance, SecondRole
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.prompts import Prompts, prompts_for


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """Hold settings shared by all trials of a run."""

    num_episodes: int
    sampling: Sampling
    max_reflection_tokens: int
    """Largest number of tokens of a remark: a reflection, a strategy or notes."""
    parser: ActionParser
    prompts: Prompts
    keeps_history: bool
    """Whether earlier episodes stay in the context."""
    reflects: bool
    """Whether the agent writes a remark after each episode but the last. Later contexts begin with
    these remarks.
    """
    refresh_kv: Literal["never", "episode", "turn"] = "never"
    """When cached keys and values of older weights are recomputed: at the start of an episode, or
    at every turn.
    """
    turn_deadline_s: float = math.inf
    """Seconds after which a turn without a completion is given up."""
    stops_on_success: bool = False
    """Whether a won episode ends the trial."""
    max_turns: int = 0
    """Number of actions after which an episode ends, with its return so far; 0: no limit."""
    episode_budget: int = 0
    """Largest number of actions of a trial, in units of `Facts.max_turns`; they may be spent in up
    to `num_episodes` episodes. No limit if it is 0, or not below `num_episodes`.
    """
    strategy: Literal["none", "episode", "turn"] = "none"
    """When the agent writes a strategy: never, before the first action of an episode, or before
    every action.
    """
    strategy_temperature: float = 1.0
    """Sampling temperature of strategies."""
    advisers: Advisers | None = None
    """Creates the adviser that proposes an alternative to each action; `None`: there is no
    adviser.
    """
    max_tokens: int = 0
    """Largest context of the engine, in tokens, which the episodes of a trial share; 0: no limit.
    """
    restricted: bool = False
    """Whether actions are sampled from the legal ones alone, where the environment lists them or
    declares a pattern of them.
    """
    resumes: bool = True
    """Whether another process may continue a trial after its finished episodes. This needs an
    environment whose episodes depend on task and number alone, not on earlier episodes.
    """
    rivals_remember: bool = False
    """Whether a past policy in the opponent's seat remembers the trial's earlier episodes."""
    second_role: SecondRole | None = None
    """Says which turns the policy's second role takes; `None`: the policy has one role."""
    guidance_version: int | None = None
    """Version of the guidance that the prompts begin with; `None`: there is no guidance."""
    compaction: Literal["none", "notes", "truncation"] = "none"
    """How the trial continues when a context would outgrow `room`. "notes": in a new context that
    begins with notes, which the agent has written. "truncation": in a new context with the newest
    turns that fit. "none": not at all; the episode ends.
    """
    room: int = 0
    """Longest context, in tokens, where `compaction` is not "none"."""

    def blind(self) -> "TrialConfig":
        """Return the settings of the control `blind`: an episode begins without the history, the
        remarks and the notes of earlier ones. Notes within an episode stay.
        """
        return replace(self, keeps_history=False, reflects=False)

    def episodes_left(self, episode: int, num_actions: int, facts: Facts) -> int:
        """Return for how many more episodes the trial's budget of turns suffices, if each episode
        takes `facts.max_turns`; 0 at the end of the trial. If episodes are shorter, more of them
        follow, up to `num_episodes` in all.

        Args:
            episode: number of the episode that would begin next.
            num_actions: number of actions of the trial so far.
            facts: facts of the environment.
        """
        left = self.num_episodes - episode
        if not 0 < self.episode_budget < self.num_episodes:
            return left
        # Rounded up: an episode that begins with too few turns left is cut.
        turns_left = self.episode_budget * facts.max_turns - num_actions
        return min(left, -(-turns_left // facts.max_turns))

    def for_environment(self, environment: Environment) -> "TrialConfig":
        """Return the settings with the prompts and the tools of one component of a mix."""
        prompts = self._prompts_for(environment, self.num_episodes)
        parser = replace(self.parser, has_tools=bool(environment.tools))
        return replace(self, prompts=prompts, parser=parser)

    def with_horizon(
        self, environment: Environment, num_episodes: int, max_turns: int
    ) -> "TrialConfig":
        """Return the settings with another horizon; the prompts state its number of episodes.

        Args:
            num_episodes, max_turns: the horizon; see the fields of these names.
        """
        if (num_episodes, max_turns) == (self.num_episodes, self.max_turns):
            return self
        prompts = self._prompts_for(environment, num_episodes)
        return replace(self, num_episodes=num_episodes, max_turns=max_turns, prompts=prompts)

    def with_guidance(self, guidance: Guidance | None) -> "TrialConfig":
        """Return the settings with this guidance from earlier tasks in the prompts; None removes
        guidance.
        """
        text, version = (guidance.text, guidance.version) if guidance else ("", None)
        return replace(self, prompts=replace(self.prompts, guidance=text), guidance_version=version)

    def _prompts_for(self, environment: Environment, num_episodes: int) -> Prompts:
        """Return the prompts for an environment, in the style of the present ones."""
        has_rules, budget = bool(self.prompts.rules), self.episode_budget
        prompts = prompts_for(environment, num_episodes, rules=has_rules, episode_budget=budget)
        return replace(prompts, guidance=self.prompts.guidance)
