"""What is played: the environment, the trial, its transcript, how tokens are drawn."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from mage_async.config.sections.section import Count, Natural, NonNegative, Positive, Section


class Environment(Section):
    """The environment and its own options."""

    name: str = "rps"
    """Name in the catalogue, `module:Class` of your own, or `gymnasium:Taxi-v4` and the like."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    step_deadline_s: Positive = 60.0
    """Seconds that `reset`, `step` or `close` of a class with `reset` and `step` may take, and
    `begin` or `act` of a class of your own or a text engine; what takes longer costs its group."""
    workers: Natural = 0
    """Processes of each actor in which a class with `reset` and `step` is played: what ends one of
    them costs the groups it plays, and not the actor; 0 plays in the actor itself."""
    most_open: Natural = 0
    """Objects of such a class, or plays of another one of your own, that each actor has open at
    once, as a server may allow; other episodes wait before their `reset`. 0: any number."""
    idle_s: NonNegative = 0.0
    """Seconds after which an object that is not called is closed, which costs its group; 0: none
    is, however long a turn takes."""
    wait_for_room_s: NonNegative = 0.0
    """Seconds for which a `reset` that raises `CapacityReached` is made again, when another object
    has been closed and every second; then it costs its group."""


class TrialShape(Section):
    """What one trial is made of, and what of earlier episodes stays in its context."""

    episodes: Count = 3
    """Episodes of a trial in training."""
    memory: Literal["none", "history", "reflection", "history_and_reflection"] = "history"
    """What an episode sees of the earlier ones; with "none" episodes are independent retries."""
    repeats: Literal["same", "fresh"] = "same"
    """Whether an environment of your own begins the same task the same way again: "same" is
    rehearsed before anything starts, "fresh" says that it does not, on purpose."""
    stop_on_success: bool = False
    """In training an episode that is won ends its trial, as in LaMer and MAGE; evaluations always
    play all episodes, so that each has a return of its own."""
    strategy: Literal["none", "episode", "turn"] = "none"
    """Before an episode's first action, or before every one, the agent writes in a remark what it
    means to do (SGE)."""


class Curriculum(Section):
    """A horizon that grows with the policy version; without this section it stays."""

    steps: Count = 20
    """Steps that a stage lasts; the last stage stays."""
    turns: list[Count] = field(default_factory=list)
    """Most actions of an episode, stage by stage; [] is what the environment allows."""
    episodes: list[Count] = field(default_factory=list)
    """Episodes of a trial, stage by stage, the last of them `trial.episodes`; [] is always that."""


class Transcript(Section):
    """How a trial becomes chat."""

    rules: bool = True
    """Begin with the rules in words, which a real model needs and the tiny one learns."""
    forced_tags: Literal["none", "open", "both"] = "none"
    """Which `<action>` tags the transcript writes itself instead of letting the policy sample them.
    """
    max_action_tokens: Count = 64
    """Longest action, in tokens."""
    max_reflection_tokens: Count = 192
    """Longest reflection, and longest strategy, in tokens."""
    thinking: bool = False
    """Let a chat template that can (Qwen3's) have the policy think before it answers; thinking
    counts as part of the completion and stays in its context, and no action is looked for in it."""


class SamplingRules(Section):
    """How actors draw tokens in training.

    Log-probs are after temperature, before top-p and top-k on every engine, so a loss is of what
    was drawn with top-p 1 and top-k 0 alone.
    """

    temperature: Positive = 1.0
    """Temperature of all tokens but those of strategies."""
    strategy_temperature: Positive = 1.0
    """Temperature of strategies, where `trial.strategy` asks for them."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of probability that is drawn from; 1 is all."""
    top_k: Natural = 0
    """Number of likeliest tokens that are drawn from; 0 is all."""
