"""A trial against a rival: a version of the policy in the opponent's seat, played by the same
engine.

The agent's side is a trial like any other. The rival has no memory, and is told of no earlier task:
each episode is its first one, so it plays the same way in all of them, and the agent can find out
how. The rival sees what the agent would see in that seat, and its luck is the episode's, the same
for all trials of a group. Its actions reach the trial as the opponent's moves, in the environment's
words; its tokens belong to no trial, so they are neither trained on nor counted.
"""

import random
from dataclasses import replace
from functools import partial

from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import AGENT, RIVAL, Chance, Environment
from mage_async.trajectory import Task
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels.sides import SidePlay, duel_of, fault_of_silence
from mage_async.trials.duels.two_sided_run import TwoSidedRun
from mage_async.trials.trial_rules import TrialRules
from mage_async.trials.trial_run import TrialRun


class RivalSide:
    """The rival's side of one episode.

    Raises:
        EnvironmentFault: there is no seat for a rival.
    """

    def __init__(
        self,
        environment: Environment,
        task: Task,
        episode: int,
        rules: TrialRules,
        chat: ChatFormat,
        *,
        name: str,
        version: int,
    ) -> None:
        duel = self.duel = duel_of(environment, task, episode)
        self._version = version
        own_rules = replace(rules.guided(None), num_episodes=1, max_turns=0, stops_on_success=False)
        own_task = replace(task, seed=_luck(duel.chance))
        side = SidePlay(duel, RIVAL)
        own_name = f"{name}.rival{episode}"
        self._run = TrialRun(
            environment, own_task, 0, own_rules, chat, name=own_name, begin=lambda _: side
        )

    def next_prompt(self) -> Prompt | None:
        """What to sample next for the rival; None while it is not its turn."""
        prompt = self._run.next_prompt() if self.duel.turn == RIVAL else None
        return None if prompt is None else replace(prompt, rival=self._version)

    def receive(self, completion: Completion) -> None:
        """Take the completion of the last prompt."""
        self._run.receive(completion)

    def listen(self) -> None:
        """Let the rival hear what came of its last action, once it may; after every action."""
        if self.duel.turn != AGENT and self._run.is_waiting:
            self._run.hear(self.duel.hear(RIVAL))

    def contexts(self) -> list[str]:
        """Names of the contexts used so far, for an engine to release."""
        return self._run.contexts()


class DuelRun(TwoSidedRun):
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
        self._task, self._past_contexts = task, list[str]()
        rules = replace(rules, expert=None)  # scripts look at plays, not at a side of a duel
        self._meet = partial(
            RivalSide, environment, task, rules=rules, chat=chat, name=name, version=version
        )
        self._rival = self._meet(0)
        self._agent = TrialRun(
            environment, task, index, rules, chat, name=name, begin=self._agents_play
        )

    def next_prompt(self) -> Prompt | None:
        """What to sample next, for whichever side; None when the trial is over."""
        return self._rival.next_prompt() or self._agent.next_prompt()

    def receive(self, completion: Completion) -> None:
        """Take the completion of the last prompt, and let both sides hear what came of it."""
        rival, duel = self._rival, self._rival.duel
        is_rivals = duel.turn == RIVAL
        (rival if is_rivals else self._agent).receive(completion)
        if duel.turn is None and is_rivals and not self._agent.is_waiting:
            raise fault_of_silence(self._task, "the agent")
        rival.listen()
        if duel.turn != RIVAL and self._agent.is_waiting:
            self._agent.hear(duel.hear(AGENT))

    def contexts(self) -> list[str]:
        """Names of the contexts used so far, for an engine to release."""
        return [*self._agent.contexts(), *self._past_contexts, *self._rival.contexts()]

    def _agents_play(self, episode: int) -> SidePlay:
        """The agent comes to its next episode, and with it the rival."""
        if episode:
            self._past_contexts += self._rival.contexts()
            self._rival = self._meet(episode)
        return SidePlay(self._rival.duel, AGENT)


def _luck(chance: Chance) -> int:
    """A seed for the rival's completions, of the episode's luck alone."""
    return random.Random(f"{chance.seed}/{chance.episode}/rival").getrandbits(40)
