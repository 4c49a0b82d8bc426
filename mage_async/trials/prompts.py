"""Write the texts that a trial adds to the environment's observations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mage_async.environments.environment import Environment

_EPISODES = (
    "You play {played}, and what is hidden stays the same in all of them: what you learn in one "
    "helps in the next. "
)
_FORMAT = _EPISODES + (
    "At each turn answer with exactly one action in tags, such as <action> {example} </action>."
)
_TOOLS = _EPISODES + (
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
    """Texts that a trial adds to the environment's observations.

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
    """Requests a strategy, after an observation."""
    act: str = ""
    """Requests the action, after a strategy."""
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
        """Return the first message of a context: rules, guidance, remarks of earlier episodes, the
        notes that replace the context before, the outcome of the last action if the notes were
        written without it, and the first observation.
        """
        carried = [f"remark {number}: {remark}" for number, remark in enumerate(remarks, 1)]
        carried += [f"{self.noted} {notes}" if notes else "", outcome]
        return _join(self.rules, self.guidance, *carried, self.beginning(episode, observation))

    def beginning(self, episode: int, observation: str) -> str:
        """Return the first words of an episode."""
        return _join(f"episode {episode + 1}", observation)


def prompts_for(
    environment: Environment, num_episodes: int, *, rules: bool, turn_budget: int = 0
) -> Prompts:
    """Return the prompts for an environment.

    Args:
        num_episodes: episodes of a trial, which the rules mention.
        rules: whether to write sentences for a pretrained model.
        turn_budget: `TrialConfig.turn_budget`.
    """
    if not rules:
        return Prompts("", "reflect")
    form = _TOOLS if environment.tools else _FORMAT
    example = environment.facts.example or next(iter(environment.facts.words), "your action")
    played = f"{num_episodes} episodes of the same game"
    if 0 < turn_budget < num_episodes:
        turns = turn_budget * environment.facts.max_turns
        played = f"episodes of the same game until {turns} turns are used up"
    text = f"{environment.rules()}\n{form.format(played=played, example=example)}\n"
    layout = getattr(environment, "laid_out", str)  # a class of a user's own may have none
    return Prompts(text, _REFLECT, _STRATEGY, _ACT, layout, "", _NOTES, "Your notes:")


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
