"""The first turns of a policy, played in this process, to show an action and to time a turn."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mage_async.assembly import environment_of, trial_config_of
from mage_async.config.schema import Config, Embedded
from mage_async.inference.chat_files import load_chat
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler
from mage_async.policy.guards import check_trainable
from mage_async.trajectory import Kind
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import TrialInProgress, begin_trial
from mage_async.trials.scripted import random_task

NUM_TURNS = 2
"""Turns of each trial."""
MAX_EXAMPLE_CHARS = 200


@dataclass(frozen=True, slots=True)
class FirstTurns:
    """What the first turns showed."""

    num_valid: int
    num_actions: int
    example: str
    """Text of one action; of an invalid one, if there is any."""
    turn_s: float
    """Mean seconds of one turn of all trials."""

    def sentence(self) -> str:
        """Return the result as a sentence for people."""
        is_all = self.num_valid == self.num_actions
        kind = "one" if is_all else "one that was not"
        return (
            f"{self.num_valid} of {self.num_actions} actions were valid; "
            f"here is {kind}: {self.example!r}"
        )


def play_first_turns(
    config: Config,
    directory: Path,
    now: Callable[[], float],
    settle: Callable[[TrialInProgress], None],
) -> FirstTurns | None:
    """Check that the policy can be trained, and play a group of trials for `NUM_TURNS` turns.

    Args:
        now: a clock in seconds.
        settle: performs the calls that a trial waits for, and gives it the answers.

    Returns:
        What the turns showed; None if the engine is not the embedded one.

    Raises:
        PolicyError: the trainer or the engine would compute the policy wrongly.
    """
    check_trainable(directory)
    if not isinstance(config.engine, Embedded):
        return None
    torch.set_num_threads(config.engine.threads)
    size = config.admission.trials_per_group
    model = Model.load(directory, slots=size, max_tokens=config.engine.max_tokens)
    chat = load_chat(directory, thinking=config.transcript.thinking)
    environment, source = environment_of(config), random.Random(config.seed)
    rules = trial_config_of(config, environment, chat, config.trial.episodes)
    runs = [
        begin_trial(
            environment, random_task(environment, "train", source), 0, rules, chat, name=str(number)
        )
        for number in range(size)
    ]
    began = now()
    for _ in range(NUM_TURNS):
        _play_turn(runs, Scheduler(model), settle)
    return _first_turns(runs, chat, (now() - began) / NUM_TURNS)


def _play_turn(
    runs: Sequence[TrialInProgress], engine: Scheduler, settle: Callable[[TrialInProgress], None]
) -> None:
    """Sample one completion for each trial that is not over."""
    waiting: dict[str, TrialInProgress] = {}
    for run in runs:
        settle(run)
        if (prompt := run.next_prompt()) is not None:
            engine.submit(prompt)
            waiting[prompt.context] = run
    while waiting:
        for context, completion in engine.advance():
            run = waiting.pop(context)
            run.receive(completion)
            settle(run)


def _first_turns(runs: Sequence[TrialInProgress], chat: ChatFormat, turn_s: float) -> FirstTurns:
    actions: list[tuple[bool, str]] = []
    for run in runs:
        run.cut_short()
        trial = run.trial()
        for turn in trial.turns:
            tokens = trial.segments[turn.segment].tokens[turn.start : turn.stop].tolist()
            if turn.kind is Kind.ACT:
                actions.append((turn.is_valid, chat.decode(tokens)[:MAX_EXAMPLE_CHARS]))
    _, example = min(actions, default=(True, ""))  # invalid (False) sorts first
    return FirstTurns(sum(is_valid for is_valid, _ in actions), len(actions), example, turn_s)
