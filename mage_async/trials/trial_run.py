"""One trial, played without waiting: prompts out, completions in, at the end a `Trial`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.environments.calls import Call, SlowPlay
from mage_async.environments.environment import (
    PENDING,
    Environment,
    Outcome,
    Play,
)
from mage_async.environments.hosted.info import MAX_TRIAL_INFO_CHARS, TRIAL_IS_FULL
from mage_async.environments.mix.parts import part_of
from mage_async.environments.whole_play import begun, own_play
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import ExpertStep, Kind, Task, Trial, Turn, exploits_from
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.environment_faults import environment_speaking, fault_of, place_of
from mage_async.trials.experts import expert_step
from mage_async.trials.transcript import Transcript
from mage_async.trials.trial_rules import TrialRules


@dataclass(slots=True)
class _Counts:
    """What the engine said of all prompts of a trial, and what the environment tried to write; the
    names are those of `Trial`.
    """

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_repeated_tokens: int = 0
    num_extension_faults: int = 0
    num_injections: int = 0

    def add(self, completion: Completion, num_prompt_tokens: int) -> None:
        """Count one completion and its prompt."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_reused_tokens += completion.num_reused
        self.num_repeated_tokens += completion.num_repeated
        self.num_extension_faults += not completion.is_extension


class _Acted(NamedTuple):
    """An action that the environment has not answered yet."""

    start: int
    completion: Completion
    action: str
    anchor: str


class TrialRun:
    """One trial while it is played.

    `while (prompt := run.next_prompt()) is not None: run.receive(await engine.complete(prompt))`

    Before each `next_prompt`, where the environment is slow, every `next_call` is made and its
    value handed to `answer`.

    Args:
        swap: another task, played in the last episode: the causal control of adaptation.
        begin: begins the play of an episode, where the environment does not begin it by itself.
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
        swap: Task | None = None,
        begin: Callable[[int], Play] | None = None,
    ) -> None:
        self._environment, self._task, self._index = environment, task, index
        part = part_of(environment, task.member)
        self._rules = rules = rules if part is environment else rules.told_by(part)
        self._facts = part.facts
        self._name, self._swap, self._begin = name, swap, begin or self._begin_alone
        self._chat = chat.offering(part.tools)
        self._transcript = Transcript(self._chat, rules.parser)
        self._turns: list[Turn] = []
        self._expert = rules.expert(part, task, index) if rules.expert else None
        self._expert_steps: list[ExpertStep] = []
        self._remarks: list[str] = []
        self._counts = _Counts()
        self._episode, self._index_in_episode, self._kind = 0, 0, Kind.ACT
        self._earned, self._info_room = 0.0, MAX_TRIAL_INFO_CHARS
        self._is_done = False
        self._cut_at: int | None = None
        self._last_words: str | None = ""
        self._acted: _Acted | None = None
        self._call: Call | None = None
        self._closings: list[Call] = []
        self._slow: SlowPlay | None = None
        self._play = self._begun()

    def next_call(self) -> Call | None:
        """What a slow environment has to be asked before there is a next prompt; None: nothing."""
        if self._closings:
            self._call = self._closings.pop()
        elif self._slow is not None and not self._is_done:
            self._call = self._slow.next_call()
        else:
            self._call = None
        return self._call

    def answer(self, value: Any) -> None:
        """Take what the last call returned."""
        assert self._call is not None, "nothing was called"
        outcome = self._call.take(value)
        if outcome is not None:
            self.hear(outcome)

    def abandon(self) -> list[Call]:
        """End here, whatever the trial waits for: calls that close what the environment holds."""
        self._retire()
        closings, self._closings = self._closings, []
        return closings

    def next_prompt(self) -> Prompt | None:
        """What to sample next; None when the trial is over."""
        if self._is_done:
            return None
        if self._last_words is not None:
            self._open(self._last_words)
        return Prompt(
            f"{self._name}.{self._transcript.num_segments}",
            self._transcript.tokens(),
            self._sampling(),
            _seed(self._task.seed, self._index, len(self._turns)),
            fresh_keys=self._wants_fresh_keys(),
            deadline_s=self._rules.turn_deadline_s,
            exploits_from=self._exploits_from(),
        )

    def receive(self, completion: Completion) -> None:
        """Take the completion of the last prompt, and let the environment answer."""
        self._counts.add(completion, self._transcript.num_tokens)
        start, inside = self._transcript.receive(completion)
        if self._kind is Kind.REFLECT:
            self._reflect(start, completion, inside)
        elif self._kind is Kind.STRATEGY:
            self._plan(start, completion, inside)
        else:
            self._act(start, completion, inside)

    @property
    def play(self) -> Play:
        """The episode being played, as its environment knows it: a script looks at it."""
        return own_play(self._play)

    @property
    def episode(self) -> int:
        """The number of that episode, from 0."""
        return self._episode

    @property
    def kind(self) -> Kind:
        """What the next completion is for."""
        return self._kind

    @property
    def is_over(self) -> bool:
        """Nothing more is asked."""
        return self._is_done

    @property
    def is_waiting(self) -> bool:
        """The environment has not answered the last action: others have to act before it does."""
        return self._acted is not None

    def contexts(self) -> list[str]:
        """Names of the contexts used so far, for an engine to release."""
        return [f"{self._name}.{number}" for number in range(1, self._transcript.num_segments + 1)]

    def cut_short(self) -> None:
        """End here, because the last prompt cannot be answered; the trial says at which episode."""
        self._is_done = True
        self._cut_at = self._episode + (self._kind is Kind.REFLECT)

    def trial(self, duration_s: float = 0.0) -> Trial:
        """The finished trial; call it after `next_prompt()` returned None."""
        assert self._is_done
        return Trial(
            self._task,
            self._index,
            self._rules.num_episodes,
            self._transcript.segments(),
            tuple(self._turns),
            **asdict(self._counts),
            duration_s=duration_s,
            memory=self._rules.memory,
            cut_at=self._cut_at,
            expert_steps=tuple(self._expert_steps),
        )

    def _act(self, start: int, completion: Completion, action: str | None) -> None:
        with environment_speaking(self._task, self._turn_name()):
            self._acted = _Acted(start, completion, action or "", self._play.anchor)
            self._ask_expert(start, completion, action or "")
            outcome = self._play.act(action or "")
        if outcome is not PENDING:
            self.hear(outcome)

    def _ask_expert(self, start: int, completion: Completion, action: str) -> None:
        """Note what the expert would do in place of an action that the environment has not seen."""
        if self._expert is None:
            return
        done = [turn.action for turn in self._turns if turn.is_act_of(self._episode)]
        wanted = self._expert.action(self.play, self._episode, done)
        if wanted is not None:
            said = completion.tokens.tolist()
            step = ExpertStep(len(self._turns), wanted)
            parser = self._rules.parser
            self._expert_steps.append(expert_step(step, start, said, action, self._chat, parser))

    def hear(self, outcome: Outcome) -> None:
        """Take the environment's answer to the last action."""
        assert self._acted is not None, "nothing was asked of the environment"
        start, completion, action, anchor = self._acted
        self._acted = None
        if fault := fault_of(outcome):
            raise EnvironmentFault(f"{place_of(self._task)}{self._turn_name()}: act() {fault}")
        self._counts.num_injections += self._chat.holds_special_token(outcome.observation)
        outcome = replace(outcome, observation=self._rules.prompts.layout(outcome.observation))
        self._turns.append(
            replace(
                self._turn(start, completion, outcome.reward, outcome.is_valid, action, anchor),
                info=self._kept(outcome.info),
            )
        )
        self._index_in_episode += 1
        self._earned += outcome.reward
        if outcome.is_done or self._index_in_episode == self._rules.max_turns:
            self._end_episode(outcome)
        elif outcome.tool_answers and not self._wants_strategy():
            self._kind = Kind.ACT
            self._transcript.tell_tool_answers(outcome.tool_answers)
        else:
            self._invite(self._transcript.tell, outcome.observation)

    def _invite(self, say: Callable[[str, Kind], None], said: str) -> None:
        """Say something that an action answers, or a strategy and then the action."""
        self._kind = Kind.STRATEGY if self._wants_strategy() else Kind.ACT
        more = self._rules.prompts.strategy if self._kind is Kind.STRATEGY else ""
        say(f"{said} {more}".strip(), self._kind)

    def _wants_strategy(self) -> bool:
        wanted = self._rules.strategy
        return wanted == "turn" or (wanted == "episode" and self._index_in_episode == 0)

    def _plan(self, start: int, completion: Completion, plan: str | None) -> None:
        self._turns.append(self._turn(start, completion, 0.0, plan is not None, plan or "", ""))
        self._kind = Kind.ACT
        self._transcript.tell(self._rules.prompts.act, Kind.ACT)

    def _begun(self) -> Play:
        """The play of the next episode; a fast one is never asked for calls."""
        play = self._begin(self._episode)
        self._slow = play if isinstance(play, SlowPlay) else None
        return play

    def _retire(self) -> None:
        """Nothing more is asked of the play."""
        if self._slow is not None and (call := self._slow.closing()) is not None:
            self._closings.append(call)

    def _end_episode(self, outcome: Outcome) -> None:
        self._retire()
        if self._episode + 1 == self._rules.num_episodes or self._succeeded():
            self._transcript.end(outcome.observation)
            self._is_done = True
        elif self._rules.reflects:
            self._kind = Kind.REFLECT
            self._transcript.tell(
                f"{outcome.observation} {self._rules.prompts.reflect}", Kind.REFLECT
            )
        else:
            self._next_episode(outcome.observation)

    def _succeeded(self) -> bool:
        return self._rules.stops_on_success and self._facts.is_won(self._earned)

    def _reflect(self, start: int, completion: Completion, remark: str | None) -> None:
        self._turns.append(self._turn(start, completion, 0.0, remark is not None, remark or "", ""))
        self._remarks.append(remark or "")
        self._next_episode("")

    def _next_episode(self, last_words: str) -> None:
        self._episode, self._index_in_episode, self._kind = self._episode + 1, 0, Kind.ACT
        self._earned = 0.0
        self._last_words = last_words
        self._play = self._begun()

    def _open(self, last_words: str) -> None:
        """Say how the episode begins, once it is the agent's turn."""
        self._last_words = None
        words = self._rules.prompts
        observation = words.layout(self._play.observation)
        self._counts.num_injections += self._chat.holds_special_token(observation)
        if self._rules.keeps_history and self._episode:
            said = words.beginning(self._episode, observation)
            self._invite(self._transcript.tell, f"{last_words} {said}".strip())
        else:
            if last_words:
                self._transcript.end(last_words)
            said = words.opening(self._episode, observation, self._remarks)
            self._invite(self._transcript.ask, said)

    def _begin_alone(self, episode: int) -> Play:
        is_last = episode + 1 == self._rules.num_episodes
        task = self._swap if self._swap is not None and is_last else self._task
        with environment_speaking(task):
            return begun(self._environment, task, episode)

    def _turn(
        self,
        start: int,
        completion: Completion,
        reward: float,
        is_valid: bool,
        action: str,
        anchor: str,
    ) -> Turn:
        return Turn(
            self._kind,
            self._episode,
            0 if self._kind is Kind.REFLECT else self._index_in_episode,
            self._transcript.num_segments - 1,
            start,
            start + len(completion.tokens),
            reward,
            is_valid,
            action,
            anchor,
            completion.num_reused,
        )

    def _kept(self, info: str) -> str:
        """What the trial's record has room for."""
        self._info_room -= len(info)
        return info if not info or self._info_room >= 0 else TRIAL_IS_FULL

    def _turn_name(self) -> str:
        return f", episode {self._episode + 1}, turn {self._index_in_episode + 1}"

    def _exploits_from(self) -> int | None:
        """From which token of the context on the exploiter reads and acts; None: not yet."""
        rules, segment = self._rules, self._transcript.num_segments - 1
        if not rules.separates_exploration or self._episode + 1 < rules.num_episodes:
            return None
        return exploits_from(
            (turn for turn in self._turns if turn.segment == segment), rules.num_episodes
        )

    def _wants_fresh_keys(self) -> bool:
        first = Kind.ACT if self._rules.strategy == "none" else Kind.STRATEGY
        begins = self._index_in_episode == 0 and self._kind is first and self._episode > 0
        return self._rules.fresh_keys == "turn" or (self._rules.fresh_keys == "episode" and begins)

    def _sampling(self) -> Sampling:
        rules = self._rules
        if self._kind is Kind.ACT:
            return rules.sampling
        written = replace(rules.sampling, max_tokens=rules.max_reflection_tokens)
        if self._kind is Kind.REFLECT:
            return written
        return replace(written, temperature=rules.strategy_temperature)


def _seed(task_seed: int, trial: int, turn: int) -> int:
    """A seed of 63 bits for one completion; distinct trials and turns get unrelated ones."""
    mixed = (task_seed * 0x9E3779B97F4A7C15 + trial * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return ((mixed ^ (mixed >> 31)) + turn * 0x94D049BB133111EB) % 2**63
