"""Begin trials of all kinds, and play those in which a policy also has the other player's seat: a
past policy, or the trained policy itself.

`begin_trial` chooses the kind by the task. A trial against the environment is a `TrialRun` alone.
A *duel* is an episode between two policies on the same engine: each side is a `TrialRun` of its
own, and the actions of one side reach the other as observations in the environment's words.

In a `DuelRun` the opponent is a past policy without memory and without guidance: each episode is
its first, so it plays the same way in all of them, and the agent can find out how. Its random seed
is the episode's, the same for all trials of a group. Its tokens belong to no trial, so they are
neither trained on nor counted. In a `TwoMemoriesRun` both sides remember earlier episodes.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from mage_async.completion import Completion, Prompt
from mage_async.environments.agent import AgentTasks
from mage_async.environments.environment import (
    AGENT,
    OPPONENT,
    PENDING,
    Chance,
    Duel,
    Environment,
    Outcome,
    Play,
    Side,
)
from mage_async.environments.mix import component_of
from mage_async.environments.user_calls import Call
from mage_async.errors import EnvironmentFault, TrialFault
from mage_async.tasks.league import version_of
from mage_async.tasks.task_stream import MIXED, num_seats, own_task
from mage_async.trajectory import FinishedEpisodes, Kind, Task, Trial
from mage_async.trials.agent_run import AgentRun
from mage_async.trials.trial_run import TrialRun, TrialStart, environment_code

TrialInProgress: TypeAlias = "TrialRun | AgentRun | DuelRun | TwoMemoriesRun"
"""A trial that is being played, of any kind; all kinds have the interface of `TrialRun`."""


def begin_trial(start: TrialStart) -> TrialInProgress:
    """Create a trial: against the environment, of a program, against a past policy, or with the
    policy in both seats.

    A trial of two sides is never continued: its `after` is None.
    """
    if MIXED in start.task.member:  # a mixed group, in which each trial has a member of its own
        start = replace(start, task=own_task(start.task, start.index))
    member = start.task.member
    version = version_of(member)
    if isinstance(component_of(start.environment, member), AgentTasks):
        return AgentRun(start)
    if num_seats(member) == 1 and version is None:
        return TrialRun(start)
    assert start.after is None, "the other side may remember earlier episodes"
    # An adviser needs the environment's own play, and a side of a duel is a `SidePlay`.
    start = replace(start, config=replace(start.config, advisers=None))
    if version is None or start.config.rivals_remember:
        return TwoMemoriesRun(start, version)
    return DuelRun(start, version)


def make_calls(trial: TrialInProgress) -> None:
    """Make the environment calls that a trial waits for, one after another, without an event loop.

    Raises:
        EnvironmentFault: see `Call.now`.
    """
    while (call := trial.next_call()) is not None:
        trial.answer(call.now())


def duel_of(environment: Environment, task: Task, episode: int) -> Duel:
    """Start an episode between two policies.

    Raises:
        EnvironmentFault: the environment has no opponent's seat.
    """
    with environment_code(task):
        duel = environment.duel(task, episode)
    if duel is None:
        raise EnvironmentFault(f"{task.environment}: nobody can play the opponent's seat")
    return duel


def no_turn_fault(task: Task, side: str) -> TrialFault:
    """Return the fault of an episode that was over before a side could act: nothing of it can be
    credited to that side.

    The fault is no `EnvironmentFault`, after which the trial would be played again: the environment
    did what it should.

    Args:
        side: `the agent` or `the other seat`.
    """
    return TrialFault(
        f"{task.environment}, seed {task.seed}: an episode against {task.member!r} was over before "
        f"{side} could act"
    )


class SidePlay(Play):
    """Adapt one side of a duel to `Play`, so that a `TrialRun` plays it like any other."""

    def __init__(self, duel: Duel, side: Side) -> None:
        self._duel, self._side = duel, side
        self.chance = duel.chance

    @property
    def observation(self) -> str:
        """The first observation; it can be read once."""
        return self._duel.observe(self._side).observation

    @property
    def anchor(self) -> str:
        return self._duel.anchor(self._side)

    def legal_actions(self) -> Sequence[str]:
        return self._duel.legal_actions() if self._duel.turn == self._side else ()

    def act(self, action: str) -> Outcome:
        """Apply the action; its outcome is known when it is this side's turn again, or the episode
        is done.
        """
        self._duel.act(action)
        return PENDING


class TwoSidedRun:
    """Play both sides of a trial; base class. It has the interface of `TrialRun`, and yields the
    prompts of both sides.

    Environments with duels are never slow, so `next_call` returns None: the agent's trial has no
    call.

    Args:
        version: of the past policy on the other side; `None`: the policy itself.

    Raises:
        EnvironmentFault: the environment has no opponent's seat.
    """

    def __init__(self, start: TrialStart, version: int | None) -> None:
        self._environment, self._task, self._version = start.environment, start.task, version
        self._begin_opponent(start)
        self._agent = TrialRun(start, self._agent_play)

    def _begin_opponent(self, start: TrialStart) -> None:
        """Create the other side; the arguments are those of the constructor.

        Called before the agent's side is created, which may need the other side's duel.
        """
        raise NotImplementedError

    def _agent_play(self, episode: int) -> Play:
        """Create the agent's play of an episode."""
        raise NotImplementedError

    def next_call(self) -> Call | None:
        """See `TrialRun.next_call`."""
        return self._agent.next_call()

    def answer(self, value: Any) -> None:
        """See `TrialRun.answer`."""
        self._agent.answer(value)

    def abandon(self) -> list[Call]:
        """See `TrialRun.abandon`."""
        return self._agent.abandon()

    is_between_episodes = False
    """See `TrialRun.is_between_episodes`: the other side may remember earlier episodes."""

    @property
    def episode(self) -> int:
        """See `TrialRun.episode`; that of the agent."""
        return self._agent.episode

    @property
    def num_turns(self) -> int:
        """See `TrialRun.num_turns`; those of the agent."""
        return self._agent.num_turns

    def cut_short(self) -> None:
        """See `TrialRun.cut_short`; the last prompt may be of either side."""
        self._agent.cut_short()

    def finished_episodes(self, duration_s: float) -> FinishedEpisodes:
        """See `TrialRun.finished_episodes`; never called."""
        raise AssertionError("a trial of two sides is never continued")

    def trial(self, duration_s: float = 0.0) -> Trial:
        """Return the agent's finished trial."""
        return self._agent.trial(duration_s)

    def trials(self, duration_s: float = 0.0) -> tuple[Trial, ...]:
        """See `TrialRun.trials`."""
        return (self.trial(duration_s),)


class PastPolicySide:
    """Play a past policy's side of one episode.

    Raises:
        EnvironmentFault: the environment has no opponent's seat.
    """

    def __init__(self, start: TrialStart, version: int, episode: int) -> None:
        duel = self.duel = duel_of(start.environment, start.task, episode)
        self._version = version
        # For the past policy an episode is a whole trial, which lasts as long as the agent plays.
        own_config = replace(
            start.config.with_guidance(None), num_episodes=1, max_turns=0, stops_on_success=False
        )
        # A trial's completions get their seeds from its task's seed.
        seeded_task = replace(start.task, seed=_episode_sampling_seed(duel.chance))
        own_name = f"{start.name}.rival{episode}"
        own = replace(start, task=seeded_task, index=0, config=own_config, name=own_name)
        self._run = TrialRun(own, lambda _: SidePlay(duel, OPPONENT))

    def next_prompt(self) -> Prompt | None:
        """Return the past policy's next prompt; `None` if it is not its turn."""
        prompt = self._run.next_prompt() if self.duel.turn == OPPONENT else None
        return None if prompt is None else replace(prompt, rival=self._version)

    def receive(self, completion: Completion) -> None:
        """Receive the completion of the last prompt."""
        self._run.receive(completion)

    def observe(self) -> None:
        """Pass the outcome of the past policy's last action to it, if it is known; call this after
        every action.
        """
        if self.duel.turn != AGENT and self._run.is_waiting:
            self._run.observe(self.duel.observe(OPPONENT))

    def contexts(self) -> list[str]:
        """Return the names of the contexts so far, for an engine to release."""
        return self._run.contexts()


class DuelRun(TwoSidedRun):
    """Play a trial against a past policy that remembers nothing: each episode is its first."""

    def _begin_opponent(self, start: TrialStart) -> None:
        assert self._version is not None, "without memory, only a past policy plays the other seat"
        self._past_contexts = list[str]()
        """Contexts of the past policy in the episodes before the current one."""
        # Called with the number of an episode.
        self._start_opponent = partial(PastPolicySide, start, self._version)
        self._opponent = self._start_opponent(0)

    def next_prompt(self) -> Prompt | None:
        """Return the next prompt of either side; `None` when the trial is over."""
        return self._opponent.next_prompt() or self._agent.next_prompt()

    def receive(self, completion: Completion) -> None:
        """Receive the completion of the last prompt, and pass outcomes to both sides."""
        opponent, duel = self._opponent, self._opponent.duel
        is_opponents = duel.turn == OPPONENT
        (opponent if is_opponents else self._agent).receive(completion)
        if duel.turn is None and is_opponents and not self._agent.is_waiting:
            raise no_turn_fault(self._task, "the agent")
        opponent.observe()
        # The agent's last action has its outcome once it is the agent's turn again, or at the end.
        if duel.turn != OPPONENT and self._agent.is_waiting:
            self._agent.observe(duel.observe(AGENT))

    def contexts(self) -> list[str]:
        """Return the names of the contexts so far, for an engine to release."""
        return [*self._agent.contexts(), *self._past_contexts, *self._opponent.contexts()]

    def _agent_play(self, episode: int) -> SidePlay:
        """Start the agent's next episode, and the past policy's with it."""
        if episode:
            self._past_contexts += self._opponent.contexts()
            self._opponent = self._start_opponent(episode)
        return SidePlay(self._opponent.duel, AGENT)


def _episode_sampling_seed(chance: Chance) -> int:
    """Return the seed of the past policy's completions, from the episode's chance alone."""
    return random.Random(f"{chance.seed}/{chance.episode}/rival").getrandbits(40)


class TwoMemoriesRun(TwoSidedRun):
    """Play a trial in which both sides remember the earlier episodes.

    Each side has a context with the episodes as it observed them and its own remarks, and starts
    the next episode after its remark. The other side is either the same policy (self-play), whose
    trial is trained on too, with its own returns, as a second trial of the group; or a past policy,
    whose prompts request the weights of its version, whose seeds are the same for all trials of a
    group, and whose tokens belong to no trial.

    Raises:
        EnvironmentFault: the environment has no opponent's seat.
        TrialFault: an episode was over before a side could act in it.
    """

    def _begin_opponent(self, start: TrialStart) -> None:
        assert not start.config.max_turns, (
            "no method limits turns here, as the configuration's checks ensure"
        )
        self._duels: list[Duel] = []
        """The duel of each episode so far. One side may be an episode ahead of the other."""
        self._side_to_sample: Side = AGENT
        """The side of the last prompt."""
        # In self-play this side is the group's next trial: the same task from the other seat.
        own = replace(
            start,
            task=start.task.from_other_seat(),
            index=start.index + 1,
            name=f"{start.name}.across",
        )
        if self._version is not None:
            own_config = replace(start.config.with_guidance(None), stops_on_success=False)
            task = replace(own.task, seed=_group_sampling_seed(own.task))
            own = replace(own, task=task, index=0, config=own_config)
        self._opponent = TrialRun(own, partial(self._side_play, OPPONENT))

    def next_prompt(self) -> Prompt | None:
        """Return the next prompt of either side; `None` when the agent's trial is over."""
        if self._agent.is_over:
            return None
        self._side_to_sample = next(side for side in self._runs if self._can_sample(side))
        prompt = self._runs[self._side_to_sample].next_prompt()
        assert prompt is not None, "a side whose trial is over cannot sample"
        return prompt if self._side_to_sample == AGENT else replace(prompt, rival=self._version)

    def receive(self, completion: Completion) -> None:
        """Receive the completion of the last prompt, and pass outcomes to both sides."""
        run = self._runs[self._side_to_sample]
        duel = self._duels[run.episode]
        run.receive(completion)
        if duel.turn is None and run.is_waiting:
            self._check_both_acted()
        for side, side_run in self._runs.items():
            side_duel = self._duels[side_run.episode]
            if side_run.is_waiting and side_duel.turn in (side, None):
                side_run.observe(side_duel.observe(side))

    @property
    def num_turns(self) -> int:
        """See `TrialRun.num_turns`; in self-play those of both seats."""
        return self._agent.num_turns + (self._opponent.num_turns if self._version is None else 0)

    def contexts(self) -> list[str]:
        """Return the names of the contexts so far, for an engine to release."""
        return [context for run in self._runs.values() for context in run.contexts()]

    def trials(self, duration_s: float = 0.0) -> tuple[Trial, ...]:
        """Return the finished trial of the agent; in self-play, those of both seats."""
        sides = (AGENT, OPPONENT) if self._version is None else (AGENT,)
        return tuple(self._runs[side].trial(duration_s) for side in sides)

    def _agent_play(self, episode: int) -> SidePlay:
        return self._side_play(AGENT, episode)

    def _side_play(self, side: Side, episode: int) -> SidePlay:
        """Create a side's play of an episode; the first side to arrive starts the duel."""
        if episode == len(self._duels):
            self._duels.append(duel_of(self._environment, self._task, episode))
        return SidePlay(self._duels[episode], side)

    @property
    def _runs(self) -> dict[Side, TrialRun]:
        """Both sides, in order of precedence when both can go on."""
        return {OPPONENT: self._opponent, AGENT: self._agent}

    def _can_sample(self, side: Side) -> bool:
        """Return whether a side can go on: with a remark, or with an action at its turn."""
        run = self._runs[side]
        if run.is_over or run.is_waiting:
            return False
        return run.kind in (Kind.REFLECT, Kind.NOTES) or self._duels[run.episode].turn == side

    def _check_both_acted(self) -> None:
        """Check, at the end of an episode, that both sides wait for an outcome and so have
        acted.
        """
        for side, words in ((AGENT, "the agent"), (OPPONENT, "the other seat")):
            if not self._runs[side].is_waiting:
                raise no_turn_fault(self._task, words)


def _group_sampling_seed(task: Task) -> int:
    """Return the seed of a past policy's completions, which depends only on the group's seed."""
    return random.Random(f"{task.seed}/across").getrandbits(40)
