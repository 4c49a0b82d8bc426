"""What the files of a model directory say, before anything is loaded; torch is not imported.

The tokenizer and the chat template are used as a trial uses them, on trials that a script plays:
so a context that is too short, or an action that is cut off, is known in words of this model.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from mage_async.assembly import named_parts, rules_of
from mage_async.config.schema import Config
from mage_async.environments.environment import Environment
from mage_async.environments.reset_step import ResetStep
from mage_async.errors import ConfigError
from mage_async.inference.chat_files import load_chat
from mage_async.policy.headers import (
    Outline,
    check_head,
    check_targets,
    outline_of,
    says_untied,
)
from mage_async.trajectory import Kind, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.scripted import random_task, scripted_trial

NUM_TRIALS = 3
"""Scripted trials that are measured."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """Lengths of trials in the tokens of a policy."""

    scripted: int
    """Tokens of the longest context of the shortest scripted trial."""
    longest: int
    """The same, with every action as long as it may be."""
    num_turns: int
    """Turns of the longest scripted trial."""


def check_files(config: Config, directory: Path) -> Contexts:
    """Read tokenizer and chat template, and measure scripted trials in their tokens.

    Where an environment has no script, or makes calls that may wait, its trials are not measured
    here: the longest is taken to have all turns, and its observations are known when it is played.

    Raises:
        PolicyError: there is none of them, or the template drops words.
        ConfigError: no trial has room in the engine, or no action in its tokens.
    """
    chat = load_chat(directory, thinking=config.transcript.thinking)
    parts = [_contexts(config, directory, chat, *named) for named in named_parts(config)]
    return Contexts(
        max(part.scripted for part in parts),
        max(part.longest for part in parts),
        max(part.num_turns for part in parts),
    )


def _contexts(
    config: Config, directory: Path, chat: ChatFormat, name: str, environment: Environment
) -> Contexts:
    """Lengths of the trials of one environment, which the configuration calls `name`."""
    num_turns = config.trial.episodes * environment.facts.max_turns
    if isinstance(environment, ResetStep) or environment.script(random.Random(0)) is None:
        return Contexts(0, num_turns * config.transcript.max_action_tokens, num_turns)
    rules = rules_of(config, environment, chat, config.trial.episodes)
    source = random.Random(0)
    tasks = [random_task(environment, "train", source) for _ in range(NUM_TRIALS)]
    trials = [scripted_trial(environment, task, 0, rules, chat) for task in tasks]
    _check_actions(config, name, trials)
    scripted = min(max(turn.start for turn in trial.turns) + 1 for trial in trials)
    if scripted > config.engine.max_tokens:
        raise ConfigError(
            f"engine.max_tokens must be at least {scripted}, which a trial of "
            f"{config.trial.episodes} episodes of {name!r} takes in the tokens of {directory}; "
            f"got {config.engine.max_tokens}"
        )
    num_turns = max(len(trial.turns) for trial in trials)
    longest = max(len(segment.tokens) for trial in trials for segment in trial.segments)
    sampled = num_turns * config.transcript.max_action_tokens
    return Contexts(scripted, longest + sampled, num_turns)


def check_outline(config: Config, directory: Path) -> Outline:
    """Read what the files say of the model's shape, and refuse what does not go together.

    Raises:
        PolicyError: a file cannot be read, there is no head, or adapters have no layers.
    """
    outline = outline_of(directory)
    check_head(directory, outline.tensors, is_tied=not says_untied(directory))
    if config.policy.lora and outline.tensors:
        check_targets(outline.model_type, config.policy.lora.targets, outline.linear())
    return outline


def _check_actions(config: Config, name: str, trials: list[Trial]) -> None:
    longest = max(
        turn.stop - turn.start for trial in trials for turn in trial.turns if turn.kind is Kind.ACT
    )
    if longest > config.transcript.max_action_tokens:
        raise ConfigError(
            f"transcript.max_action_tokens must be at least {longest}, which an action of "
            f"{name!r} has in this policy's tokens; "
            f"got {config.transcript.max_action_tokens}"
        )
