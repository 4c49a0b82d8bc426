"""Try a policy before a run starts: play two turns and train on one micro-batch, in this process.

The turns show whether the policy's actions are valid, and the times forecast how long the run will
take.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from mage_async.assembly import environment_of, named_parts, trial_config_of
from mage_async.completion import Sampling
from mage_async.config.schema import Config, Embedded
from mage_async.environments.agent import AgentTasks
from mage_async.environments.catalogue import LOADERS
from mage_async.environments.environment import Environment
from mage_async.errors import ConfigError
from mage_async.inference.chat_files import load_chat
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler
from mage_async.learning.trainer import trainer_of
from mage_async.methods.method import overriding
from mage_async.plan.forecast import Pace
from mage_async.plan.update_memory import Batch, random_segments
from mage_async.policy.demonstrations import LATE_S, InTime, scripted_play
from mage_async.policy.load import check_trainable, load_frozen_policies, load_trained
from mage_async.trajectory import Kind
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import TrialInProgress
from mage_async.trials.scripted_play import random_play, random_task, random_trials

NUM_TURNS = 2
"""Number of turns of each trial: one that reads the rules, and one of those that follow."""
MOST_CONTEXTS = 16
"""Largest number of trials that are played at once; more trials would take longer in proportion."""
NUM_RANDOM_TRIALS = 6
"""Number of trials of random play, whose mean length is taken as the length of the run's trials."""
TIMED_S = 3.0
"""Largest number of seconds of the timed update, unless the update of a single trial takes longer.
"""
MAX_EXAMPLE_CHARS = 200
"""Number of characters to which the example of an action is cut."""


@dataclass(frozen=True, slots=True)
class FirstTurns:
    """Hold the results of the first turns: how many actions were valid, the text of one action, and
    times.
    """

    num_valid: int
    num_actions: int
    num_cut: int
    """Number of actions that were cut at `most_tokens`, before a closing tag or a stop token."""
    most_tokens: int
    """Value of `transcript.max_action_tokens`."""
    cure: str
    """What to do if most actions are cut."""
    example: str
    """Text of one action; of an invalid one, if there is any."""
    turn_s: float
    """Mean seconds of one turn of the trials of a group."""
    pace: Pace | None
    """Times of turns and of training; None if the learner computes on a GPU, or a method trains in
    its own way.
    """

    def sentence(self) -> str:
        """Return the result as a sentence for people."""
        text = f"{self.num_valid} of {self.num_actions} actions were valid; "
        if self.num_cut:
            text += f"{self.num_cut} were cut at transcript.max_action_tokens = {self.most_tokens}"
            if 2 * self.num_cut > self.num_actions:
                text += f" ({self.cure})"
            text += "; "
        kind = "one" if self.num_valid == self.num_actions else "one that was not"
        return f"{text}here is {kind}: {self.example!r}"


def play_first_turns(
    config: Config,
    directory: Path,
    now: Callable[[], float],
    settle: Callable[[Sequence[TrialInProgress]], None],
    report: Callable[[str], None],
    in_time: InTime,
) -> FirstTurns | None:
    """Check that the policy can be trained, and play a group of trials for `NUM_TURNS` turns.

    Args:
        now: Clock, in seconds.
        settle: Makes the calls that trials wait for, as an actor does, and passes each trial the
            results. Calls of different trials are made at the same time.
        report: Called with a line of text for the user once the turns are played, or if a program
            would have to play them.
        in_time: Yields the trials of random play, and ends when one of them takes too long.

    Returns:
        The measurements; None if the engine is not the embedded one, or a program plays the
        environment or a part of it.

    Raises:
        PolicyError: the trainer or the engine would compute the policy wrongly.
    """
    check_trainable(directory)
    environment, source = environment_of(config), random.Random(config.seed)
    has_program = any(isinstance(part, AgentTasks) for _, part in named_parts(config))
    if not isinstance(config.engine, Embedded):
        return None
    if has_program:
        report("a program is played by the run alone, so no time is forecast before the first step")
        return None
    began = now()
    torch.set_num_threads(config.engine.threads)
    admission = config.admission
    group = admission.trials_per_group
    # The number of trials: as many whole groups as fit into `MOST_CONTEXTS` and into a batch, but
    # at least one; and no more than `engine.max_contexts`, but at least one group.
    size = min(MOST_CONTEXTS // group or 1, admission.groups_per_step) * group
    # All are open at the same time: one more than `environment.most_open` would wait for ever.
    size = min(size, max(group, config.engine.max_contexts), config.environment.most_open or size)
    model = Model.load(directory, slots=size, max_tokens=config.engine.max_tokens)
    chat = load_chat(directory, thinking=config.transcript.thinking)
    trial_config = trial_config_of(config, environment, chat, config.trial.episodes)
    runs = random_trials(environment, trial_config, chat, source, size)
    engine, times, lengths = Scheduler(model), [now()], list[int]()
    for _ in range(NUM_TURNS):
        lengths.append(_play_turn(runs, engine, settle))
        times.append(now())
    opening_s, turn_s = times[1] - times[0], times[2] - times[1]
    turns, scripted_s = _random_play(config, environment, chat, in_time)
    first, second = lengths
    # Every later turn is assumed to add as many tokens as the second one.
    tokens = min(round(first + (turns - 1) * max(0, second - first)), config.engine.max_tokens)
    pace = Pace(
        load_s=times[0] - began,
        num_contexts=size,
        opening_s=opening_s,
        turn_s=turn_s,
        trial_turns=turns,
        opening_tokens=min(first, tokens - 1) if config.learner.shared_opening else 0,
        trial_tokens=tokens,
        update_s=0.0,
        forward_s=0.0,
        num_trained=0,
        scripted_s=scripted_s,
    )
    report(f"a turn of {size} trials took {turn_s:.1f} s; now timing an update of the learner")
    full_pace = _with_training(config, directory, pace, chat, now)
    seconds = (opening_s + turn_s) / NUM_TURNS * group / size
    cure = _cure_of_cut_actions(config, environment)
    return _first_turns(runs, chat, trial_config.sampling, seconds, full_pace, cure)


def _cure_of_cut_actions(config: Config, environment: Environment) -> str:
    """Return what a user can do where most actions are cut."""
    if not config.sampling.restricted:
        return "raise it, or leave out sampling.restricted = false if there are legal actions"
    # Tools take the place of legal actions, and users declare them in their own classes alone.
    if environment.tools or config.environment.name.partition(":")[0] in LOADERS:
        return "raise it"
    return "raise it, or declare `legal_actions` or a `legal_pattern`"


def _random_play(
    config: Config, environment: Environment, chat: ChatFormat, in_time: InTime
) -> tuple[float, float]:
    """Return the mean number of turns of a trial of random play, and its mean duration in seconds.

    If the environment declares no actions, its calls may wait, or a trial takes more than `LATE_S`,
    no trial is counted, and the largest number of turns is returned.
    """
    source = random.Random(config.seed)
    tasks = (random_task(environment, "train", source) for _ in range(NUM_RANDOM_TRIALS))
    episodes = config.trial.episodes
    play = scripted_play(config, environment, chat, random_play, tasks, episodes)
    lengths, spent = list[int](), 0.0
    try:
        for trial, seconds in in_time(play, LATE_S):
            lengths.append(len(trial.turns))
            if (spent := spent + seconds) > LATE_S:
                break
    except ConfigError:  # the environment declares no actions
        lengths.clear()
    if not lengths:
        return float(config.trial.most_turns(environment.facts.max_turns)), 0.0
    return sum(lengths) / len(lengths), spent / len(lengths)


def _with_training(
    config: Config, directory: Path, pace: Pace, chat: ChatFormat, now: Callable[[], float]
) -> Pace | None:
    """Time an update on made-up trials of the measured length, and return the pace with these
    seconds; None if the learner computes on a GPU, or a method trains in its own way.
    """
    if config.learner.device != "cpu" or overriding(config, "trainer"):
        return None
    began = now()
    torch.set_num_threads(config.learner.threads)
    trainer = trainer_of(config, load_trained(config, directory, device="cpu"), chat)
    load_frozen_policies(trainer, config, directory)
    loaded_s = now() - began
    # Logits are computed for sampled tokens alone; two a turn are assumed.
    sampled = min(round(pace.trial_turns * 2), pace.trial_tokens - 1)
    vocabulary = trainer.model.config.vocab_size
    most = pace.trials_of_microbatch(config)
    lengths = [pace.trial_tokens] * most
    trials = random_segments(lengths, Batch(most, pace.trial_tokens, sampled), vocabulary)
    opening = trials[0].tokens[: pace.opening_tokens]
    for trial in trials:
        trial.tokens[: pace.opening_tokens] = opening
    # An update with one trial comes first. It allocates memory, which the timed update then need
    # not do, and it bounds the number of trials that fit into `TIMED_S`. As many as possible are
    # taken, because a nearly full micro-batch predicts the time of a full one best.
    began = now()
    trainer.update(trainer.micro_batches(trials[:1]), 1.0)
    times_larger = TIMED_S / (now() - began)
    # Each further trial adds only its own tokens, because the opening is computed once.
    own = pace.trial_tokens - pace.opening_tokens
    num_trained = min(most, 1 + int(max(0.0, times_larger - 1) * pace.trial_tokens / own))
    trials = trials[:num_trained]
    times = [now()]
    batches = [trainer.with_proximal(each) for each in trainer.micro_batches(trials)]
    times.append(now())
    trainer.update(batches, 1.0)
    times.append(now())
    return msgspec.structs.replace(
        pace,
        load_s=pace.load_s + loaded_s,
        forward_s=times[1] - times[0],
        update_s=times[2] - times[1],
        num_trained=num_trained,
    )


def _play_turn(
    runs: Sequence[TrialInProgress],
    engine: Scheduler,
    settle: Callable[[Sequence[TrialInProgress]], None],
) -> int:
    """Sample one completion for each trial that is not over, and return the mean tokens of their
    prompts.
    """
    waiting: dict[str, TrialInProgress] = {}
    lengths = list[int]()
    settle(runs)
    for run in runs:
        if (prompt := run.next_prompt()) is not None:
            engine.submit(prompt)
            lengths.append(len(prompt.tokens))
            waiting[prompt.context] = run
    while waiting:
        for context, completion in engine.advance():
            waiting.pop(context).receive(completion)
    settle(runs)
    return round(sum(lengths) / len(lengths)) if lengths else 0


def _first_turns(
    runs: Sequence[TrialInProgress],
    chat: ChatFormat,
    sampling: Sampling,
    turn_s: float,
    pace: Pace | None,
    cure: str,
) -> FirstTurns:
    """Return the results of the trials, with the actions that the policy wrote."""
    actions, num_cut, most = list[tuple[bool, str]](), 0, sampling.max_tokens
    for run in runs:
        run.cut_short()
        trial = run.trial()
        for turn in trial.turns:
            tokens = trial.segments[turn.segment].tokens[turn.start : turn.stop].tolist()
            if turn.kind is Kind.ACT:
                text = chat.decode(tokens)
                actions.append((turn.is_valid, text[:MAX_EXAMPLE_CHARS]))
                # An action that was cut may be valid, if the transcript writes the closing tag.
                is_ended = tokens[-1] in sampling.stop_tokens or "</action>" in text
                num_cut += len(tokens) >= most and not is_ended
    _, example = min(actions, default=(True, ""))  # invalid (False) sorts first
    num_valid = sum(is_valid for is_valid, _ in actions)
    return FirstTurns(num_valid, len(actions), num_cut, most, cure, example, turn_s, pace)
