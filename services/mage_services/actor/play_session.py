"""Play a trial outside of training, which a person plays or watches (`mage play`, `mage view`)."""

import fcntl
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async import user_modules
from mage_async.assembly import environment_of, trial_config_of, with_room_for
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.environments.environment import Environment
from mage_async.environments.mix import component_of
from mage_async.environments.user_calls import Call
from mage_async.errors import ConfigError, RunError
from mage_async.policy.checkpoint import MERGE_AGAIN, MERGED, chosen_checkpoint, whole_policy
from mage_async.policy.full_disk import writing
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.league import name_of, version_of
from mage_async.trajectory import Task, Trial
from mage_async.trials.duels import PastPolicySide
from mage_async.trials.human_play import HumanPlay, HumanPrompt, human_play, shown
from mage_async.trials.trial_run import TrialStart
from mage_services.environments.call_runner import CallRunner

if TYPE_CHECKING:
    from mage_async.trials.chat_format import ChatFormat
    from mage_services.actor.rollout import Stage
    from mage_services.weights.weight_store import WeightFiles


@dataclass(frozen=True, slots=True)
class PlaySession:
    """Hold a task, the chat format and version of the policy that plays it, and a function that
    makes its `Stage`, with which trials are begun on an engine.
    """

    task: Task
    chat: "ChatFormat"
    version: int
    """Version of the policy."""
    make: "Callable[[], Stage]"
    """Makes the stage, with an engine of its own."""


def prepare(
    run: RunDirectory,
    member: str | None,
    seed: int | None,
    episodes: int | None,
    checkpoint: str = "newest",
) -> PlaySession:
    """Return a session of a run's policy and a task.

    Args:
        member: name of the hidden task variant, or of a past policy; None: any held-out variant.
        seed: seed of the task; None: a new one.
        episodes: episodes of the trial; None: as in training.
        checkpoint: as for `chosen_checkpoint`.

    Raises:
        RunError: the run has no policy, or not that checkpoint.
        ConfigError: there is no such member.
    """
    run.check_policy()
    config = config_file.load_recorded(run.config, imports=False)
    environment = environment_of(config)
    if member is not None:
        _check_member(environment, member)

    # imported here, so that a wrong member is refused before torch is imported, which takes seconds
    from mage_async.inference.chat_files import load_chat
    from mage_services.actor.rollout import Stage
    from mage_services.engines.engine import make_engine

    task = drawn_task(environment, member, seed)
    policy, version = chosen_policy(run, config, checkpoint)
    chat = load_chat(policy, thinking=config.transcript.thinking)
    num_episodes = episodes or config.trial.episodes
    config = with_room_for(config, num_episodes)
    trial_config = trial_config_of(config, environment, chat, num_episodes)

    def make() -> "Stage":
        engine = make_engine(config, policy, "play", base=run.policy)
        workers = CallRunner(config.environment)
        return Stage(environment, trial_config, chat, engine, workers)

    return PlaySession(task, chat, version, make)


def _check_member(environment: Environment, member: str) -> None:
    """Refuse a member that is neither a task variant of the environment nor a past policy, and name
    the closest variant.
    """
    known = (*environment.members("train"), *environment.members("heldout"))
    if version_of(member) is None and member not in known:
        hint = user_modules.did_you_mean(member, known)
        raise ConfigError(f"no member {member!r}{hint}; there are {shown(known)}")


def drawn_task(environment: Environment, member: str | None, seed: int | None) -> Task:
    """Return a task of the variant `member`, or of a held-out variant drawn by the seed.

    Without a seed, a random one is taken.
    """
    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    source = random.Random(seed)
    chosen = member or source.choice(environment.members("heldout"))
    seats = component_of(environment, chosen).seats()
    return Task(environment.facts.name, chosen, seed, source.choice(seats))


def chosen_policy(run: RunDirectory, config: Config, checkpoint: str) -> tuple[Path, int]:
    """Return the checkpoint of a run that `chosen_checkpoint` returns, as a model directory, and
    its version.

    Raises:
        RunError: the run has no checkpoint of that step.
    """
    folder, version = chosen_checkpoint(run, config, checkpoint)
    return model_directory(run, config, folder), version


def model_directory(run: RunDirectory, config: Config, checkpoint: Path) -> Path:
    """Return a checkpoint as a model directory, with adapters merged into the weights. Wait while
    another process, such as `mage play`, merges the same ones.
    """
    # The policy that the run began with has no adapters.
    if config.policy.lora is None or checkpoint == run.policy:
        return checkpoint
    merged = checkpoint / MERGED
    # No lock where nothing is left to merge: a run that may only be read can be played too.
    if merged.is_dir():
        return merged
    with (
        writing(f"the merged model to {merged}", MERGE_AGAIN),
        (checkpoint / f".{MERGED}.lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
        return whole_policy(config, run.policy, checkpoint)


Ask = Callable[[HumanPrompt], str]
"""Shows the person the possible actions, and returns the answer. Until then it blocks the event
loop."""
Tell = Callable[[str], None]
"""Shows the person a text."""


async def play_by_person(
    play: HumanPlay,
    ask: Ask,
    complete: Callable[[Prompt], Awaitable[Completion]],
    workers: CallRunner,
    tell: Tell = print,
) -> list[float]:
    """Let a person play a trial; return the reward of each episode.

    Cancellation ends the call or completion that is awaited; the caller closes `workers` and the
    engine.

    Args:
        play: the trial.
        ask: gets the person's next action.
        complete: samples the turns of an opponent that is a past policy.
        workers: make the calls of an environment whose methods may block.
        tell: shows the person a text.
    """
    # The generator `play` yields a call, a prompt for the opponent, or a prompt for the person, and
    # waits for the result.
    request = next(play)
    while True:
        try:
            if isinstance(request, Call):
                request = play.send(await workers.perform(request))
            elif isinstance(request, Prompt):
                request = play.send(await complete(request))
            else:
                tell(request.text)
                request = play.send(ask(request).strip() if request.is_question else "")
        except StopIteration as end:
            rewards: list[float] = end.value
            return rewards


async def play_person_and_agent(
    make: "Callable[[], Stage]",
    task: Task,
    weights: "WeightFiles",
    ask: Ask | None = None,
    tell: Tell = print,
) -> tuple[list[float], Trial]:
    """Have a person play a task, unless `ask` is None, and then the agent.

    Cancellation abandons both.

    Args:
        make: makes the stage, as `PlaySession.make`.
        weights: the published weights of the run, for an opponent that is a past policy.
        ask: gets the person's next action; None: no person plays.
        tell: shows the person a text.

    Returns:
        The person's reward of each episode, and the agent's trial.

    Raises:
        RunError: the opponent is a past policy whose weights the run has not kept.
    """
    from mage_services.actor.rollout import play_trial

    version, stage, rewards, begin_opponent = version_of(task.member), make(), list[float](), None
    environment, trial_config = stage.environment, stage.config
    async with stage.engine as engine, stage.workers:
        if version is not None:
            if not (file := weights.announced_path(version)).is_file():
                kept = ", ".join(map(name_of, weights.versions()))
                raise RunError(f"{file} is not there: the run has kept {kept}")
            await engine.load_past(version, file)
            # "person": prefix of the names of the sequences of the past policy, their opponent.
            start = TrialStart(environment, task, 0, trial_config, stage.chat, "person")
            begin_opponent = partial(PastPolicySide, start, version)
        if ask is not None:
            tell(component_of(environment, task.member).rules())
            play = human_play(environment, task, trial_config.num_episodes, begin_opponent)
            rewards = await play_by_person(play, ask, engine.complete, stage.workers, tell)
        return rewards, await play_trial(stage.begin(task, 0, "play"), engine, stage.workers)
