"""A trial against a rival: a version of the policy in the opponent's seat, played by the same
engine.

The agent's side is a trial like any other. The rival has no memory: each episode is its first one,
so its way to play is the same in all of them, and can be found out. It sees what the agent would
see in its seat, and its luck is the episode's, the same for all trials of a group. What it does
reaches the trial as the opponent's moves, in the environment's words; its tokens are in nobody's
trial, so they are neither trained on nor counted.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from mage_async.chat import ChatFormat
from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import (
    AGENT,
    PENDING,
    RIVAL,
    Chance,
    Duel,
    Environment,
    Outcome,
    Play,
    Side,
)
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task, Trial
from mage_async.trial_run import TrialRules, TrialRun, environment_speaking


class DuelRun:
    """As `TrialRun`, with the turns of both sides.

    Args:
        version: of the rival; its prompts ask for the weights of that one.

    Raises:
        EnvironmentFault: there is no seat for a rival.
    """

    def __init__(
        self,
        environment: Environment,
        task: Task,
        index: int,
        rules: TrialRules,
        chat: ChatFormat,
        *,
        name: str,
        version: int,
    ) -> None:
        self._shared = _Shared(environment, rules, chat, name)
        self._task, self._version = task, version
        self._past_contexts: list[str] = []
        self._rival: _SideRun | None = None
        self._duel = self._meet(0)
        self._agent = _SideRun(self._shared, task, index, rules, name, self._agents_play)

    def next_prompt(self) -> Prompt | None:
        """What to sample next, for whichever side; None when the trial is over."""
        if self._duel.turn != RIVAL or self._rival is None:
            return self._agent.next_prompt()
        prompt = self._rival.next_prompt()
        return None if prompt is None else replace(prompt, rival=self._version)

    def receive(self, completion: Completion) -> None:
        """Take the completion of the last prompt, and let both sides hear what came of it."""
        duel, rival = self._duel, self._rival
        assert rival is not None
        is_rivals = duel.turn == RIVAL
        (rival if is_rivals else self._agent).receive(completion)
        if duel.turn is None and is_rivals and not self._agent.is_waiting:
            raise EnvironmentFault(
                f"{self._task.environment}, seed {self._task.seed}: an episode against "
                f"{self._task.member!r} was over before the agent could act"
            )
        if duel.turn != AGENT and rival.is_waiting:
            rival.hear(duel.hear(RIVAL))
        if duel.turn != RIVAL and self._agent.is_waiting:
            self._agent.hear(duel.hear(AGENT))

    def contexts(self) -> list[str]:
        """Names of the contexts used so far, for an engine to release."""
        rivals = self._rival.contexts() if self._rival else []
        return [*self._agent.contexts(), *self._past_contexts, *rivals]

    def cut_short(self) -> None:
        """As `TrialRun.cut_short`, whosever prompt it was."""
        self._agent.cut_short()

    def trial(self, duration_s: float = 0.0) -> Trial:
        """The agent's finished trial."""
        return self._agent.trial(duration_s)

    def _agents_play(self, episode: int) -> "_SidePlay":
        """The agent comes to its next episode, and with it the rival."""
        if episode:
            self._duel = self._meet(episode)
        return _SidePlay(self._duel, AGENT)

    def _meet(self, episode: int) -> Duel:
        with environment_speaking(self._task):
            duel = self._shared.environment.duel(self._task, episode)
        if duel is None:
            raise EnvironmentFault(f"{self._task.environment}: nobody can play the opponent's seat")
        if self._rival is not None:
            self._past_contexts += self._rival.contexts()
        rules = replace(self._shared.rules, num_episodes=1, max_turns=0, stops_on_success=False)
        task = replace(self._task, seed=_luck(duel.chance))
        name = f"{self._shared.name}.rival{episode}"
        self._rival = _SideRun(self._shared, task, 0, rules, name, lambda _: _SidePlay(duel, RIVAL))
        return duel


class _Shared(NamedTuple):
    """What the trials of both sides have in common."""

    environment: Environment
    rules: TrialRules
    chat: ChatFormat
    name: str


class _SidePlay(Play):
    """A duel as one side's `Play`."""

    def __init__(self, duel: Duel, side: Side) -> None:
        self._duel, self._side, self.chance = duel, side, duel.chance

    @property
    def observation(self) -> str:
        """What the side was told before its first action; it is told once."""
        return self._duel.hear(self._side).observation

    @property
    def anchor(self) -> str:
        return self._duel.anchor(self._side)

    def legal_actions(self) -> Sequence[str]:
        return self._duel.legal_actions() if self._duel.turn == self._side else ()

    def act(self, action: str) -> Outcome:
        """The answer comes when it is this side's turn again, or all is done."""
        self._duel.act(action)
        return PENDING


class _SideRun(TrialRun):
    """One side's trial."""

    def __init__(
        self,
        shared: _Shared,
        task: Task,
        index: int,
        rules: TrialRules,
        name: str,
        begin: Callable[[int], _SidePlay],
    ) -> None:
        self._begin_side = begin
        super().__init__(shared.environment, task, index, rules, shared.chat, name=name)

    def _begin(self) -> Play:
        return self._begin_side(self._episode)


def _luck(chance: Chance) -> int:
    """A seed for the rival's completions, of the episode's luck alone."""
    return random.Random(f"{chance.seed}/{chance.episode}/rival").getrandbits(40)
