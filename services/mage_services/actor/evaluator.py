"""Run the evaluator: play published versions on fixed sets of tasks, without blocking the training.

During training the learner sends it each `evaluation.every`-th version, and the last one
(`Evaluation.is_due` of `mage_async/config/schema.py`). The evaluator plays every version that it is
sent, on tasks of training and on held-out ones, and adds a point to the run's curve. With the last
version it plays the final sets instead, with two causal controls: `blind` (earlier episodes are not
in the context; `TrialConfig.blind` removes them) and `swapped` (in the last episode the hidden task
variant is another one). The return that is lost under a control is due to adaptation. Points of the
curve that are still waiting at the end are played after the final sets. If `evaluation.every` is 0,
there is no curve, and the engine is made only after training.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from mage_services.processes.cores_and_memory import EVALUATOR, lower_priority, restore_priority

if __name__ == "__main__":
    # Lowered before the imports below, as in `actor.py`.
    lower_priority(EVALUATOR)

import msgspec

from mage_async.assembly import environment_of, trial_config_of
from mage_async.config.schema import Config, Tiny
from mage_async.environments.agent import AgentTasks
from mage_async.environments.environment import Environment, Split
from mage_async.environments.game_references import Sampled
from mage_async.environments.ladders import harder
from mage_async.environments.mix import Mix
from mage_async.errors import ConfigError, RunError
from mage_async.inference.chat_files import load_chat
from mage_async.methods.method import Methods
from mage_async.plan.forecast import final_sets
from mage_async.policy.demonstrations import LATE_S, WIN_STAY_RULE, scripted_play
from mage_async.policy.full_disk import writing
from mage_async.protocol.messages import Goodbye, Heartbeat, Loaded, Message, Publication, Welcome
from mage_async.results.run_directory import RunDirectory, checkpoint_at
from mage_async.results.run_files import read_document, read_lines, write_whole
from mage_async.results.score import (
    Diversity,
    Harder,
    Rung,
    Score,
    by_environment,
    diversity,
    environment_returns,
    references,
    rung_label,
    score,
    with_errors,
)
from mage_async.tasks.task_stream import CURVE_SEED, FINAL_SEED, evaluation_tasks, swapped
from mage_async.trajectory import Guidance, Task, Trial, trial_as_dict
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.scripted_play import Player, random_play
from mage_async.trials.win_stay import Rule, player_of
from mage_services.actor.actor import note_edits, with_heartbeats
from mage_services.actor.play_session import model_directory
from mage_services.actor.rollout import Planned, Retries, Stage, play_all
from mage_services.engines.engine import Engine, make_engine
from mage_services.engines.weight_acceptance import loaded
from mage_services.environments.call_runner import CallRunner
from mage_services.processes.process import (
    Startup,
    Status,
    append_lines,
    in_time,
    read_startup,
    run_process,
    ticks,
    until_there_is_space,
)
from mage_services.processes.time_accounting import TimeAccounting
from mage_services.transport.access_control import actor_keys, keys_in
from mage_services.transport.channels import PeerChannel
from mage_services.weights.process_group import on_disk

Report = Callable[[int, int], None]
"""A function that is called with the number of trials played so far, and that of all."""
GuidanceOf = Callable[[Task], Guidance | None]
"""Returns the guidance, a text of a method, with which the trial of a task begins; None: no text.
"""


def at_intervals(seconds: float, report: Report) -> Report:
    """Return a function that calls `report` unless it did so less than `seconds` ago."""
    latest = time.monotonic()

    def reported(played: int, of: int) -> None:
        nonlocal latest
        if (now := time.monotonic()) - latest >= seconds:
            latest = now
            report(played, of)

    return reported


def counted(report: Report, of: int) -> Callable[[], None]:
    """Return a function that is called after each trial, and counts them for `report`."""
    numbers = count(1)
    return lambda: report(next(numbers), of)


def no_guidance(task: Task) -> None:
    """Return no guidance: the trial begins without text from a method."""


def recorded_guidance(run: RunDirectory, config: Config, version: int) -> GuidanceOf:
    """Return the guidance that methods gave at a version, by the states that the run recorded.

    The learner records the states before it announces the version, so they belong to the weights.
    """
    lines = [line for line in read_lines(run.memory) if line["version"] == version]
    methods, records = Methods(config), {line["method"]: line for line in lines}
    return lambda task: methods.evaluation_guidance(task, records)


REPORT_S = 5.0
"""Seconds between two reports of how many trials of the final sets are played."""
GOODBYE_WAIT_S = 10.0
"""Seconds within which a learner's goodbye has to arrive after its last step."""
MEASURED_ON_REQUEST = ("diversity", "harder")
"""Parts of an evaluation that only `mage evaluate` measures, by options of these names."""


class Evaluator:
    """Play sets of trials with the weights that its engine holds, and score them.

    Args:
        episodes: number of episodes of a trial.
    """

    def __init__(
        self,
        config: Config,
        chat: ChatFormat,
        engine: Engine,
        workers: CallRunner,
        episodes: int,
    ) -> None:
        self.environment = environment = environment_of(config)
        self.engine, self._chat = engine, chat
        trial_config = trial_config_of(config, environment, chat, episodes)
        retries = Retries(config.environment.retries)
        self._stage = Stage(environment, trial_config, chat, engine, workers, retries)
        self._blind = replace(self._stage, config=trial_config.blind())
        self._at_once = config.engine.max_contexts
        """Number of trials that are played concurrently."""
        self._final_sets = final_sets(config, episodes)
        """Names of the sets of a final evaluation, in the order in which they are played."""
        self.guidance: GuidanceOf = no_guidance
        """The text with which each trial begins."""
        self._num_sets = 0
        """Number of sets played so far, which makes the names of trials unique on the engine."""

    def for_tasks_of(self, config: Config) -> "Evaluator":
        """Return an evaluator of other tasks, with the same engine and number of episodes."""
        stage = self._stage
        return Evaluator(config, self._chat, self.engine, stage.workers, stage.config.num_episodes)

    async def curve(self, num_trials: int) -> dict[str, Score]:
        """Play the train and held-out tasks of the curve. Cancellation abandons them."""
        return {
            split: await self.play(split, num_trials, CURVE_SEED) for split in ("train", "heldout")
        }

    async def final(
        self, num_trials: int, report: Report = lambda played, of: None
    ) -> dict[str, Score]:
        """Play the final sets with both controls, and without guidance if a method gives any.

        The controls change what an episode sees of earlier ones: trials of a single episode are
        played without them. Cancellation abandons the sets.

        Args:
            report: called after each trial.
        """
        on_end = counted(report, len(self._final_sets) * num_trials)
        sets = dict[str, Score]()
        for name in self._final_sets:
            if name == "heldout_unguided":
                self.guidance = no_guidance
            sets[name] = await self.play(
                "train" if name == "train" else "heldout",
                num_trials,
                FINAL_SEED,
                on_end=on_end,
                blind=name == "heldout_blind",
                swap=name == "heldout_swapped",
            )
        return sets

    async def play(
        self,
        split: Split,
        num_trials: int,
        seed: int,
        *,
        blind: bool = False,
        swap: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ) -> Score:
        """Play one set and score it.

        Args:
            blind: whether earlier episodes are left out of the context.
            swap: whether the last episode has another task variant.
            on_end: called after each trial.
        """
        stage = self._blind if blind else self._stage
        tasks = evaluation_tasks(self.environment, split, num_trials, seed)
        swap_split = split if swap else None
        trials = await self._trials(stage, tasks, swap_split=swap_split, on_end=on_end)
        return score(trials, self.environment)

    async def diversity(
        self, num_trials: int, repeats: int, report: Report = lambda played, of: None
    ) -> Diversity:
        """Play held-out tasks `repeats` times each, about `num_trials` trials in all, and measure
        how different the trajectories of a task are. Cancellation abandons the trials.

        Args:
            report: called after each trial.
        """
        num_tasks = max(1, num_trials // repeats)
        tasks = evaluation_tasks(self.environment, "heldout", num_tasks, FINAL_SEED)
        on_end = counted(report, num_tasks * repeats)
        trials = await self._trials(self._stage, tasks, repeats, on_end=on_end)
        return diversity(
            [trials[start : start + repeats] for start in range(0, len(trials), repeats)]
        )

    async def samples(self, split: Split, count: int, version: int) -> list[dict[str, Any]]:
        """Return a few whole trials as plain data, which the run records as samples."""
        tasks = evaluation_tasks(self.environment, split, count, FINAL_SEED)
        trials = await self._trials(self._stage, tasks)
        return [trial_as_dict(trial, self._chat.decode, version) for trial in trials]

    async def _trials(
        self,
        stage: Stage,
        tasks: Sequence[Task],
        repeats: int = 1,
        swap_split: Split | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> list[Trial]:
        """Play each task `repeats` times; return the trials in order of their tasks.

        Args:
            swap_split: split from which another task variant is drawn for the last episode; None:
                all episodes have the same variant.
            on_end: called after each trial.
        """
        self._num_sets += 1
        plans: list[Planned] = []
        for number, task in enumerate(tasks):
            swap = swapped(task, self.environment, swap_split) if swap_split else None
            guided = stage.guided(self.guidance(task))
            for repeat in range(repeats):
                name = f"e{self._num_sets}.{number}.{repeat}"
                plans.append(guided.plan(task, repeat, name, swap))
        return await play_all(plans, stage, self._at_once, on_end)


PLAYED_S = 5.0
"""Seconds after which the play of a reference ends."""


def played_references(
    config: Config, policy: Path, num_trials: int, *, with_rule: bool = True
) -> dict[str, Any]:
    """Play tasks of the final held-out set without a model, and return the returns in the form of
    `references`: those of random play, and those of the win-stay, lose-shift rule if the policy was
    cloned from it.

    Nothing is played if the environment states references of its own, or does not say what an
    action may be.

    Args:
        policy: Model directory of version 0.
        num_trials: Largest number of trials of each player, which end after `PLAYED_S`.
        with_rule: whether to play that rule too; it fits only the environment of the warm start.
    """
    environment, episodes = environment_of(config), config.evaluation.episodes
    if isinstance(environment, AgentTasks) or environment.references("heldout", episodes):
        return {}
    chat = load_chat(policy, thinking=config.transcript.thinking)
    players: dict[str, Player] = {"random": random_play}
    if with_rule and (policy / WIN_STAY_RULE).is_file():
        rule = msgspec.json.decode((policy / WIN_STAY_RULE).read_bytes(), type=Rule)
        players["win-stay"] = player_of(rule)
    tasks = evaluation_tasks(environment, "heldout", num_trials, FINAL_SEED)
    found = dict[str, tuple[float, ...]]()
    for name, player in players.items():
        play = scripted_play(config, environment, chat, player, tasks, episodes)
        trials, spent = list[Trial](), 0.0
        try:
            for trial, seconds in in_time(play, LATE_S):
                trials.append(trial)
                if (spent := spent + seconds) > PLAYED_S:
                    break
        except ConfigError:  # the environment declares no actions
            return {}
        if len(trials) > 1:
            earned = score(trials, environment)
            found[name] = Sampled(earned.return_by_episode, earned.ci95_by_episode)
    return with_errors({"train": {}, "heldout": found})


def write_evaluation(
    run: RunDirectory,
    sets: dict[str, Score],
    environment: Environment,
    version: int,
    *,
    blocked_s: Mapping[str, float],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the final evaluation, with reference values and the time accounting of its process.

    Args:
        blocked_s: Seconds of the evaluator's process by state; {} if they were not measured.
        more: Further parts. "diversity" and "harder", if they were measured; otherwise those of an
            earlier evaluation of the same version are kept. "chosen_of", the number of checkpoints
            of which this one was the best on held-out tasks, if it was chosen so. The result of
            `played_references`, which replaces the environment's own references.
    """
    earlier = read_document(run.evaluation)
    kept = {} if earlier.get("version") != version else earlier
    further = {key: kept[key] for key in MEASURED_ON_REQUEST if key in kept} | dict(more or {})
    num_episodes = len(next(iter(sets.values())).return_by_episode)
    document = {
        "version": version,
        "sets": {name: msgspec.to_builtins(value) for name, value in sets.items()},
        **references(environment, num_episodes),
        "environment": asdict(environment.facts),
        **by_environment(environment, num_episodes),
        **further,
        "blocked_s": blocked_s,
    }
    write_whole(run.evaluation, json.dumps(document, indent=2))


# `mage evaluate --harder` plays tasks that are harder than those of training, such as with more
# boxes. An environment declares ladders. A ladder is a sequence of rungs; a rung is a setting of
# options that is harder than the rung before.

Options = Mapping[str, Any]
"""Options of an environment by name."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """List the rungs of a ladder that are harder than the tasks as trained."""

    name: str
    """Name of the ladder; of a mix `component/ladder`."""
    config: Config
    """The configuration of the tasks as trained; of a mix, with one component alone."""
    rungs: list[dict[str, Any]]
    """Options of each rung, from the easiest to the hardest."""
    part: str = ""
    """Label of the mix component; "" where the environment is no mix."""


def ladder_of(config: Config, name: str) -> Ladder:
    """Return the harder rungs of a ladder that the run's policy can play.

    Args:
        name: of the ladder, or "" for the first; of a mix `component` or `component/ladder`.

    Raises:
        ConfigError: there is no such ladder, no rung is harder, or each has words that a tiny
            policy does not know.
    """
    # `environment.ladder` trains on easier rungs first, and on the environment's own options last.
    # Harder rungs lie above these options, so the easier ones are left out here.
    config = _with_environment(config, ladder="")
    environment, part, own = environment_of(config), "", config
    if isinstance(environment, Mix):
        part, _, name = name.partition("/")
        own = _part_alone(config, environment, part)
    section = own.environment
    rungs = harder(section.name, environment_of(own), section.options, name)
    if isinstance(config.policy, Tiny):
        rungs = _readable(own, rungs, set(environment.facts.words))
    # A ladder has the name of the first option that its rungs change.
    ladder = next(iter(rungs[0]))
    return Ladder(f"{part}/{ladder}" if part else ladder, own, rungs, part)


def _part_alone(config: Config, mix: Mix, label: str) -> Config:
    """Return the configuration with one component of a mix as its environment.

    Raises:
        ConfigError: the mix has no such component.
    """
    for part, given in zip(mix.parts, config.environment.options["parts"], strict=True):
        if part.label == label:
            options = dict(given.get("options", {}))
            return _with_environment(config, name=part.name, options=options)
    known = ", ".join(part.label for part in mix.parts if part.environment.ladders)
    raise ConfigError(
        f"the environment is a mix, and no part of it is called {label!r}: write `--harder PART` "
        f"or `PART/LADDER` with a part that declares `ladders`; these do: {known or 'none'}"
    )


def _readable(own: Config, rungs: list[dict[str, Any]], known: set[str]) -> list[dict[str, Any]]:
    """Return the rungs all of whose words a tiny policy knows.

    Raises:
        ConfigError: there is none.
    """
    readable = [
        rung for rung in rungs if known.issuperset(environment_of(with_rung(own, rung)).facts.words)
    ]
    if not readable:
        raise ConfigError(
            f"environment {own.environment.name!r}: harder tasks need words that the tiny policy "
            "was not built with; train a pretrained model (policy.source), or take another ladder"
        )
    return readable


def with_rung(config: Config, rung: Options) -> Config:
    """Return the configuration with the options of a rung."""
    return _with_environment(config, options={**config.environment.options, **rung})


def _with_environment(config: Config, **changes: Any) -> Config:
    """Return the configuration with other values of keys of `[environment]`."""
    environment = msgspec.structs.replace(config.environment, **changes)
    return msgspec.structs.replace(config, environment=environment)


def length_factor(config: Config, ladder: Ladder | None) -> float:
    """Return the factor by which the longest episode of any rung, in turns, exceeds the run's own;
    at least 1. Contexts have to be longer by this factor.
    """
    own = environment_of(config).facts.max_turns
    rungs = [] if ladder is None else [with_rung(ladder.config, each) for each in ladder.rungs]
    return max([own, *(environment_of(each).facts.max_turns for each in rungs)]) / own


async def score_rungs(
    ladder: Ladder,
    heldout: Score,
    evaluator: Evaluator,
    report: Report = lambda played, of: None,
) -> Harder:
    """Play as many held-out tasks of each rung as of the run's own. Cancellation abandons them.

    Args:
        heldout: the score on the run's own tasks. A component of a mix is also played alone as
            trained, to compare with.
        report: called after each trial.
    """
    num_trials, num_sets = heldout.num_trials, len(ladder.rungs) + bool(ladder.part)
    on_end = counted(report, num_sets * num_trials)

    async def score_of(config: Config) -> Score:
        other = evaluator.for_tasks_of(config)
        return await other.play("heldout", num_trials, FINAL_SEED, on_end=on_end)

    as_trained = await score_of(ladder.config) if ladder.part else heldout
    found = [Rung("as trained", {}, as_trained)]
    for rung in ladder.rungs:
        label = f"{ladder.part} {rung_label(rung)}".lstrip()
        found.append(Rung(label, dict(rung), await score_of(with_rung(ladder.config, rung))))
    return Harder(ladder.name, found)


class CurveEvaluator:
    """Evaluate a run: points of the curve while it trains, the final sets at its end."""

    def __init__(self, startup: Startup, status: Status, channel: PeerChannel) -> None:
        self._run, self._config, self._name = startup.run, startup.config, startup.name
        self._startup, self._status, self._channel = startup, status, channel
        self.messages = asyncio.Queue[Message]()
        """Messages that were not handled yet; the last one is the learner's goodbye."""
        self._is_over = False
        """Whether the learner has said goodbye, or has left."""
        self._began = time.monotonic()
        self.time = TimeAccounting("preparing")

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Queue the learner's messages in a task, until its goodbye or the end of the context.

        The evaluator handles no message while it makes its engine or plays, but the channel has to
        answer a restarted learner, and the goodbye changes what is played next.
        """
        async with asyncio.TaskGroup() as tasks:
            children = [
                tasks.create_task(self._receive(), name="messages of the learner"),
                tasks.create_task(self._watch(), name="end of the learner"),
            ]
            yield
            for task in children:
                task.cancel()

    async def _receive(self) -> None:
        """Queue messages until the learner's goodbye. Cancellation loses no message."""
        while not isinstance(message := await self._channel.receive(), Goodbye):
            self.messages.put_nowait(message)
        self._end(message)

    async def _watch(self) -> None:
        """End as after a goodbye if the learner has left and its goodbye did not arrive.

        The learner waits only `GOODBYE_PATIENCE_S` (`learner/training_loop.py`) for a peer whose
        connection broke.
        """
        had_finished = False
        async for _ in ticks(GOODBYE_WAIT_S):
            has_finished = await asyncio.to_thread(_has_finished, self._startup)
            if self._is_over:
                return
            if had_finished and has_finished:
                text = "the learner has left, and its goodbye did not arrive"
                self._status.note(f"{text}: the final sets are played without it")
                self._end(Goodbye(reason=text))
                return
            had_finished = has_finished

    def _end(self, goodbye: Goodbye) -> None:
        """Queue the goodbye, and restore this process's priority: the training is over."""
        if not self._is_over:
            self._is_over = True
            restore_priority()
            self.messages.put_nowait(goodbye)

    async def begin(self, evaluator: Evaluator, version: int) -> None:
        """Measure the point of the version that the evaluator begins with, if the curve lacks it,
        and write sample trials of the untrained policy, version 0.

        A later version means that the evaluator was restarted during training.
        """
        self.time.enter("playing")
        if version == 0:
            await self._sample(evaluator, version)
        await self._point(evaluator, version)

    async def follow(self, evaluator: Evaluator, version: int, weights: Path) -> None:
        """Evaluate each version that the learner sends until its goodbye, then the final sets, and
        last the points of the curve for which there was no time before the goodbye.

        Cancellation loses the current evaluation.

        Args:
            version, weights: those of the learner's welcome; not loaded yet.
        """
        curve = self._curve(evaluator, version, weights)
        version, waiting = await with_heartbeats(self._channel, self._heartbeat, curve)
        if waiting:
            version = max(waiting)
            await self.load(evaluator.engine, version, waiting[version])
        if version < self._config.learner.steps:  # the learner has left before it sent the last
            version, weights = await asyncio.to_thread(_last, self._startup)
            await evaluator.engine.load(version, weights)
        await self.finish(evaluator, version)
        if points := [each for each in waiting if self.lacks(each)]:
            self._status.note(
                f"{self._run.evaluation.name} is written; {len(points)} points of the curve are "
                "still to be played. To do without them, end the run with Ctrl-C"
            )
        for each in points:
            await self._load_and_measure(evaluator, each, waiting[each])

    async def wait_for_end(self, version: int) -> None:
        """Receive messages until the learner's goodbye, without loading any weights. Safe to
        cancel.
        """
        self.time.enter("no version")
        await with_heartbeats(self._channel, self._heartbeat, self._load_nothing(version))

    async def _load_nothing(self, version: int) -> None:
        """Report every announced version as loaded, until the learner's goodbye."""
        while not isinstance(message := await self.messages.get(), Goodbye):
            if isinstance(message, Publication | Welcome):
                version = max(version, message.version)
                # Nothing was loaded, but the learner may delete older weights.
                await self._channel.send(Loaded(version=version))

    async def _curve(
        self, evaluator: Evaluator, version: int, weights: Path
    ) -> tuple[int, dict[int, Path]]:
        """Measure points of the curve until the learner's goodbye.

        Returns:
            The version that the engine has, and the paths of newer ones that were not loaded,
            oldest first.
        """
        waiting: dict[int, Path] = {}
        # On busy cores the first steps may be trained before this process has begun. Its engine
        # still has the policy that the run began with.
        if version and self.lacks(0):
            await self.begin(evaluator, 0)
        await self.load(evaluator.engine, version, weights)
        await self.begin(evaluator, version)
        self._free_cache(evaluator.engine)
        while not isinstance(message := await self.messages.get(), Goodbye):
            match message:
                # A restarted learner welcomes the evaluator with its newest weights, which it may
                # not have announced before.
                case (
                    Publication(version=newer, path=path)
                    | Welcome(version=newer, weights_path=str(path))
                ) if newer > version:
                    if self._is_over:
                        waiting[newer] = Path(path)  # the final sets come first
                    else:
                        version = newer
                        await self._load_and_measure(evaluator, newer, Path(path))
                case Publication() | Welcome():
                    await self._channel.send(Loaded(version=version))
                case _:
                    raise RunError(f"an evaluator cannot take {type(message).__name__}")
            self._free_cache(evaluator.engine)
        return version, waiting

    def _free_cache(self, engine: Engine) -> None:
        """Free the memory of cached keys and values until the next version comes: with a model of
        135 million weights it is a gigabyte and a half, which the learner may need.
        """
        self.time.enter("no version")
        engine.trim()

    async def _load_and_measure(self, evaluator: Evaluator, version: int, path: Path) -> None:
        """Load published weights and measure their point of the curve."""
        await self.load(evaluator.engine, version, path)
        self.time.enter("playing")
        await self._point(evaluator, version)

    async def load(self, engine: Engine, version: int, path: Path) -> None:
        """Load weights, and tell the learner, which may then delete older ones."""
        self.time.enter("loading")
        # Weights are read from files, even if the learner sends them to the actors' engines: it may
        # have ended when the last points of the curve are played.
        receipt = await engine.load(version, on_disk(path))
        await self._channel.send(loaded(version, receipt))

    def _heartbeat(self) -> Heartbeat:
        """Return a heartbeat without counters: it lets a restarted learner know of this peer."""
        return Heartbeat(name=self._name, counters={}, blocked_s=self.time.seconds())

    async def finish(self, evaluator: Evaluator, version: int) -> None:
        """Play the final sets with the last weights. Cancellation loses them."""
        self._status.send("evaluating", version=version)
        self.time.enter("playing")
        evaluator.guidance = recorded_guidance(self._run, self._config, version)
        await self._sample(evaluator, version)

        def report(played: int, of: int) -> None:
            self._status.send("final_trials", played=played, of=of)

        num_trials, policy = self._config.evaluation.final_trials, self._run.policy
        sets = await evaluator.final(num_trials, at_intervals(REPORT_S, report))
        more = await asyncio.to_thread(played_references, self._config, policy, num_trials)
        measured = partial(write_evaluation, self._run, sets, evaluator.environment, version)
        write = partial(measured, blocked_s=self.time.seconds(), more=more)
        await self._write(self._run.evaluation, write)

    async def _sample(self, evaluator: Evaluator, version: int) -> None:
        """Write a few held-out trials, of the same tasks for the first and the last version."""
        lines = await evaluator.samples("heldout", 6, version)
        lines = [line | {"split": "heldout"} for line in lines]
        await self._write(self._run.samples, partial(append_lines, self._run.samples, lines))

    async def _write(self, file: Path, write: Callable[[], None]) -> None:
        """Write a file of the run; while the disk is full, wait for space, because the content took
        minutes to measure.
        """

        async def attempt() -> None:
            with writing(str(file)):
                await asyncio.to_thread(write)

        await until_there_is_space(attempt, self._status.note)

    def lacks(self, version: int) -> bool:
        """Return whether the curve lacks a point of a version: it is due, and was not measured.

        The last version is measured by the final sets, and without a curve no version is.
        """
        evaluation, last = self._config.evaluation, self._config.learner.steps
        if version == last or not evaluation.every or not evaluation.is_due(version, last):
            return False
        return all(line["version"] != version for line in read_lines(self._run.curve))

    async def _point(self, evaluator: Evaluator, version: int) -> None:
        """Measure a point of the curve, unless the curve needs none of this version."""
        if not self.lacks(version):
            return
        evaluator.guidance = recorded_guidance(self._run, self._config, version)
        sets = await evaluator.curve(self._config.evaluation.trials)
        line = {
            "version": version,
            "time_s": time.monotonic() - self._began,
            "sets": {name: msgspec.to_builtins(value) for name, value in sets.items()},
        }
        await self._write(self._run.curve, partial(append_lines, self._run.curve, [line]))
        self._status.send(
            "curve",
            version=version,
            sets={n: s.return_by_episode for n, s in sets.items()},
            environments=environment_returns(sets["heldout"]),
        )


async def main(startup: Startup, status: Status) -> None:
    """Connect to the learner, evaluate its versions, and end with the run."""
    config = startup.config
    keys = keys_in(actor_keys, startup.keys)
    note_edits(startup.run.launch, status.note)
    async with AsyncExitStack() as stack:
        hello = startup.hello("evaluator")
        channel = stack.enter_context(PeerChannel(startup.address, hello, keys=keys))
        curve_evaluator = CurveEvaluator(startup, status, channel)
        # In a thread: merging the adapters of a large model takes minutes, in which the channel
        # still sends heartbeats.
        finished = await asyncio.to_thread(_finished, startup)
        if finished is None:
            await stack.enter_async_context(curve_evaluator.receiving())
            message = await curve_evaluator.messages.get()
            if isinstance(message, Goodbye):
                finished = await asyncio.to_thread(_last, startup)
        version, weights = finished or _welcomed(message)
        # Without a curve there is nothing to play before the training has ended.
        is_idle = finished is None and not config.evaluation.every
        if is_idle:
            status.send("ready")
            await curve_evaluator.wait_for_end(version)
            finished = await asyncio.to_thread(_last, startup)
        if finished:  # the training is over
            restore_priority()
        chat = load_chat(startup.run.policy, thinking=config.transcript.thinking)
        made = await asyncio.to_thread(make_engine, config, startup.run.policy, startup.name)
        async with made as engine, CallRunner(config.environment) as workers:
            status.send("ready")
            episodes = config.evaluation.episodes
            evaluator = Evaluator(config, chat, engine, workers, episodes)
            if finished is None:
                await curve_evaluator.follow(evaluator, version, weights)
            else:
                if is_idle or curve_evaluator.lacks(0):
                    # The engine still has the policy that the run began with, version 0, even if
                    # the learner's welcome named a later one, or the training had ended before
                    # this process began.
                    await curve_evaluator.begin(evaluator, 0)
                version, weights = finished
                await engine.load(version, weights)  # of a checkpoint, which is on disk
                await curve_evaluator.finish(evaluator, version)
    status.send("done", reason="evaluated")


def _welcomed(welcome: Message) -> tuple[int, Path]:
    """Return the version and weights of the learner's welcome, its first message."""
    if not isinstance(welcome, Welcome) or welcome.weights_path is None:
        raise RunError(f"expected to be welcomed with weights, got {type(welcome).__name__}")
    return welcome.version, Path(welcome.weights_path)


def _has_finished(startup: Startup) -> bool:
    """Return whether training is over: the learner has written its summary of the last step."""
    file = startup.run.learner
    return (
        file.is_file() and json.loads(file.read_text())["version"] == startup.config.learner.steps
    )


def _finished(startup: Startup) -> tuple[int, Path] | None:
    """Return the last version and its weights where training is over, else None.

    An evaluator that is restarted after the training has no learner to connect to.
    """
    if not _has_finished(startup):
        return None
    run, steps = startup.run, startup.config.learner.steps
    return steps, model_directory(run, startup.config, checkpoint_at(run.checkpoints, steps))


def _last(startup: Startup) -> tuple[int, Path]:
    """Return the last version of a run whose learner has sent its goodbye."""
    if (last := _finished(startup)) is None:
        raise RunError("the learner said goodbye before its last step")
    return last


if __name__ == "__main__":
    run_process(lambda status: main(read_startup("The evaluator of a run.", status), status))
