"""Define the settings of trials: episodes, sampling, prompts, and what stays in the context."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mage_async.completion import Sampling
from mage_async.environments.environment import Environment, Facts
from mage_async.methods.method import Advisers
from mage_async.trajectory import Guidance, SecondRole
from mage_async.trials.action_parser import ActionParser

_EPISODES = (
    "You play {played}, and what is hidden stays the same in all of them: what you learn in one "
    "helps in the next. "
)
_ONE_EPISODE = "You play one episode. "
_FORMAT = (
    "At each turn answer with exactly one action in tags, such as <action> {example} </action>."
)
_TOOLS = (
    "At each turn call one or more tools, or give your final answer without a call, which ends the "
    "episode."
)
_STRATEGY = (
    "First write in <remark> tags, in one or two sentences, the strategy you will follow: what you "
    "try, and what it will tell you. Do not act yet."
)
_ACT = "Now take the action that your strategy asks for."
_REFLECT = (
    "Before the next episode begins, write in <remark> tags what you have learned about what is "
    "hidden and what you will do differently."
)
_NOTES = (
    "Your context is full. Before you go on, write in <remark> tags all that you need from here "
    "on: what you have learned about what is hidden, and how this episode stands. Your notes will "
    "replace everything above."
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Hold texts that a trial adds to the environment's observations.

    They are sentences for a pretrained model, which reads them, and single words for a tiny model,
    which has to learn them.
    """

    rules: str
    """Rules of the game and form of an answer, before the first observation; empty for a tiny
    model.
    """
    reflect: str
    """Requests a reflection, after an episode."""
    strategy: str = ""
    """Requests a strategy, after an observation; empty for a tiny model, whose answers begin with
    the tag of a remark.
    """
    act: str = ""
    """Requests the action, after a strategy; empty for a tiny model."""
    layout: Callable[[str], str] = str
    """Breaks an observation into lines, such as a board into rows, for a pretrained model."""
    guidance: str = ""
    """Guidance from earlier tasks, after the rules in every context."""
    notes: str = "reflect"
    """Requests notes, in a context that is full."""
    noted: str = "remark"
    """Precedes the notes with which a context begins."""

    def opening(
        self,
        episode: int,
        observation: str,
        remarks: Sequence[str],
        notes: str = "",
        outcome: str = "",
    ) -> str:
        """Return the first message of a context. Its parts in order, of which some may be empty:

        - the rules, and guidance from earlier tasks
        - `remarks`: what the agent wrote after earlier episodes
        - `notes`: what the agent wrote to replace a full context, which this one continues
        - `outcome`: the outcome of the last action, if the notes were written before it was known
        - `observation`, after the number of the episode
        """
        carried = [*remark_lines(remarks), f"{self.noted} {notes}" if notes else "", outcome]
        return _join(self.rules, self.guidance, *carried, self.beginning(episode, observation))

    def beginning(self, episode: int, observation: str) -> str:
        """Return the first words of an episode."""
        return _join(f"episode {episode + 1}", observation)


def remark_lines(remarks: Sequence[str]) -> list[str]:
    """Return a line for each remark that is not empty, with the number of its episode."""
    return [f"remark {number}: {remark}" for number, remark in enumerate(remarks, 1) if remark]


def prompts_for(
    environment: Environment, num_episodes: int, *, rules: bool, episode_budget: int = 0
) -> Prompts:
    """Return the prompts for an environment.

    Args:
        num_episodes: episodes of a trial, which the rules mention.
        rules: whether to write sentences for a pretrained model.
        episode_budget: `TrialConfig.episode_budget`.
    """
    if not rules:
        return Prompts("", "reflect")
    form = _TOOLS if environment.tools else _FORMAT
    example = environment.facts.example or next(iter(environment.facts.words), "your action")
    played = f"{num_episodes} episodes of the same game"
    if 0 < episode_budget < num_episodes:
        turns = episode_budget * environment.facts.max_turns
        played = f"episodes of the same game until {turns} turns are used up"
    episodes = _ONE_EPISODE if num_episodes == 1 else _EPISODES.format(played=played)
    text = f"{environment.rules()}\n{episodes}{form.format(example=example)}\n"
    layout = getattr(environment, "laid_out", str)  # a class of a user's own may have none
    return Prompts(
        text, _REFLECT, _STRATEGY, _ACT, layout=layout, notes=_NOTES, noted="Your notes:"
    )


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


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
    """Whether the agent writes a remark between episodes, which new contexts begin with."""
    refresh_kv: Literal["never", "episode", "turn"] = "never"
    """When cached keys and values of older weights are recomputed: at the start of an episode, or
    at every turn.
    """
    turn_deadline_s: float = math.inf
    """Seconds after which a turn without a completion is given up."""
    stops_on_success: bool = False
    """Whether a won episode ends the trial."""
    max_turns: int = 0
    """Number of actions after which an episode ends, with what it has earned; 0: no limit."""
    episode_budget: int = 0
    """Largest number of actions of a trial, in units of `Facts.max_turns`; they may be spent in up
    to `num_episodes` episodes. No limit if it is 0, or not below `num_episodes`.
    """
    strategy: Literal["none", "episode", "turn"] = "none"
    """Before which actions the agent writes a strategy."""
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
    """What replaces a context that would outgrow `room`: one that begins with notes which the agent
    writes, or one with the newest turns that fit; "none": the episode ends there.
    """
    room: int = 0
    """Longest context, in tokens, where `compaction` is not "none"."""

    def blind(self) -> "TrialConfig":
        """Return the settings of the control `blind`: an episode begins without the history, the
        remarks and the notes of earlier ones. Notes within an episode stay.
        """
        return replace(self, keeps_history=False, reflects=False)

    def episodes_left(self, episode: int, num_actions: int, facts: Facts) -> int:
        """Return how many more episodes a trial has turns for, if each takes `facts.max_turns` of
        them; 0 at the end of the trial. If episodes are shorter, more of them follow, up to
        `num_episodes` in all.

        Args:
            episode: number of the episode that would begin next.
            num_actions: number of actions of the trial so far.
            facts: of the environment.
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
            num_episodes, max_turns: the horizon; see the fields.
        """
        if (num_episodes, max_turns) == (self.num_episodes, self.max_turns):
            return self
        prompts = self._prompts_for(environment, num_episodes)
        return replace(self, num_episodes=num_episodes, max_turns=max_turns, prompts=prompts)

    def with_guidance(self, guidance: Guidance | None) -> "TrialConfig":
        """Return the settings with guidance from earlier tasks in the prompts, or without any."""
        text, version = (guidance.text, guidance.version) if guidance else ("", None)
        return replace(self, prompts=replace(self.prompts, guidance=text), guidance_version=version)

    def _prompts_for(self, environment: Environment, num_episodes: int) -> Prompts:
        has_rules, budget = bool(self.prompts.rules), self.episode_budget
        prompts = prompts_for(environment, num_episodes, rules=has_rules, episode_budget=budget)
        return replace(prompts, guidance=self.prompts.guidance)
