"""Play the trials behind a certificate of adaptation, and record each completion as it is sampled.

Each task is played in five arms: with its history (`own`), without any (`blind`), in independent
trials of one episode (`retry`), and in two controls of which only the last episode is sampled.
`swapped` begins with the task's own recorded answers, and its last episode has another task
variant; `noise` begins with the answers of another task whose history is about as long. The last
episodes of two arms are compared; they differ only in the history that they follow.

A measurement that was interrupted continues where it stopped: recorded answers are given again
instead of being sampled.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import Environment, Play
from mage_async.environments.user_calls import new_play
from mage_async.errors import ConfigError
from mage_async.policy.full_disk import writing
from mage_async.policy_version import VersionRun
from mage_async.results.certificate import ARMS, Arm, PlayCounts, TaskReturns, scaled
from mage_async.results.run_files import read_lines
from mage_async.tasks.task_stream import FINAL_SEED, evaluation_tasks, swapped
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import TrialInProgress
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialRun, TrialStart, environment_code
from mage_services.actor.rollout import Planned, Retries, play_or_cut
from mage_services.engines.chat_endpoint import ChatEndpoint, Usage, as_completion
from mage_services.engines.engine import Sampler
from mage_services.environments.call_runner import CallRunner
from mage_services.processes.process import append_lines

ENOUGH_REPEATED = 20
"""Episodes that must repeat the actions of an earlier one, with equal rewards, before a game counts
as one without chance."""
LAST_ONLY: tuple[Arm, ...] = ("swapped", "noise")
"""Arms that begin with a recorded history, so that only their last episode is sampled."""


@dataclass(frozen=True, slots=True)
class Game:
    """Describe a game in which a model's adaptation is measured, and how the model plays it."""

    label: str
    """Name of the game in the record and in the certificate."""
    environment: Environment
    config: TrialConfig
    """Settings of a trial; a later episode sees the history, or notes that the model wrote."""


@dataclass(frozen=True, slots=True)
class TrialKey:
    """Identify a trial that is to be played: its game, task and arm."""

    game: str
    """Label of the game."""
    task: int
    """Index of the task among the tasks of the game."""
    arm: Arm
    try_: int = 0
    """Number of the independent trial of the arm `retry`; 0 in other arms."""

    @property
    def name(self) -> str:
        """The trial's name in the record."""
        more = f"/{self.try_}" if self.arm == "retry" else ""
        return f"{self.game}/{self.task}/{self.arm}{more}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold what the record keeps of a trial."""

    rewards: list[float]
    """One for each finished episode."""
    is_cut: bool
    """Whether the trial outgrew the model's context, or its environment or engine failed in every
    try.
    """
    invalid: int
    """Number of invalid actions."""
    turns: int
    """Number of actions, including those of an unfinished episode."""
    history_tokens: int
    """Length of the context in which the last episode begins."""
    history_answers: int
    """Number of the model's answers before the last episode."""
    actions: list[list[str]]
    """Actions of each finished episode."""
    has_lost_remark: bool = False
    """Whether a reflection had no tags, so that later episodes did not see it."""


class Record:
    """Write every answer and the outcome of every finished trial of a measurement to files, and
    read them back when it goes on.
    """

    def __init__(self, folder: Path) -> None:
        self._answers_file = folder / "answers.jsonl"
        self._trials_file = folder / "trials.jsonl"
        self.answers: dict[str, list[Completion]] = defaultdict(list)
        """Answers of each trial, in order, by `Measurement._recorded_as`."""
        self.outcomes: dict[str, Outcome] = {}
        """Outcomes of finished trials, by name."""
        self.usage = Usage()
        """Usage of all recorded answers."""
        self.served: str | None = None
        """Name of the model that has answered."""
        self.fingerprints: set[str] = set()
        """Every `system_fingerprint` of the endpoint's answers."""
        self._delayed: list[tuple[Path, dict[str, Any]]] = []
        """Lines that are written only once an answer with text follows: empty answers, and all
        lines after them. If none follows, the endpoint was out of order, and no trial must depend
        on its empty answers."""
        for line in read_lines(self._answers_file):
            self._add_answer_line(line)
        for line in read_lines(self._trials_file):
            name = line.pop("trial")
            self.outcomes[name] = Outcome(**line)

    def add_answer(self, line: dict[str, Any]) -> None:
        """Write an answer down; raise a `RunError` if the disk is full or fails.

        Args:
            line: name of its trial, its usage, and the name of the model that has answered, with
                the text of an endpoint's answer, or the tokens of a model that this process runs.
        """
        self._delayed.append((self._answers_file, line))
        if not line["empty"]:
            self.write_delayed()
        self._add_answer_line(line)

    def add_outcome(self, trial: str, outcome: Outcome) -> None:
        """Write the outcome of a finished trial down; raise a `RunError` as `add_answer` does."""
        is_delayed = bool(self._delayed)
        self._delayed.append((self._trials_file, {"trial": trial, **asdict(outcome)}))
        if not is_delayed:
            self.write_delayed()
        self.outcomes[trial] = outcome

    def write_delayed(self) -> None:
        """Write the delayed lines; raise a `RunError` as `add_answer` does."""
        while self._delayed:
            file, line = self._delayed[0]
            with writing(str(file), "make room"):
                append_lines(file, [line])
            del self._delayed[0]

    def _add_answer_line(self, line: Mapping[str, Any]) -> None:
        """Add a line of the file of answers to this object."""
        tokens = line.get("tokens")
        answer = as_completion(line["text"]) if tokens is None else _of_tokens(tokens)
        self.answers[line["trial"]].append(answer)
        self.usage.add(Usage(**{name: line[name] for name in Usage.__dataclass_fields__}))
        self.served = line["model"] or self.served
        if fingerprint := line.get("fingerprint"):
            self.fingerprints.add(fingerprint)


def _of_tokens(tokens: Sequence[int]) -> Completion:
    """Return a recorded answer as a completion; log-probs and version, not recorded, are 0."""
    data, zeros = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
    return Completion(data, zeros, (VersionRun(0, 0, 0),), "stop", 0)


class _RecordingEngine:
    """Answer the prompts of one trial: with a given history, then with recorded answers, and then
    with samples, which are recorded.

    Args:
        name: name of the trial's answers in the record.
    """

    def __init__(
        self, name: str, engine: Sampler, record: Record, history: Sequence[Completion]
    ) -> None:
        self._name, self._engine, self._record, self._history = name, engine, record, history
        self.restart()

    def restart(self) -> None:
        """Begin the trial, or another try of it: the answers recorded so far are given first."""
        self._given = [*self._history, *self._record.answers[self._name]]
        self._next = 0

    async def complete(self, prompt: Prompt) -> Completion:
        """Return the next answer. Cancellation aborts the one that is sampled."""
        self._next += 1
        if self._next <= len(self._given):
            return self._given[self._next - 1]
        completion = await self._engine.complete(prompt)
        if isinstance(self._engine, ChatEndpoint):
            usage = self._engine.usage(prompt.context)
            # The tokens of an endpoint are the code points of its text.
            text = "".join(map(chr, completion.tokens.tolist()))
            line = {"model": self._engine.served, "text": text}
            if self._engine.fingerprint:
                line["fingerprint"] = self._engine.fingerprint
        else:
            num_tokens, reused = len(prompt.tokens), completion.num_reused
            cut = int(completion.finish == "length")
            usage = Usage(1, num_tokens, reused, len(completion.tokens), cut)
            line = {"model": None, "tokens": completion.tokens.tolist()}
        self._record.add_answer({"trial": self._name, **line, **asdict(usage)})
        return completion

    def release(self, context: str) -> None:
        """Release a context on the engine."""
        self._engine.release(context)


class Measurement:
    """Play all trials of a measurement.

    Args:
        num_tasks: tasks of each game.
        at_once: trials that are played concurrently.

    Raises:
        ConfigError: a game has fewer than two held-out task variants, or all its tasks have the
            same one; then `noise` finds no history of another variant.
    """

    def __init__(
        self,
        games: Sequence[Game],
        chat: ChatFormat,
        engine: Sampler,
        record: Record,
        workers: CallRunner,
        *,
        num_tasks: int,
        at_once: int,
        retries: Retries,
    ) -> None:
        self.games, self.record = games, record
        self._games = {game.label: game for game in games}
        self._chat, self._engine, self._workers = chat, engine, workers
        self._num_tasks, self._retries = num_tasks, retries
        self._playing_slots = asyncio.Semaphore(at_once)
        self._tasks = {game.label: tasks_of(game.environment, num_tasks) for game in games}
        for game in games:
            if len(set(game.environment.members("heldout"))) < 2:
                raise ConfigError(
                    f"game {game.label!r} has one held-out task: the controls `noise` and "
                    "`swapped` need another one"
                )
            if len({task.member for task in self._tasks[game.label]}) < 2:
                raise ConfigError(
                    f"the control `noise` needs tasks of two variants of {game.label!r}, but the "
                    f"number of tasks (--trials) is {num_tasks}: give a larger one"
                )

    async def play(self) -> None:
        """Play the trials that are not recorded yet. A cancellation keeps all recorded answers."""
        # The last two arms begin with what the first one has recorded. `noise` chooses a history
        # among those of all tasks, so it waits for all of them.
        for arms in (("own", "blind", "retry"), LAST_ONLY):
            async with asyncio.TaskGroup() as group:
                for key in self._keys(arms):
                    if key.name not in self.record.outcomes:
                        group.create_task(self._play(key), name=key.name)
        self.record.write_delayed()

    def num_trials(self) -> int:
        """Return the number of trials of the whole measurement."""
        return sum(1 for _ in self._keys(ARMS))

    def num_members(self) -> int:
        """Return the number of different task variants that the tasks of all games hide."""
        return sum(len({task.member for task in each}) for each in self._tasks.values())

    def _keys(self, arms: Sequence[Arm]) -> Iterator[TrialKey]:
        """Yield the trials of some arms: first those of the first task of every game, then those of
        the second task, and so on. If a measurement is interrupted during the last two arms, all
        trials of its first tasks have thus finished, and `returns` can use these tasks.
        """
        for number in range(self._num_tasks):
            for label in self._games:
                yield from self._keys_of(label, number, arms)

    def _keys_of(self, label: str, number: int, arms: Sequence[Arm]) -> Iterator[TrialKey]:
        """Yield the trials of one task of a game."""
        for arm in arms:
            tries = self._games[label].config.num_episodes if arm == "retry" else 1
            yield from (TrialKey(label, number, arm, each) for each in range(tries))

    async def _play(self, key: TrialKey) -> None:
        """Play a trial once fewer than `at_once` are being played, and record its outcome."""
        async with self._playing_slots:
            trial = await self._trial(key)
        self.record.add_outcome(key.name, _outcome(trial))

    async def _trial(self, key: TrialKey) -> Trial:
        """Play a trial, again after a fault of its environment or engine; see `play_or_cut`."""
        name, history = self._recorded_as(key), self._history(key)
        engine = _RecordingEngine(name, self._engine, self.record, history)
        plan = self._plan(key)

        def begin() -> TrialInProgress:
            engine.restart()
            return plan.begin()

        again = plan._replace(begin=begin)
        return await play_or_cut(again, engine, self._workers, self._retries)

    def _plan(self, key: TrialKey) -> Planned:
        """Return the trial that a key describes."""
        game, task = self._games[key.game], self._tasks[key.game][key.task]
        environment, config, swap, begin = game.environment, game.config, None, None
        if key.arm == "blind":
            config = config.blind()
        elif key.arm == "retry":
            config = config.with_horizon(environment, 1, config.max_turns)
            # Try n begins as episode n of the task, so it meets the same random events as episode n
            # in the other arms.
            begin = partial(_begin_try, environment, task, key.try_)
        elif key.arm == "swapped":
            swap = swapped(task, environment, "heldout")
        elif key.arm == "noise":
            # The trial begins as one of the other task, and its last episode is of this one.
            task, swap = self._tasks[key.game][self._other(key)], task
        index = _index(key)
        start = TrialStart(environment, task, index, config, self._chat, key.name, swap)
        return Planned.of(partial(TrialRun, start, begin), task, index, config.num_episodes)

    def _history(self, key: TrialKey) -> list[Completion]:
        """Return the recorded answers that a trial begins with."""
        if key.arm not in LAST_ONLY:
            return []
        whose = key.task if key.arm == "swapped" else self._other(key)
        own = TrialKey(key.game, whose, "own").name
        return self.record.answers[own][: self.record.outcomes[own].history_answers]

    def _recorded_as(self, key: TrialKey) -> str:
        """Return the name of a trial's answers in the record; a trial of the arm `noise` is named
        with the other task too, as in `rps/3/noise/7`.
        """
        # If `num_tasks` is larger than before the interruption, a different task may have the
        # closest history. The recorded answers followed the old one, so the trial begins anew.
        return f"{key.name}/{self._other(key)}" if key.arm == "noise" else key.name

    def _other(self, key: TrialKey) -> int:
        """Return the index of the task whose history is the closest in length to that of this task,
        among the tasks of other variants.
        """
        tasks, outcomes = self._tasks[key.game], self.record.outcomes
        lengths = [
            outcomes[TrialKey(key.game, number, "own").name].history_tokens
            for number in range(len(tasks))
        ]
        own = tasks[key.task].member
        others = [number for number, task in enumerate(tasks) if task.member != own]
        # Of tasks that are equally close, take the next one in the list, counted from this task:
        # so each task is used about equally often.
        return min(
            others,
            key=lambda number: (
                abs(lengths[number] - lengths[key.task]),
                (number - key.task) % len(tasks),
            ),
        )

    def scale(self, label: str) -> tuple[float, float]:
        """Return the least and the largest return of an episode of a game: the declared bounds, or
        the extremes of the recorded episodes.
        """
        facts = self._games[label].environment.facts
        seen = [
            reward
            for name, outcome in self.record.outcomes.items()
            if name.startswith(f"{label}/")
            for reward in outcome.rewards
        ]
        least = min(seen, default=0.0) if facts.min_return is None else facts.min_return
        most = max(seen, default=1.0) if facts.max_return is None else facts.max_return
        return least, most

    def returns(self, label: str) -> list[TaskReturns]:
        """Return the scaled returns of those tasks of a game whose trials have all finished."""
        least, most = self.scale(label)
        outcomes, game = self.record.outcomes, self._games[label]

        def of(key: TrialKey) -> list[float]:
            """Return the scaled return of each episode of a trial."""
            num_episodes = 1 if key.arm == "retry" else game.config.num_episodes
            # Episodes that a cut trial has not finished count as the least.
            rewards = [*outcomes[key.name].rewards, *[least] * num_episodes][:num_episodes]
            return scaled(rewards, least, most)

        found, chance = [], game.environment.facts.has_chance and not self._repeats(label)
        for number in range(self._num_tasks):
            keys = list(self._keys_of(label, number, ARMS))
            if any(key.name not in outcomes for key in keys):
                continue
            values = {key: of(key) for key in keys}
            own, blind, noise, swap = (
                values[TrialKey(label, number, arm)] for arm in ("own", "blind", "noise", "swapped")
            )
            retry = [value[0] for key, value in values.items() if key.arm == "retry"]
            member = self._tasks[label][number].member
            found.append(TaskReturns(label, member, own, blind, retry, noise[-1], swap[-1], chance))
        return found

    def _repeats(self, label: str) -> bool:
        """Return whether equal actions have earned equal rewards in all episodes of a task, often
        enough to conclude that the game has no chance.

        This is needed for a user's own class, which always counts as one with chance, because its
        `reset` receives a seed.
        """
        num_repeated = 0
        for number in range(self._num_tasks):
            earned: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
            for key in self._keys_of(label, number, ("own", "blind", "retry")):
                if outcome := self.record.outcomes.get(key.name):
                    pairs = zip(outcome.actions, outcome.rewards, strict=True)
                    # An independent try has one episode, whose number is that of the try (`_plan`).
                    for episode, (actions, reward) in enumerate(pairs, key.try_):
                        earned[tuple(actions)].append((episode, reward))
            for same in earned.values():
                # Episode n has the same seed in all arms, so there even a game with chance repeats
                # itself: only an episode of another number counts as a repetition. Different
                # rewards of any two episodes show that there is chance.
                num_repeated += len({episode for episode, _ in same}) - 1
                rewards = [reward for _, reward in same]
                if max(rewards) - min(rewards) > 1e-9:
                    return False
        return num_repeated >= ENOUGH_REPEATED

    def counts(self, label: str) -> PlayCounts:
        """Count the actions and the trials of a game."""
        named = {
            name: each
            for name, each in self.record.outcomes.items()
            if name.startswith(f"{label}/")
        }
        found, answers = named.values(), self.record.answers
        examples = (
            self._chat.decode(answers[name][0].tokens.tolist())
            for name, each in named.items()
            if each.invalid and each.invalid == each.turns and answers.get(name)
        )
        return PlayCounts(
            actions=sum(each.turns for each in found),
            invalid=sum(each.invalid for each in found),
            trials=len(found),
            cut=sum(each.is_cut for each in found),
            without_remark=sum(each.has_lost_remark for each in found),
            example=next(examples, ""),
        )


def tasks_of(environment: Environment, num_tasks: int) -> list[Task]:
    """Return the held-out tasks to play; with a larger `num_tasks` further ones follow these."""
    return evaluation_tasks(environment, "heldout", num_tasks, FINAL_SEED)


def _begin_try(environment: Environment, task: Task, number: int, episode: int) -> Play:
    """Create the episode of the independent try `number`; `episode` is always 0, and not used."""
    with environment_code(task):
        return new_play(environment, task, number)


def _index(key: TrialKey) -> int:
    """Return the trial's index, from which a model of our own derives the seeds of its samples."""
    # Each try has 8 indices, of which 5 are used: up to three more arms would change no seed.
    return 8 * key.try_ + ARMS.index(key.arm)


def _outcome(trial: Trial) -> Outcome:
    """Return what is recorded of a trial that has ended."""
    last = trial.num_episodes - 1
    before = [turn for turn in trial.turns if turn.episode < last]
    start = next((turn.start for turn in trial.turns if turn.episode == last), 0)
    rewards = trial.episode_rewards()[: trial.cut_at]
    actions = [
        [turn.action for turn in trial.turns if turn.is_act_of(episode)]
        for episode in range(len(rewards))
    ]
    is_cut = trial.cut_at is not None
    # Both counts include an episode that has not finished: its refused actions may be the reason
    # why the trial was cut.
    invalid, turns = trial.num_invalid(), trial.num_actions()
    has_lost = any(turn.kind is Kind.REFLECT and not turn.is_valid for turn in trial.turns)
    return Outcome(rewards, is_cut, invalid, turns, start, len(before), actions, has_lost)
