"""A trial in which both seats remember: the policy plays each as a trial of its own.

Each side has a context, with the episodes as it saw them and its own remarks between them, and goes
on to the next episode when it has written its remark. The other side is

- the same policy (self-play): both trials are trained on, each with its own returns, as two trials
  of one group, or
- an older version: its prompts ask for the weights of that one, its luck is the same for all trials
  of a group, and its tokens belong to no trial.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import AGENT, RIVAL, Duel, Environment, Play, Side
from mage_async.trajectory import Kind, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels.sides import SidePlay, duel_of, fault_of_silence
from mage_async.trials.duels.two_sided_run import TwoSidedRun
from mage_async.trials.trial_rules import TrialRules
from mage_async.trials.trial_run import TrialRun


class TwoMemoriesRun(TwoSidedRun):
    """As `TrialRun`, with the turns of both sides.

    Args:
        version: of the other side; None: the policy itself, whose other trial is wanted too.

    Raises:
        EnvironmentFault: there is no seat for a rival, or an episode was over before a side could
            act in it.
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
        version: int | None,
    ) -> None:
        assert not rules.max_turns, "both sides have all turns of an episode, as is checked"
        self._environment, self._task, self._version = environment, task, version
        self._duels: list[Duel] = []
        self._asked: Side = AGENT
        rules = replace(rules, expert=None)  # scripts look at plays, not at a side of a duel
        mine, across, beside = self._play_of(AGENT), self._play_of(RIVAL), f"{name}.across"
        agent = self._agent = TrialRun(environment, task, index, rules, chat, name=name, begin=mine)
        task, index = task.across(), index + 1
        if version is not None:
            task, index = replace(task, seed=_luck(task)), 0
            rules = replace(rules.guided(None), stops_on_success=False)
        other = TrialRun(environment, task, index, rules, chat, name=beside, begin=across)
        self._runs: dict[Side, TrialRun] = {RIVAL: other, AGENT: agent}
        """In the order in which sides are asked, or told, where both may be."""

    def next_prompt(self) -> Prompt | None:
        """What to sample next, for whichever side; None when the agent's trial is over."""
        if self._agent.is_over:
            return None
        self._asked = next(side for side in self._runs if self._may_ask(side))
        prompt = self._runs[self._asked].next_prompt()
        assert prompt is not None, "a side whose trial is over is not asked"
        return prompt if self._asked == AGENT else replace(prompt, rival=self._version)

    def receive(self, completion: Completion) -> None:
        """Take the completion of the last prompt, and let both sides hear what came of it."""
        run = self._runs[self._asked]
        duel = self._duels[run.episode]
        run.receive(completion)
        if duel.turn is None and run.is_waiting:
            self._check_heard()
        for side, hearing in self._runs.items():
            own = self._duels[hearing.episode]
            if hearing.is_waiting and own.turn in (side, None):
                hearing.hear(own.hear(side))

    def contexts(self) -> list[str]:
        """Names of the contexts used so far, for an engine to release."""
        return [context for run in self._runs.values() for context in run.contexts()]

    def trial_across(self, duration_s: float = 0.0) -> Trial | None:
        """The finished trial of the other seat; None where an older version had that seat."""
        return self._runs[RIVAL].trial(duration_s) if self._version is None else None

    def _play_of(self, side: Side) -> Callable[[int], Play]:
        """How a side comes to an episode; the first of the two begins it."""

        def begin(episode: int) -> Play:
            if episode == len(self._duels):
                self._duels.append(duel_of(self._environment, self._task, episode))
            return SidePlay(self._duels[episode], side)

        return begin

    def _may_ask(self, side: Side) -> bool:
        """Whether a side has something to say: a remark, or an action at its turn."""
        run = self._runs[side]
        if run.is_over or run.is_waiting:
            return False
        return run.kind is Kind.REFLECT or self._duels[run.episode].turn == side

    def _check_heard(self) -> None:
        """At an episode's end both sides wait to hear of it: both have acted."""
        for side, words in ((AGENT, "the agent"), (RIVAL, "the other seat")):
            if not self._runs[side].is_waiting:
                raise fault_of_silence(self._task, words)


def _luck(task: Task) -> int:
    """A seed for an older version's completions, of the group's luck alone."""
    return random.Random(f"{task.seed}/across").getrandbits(40)
