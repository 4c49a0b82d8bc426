"""Run an actor: play granted groups, concurrently, on one engine whose weights change.

A group is some trials of one task. The learner grants it to one actor and, if that actor fails, to
another one; the epoch of a grant is how often the group was granted before.

task        waits for                       then
receive     the learner's next message      queues it; answers WhoAreYou of a restarted learner
handle      the next queued message         loads weights, starts a group, forgets a trial
group N     weights as new as its grant     plays its trials, each a task, until they end or the
                                            learner takes the group away
trial N.i   completions of the engine       sends the result, keeps it until acknowledged
heartbeat   the clock                       sends the engine's counters and each group's turns
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mage_services.processes.cores_and_memory import ACTOR, lower_priority

if __name__ == "__main__":
    # Lowered before the imports below, which take seconds, so that the learner's imports, for which
    # all processes wait, go first.
    lower_priority(ACTOR)

from mage_async.assembly import (
    edit_notes,
    environment_of,
    source_digests,
    trial_config_of,
)
from mage_async.config.schema import Config
from mage_async.errors import RunError, TrialFault, WireError, error_text
from mage_async.inference.chat_files import load_chat
from mage_async.methods.method import Methods
from mage_async.protocol.codec import encode, encode_result
from mage_async.protocol.messages import (
    MAX_REASON_CHARS,
    Acknowledge,
    EpisodeResult,
    Goodbye,
    GroupDrop,
    GroupGrant,
    Heartbeat,
    Loaded,
    Message,
    Publication,
    Rival,
    Unwanted,
    Welcome,
)
from mage_async.results.run_files import read_document
from mage_async.tasks.task_stream import indices_to_begin
from mage_async.trajectory import FinishedEpisodes, Task
from mage_async.trials.duels import TrialInProgress
from mage_services.actor.rollout import Retries, Stage, play_retried
from mage_services.engines.engine import Engine, make_engine
from mage_services.engines.weight_acceptance import loaded
from mage_services.environments.call_runner import CallRunner
from mage_services.processes.process import (
    RunFiles,
    Startup,
    Status,
    read_startup,
    run_process,
    ticks,
)
from mage_services.processes.time_accounting import TimeAccounting
from mage_services.transport.access_control import actor_keys, keys_in
from mage_services.transport.channels import PeerChannel

if TYPE_CHECKING:
    from mage_async.protocol.trial_arrays import Frame

T = TypeVar("T")

HEARTBEAT_S = 1.0
"""Seconds between the heartbeats that tell the learner that an actor or the evaluator lives."""
KEPT_AFTER_S = 1.0
"""Seconds of playing after which a trial's finished episodes are sent to the learner, so that
another actor can continue the trial after them. Episodes that took less are cheaper to play again
than to send."""


@dataclass(slots=True)
class PlayedGroup:
    """Hold a group while it is played."""

    grant: GroupGrant
    episodes: dict[int, FinishedEpisodes]
    """Finished episodes of its trials by index; a trial that is continued or played again begins
    after them."""
    unfinished: dict[int, TrialInProgress] = field(default_factory=dict)
    """Its trials that have begun and not ended, by index."""

    def num_turns(self) -> int:
        """Return the number of turns that its unfinished trials have had."""
        return sum(trial.num_turns for trial in self.unfinished.values())


@dataclass(slots=True)
class Weights:
    """Hold the version that the engine samples with, and let tasks wait for a newer one."""

    version: int = -1
    """-1 until the engine has loaded weights."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def record(self, version: int) -> None:
        """Record that the engine samples with `version` from here on."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def wait_for(self, version: int) -> None:
        """Wait until the engine samples with `version` or newer. Safe to cancel."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)


async def with_heartbeats(
    channel: PeerChannel, heartbeat: Callable[[], Heartbeat], work: Awaitable[T]
) -> T:
    """Await `work`, and send a heartbeat each second meanwhile; return the result of the work.

    Cancellation cancels the work. If the work waits for a thread, the thread runs on to its end.
    """
    async with asyncio.TaskGroup() as tasks:
        beat = tasks.create_task(_beat(channel, heartbeat), name="heartbeat")
        done = await work
        beat.cancel()
    return done


async def _beat(channel: PeerChannel, heartbeat: Callable[[], Heartbeat]) -> None:
    """Send heartbeats until cancelled."""
    async for _ in ticks(HEARTBEAT_S):
        await channel.send(heartbeat())


@asynccontextmanager
async def receiving(channel: PeerChannel) -> AsyncIterator[asyncio.Queue[Message]]:
    """Queue the learner's messages in a task, until its goodbye or the end of the context.

    The actor handles no message while it makes its engine or loads weights. But a restarted learner
    waits only `SILENCE_S` (`learner/coordinator.py`) for the Hello with which the channel answers
    its `WhoAreYou`, and then grants the actor's groups to others. Cancellation ends the task.
    """
    messages = asyncio.Queue[Message]()

    async def receive() -> None:
        message: Message | None = None
        while not isinstance(message, Goodbye):
            messages.put_nowait(message := await channel.receive())

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(receive(), name="messages of the learner")
        yield messages
        task.cancel()


async def bring_nothing(path: Path) -> Path:
    """Return the path unchanged: the file is on this machine already."""
    return path


class Actor:
    """Play groups until the learner's goodbye.

    Args:
        stage: Begins trials, with the engine and the workers.
        name: Name of the actor in messages to the learner.
        played: Called after each group that was played to its end.
        bring: Copies a file of the run to this machine, and returns its path there.
    """

    def __init__(
        self,
        channel: PeerChannel,
        stage: Stage,
        name: str,
        played: Callable[[], None] = lambda: None,
        bring: Callable[[Path], Awaitable[Path]] = bring_nothing,
    ) -> None:
        self._channel, self._stage, self._name, self._report_played = channel, stage, name, played
        self._bring = bring
        self._weights = Weights()
        self._unacknowledged: dict[tuple[int, int], list[Frame]] = {}
        """Encoded results by grant and trial index, until the learner has acknowledged them."""
        self._playing: dict[tuple[int, int], PlayedGroup] = {}
        """The groups being played, by grant and epoch."""
        self._offered: dict[int, dict[int, FinishedEpisodes]] = {}
        """Finished episodes that an earlier actor played, by grant and trial index. The learner
        sends them before it grants their group to this actor."""
        self._num_groups = {"playing": 0, "no fresh weights": 0}
        """Number of groups in each state. The actor's own state is the first one of these that has
        a group, or "no grant"."""
        self.time = TimeAccounting("no grant")
        """Seconds spent in each state."""
        self._playing_s = dict.fromkeys(("engine", "trials", "environment", "other"), 0.0)
        """Seconds of playing by what they were spent on."""
        self._counted = 0.0, 0.0, time.thread_time(), 0.0
        """Totals that `_playing_s` has been computed from so far: seconds of playing, of the
        engine's forward passes, of this thread's CPU time and of environment calls."""

    async def run(self, first: Message, messages: asyncio.Queue[Message]) -> str:
        """Serve the learner until its goodbye, whose reason is returned.

        Cancellation abandons every trial; the learner grants their groups again.

        Args:
            first: The learner's first message.
            messages: The later ones, as `receiving` queues them.
        """
        async with asyncio.TaskGroup() as tasks:
            handling = self._handle(first, messages, tasks)
            return await with_heartbeats(self._channel, self._heartbeat, handling)

    async def _handle(
        self, message: Message, messages: asyncio.Queue[Message], tasks: asyncio.TaskGroup
    ) -> str:
        """Handle the learner's messages from this one to its goodbye, whose reason is returned."""
        group_tasks: dict[tuple[int, int], asyncio.Task[None]] = {}

        def forget(key: tuple[int, int], _: object) -> None:
            """Forget a group whose task has ended."""
            del group_tasks[key], self._playing[key]

        while True:
            match message:
                case GroupGrant():
                    key = message.grant, message.epoch
                    episodes = self._offered.pop(message.grant, {})
                    if key not in group_tasks:  # a restarted learner repeats its grants
                        group = self._playing[key] = PlayedGroup(message, episodes)
                        task = tasks.create_task(self._group(group), name=f"group {key[0]}")
                        group_tasks[key] = task
                        task.add_done_callback(partial(forget, key))
                case EpisodeResult():
                    offered = self._offered.setdefault(message.grant, {})
                    offered[message.finished.trial.index] = message.finished
                case Goodbye():
                    _cancel(group_tasks.values())
                    return message.reason
                case Welcome():
                    # The learner has ended the other groups, or granted them to another actor.
                    _cancel(group_tasks[key] for key in group_tasks.keys() - set(message.keeps))
                    await self._welcome(message)
                case Publication():
                    await self._load(message.version, Path(message.path))
                case Acknowledge() | Unwanted():
                    self._unacknowledged.pop((message.grant, message.trial), None)
                case _:
                    raise RunError(f"an actor cannot take {type(message).__name__}")
            message = await messages.get()

    async def _welcome(self, welcome: Welcome) -> None:
        """Answer a learner that has accepted this actor, perhaps after a restart.

        Results and finished episodes that it may not have are sent again.
        """
        if welcome.weights_path is not None and welcome.version > self._weights.version:
            await self._load(welcome.version, Path(welcome.weights_path))
        elif self._weights.version >= 0:
            await self._channel.send(Loaded(version=self._weights.version))
        for frames in list(self._unacknowledged.values()):
            await self._channel.send_frames(frames)
        for key in self._playing.keys() & set(welcome.keeps):
            group = self._playing[key]
            for finished in list(group.episodes.values()):
                await self._send_episodes(group.grant, finished)

    async def _load(self, version: int, path: Path) -> None:
        """Load weights into the engine, wake the groups that wait for them, tell the learner."""
        receipt = await self._stage.engine.load(version, await self._bring(path))
        await self._weights.record(version)
        await self._channel.send(loaded(version, receipt))

    async def _group(self, group: PlayedGroup) -> None:
        """Play the trials of one group, or report the fault that ended it.

        There is no deadline here: the learner takes an overdue group away. Cancellation abandons
        the trials that are not finished.
        """
        grant = group.grant
        with self._in_state("no fresh weights"):
            await self._weights.wait_for(grant.version)
        with self._in_state("playing"):
            try:
                async with self._past_policy(grant.rival):
                    await self._trials(group)
                self._report_played()
            except* TrialFault as faults:
                reason = error_text(faults.exceptions[0])[:MAX_REASON_CHARS]
                turns = group.num_turns()
                await self._channel.send(
                    GroupDrop(grant=grant.grant, epoch=grant.epoch, reason=reason, num_turns=turns)
                )

    @contextmanager
    def _in_state(self, state: str) -> Iterator[None]:
        """Context manager: count one more group in a state, for the time accounting."""
        self._num_groups[state] += 1
        self._enter_state()
        try:
            yield
        finally:
            self._num_groups[state] -= 1
            self._enter_state()

    def _enter_state(self) -> None:
        """Enter the actor's state, which follows from the states of its groups (`_num_groups`)."""
        states = (state for state, count in self._num_groups.items() if count)
        self.time.enter(next(states, "no grant"))

    @asynccontextmanager
    async def _past_policy(self, rival: Rival | None) -> AsyncIterator[None]:
        """Context manager: keep the weights of a past policy, the opponent, in the engine.

        Cancellation releases them.
        """
        if rival is None:
            yield
            return
        engine = self._stage.engine
        await engine.load_past(rival.version, await self._bring(Path(rival.path)))
        try:
            yield
        finally:
            engine.release_past(rival.version)

    async def _trials(self, group: PlayedGroup) -> None:
        """Play the trials of a group concurrently, except those that the learner has already."""
        grant = group.grant
        task = Task(grant.environment, grant.member, grant.seed, grant.seat)
        stage = self._stage.with_horizon(grant.num_episodes, grant.max_turns)
        async with asyncio.TaskGroup() as trials:
            # Where the policy plays both seats of a game, two trials come from one play:
            # `indices_to_begin` has the index of the first of them.
            for index in indices_to_begin(task, grant.num_trials):
                if index in grant.held or (grant.grant, index) in self._unacknowledged:
                    continue  # the learner has it, or it was sent
                guided = stage.guided(grant.guidance and grant.guidance.for_trial(index))
                trials.create_task(
                    self._trial(guided, group, task, index), name=f"trial {grant.grant}.{index}"
                )

    async def _trial(self, stage: Stage, group: PlayedGroup, task: Task, index: int) -> None:
        """Play a trial and send it, with that of the other seat if the policy plays both.

        After a fault of the environment the same trial is played again, beginning after the last
        finished episode that was kept, while the group's other trials go on. Cancellation abandons
        the trial, unless it has ended.

        Raises:
            TrialFault: the last retry has failed too; or the trial does not fit into a message, as
                when a policy has collapsed into endless text.
        """
        grant, name = group.grant, f"{group.grant.grant}.{group.grant.epoch}.{index}"
        # When this try began, and when finished episodes were last kept.
        began = kept = time.monotonic()

        def begin() -> TrialInProgress:
            nonlocal began
            began = time.monotonic()
            trial = stage.begin(task, index, name, after=group.episodes.get(index))
            group.unfinished[index] = trial
            return trial

        async def keep(trial: TrialInProgress) -> None:
            """Keep and send finished episodes that are new and took long to play."""
            nonlocal kept
            known, now = group.episodes.get(index), time.monotonic()
            has_new = known is None or known.num_episodes != trial.episode
            if has_new and now - kept >= KEPT_AFTER_S:
                kept = now
                finished = group.episodes[index] = trial.finished_episodes(now - began)
                await self._send_episodes(grant, finished)

        played = await play_retried(begin, stage.engine, stage.workers, stage.retries, keep)
        trials = played.run.trials(played.duration_s)
        try:
            frames = encode_result(grant.grant, grant.epoch, trials, played.num_retries)
        except WireError as fault:
            # A fault of the trial, not of the actor: were the actor to end, the next one would be
            # granted the same seeds, and end too.
            raise TrialFault(f"trial {index} cannot be sent: {fault}") from fault
        del group.unfinished[index]
        group.episodes.pop(index, None)
        self._unacknowledged[grant.grant, index] = frames
        await self._channel.send_frames(frames)

    async def _send_episodes(self, grant: GroupGrant, finished: FinishedEpisodes) -> None:
        """Send finished episodes to the learner, which gives them to the next actor if this one
        ends.
        """
        try:
            frames = encode(EpisodeResult(grant.grant, grant.epoch, finished))
        except WireError:
            return  # the whole trial will not fit into a message either, and says so
        await self._channel.send_frames(frames)

    def _heartbeat(self) -> Heartbeat:
        """Return the engine's counters, the number of trials played again, the seconds in each
        state so far, and how far each group has come.
        """
        statistics = self._stage.engine.statistics()
        seconds = self._book_seconds(statistics.forward_s)
        turns = tuple((*key, group.num_turns()) for key, group in self._playing.items())
        counters = statistics.counters() | {"num_played_again": self._stage.retries.num_trials}
        return Heartbeat(name=self._name, counters=counters, blocked_s=seconds, turns=turns)

    def _book_seconds(self, engine_s: float) -> dict[str, float]:
        """Add the seconds since the last call to the parts of "playing", and return the seconds in
        each state, with these four parts in place of "playing".

        The parts are the engine's forward passes, this thread's work on trials, the calls of the
        environment, and "other" (handing over between threads, and waiting for a core). Of parts
        that happen at the same time, only the first one named is counted, so the parts add up to
        the seconds of playing.

        Args:
            engine_s: Seconds of the engine's forward passes since it started.
        """
        seconds = self.time.seconds()
        playing_s = seconds.pop("playing", 0.0)
        now = playing_s, engine_s, time.thread_time(), self._stage.workers.calling_s()
        # `left`: seconds of playing since the last call that are not counted for a part yet.
        left, *parts = (new - old for new, old in zip(now, self._counted, strict=True))
        self._counted = now
        for state, spent in zip(("engine", "trials", "environment"), parts, strict=True):
            booked = max(0.0, min(spent, left))
            self._playing_s[state] += booked
            left -= booked
        self._playing_s["other"] += left
        return seconds | self._playing_s


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()


async def main(startup: Startup, status: Status) -> None:
    """Connect to the learner, play, and end with the learner."""
    config = startup.config
    # As many groups as the engine serves at once.
    quota = config.engine.max_contexts // config.admission.trials_per_group
    keys = keys_in(actor_keys, startup.keys)
    with PeerChannel(startup.address, startup.hello("actor", quota), keys=keys) as channel:
        files = RunFiles(status, startup.is_remote)
        note_edits(await files.bring(startup.run.launch), status.note)
        reason = await play(channel, config, startup.run.policy, startup.name, status, files.bring)
    status.send("done", reason=reason)


def note_edits(launch: Path, note: Callable[[str], None]) -> None:
    """Note each class of the user that was edited since the start of the run: this process plays
    the class as it is now, and the processes that were not restarted play it as it was.

    Args:
        launch: Record of the start, with digests of the sources.
    """
    before = read_document(launch).get("sources", {})
    for text in edit_notes(before, source_digests(before)):
        note(text)


async def play(
    channel: PeerChannel,
    config: Config,
    policy: Path,
    name: str,
    status: Status,
    bring: Callable[[Path], Awaitable[Path]] = bring_nothing,
) -> str:
    """Wait until the learner accepts this actor, then play until its goodbye, whose reason is
    returned. Cancellation abandons every trial.

    Args:
        policy: Directory of the model.
        bring: Copies a file of the run to this machine, and returns its path there.
    """
    async with receiving(channel) as messages:
        welcome = await messages.get()
        unready = partial(Heartbeat, name=name, counters={}, blocked_s={})
        policy = await with_heartbeats(channel, unready, bring(policy))
        environment = environment_of(config)
        chat = load_chat(policy, thinking=config.transcript.thinking)
        trial_config = trial_config_of(
            config,
            environment,
            chat,
            config.trial.episodes,
            stops_on_success=config.trial.stop_on_success,
            advisers=Methods(config, environment).advisers(),
        )
        # In a thread, while heartbeats go on: reading and arranging the weights of a large model
        # takes longer than the silence after which the learner takes an actor for dead.
        making = asyncio.to_thread(make_engine, config, policy, name)
        async with (
            await with_heartbeats(channel, unready, making) as engine,
            CallRunner(config.environment, status.note) as workers,
            asyncio.TaskGroup() as tasks,
        ):
            engine_report = tasks.create_task(_report_engine(engine, status), name="engine report")
            retries = Retries(config.environment.retries, status.note)
            stage = Stage(environment, trial_config, chat, engine, workers, retries)
            actor = Actor(channel, stage, name, partial(status.send, "played"), bring)
            reason = await actor.run(welcome, messages)
            engine_report.cancel()  # the run may end before the engine has described itself
    return reason


async def _report_engine(engine: Engine, status: Status) -> None:
    """Send the supervisor a description of the engine as soon as it serves. Cancellation sends
    nothing.
    """
    facts = await engine.describe()
    status.send("ready")
    status.send("fact", text=facts)


if __name__ == "__main__":
    run_process(lambda status: main(read_startup("An actor of a run.", status), status))
