"""Play one trial as a state machine without I/O: prompts out, completions in, a `Trial` at the end.

Actors, evaluators and scripts drive it. `duels.py` joins two runs, one for each side, into a game
between two policies. There, the outcome of an action is `PENDING` until the other side has acted,
and a game of the policy against itself ends as two trials. An action in a slow environment is
`PENDING` until its call has returned.

The environment decides whether an action is legal (`Outcome.is_valid`); an illegal one uses up its
turn and costs `advantage.format_penalty` in training, and where the environment names its legal
actions, it cannot be sampled (`allowed_tokens.py`). `context_limit.py` keeps contexts short enough
for the engine.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.environments.environment import (
    PENDING,
    Environment,
    Outcome,
    Play,
    observation_fault,
    reward_fault,
)
from mage_async.environments.mix import component_of
from mage_async.environments.user_calls import (
    MAX_INFO_CHARS,
    MAX_TRIAL_INFO_CHARS,
    TRIAL_IS_FULL,
    Call,
    SlowPlay,
    new_play,
    own_play,
)
from mage_async.errors import CallFault, ContextFull, EnvironmentFault, error_text
from mage_async.restriction import Restriction
from mage_async.trajectory import (
    Alternative,
    FinishedEpisodes,
    Kind,
    Task,
    Trial,
    Turn,
    role_changes,
)
from mage_async.trials.action_parser import NAMES, ActionParser
from mage_async.trials.allowed_tokens import restriction_of
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.context_limit import Contexts, NextTurn
from mage_async.trials.transcript import Transcript
from mage_async.trials.trial_config import TrialConfig


@dataclass(slots=True)
class Counts:
    """Hold the counters of a trial; `Trial` describes them, in fields of the same names."""

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_repeated_tokens: int = 0
    num_extension_faults: int = 0
    num_injections: int = 0
    num_cut_episodes: int = 0

    def add(self, completion: Completion, num_prompt_tokens: int) -> None:
        """Count one completion and its prompt."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_reused_tokens += completion.num_reused
        self.num_repeated_tokens += completion.num_repeated
        self.num_extension_faults += not completion.is_extension


class _PendingAction(NamedTuple):
    """Hold an action whose outcome is not known yet."""

    start: int
    """Where the completion begins in its segment of the transcript."""
    completion: Completion
    action: str
    anchor: str


@dataclass(frozen=True, slots=True)
class TrialStart:
    """Hold the arguments with which a trial of any kind begins."""

    environment: Environment
    task: Task
    index: int
    """Number of the trial in its group."""
    config: TrialConfig
    chat: ChatFormat
    name: str
    """Prefix of the names of its contexts in the engine."""
    swap: Task | None = None
    """Another task, which replaces the task in the last episode, as a control of adaptation."""
    after: FinishedEpisodes | None = None
    """Episodes of this trial that another process has finished, which the run continues; None: the
    trial begins here.
    """


class TrialRun:
    """Play one trial: hand out its prompts, receive their completions, return the trial.

    `while (prompt := run.next_prompt()) is not None: run.receive(await engine.complete(prompt))`

    A *slow* environment is one whose methods may block, such as a user's class, so the caller makes
    its calls elsewhere: before each `next_prompt`, make the calls that `next_call` returns, and
    pass their results to `answer`.

    Args:
        begin: creates the play of an episode in which a policy has the other seat (`duels.py`);
            None: the environment's own play.
    """

    def __init__(self, start: TrialStart, begin: Callable[[int], Play] | None = None) -> None:
        environment, task, config = start.environment, start.task, start.config
        self._environment, self._task, self._index = environment, task, start.index
        self._name, self._swap, self._after = start.name, start.swap, start.after
        # The environment itself or, of a mix of environments, the one that this task belongs to.
        part = component_of(environment, task.member)
        self._config = config = config if part is environment else config.for_environment(part)
        self._facts = part.facts
        self._make_play = begin or self._play_alone
        self._chat = start.chat.offering(part.tools)
        self._transcript = Transcript(self._chat, config.parser)
        self._contexts = Contexts(config, self._chat, self._transcript, self._legal_actions)
        self._turns: list[Turn] = []
        self._adviser = config.advisers(part, task, start.index) if config.advisers else None
        self._alternatives: list[Alternative] = []
        self._remarks: list[str] = []
        """The agent's remarks after each finished episode."""
        self._counts = Counts()
        self.episode, self._index_in_episode = 0, 0
        """Number of the current episode, and of the next action in it, both from 0."""
        self.kind = Kind.ACT
        """Kind of the next completion."""
        self._info_left = MAX_TRIAL_INFO_CHARS
        """Characters of `info` for which the trial's record still has room; below 0 once it is
        full.
        """
        self.is_over = False
        """Whether the trial needs no more completions."""
        self._cut_at: int | None = None
        """The episode in which the trial was cut short; `None`: it was not."""
        self._last_message: str | None = ""
        """The last observation of the episode before, until the current episode begins; then
        `None`.
        """
        self._pending_action: _PendingAction | None = None
        """The action that has no outcome yet."""
        self._call: Call | None = None
        """The call whose result `answer` receives."""
        self._allowed: tuple[tuple[int, int], Restriction | None] | None = None
        """Legal actions as tokens, and the episode and turn that they are of."""
        self._closings: list[Call] = []
        """Calls that close the objects of ended episodes."""
        self._slow: SlowPlay | None = None
        """The current play, if its environment is slow."""
        # Another process cannot continue a trial whose adviser, or whose other seat in a duel, may
        # remember the episodes that it has seen.
        self._may_be_resumed = (
            config.resumes and not config.advisers and begin is None and self._swap is None
        )
        # Truncation needs the texts of the context's messages, and `FinishedEpisodes` has only
        # their tokens.
        self._may_be_resumed &= config.compaction != "truncation"
        if self._after is not None:
            self._resume(self._after)
        self._play = self._begin_play()

    def next_call(self) -> Call | None:
        """Return the call that a slow environment needs before the next prompt; `None` if there is
        none.
        """
        if self._closings:
            self._call = self._closings.pop()
        elif self._slow is not None and not self.is_over:
            self._call = self._slow.next_call()
        else:
            self._call = None
        return self._call

    def answer(self, value: Any) -> None:
        """Receive the result of the call that `next_call` returned last."""
        assert self._call is not None, "nothing was called"
        outcome = self._call.take(value)
        if outcome is not None:
            self.observe(outcome)

    def abandon(self) -> list[Call]:
        """Give the trial up in any state; return the calls that close the environment's objects."""
        self._close_play()
        closings, self._closings = self._closings, []
        return closings

    def next_prompt(self) -> Prompt | None:
        """Return the next prompt; `None` when the trial is over.

        A second call before `receive` returns the same prompt.
        """
        if self.is_over:
            return None
        if self._last_message is not None:
            self._begin_episode(self._last_message)
        return Prompt(
            # Each segment of the transcript is one growing context of the engine.
            f"{self._name}.{self._transcript.num_segments}",
            self._transcript.tokens(),
            self._sampling(),
            turn_seed(self._task.seed, self._index, len(self._turns)),
            refresh_kv=self._wants_kv_refreshed(),
            deadline_s=self._config.turn_deadline_s,
            role_changes=self._role_changes(),
            restriction=self._restriction(),
        )

    def receive(self, completion: Completion) -> None:
        """Receive the completion of the last prompt, and pass its action to the environment."""
        self._counts.add(completion, self._transcript.num_tokens)
        start, text = self._transcript.receive(completion)
        if self.kind is Kind.ACT:
            self._act(start, completion, text)
        else:
            self._record_remark(start, completion, text)

    @property
    def play(self) -> Play:
        """The environment's play of the current episode, without the wrapper of a slow environment;
        scripts read it.
        """
        return own_play(self._play)

    @property
    def is_waiting(self) -> bool:
        """Whether the last action has no outcome yet: another seat acts first (`duels.py`), or the
        call of a slow environment has not returned.
        """
        return self._pending_action is not None

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns so far."""
        return self._turns

    @property
    def num_turns(self) -> int:
        """Number of turns so far."""
        return len(self._turns)

    @property
    def is_between_episodes(self) -> bool:
        """Whether another process may continue the trial now: an episode has ended, and the next
        one has not begun for the agent.
        """
        return self._may_be_resumed and self.episode > 0 and self._last_message is not None

    def finished_episodes(self, duration_s: float) -> FinishedEpisodes:
        """Return what a trial needs to be continued; call it where `is_between_episodes`."""
        assert self.is_between_episodes
        assert self._last_message is not None
        return FinishedEpisodes(self._trial(duration_s), self._last_message)

    def contexts(self) -> list[str]:
        """Return the names of the contexts so far, for an engine to release."""
        return [f"{self._name}.{number}" for number in range(1, self._transcript.num_segments + 1)]

    def cut_short(self) -> None:
        """End the trial because its last prompt cannot be answered, and record in which episode."""
        self.is_over = True
        # A reflection is requested after the end of its episode, so the next episode is cut.
        self._cut_at = self.episode + 1 if self.kind is Kind.REFLECT else self.episode

    def trials(self, duration_s: float = 0.0) -> tuple[Trial, ...]:
        """Return the finished trials: this one. A run of `duels.py` may return one of each seat."""
        return (self.trial(duration_s),)

    def trial(self, duration_s: float = 0.0) -> Trial:
        """Return the finished trial; call it after `next_prompt()` returned `None`."""
        assert self.is_over
        return self._trial(duration_s)

    def _trial(self, duration_s: float) -> Trial:
        """Return the trial so far."""
        after = self._after
        return Trial(
            self._task,
            self._index,
            self._config.num_episodes,
            self._transcript.segments(),
            tuple(self._turns),
            **asdict(self._counts),
            num_kept_episodes=after.num_episodes if after else 0,
            duration_s=duration_s + (after.trial.duration_s if after else 0.0),
            memory=self._config.guidance_version,
            cut_at=self._cut_at,
            alternatives=tuple(self._alternatives),
        )

    def _resume(self, after: FinishedEpisodes) -> None:
        """Take over the state in which another run of this trial ended its last episode."""
        trial = after.trial
        self.episode, self._last_message = after.num_episodes, after.last_message
        self._transcript.resume(trial)
        self._turns = list(trial.turns)
        self._remarks = [turn.action for turn in trial.turns if turn.kind is Kind.REFLECT]
        self._counts = Counts(**{name: getattr(trial, name) for name in Counts.__slots__})
        self._info_left -= sum(len(turn.info) for turn in trial.turns)
        # If the record was full, turns hold a short note in place of their infos, so the sum above
        # is too small.
        if any(turn.info == TRIAL_IS_FULL for turn in trial.turns):
            self._info_left = -1

    def _act(self, start: int, completion: Completion, action: str | None) -> None:
        """Pass an action to the environment; the outcome may come later (`PENDING`).

        A completion without an action counts as the action "", which is illegal.
        """
        with environment_code(self._task, self._turn_name()):
            self._pending_action = _PendingAction(
                start, completion, action or "", self._play.anchor
            )
        self._record_alternative(start, completion, action or "")
        with environment_code(self._task, self._turn_name()):
            outcome = self._play.act(action or "")
        if outcome is not PENDING:
            self.observe(outcome)

    def _record_alternative(self, start: int, completion: Completion, action: str) -> None:
        """Record the adviser's alternative to an action that the environment has not seen."""
        if self._adviser is None:
            return
        done = [turn.action for turn in self._turns if turn.is_act_of(self.episode)]
        with environment_code(self._task, self._turn_name(), "the adviser "):
            advised = self._adviser.action(self.play, self.episode, done)
            if not isinstance(advised, str | None):
                raise EnvironmentFault(f"the adviser must return an action, got {advised!r:.60}")
        if advised is not None:
            tokens, parser = completion.tokens.tolist(), self._config.parser
            alternative = Alternative(len(self._turns), advised)
            self._alternatives.append(
                with_first_difference(alternative, start, tokens, action, self._chat, parser)
            )

    def observe(self, outcome: Outcome) -> None:
        """Receive the outcome of the last action: record the turn, and go on to the next turn or
        end the episode.
        """
        assert self._pending_action is not None, "the environment has no action to answer"
        start, completion, action, anchor = self._pending_action
        self._pending_action = None
        if fault := _outcome_fault(outcome):
            where = f"{_task_text(self._task)}{self._turn_name()}: act()"
            raise CallFault(f"{where} {fault}", mistake=fault)
        self._counts.num_injections += self._chat.holds_special_token(outcome.observation)
        laid_out = self._config.prompts.layout(outcome.observation)
        if laid_out != outcome.observation:  # in few environments; `replace` is slow
            outcome = replace(outcome, observation=laid_out)
        info = self._bounded_info(outcome.info)
        self._turns.append(
            self._turn(start, completion, outcome.reward, outcome.is_valid, action, anchor, info)
        )
        self._index_in_episode += 1
        is_last = self._index_in_episode == self._config.max_turns
        # A strategy is requested in a user message. This message has the observation, and thus the
        # texts of all tool answers, so they are not sent as messages of their own.
        answers = () if self._wants_strategy() else outcome.tool_answers
        turn = self._next_turn()
        if outcome.is_done or is_last or not self._episodes_left(self.episode):
            self._end_episode(outcome)
        elif self._contexts.is_full_with(outcome.observation, turn, answers):
            if not self._compact("", outcome.observation):
                # The observation is dropped too, because it may be what does not fit.
                self._counts.num_cut_episodes += 1
                self._end_episode(replace(outcome, observation="", tool_answers=()))
        elif answers:
            self.kind = Kind.ACT
            self._transcript.add_message("", Kind.ACT, answers)
        else:
            message = outcome.observation
            self.kind = self._contexts.append(message, message, turn)

    def _wants_strategy(self) -> bool:
        """Return whether the policy writes a strategy before the next action."""
        when = self._config.strategy
        return when == "turn" or (when == "episode" and self._index_in_episode == 0)

    def _begin_play(self) -> Play:
        """Create the play of the next episode; a fast play never needs calls."""
        play = self._make_play(self.episode)
        self._slow = play if isinstance(play, SlowPlay) else None
        return play

    def _close_play(self) -> None:
        """Collect the call that closes a slow play."""
        if self._slow is not None and (call := self._slow.closing()) is not None:
            self._closings.append(call)

    def _end_episode(self, outcome: Outcome) -> None:
        """End the episode. Then end the trial, request a reflection, or begin the next episode."""
        self._close_play()
        if not self._episodes_left(self.episode + 1) or self._succeeded():
            self._transcript.close(outcome.observation)
            self.is_over = True
        elif self._config.reflects:
            self.kind = Kind.REFLECT
            message = self._contexts.reflection_request(outcome.observation)
            self._transcript.add_message(message, Kind.REFLECT)
        else:
            self._next_episode(outcome.observation)

    def _episodes_left(self, episode: int) -> int:
        """Return how many episodes the trial still has turns for; see `TrialConfig.episodes_left`.

        Args:
            episode: number of the first of them.
        """
        num_actions = sum(turn.kind is Kind.ACT for turn in self._turns)
        return self._config.episodes_left(episode, num_actions, self._facts)

    def _succeeded(self) -> bool:
        if not self._config.stops_on_success:
            return False
        acts = (turn for turn in self._turns if turn.is_act_of(self.episode))
        return self._facts.is_won([turn.reward for turn in acts])

    def _record_remark(self, start: int, completion: Completion, remark: str | None) -> None:
        """Record a reflection, notes or a strategy, and send the message that follows it."""
        self._turns.append(self._turn(start, completion, 0.0, remark is not None, remark or "", ""))
        if self.kind is Kind.REFLECT:
            self._remarks.append(remark or "")
            self._next_episode("")
        elif self.kind is Kind.NOTES:
            self.kind = self._contexts.open_after_notes(remark or "", self._next_turn())
        else:
            self.kind = Kind.ACT
            self._transcript.add_message(self._config.prompts.act, Kind.ACT)

    def _next_episode(self, last_message: str) -> None:
        """Create the next episode; `_begin_episode` sends its first observation later."""
        self.episode, self._index_in_episode, self.kind = self.episode + 1, 0, Kind.ACT
        self._last_message = last_message
        self._play = self._begin_play()

    def _begin_episode(self, last_message: str) -> None:
        """Send the first observation of an episode, once it is the agent's turn."""
        self._last_message = None
        prompts = self._config.prompts
        observation = prompts.layout(self._play.observation)
        self._counts.num_injections += self._chat.holds_special_token(observation)
        num_left = self._episodes_left(self.episode)
        self._contexts.keep_room(observation, self.episode, num_left)
        self._send_first(last_message, observation)
        # An episode may use an even share of the tokens left; beyond that it is cut.
        self._contexts.limit_episode(num_left)

    def _send_first(self, last_message: str, observation: str) -> None:
        """Send the first observation of an episode in the context of the episodes before, or in one
        of its own.
        """
        config, contexts, turn = self._config, self._contexts, self._next_turn()
        if not (config.keeps_history and self.episode):
            if last_message:
                self._transcript.close(last_message)
            if config.compaction != "none" and not contexts.fits_alone("", observation, turn):
                raise self._lack_of_room(observation)
            self.kind = contexts.open("", observation, turn)
            return
        beginning = config.prompts.beginning(self.episode, observation)
        message = f"{last_message} {beginning}".strip()
        if not contexts.is_full_with(message, turn):
            self.kind = contexts.append(message, observation, turn)
        # If there is no room for both the outcome of the last action and the first observation, the
        # outcome is left out: of the current context, or of the new one.
        elif config.compaction == "none":
            self.kind = contexts.append(beginning, observation, turn)
        elif not (self._compact(last_message, observation) or self._compact("", observation)):
            raise self._lack_of_room(observation)

    def _compact(self, outcome: str, observation: str) -> bool:
        """Compact the full context; return whether a new one has room for outcome and observation.

        See `Contexts.compact`.
        """
        kind = self._contexts.compact(outcome, observation, self._next_turn())
        self.kind = self.kind if kind is None else kind
        return kind is not None

    def _lack_of_room(self, observation: str) -> ContextFull:
        """Return the fault of an observation that is too long to begin a context."""
        reason = self._contexts.lack_of_room(observation, self._next_turn())
        return ContextFull(f"{_task_text(self._task)}{self._turn_name()}: {reason}")

    def _next_turn(self) -> NextTurn:
        is_first = not self._index_in_episode
        return NextTurn(self.episode, is_first, self._wants_strategy(), self._remarks)

    def _play_alone(self, episode: int) -> Play:
        """Create the play of an episode against the environment."""
        is_last = episode + 1 == self._config.num_episodes
        task = self._swap if self._swap is not None and is_last else self._task
        with environment_code(task):
            return new_play(self._environment, task, episode)

    def _turn(
        self,
        start: int,
        completion: Completion,
        reward: float,
        is_valid: bool,
        action: str,
        anchor: str,
        info: str = "",
    ) -> Turn:
        """Return the turn of a completion that begins at `start` in its segment."""
        episode, index = self._episode_of_turn(), self._index_in_episode
        if self.kind is Kind.REFLECT:
            index = 0
        elif self.kind is Kind.NOTES:
            earlier = (turn for turn in self._turns if turn.kind is Kind.NOTES)
            index = sum(turn.episode == episode for turn in earlier)
        return Turn(
            self.kind,
            episode,
            index,
            self._transcript.num_segments - 1,
            start,
            start + len(completion.tokens),
            reward,
            is_valid,
            action,
            anchor,
            completion.num_reused,
            info=info,
        )

    def _episode_of_turn(self) -> int:
        """Return the episode of the next turn: notes before an episode's first action belong to the
        episode before.
        """
        looks_back = self.kind is Kind.NOTES and self._index_in_episode == 0
        return self.episode - 1 if looks_back else self.episode

    def _bounded_info(self, info: str) -> str:
        """Return the info, or a note if the trial's record has no room for it."""
        self._info_left -= len(info)
        return info if not info or self._info_left >= 0 else TRIAL_IS_FULL

    def _turn_name(self) -> str:
        return f", episode {self.episode + 1}, turn {self._index_in_episode + 1}"

    def _role_changes(self) -> tuple[int, ...]:
        """Return the places in the context where the role changes, up to the next completion."""
        config, segment = self._config, self._transcript.num_segments - 1
        if config.second_role is None:
            return ()
        turns = (turn for turn in self._turns if turn.segment == segment)
        coming = (self.kind, self._episode_of_turn())
        return role_changes(turns, config.num_episodes, config.second_role, coming)

    def _restriction(self) -> Restriction | None:
        """Return the legal actions as tokens, if the next completion is one of them."""
        return self._legal_actions() if self.kind is Kind.ACT else None

    def _legal_actions(self) -> Restriction | None:
        """Return the legal actions as tokens; `None` where actions are not restricted."""
        if not self._config.restricted:
            return None
        turn = self.episode, self._index_in_episode
        if self._allowed is None or self._allowed[0] != turn:
            with environment_code(self._task, self._turn_name()):
                allowed = restriction_of(self._play, self._chat, self._config.parser)
            self._allowed = turn, allowed
        return self._allowed[1]

    def _wants_kv_refreshed(self) -> bool:
        """Return whether the engine shall recompute keys and values that older weights computed."""
        first = Kind.ACT if self._config.strategy == "none" else Kind.STRATEGY
        begins = self._index_in_episode == 0 and self.kind is first and self.episode > 0
        return self._config.refresh_kv == "turn" or (
            self._config.refresh_kv == "episode" and begins
        )

    def _sampling(self) -> Sampling:
        """Return how the next completion is sampled, by its kind."""
        config = self._config
        if self.kind is Kind.ACT:
            return config.sampling
        sampling = replace(config.sampling, max_tokens=config.max_reflection_tokens)
        if self.kind is not Kind.STRATEGY:
            return sampling
        return replace(sampling, temperature=config.strategy_temperature)


def turn_seed(task_seed: int, trial: int, turn: int) -> int:
    """Return a 63-bit seed for one completion; distinct trials and turns get unrelated seeds."""
    # A multiplicative hash with the constants of SplitMix64 (Steele et al. 2014), because sums of
    # small numbers would give different turns the same seed.
    mixed = (task_seed * 0x9E3779B97F4A7C15 + trial * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return ((mixed ^ (mixed >> 31)) + turn * 0x94D049BB133111EB) % 2**63


# Exceptions in an environment's code, which may be a user's, become faults that name the task.


@contextmanager
def environment_code(task: Task, turn: str = "", whose: str = "") -> Iterator[None]:
    """Turn any exception of an environment's code into an `EnvironmentFault` that names the task.

    Such a fault costs one group.

    Args:
        turn: the episode and turn, if they are known.
        whose: words for the code, before "raised"; "" for the environment's own.
    """
    try:
        yield
    except EnvironmentFault as fault:
        raise EnvironmentFault(f"{_task_text(task)}{turn}: {error_text(fault)}") from fault
    except Exception as error:  # the code may be a user's, and raise anything
        where = _task_text(task) + turn
        raised = f"{whose}raised {type(error).__name__}: {error_text(error)}"
        raise EnvironmentFault(f"{where}: {raised}") from error


def _task_text(task: Task) -> str:
    """Return the beginning of an error message, which names the task."""
    return f"{task.environment} against {task.member!r}, seed {task.seed}"


def _outcome_fault(outcome: Outcome) -> str | None:
    """Return why an outcome is invalid, or `None`."""
    if fault := reward_fault(outcome.reward):
        return fault
    if len(outcome.info) > MAX_INFO_CHARS:
        return f"gave {len(outcome.info):,} characters of info: at most {MAX_INFO_CHARS:,} fit"
    return observation_fault(outcome.observation)


# An adviser (`mage_async/methods/method.py`) names an action that the policy could have taken.
#
# The adviser is asked before the environment has seen the policy's action: both are for the same
# state. The advised action is stored in the trial (`Alternative`), so that neither the learner nor
# a replay of the journal needs the environment or the adviser.


def with_first_difference(
    alternative: Alternative,
    start: int,
    tokens: Sequence[int],
    action: str,
    chat: ChatFormat,
    parser: ActionParser,
) -> Alternative:
    """Return an alternative with the position and id of the first token in which the completion
    would differ if the advised action replaced the sampled one. The alternative stays as it is if
    there is no such token, or if the completion's text does not begin with the sampled action.

    Args:
        start: where the completion begins in its segment.
        tokens: tokens of the completion.
        action: the action that was parsed from the completion.
    """
    advised, first = alternative.action, _first_of_action(tokens, chat, parser)
    text = chat.decode(tokens[first:])
    stripped = text.lstrip()
    if advised == action or not action or not stripped.startswith(action):
        return alternative
    lead = text[: len(text) - len(stripped)]  # keeps the space before the action
    closing = "" if parser.has_tools else f"</{NAMES[Kind.ACT]}>"
    replacement = chat.encode(f"{lead}{advised}{closing}")
    pairs = zip(tokens[first:], replacement, strict=False)
    for place, (sampled, other) in enumerate(pairs, first):
        if sampled != other:
            return replace(alternative, place=start + place, token=other)
    return alternative


def _first_of_action(tokens: Sequence[int], chat: ChatFormat, parser: ActionParser) -> int:
    """Return the index of the completion's token with which the action begins."""
    if parser.has_tools or parser.prefill(Kind.ACT):
        return 0
    tag, text = f"<{NAMES[Kind.ACT]}>", chat.decode(tokens)
    # A tag inside thinking is no action; without thinking `rfind` gives -1, so the search begins
    # at 0.
    before = text.find(tag, text.rfind("</think>") + 1) + len(tag)
    # The least number of tokens whose text reaches to the end of the tag.
    lengths = range(len(tokens) + 1)
    return bisect_left(lengths, before, key=lambda length: len(chat.decode(tokens[:length])))
