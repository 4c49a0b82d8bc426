"""Define the texts that a trial adds to an environment's observations: rules, the beginning of an
episode, and requests for a reflection, a strategy, an action or notes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mage_async.environments.environment import Environment

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
        return _join(episode_mark(episode), observation)


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


def episode_mark(episode: int) -> str:
    """Return the words before the first observation of an episode."""
    return f"episode {episode + 1}"


def _join(*parts: str) -> str:
    """Join the parts that are not empty by spaces."""
    return " ".join(part for part in parts if part)
