"""Run one trial whose episodes a program plays, as a state machine without I/O.

The program calls the policy as it would call any model: each call sends a whole conversation, and
several calls may wait at once. A call whose messages extend those of an earlier call and its answer
continues that call's tokens; nothing is tokenised again. Every other call begins another *lineage*,
as a sub-agent, a summary or a changed system message does. A lineage is a segment of the trial (a
token sequence that only grows), and a call is a turn, so all lineages of a trial share the returns
of its episodes. If two calls continue the same answer, the second one begins a lineage with a copy
of the tokens up to there. The copy is part of a prompt, so no token is trained on twice.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2s
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.environments.agent import AgentTasks, Session
from mage_async.environments.legal_pattern import regex_form
from mage_async.environments.mix import component_of, component_task
from mage_async.environments.tools import InvalidCall, ToolCall, parse_calls
from mage_async.environments.user_calls import Call, MethodResult
from mage_async.errors import CallFault, ContextFull, RunError
from mage_async.trajectory import FinishedEpisodes, Kind, Trial, Turn
from mage_async.trials.action_parser import outside_thinking
from mage_async.trials.allowed_tokens import answer_restriction, json_form, tool_form
from mage_async.trials.chat_format import Message as ChatMessage
from mage_async.trials.chat_format import Tools
from mage_async.trials.prompts import remark_lines
from mage_async.trials.transcript import GrowingSegment
from mage_async.trials.trial_run import Counts, TrialStart, turn_seed

MAX_LINEAGES = 256
"""Largest number of lineages of a trial: a message to the learner holds no more segments
(`Limits`)."""
MAX_ACTION_CHARS = 2000
"""Longer texts of turns are cut in the record; their tokens are all recorded."""
MEMORY = "{memory}"
"""Placeholder in a program's messages. The guidance and the agent's earlier reflections replace it,
and after a full context the agent's notes too.
"""


class Message(NamedTuple):
    """Describe a message of a conversation, in one form for all protocols of programs."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments (JSON) of the tools that an assistant's message calls."""
    ids: tuple[str, ...] = ()
    """Ids of these calls; in a message of a tool, the id of the call that it answers. "" stands for
    a call without an id. The policy never sees ids.
    """

    def identity(self) -> tuple[str, ...]:
        """Return a canonical form, in which spaces and the order of JSON keys do not matter."""
        if self.calls:
            written = (f"{name} {_sorted_json(arguments)}" for name, arguments in self.calls)
            return (self.role, *written)
        return self.role, self.content.strip() if self.role == "assistant" else self.content

    def as_chat(self) -> ChatMessage:
        """Return the message for a chat template; calls are written as text."""
        written = [
            f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        text = "\n".join([self.content, *written] if self.content else written)
        return {"role": self.role, "content": text if self.calls else self.content}


@dataclass(frozen=True, slots=True)
class PolicyCall:
    """Hold a program's call of the policy: a conversation, and the form that the answer must have.

    An answer with a schema or a pattern may call tools instead, if there are any. If `must_call` is
    given, schema and pattern have no effect; if a schema is given, the pattern has none.
    """

    messages: tuple[Message, ...]
    tools: Tools = ()
    num_choices: int = 1
    """Number of answers, each sampled by itself."""
    max_tokens: int | None = None
    """Largest number of tokens of a completion; None: as many as the run allows."""
    stops: tuple[str, ...] = ()
    """A completion ends with the first of these texts, which the answer does not show."""
    pattern: str | None = None
    """Regular expression that the answer matches; None: it may be any text."""
    schema: dict[str, Any] | None = None
    """JSON schema that the answer follows; None: it may be any text."""
    must_call: tuple[str, ...] = ()
    """Names of tools, of which the answer calls one or more; empty: it need not call any."""
    is_parallel: bool = True
    """Whether an answer that must call tools may call more than one."""
    sampling: Sampling | None = None
    """Gives temperature and `top_p` in place of the run's; None in every trial."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Hold the policy's answer to a call, in text: one of the call's choices."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments (JSON) of the tools that it calls."""
    finish: Literal["stop", "length", "tool_calls"]
    stop: str | None
    """The text of `PolicyCall.stops` that ended it; None: none did."""
    num_prompt_tokens: int
    num_reused: int
    """Number of prompt tokens that the engine took from its prefix cache."""
    tokens: tuple[str, ...]
    """Texts of its tokens, one by one."""
    logprobs: tuple[float, ...]
    """Log-prob of each token in nats, in the distribution from which it was drawn."""


@dataclass(slots=True, eq=False)
class _Lineage:
    """Hold a conversation that only grows, as tokens: a segment of the trial."""

    name: str
    """Name of its context in the engine."""
    system_message: str
    """The system message that it begins with."""
    segment: GrowingSegment = field(default_factory=GrowingSegment)
    number: int = -1
    """Number of its segment; -1 until it has a turn."""
    is_busy: bool = False
    """Whether a call on it waits or was given up; another call then continues a copy of it."""


_End = tuple[_Lineage, int]
"""The end of an answer: its lineage, and the number of the lineage's tokens up to there."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Describe a call, or one of its choices, that waits for its completion."""

    prompt: Prompt
    policy_call: PolicyCall
    lineage: _Lineage
    digest: bytes
    """Digest of the conversation."""
    episode: int
    replaced: _End | None = None
    """End of the sequence that the notes replace; None if the call does not request notes."""


class AgentRun:
    """Play one trial whose episodes a program plays; has the interface of `TrialRun`.

    For each call of the policy by the program, the caller takes the prompt of `notes_due`, if there
    is one, and gives its completion to `take_notes`. It then takes the prompts of `prompts_of`, and
    gives each completion to `take`, or calls `give_up`. The program's return is given to `answer`.

    Args:
        index: number of the trial in its group.
        name: prefix of the names of its contexts in the engine.
        swap: another task, played in the last episode.
    """

    is_between_episodes = False
    """See `TrialRun.is_between_episodes`. Always False: only the program knows its state, so
    another actor has to begin the trial again.
    """

    def __init__(self, start: TrialStart) -> None:
        self._environment, self._task, self._index = start.environment, start.task, start.index
        self._config, self._chat = start.config, start.chat
        self._name, self._swap = start.name, start.swap
        self._facts = component_of(start.environment, start.task.member).facts
        self._open_session: Callable[[], Session] | None = None
        self._call: Call | None = None
        self._closings: list[Call] = []
        """The `close` calls of programs that have returned; each frees a place for another program.
        """
        self._session: Session | None = None
        self._counts = Counts()
        self._turns: list[Turn] = []
        self._reflections: list[str] = []
        self._lineages: list[_Lineage] = []
        """Lineages that have a turn, in the order of their first turns."""
        self._new_lineages: set[_Lineage] = set()
        """Lineages whose first call waits for its completion."""
        self._contexts: list[str] = []
        self._answer_ends: dict[bytes, list[_End]] = {}
        """Lineages and lengths of conversations that end with an answer, by the digest of the
        conversation."""
        # A later episode continues the earlier conversation that has the same system message or, if
        # there is none, the conversation with which the previous episode began.
        self._last_answers: dict[str, _End] = {}
        """Ends of the latest conversations of earlier episodes, by their system messages."""
        self._main_end: _End | None = None
        """End of the conversation with which the previous episode began."""
        self._first_lineage: _Lineage | None = None
        """The lineage of the first call of the current episode."""
        self._longest_growth = 0
        """Largest number of tokens that an episode has added to a lineage."""
        self._sizes_at_start: dict[_Lineage, int] = {}
        """Tokens that each lineage of the current episode had when the episode began."""
        self._pending_reflection: Pending | None = None
        self._notes: dict[_End, str] = {}
        """Notes that were written after an answer, because the context had no room left."""
        self._reward = 0.0
        self.episode, self._num_calls, self._num_prompts = 0, 0, 0
        self.kind = Kind.ACT
        self.is_playing = False
        """Whether the program plays an episode now."""
        self.is_over = False
        self._cut_at: int | None = None

    # The interface of `TrialRun`.

    def connect(self, open_session: Callable[[], Session]) -> None:
        """Set the function that opens the session of an episode: the address at which its program
        calls the policy.
        """
        self._open_session = open_session

    def next_call(self) -> Call | None:
        """Return the call that runs the program for the next episode, if one is due."""
        if self._closings:
            self._call = self._closings.pop()
            return self._call
        if self.is_over or self.kind is Kind.REFLECT:
            return None
        if self._open_session is None:
            raise RunError(
                f"{self._facts.name}: a program is played by actors and evaluators alone, "
                'which serve it the policy: set warm_start = "none"'
            )
        is_last = self.episode + 1 == self._config.num_episodes
        task = self._swap if self._swap is not None and is_last else self._task
        part, own = component_task(self._environment, task)
        assert isinstance(part, AgentTasks)
        self._session, self._num_calls, self._first_lineage = self._open_session(), 0, None
        self._session.memory = self._memory_text()
        self._call = part.call(own, self.episode, self._session)
        self.is_playing = True
        return self._call

    def answer(self, value: MethodResult) -> None:
        """Receive the result of the program, which ends the episode.

        Args:
            value: Its `outcome.reward` is what the program returned for the episode.

        Raises:
            CallFault: the program did not call the policy, or its reward lies outside of the bounds
                that it declares.
            ContextFull: all its calls were refused, because their conversations have too many
                tokens.
        """
        assert self._call is not None, "nothing was called"
        call, self._call = self._call, None
        if call.request.method == "close":
            return
        place, self.is_playing = call.place, False
        self._closings.append(closing_of(call))
        assert self._session is not None
        # `length_error` is not empty if a call was refused because its conversation outgrew its
        # context.
        self._counts.num_cut_episodes += bool(self._session.length_error)
        acts = [n for n, turn in enumerate(self._turns) if turn.is_act_of(self.episode)]
        if not acts:
            if self._session.length_error:
                raise ContextFull(self._session.length_error)
            raise CallFault(
                f"{place} returned without a call of the policy: pass `base_url` and `api_key` to "
                "its client",
                kind="run() called nothing",
                mistake="run() called nothing",
            )
        reward = value.outcome.reward
        facts = component_of(self._environment, self._task.member).facts
        # An episode that failed because its conversation outgrew the context earns 0, which may lie
        # below `min_return`.
        if not facts.allows(reward) and (reward or not self._session.length_error):
            wrong = (
                f"must return a reward from min_return = {facts.min_return:g} to max_return = "
                f"{facts.max_return:g}, got {reward:g}"
            )
            raise CallFault(f"{place} {wrong}", mistake=wrong)
        self._reward = reward
        self._turns[acts[-1]] = replace(self._turns[acts[-1]], reward=self._reward)
        self._end_episode()

    def next_prompt(self) -> Prompt | None:
        """Return the prompt of a reflection between two episodes; `None` if none is due."""
        if self.is_over or self.kind is not Kind.REFLECT:
            return None
        assert self._pending_reflection is not None
        return self._pending_reflection.prompt

    def receive(self, completion: Completion) -> None:
        """Receive the completion of a reflection, after which the next episode begins."""
        pending, self._pending_reflection = self._pending_reflection, None
        assert pending is not None, "no reflection was requested"
        self._reflections.append(self._record_remark(pending, completion, Kind.REFLECT))
        self._main_end = pending.lineage, len(pending.lineage.segment.tokens)
        self._last_answers[pending.lineage.system_message] = self._main_end
        self._next_episode()

    def abandon(self) -> list[Call]:
        """End the trial in any state; return the `close` calls that are still to be made."""
        is_running, self.is_playing = self.is_playing, False
        closings, self._closings = self._closings, []
        return [*closings, closing_of(self._call)] if is_running and self._call else closings

    @property
    def num_turns(self) -> int:
        """Number of turns so far."""
        return len(self._turns)

    def contexts(self) -> list[str]:
        """Return the names of the contexts so far, for an engine to release."""
        return self._contexts

    def finished_episodes(self, duration_s: float) -> FinishedEpisodes:
        """Refuse: see `is_between_episodes`."""
        raise AssertionError("a program's trial is never continued")

    def cut_short(self) -> None:
        """End the trial, because the program failed in every try or outgrew its context, and record
        the first episode that was not finished (`Trial.cut_at`).
        """
        self.is_over = True
        # A reflection comes after the end of its episode, so the next episode is cut.
        self._cut_at = self.episode + 1 if self.kind is Kind.REFLECT else self.episode

    def trials(self, duration_s: float = 0.0) -> tuple[Trial, ...]:
        """Return the finished trial, as a tuple like that of a run with two seats."""
        return (self.trial(duration_s),)

    def trial(self, duration_s: float = 0.0) -> Trial:
        """Return the finished trial."""
        assert self.is_over
        return Trial(
            self._task,
            self._index,
            self._config.num_episodes,
            tuple(lineage.segment.close() for lineage in self._lineages),
            tuple(self._turns),
            **asdict(self._counts),
            duration_s=duration_s,
            memory=self._config.guidance_version,
            cut_at=self._cut_at,
        )

    # Calls of the policy.

    def prompts_of(self, policy_call: PolicyCall) -> list[Pending]:
        """Return the prompts of a call, one for each of its choices; give each to `take`, or to
        `give_up`.

        Raises:
            CallFault: the program has made too many calls, or begun too many conversations.
            PolicyError: the chat template refuses the conversation.
            EnvironmentFault: the form of the answer cannot be read.
            ContextFull: a conversation begins with more tokens than a context with notes may have.
        """
        self._num_calls += 1
        if self._num_calls > (most := self._facts.max_turns):
            raise self._too_many(f"{most} calls in an episode: raise environment.options.turns")
        digests = _digests(policy_call)
        number, end, new = self._continuation_of(policy_call, digests)
        room = self._longest_prompt(policy_call)
        if end is None and len(new) > room:
            raise ContextFull(
                f"{self.place()}: a conversation begins with {len(new)} tokens, at most {room} "
                f"fit: the rest of {self._config.room} is for the answer and for notes. Raise "
                "trial.room, or lower transcript.max_reflection_tokens"
            )
        contents = (message.content for message in policy_call.messages[number:])
        self._counts.num_injections += any(map(self._chat.holds_special_token, contents))
        # A sequence that another call waits on or has continued is copied.
        continued = [end[0]] if end is not None and _is_free(end) else []
        num_new = policy_call.num_choices - len(continued)
        self._check_lineages(num_new)
        tokens = _joined(end, new)
        lineages = [*continued, *(self._new_lineage(policy_call) for _ in range(num_new))]
        pending = [self._pending(policy_call, digests[-1], each, tokens) for each in lineages]
        for each in lineages:
            self._wait_on(each)
        return pending

    def _check_lineages(self, num_new: int) -> None:
        """Refuse a call that would begin more lineages than the trial may have.

        Raises:
            CallFault: see `MAX_LINEAGES`.
        """
        if len(self._lineages) + len(self._new_lineages) + num_new > MAX_LINEAGES:
            raise self._too_many(f"{MAX_LINEAGES} conversations in a trial")

    def _too_many(self, what: str) -> CallFault:
        return CallFault(f"{self.place()} made more than {what}", kind="too many calls")

    def _wait_on(self, lineage: _Lineage) -> None:
        """Mark a lineage as busy: a call on it waits for its completion."""
        lineage.is_busy = True
        if lineage.number < 0:
            self._new_lineages.add(lineage)

    def notes_due(self, policy_call: PolicyCall) -> Pending | None:
        """Return the prompt of the notes that are to be written before a call, because its
        context has no room left; give it to `take_notes`, or to `give_up`. None: no notes are due.

        Raises:
            CallFault: the program has begun too many conversations.
        """
        if self._config.compaction != "notes":
            return None
        _, end, new = self._continuation_of(policy_call, _digests(policy_call))
        if end is None or end[1] + len(new) <= self._longest_prompt(policy_call):
            return None
        is_free = _is_free(end)
        self._check_lineages(not is_free)
        lineage = end[0] if is_free else self._new_lineage(policy_call)
        request = self._continued(end, [Message("user", self._request_for_notes(end))], ())
        tokens = _joined(end, request)
        self._wait_on(lineage)
        most = self._config.max_reflection_tokens
        fresh = self._config.refresh_kv == "turn"
        prompt = self._prompt(lineage, tokens, most, refresh_kv=fresh)
        return Pending(prompt, policy_call, lineage, b"", self.episode, end)

    def take_notes(self, pending: Pending, completion: Completion) -> None:
        """Record notes; the call that waits for them begins another sequence with them."""
        assert self.is_current(pending), "the call's episode is over"
        assert pending.replaced is not None, "it is no call for notes"
        self._notes[pending.replaced] = self._record_remark(pending, completion, Kind.NOTES)
        pending.lineage.is_busy = False

    def is_current(self, pending: Pending) -> bool:
        """Return whether the episode of a call is still played."""
        return self.is_playing and pending.episode == self.episode

    def take(self, pending: Pending, completion: Completion) -> Choice:
        """Record a completion as a turn, and return the answer that the program gets."""
        assert self.is_current(pending), "the call's episode is over"
        lineage, num_drawn = pending.lineage, len(completion.tokens)
        completion, is_stopped = self._until_stop(completion, pending.policy_call.stops)
        if len(completion.tokens) < num_drawn:
            # The engine's context of the old name also holds the tokens after the stop.
            lineage.name = self._new_context()
        shown = self._chat.decode_completion(completion.tokens.tolist())
        stop = None
        if is_stopped:
            stop = min(
                (each for each in pending.policy_call.stops if each in shown), key=shown.find
            )
            shown = shown.partition(stop)[0]
        # A tool call that is only quoted inside thinking is not made.
        without_thinking = outside_thinking(self._chat.opened_thinking(completion) + shown)
        calls = parse_calls(without_thinking) if pending.policy_call.tools else []
        well_formed = tuple(
            (call.name, json.dumps(call.arguments)) for call in calls if isinstance(call, ToolCall)
        )
        is_valid = not any(isinstance(call, InvalidCall) for call in calls)
        is_call = bool(well_formed) and is_valid
        # An answer that was cut before its first call was complete may not look like a call yet.
        is_valid = is_call if pending.policy_call.must_call else is_valid
        num_tags = without_thinking.count("<tool_call>")
        text = shown.rsplit("<tool_call>", num_tags)[0].strip() if is_call else shown
        if is_call and not num_tags:
            text = ""  # Llama's form: the whole text is the call
        self._add_turn(pending, completion, shown, is_valid=is_valid)
        answer = Message("assistant", text, well_formed if is_call else ())
        digest = _next_digest(pending.digest, answer)
        self._answer_ends.setdefault(digest, []).append((lineage, len(lineage.segment.tokens)))
        lineage.is_busy = False
        is_ended = is_stopped or int(completion.tokens[-1]) in self._chat.stop_tokens
        assert self._session is not None
        is_cut = not is_ended and num_drawn >= self._limit(pending.policy_call)
        self._session.call_note = self._cut_in_words(pending.policy_call) if is_cut else ""
        return Choice(
            text,
            answer.calls,
            "tool_calls" if is_call else "stop" if is_ended else "length",
            stop,
            len(pending.prompt.tokens),
            completion.num_reused,
            tuple(self._chat.decode([token]) for token in completion.tokens.tolist()),
            tuple(completion.logprobs.tolist()),
        )

    def give_up(self, pending: Pending) -> None:
        """Forget a call that was cancelled. Its lineage stays busy, so that later calls continue a
        copy of it.
        """
        pending.lineage.is_busy = True
        self._new_lineages.discard(pending.lineage)

    def _longest_known(self, digests: Sequence[bytes]) -> tuple[int, _End] | None:
        """Find the longest known beginning of a conversation that ends with an answer of the
        policy.

        Returns:
            Its number of messages, its lineage and the lineage's length; None if there is none.
        """
        for number in range(len(digests) - 1, 0, -1):
            if ends := self._answer_ends.get(digests[number]):
                return number, next(filter(_is_free, reversed(ends)), ends[-1])
        return None

    def _begin_conversation(self, policy_call: PolicyCall) -> tuple[_End | None, Sequence[int]]:
        """Begin a new conversation.

        Returns:
            The end of the earlier episode's conversation that it continues, or None; and the tokens
            of its messages.
        """
        system, notes, memory = _system_message(policy_call.messages), "", self._memory_text()
        if self._config.keeps_history and self.episode:
            # The episode's first conversation, if its system message is new, continues the one with
            # which the episode before began.
            main_end = self._main_end if self._first_lineage is None else None
            end = self._last_answers.get(system) or main_end
            if end is not None and end in self._notes:
                notes = self._notes[end]
            elif end is not None:
                messages = _with_memory(policy_call.messages, memory)
                # The sequence has the system message already, if it is the same.
                is_known = bool(system) and system == end[0].system_message
                following = self._as_next_episode(messages[1:] if is_known else messages)
                new = self._continued(end, following, policy_call.tools)
                # Without notes, the old sequence is continued only if an episode as long as the
                # longest one so far still fits into the context.
                limit = self._config.max_tokens or math.inf
                growth = max(len(new), self._longest_growth)
                if self._config.compaction == "notes" or end[1] + growth < limit:
                    return end, new
        return None, self._opening(
            policy_call.messages, [memory, self._notes_text(notes)], policy_call.tools
        )

    def _memory_text(self) -> str:
        """Return the text by which the episode knows of earlier ones: guidance and reflections."""
        carried = [self._config.prompts.guidance, *remark_lines(self._reflections)]
        return "\n".join(filter(None, carried))

    def _continuation_of(
        self, policy_call: PolicyCall, digests: Sequence[bytes]
    ) -> tuple[int, _End | None, Sequence[int]]:
        """Find the sequence that a call continues.

        Returns:
            The number of its first messages that came in earlier calls; the end of the sequence
            that it continues, None where it begins one; and the tokens that it adds.
        """
        found = self._longest_known(digests[:-1])
        if found is None:
            return 0, *self._begin_conversation(policy_call)
        number, end = found
        if end not in self._notes:
            following = policy_call.messages[number:]
            return number, end, self._continued(end, following, policy_call.tools)
        # Notes replace the messages from the first answer up to the new ones.
        first = next(n for n, each in enumerate(policy_call.messages) if each.role == "assistant")
        kept = list(policy_call.messages[:first])
        texts = [each.content for each in policy_call.messages[number:]]
        if kept and kept[-1].role == "user":
            texts.insert(0, kept.pop().content)
        kept.append(Message("user", "\n\n".join(texts)))
        memory = [self._memory_text(), self._notes_text(self._notes[end])]
        return number, None, self._opening(kept, memory, policy_call.tools)

    def _opening(
        self, messages: Sequence[Message], remembered: Sequence[str], tools: Tools
    ) -> Sequence[int]:
        """Return the tokens of a conversation in a context of its own, with the remembered texts.

        They replace `{memory}`. If no message has `{memory}`, those that no message contains yet
        are put at the beginning of the first message that is not the system message.
        """
        own = _with_memory(messages, "\n".join(filter(None, remembered)))
        if not any(MEMORY in each.content for each in messages):
            # A program that received a text may have put it into a message itself.
            missing = [
                text for text in remembered if not any(text in each.content for each in messages)
            ]
            if missing:
                place = next((n for n, each in enumerate(own) if each.role != "system"), 0)
                content = "\n\n".join(("\n".join(missing), own[place].content))
                own[place] = own[place]._replace(content=content)
        return self._chat.prompt([each.as_chat() for each in own], tools)

    # Notes.

    def _notes_text(self, notes: str) -> str:
        """Return notes in the words with which a context begins with them; "" without notes."""
        return f"{self._config.prompts.noted} {notes}" if notes else ""

    def _request_for_notes(self, end: _End) -> str:
        """Return the message that requests notes. In a sequence of an earlier episode, that
        episode's reward comes first.
        """
        is_earlier = end[0] not in self._sizes_at_start
        before = f"{self._reward_of_last()} " if is_earlier else ""
        return f"{before}{self._config.prompts.notes}"

    def _longest_prompt(self, policy_call: PolicyCall) -> float:
        """Return the largest number of tokens of a prompt after which its context still has room
        for the answer and for notes; infinite without compaction.
        """
        # `room` bounds contexts with notes (`trial.room`); `max_tokens` is the engine's bound.
        config = self._config
        if config.compaction == "none":
            return math.inf
        request = Message("user", f"{self._reward_of_last()} {config.prompts.notes}").as_chat()
        # -1 is no stop token, so the tokens that end the answer's turn are counted as well.
        request_tokens = len(self._chat.continuation(-1, [request]))
        notes_tokens = request_tokens + config.max_reflection_tokens
        return config.room - self._limit(policy_call) - notes_tokens

    def _record_remark(self, pending: Pending, completion: Completion, kind: Kind) -> str:
        """Append a reflection or notes, and the prompt, to their lineage; return their text."""
        text = self._chat.decode_completion(completion.tokens.tolist())
        remark = self._config.parser.parse(kind, text) or text.strip()
        self._add_turn(pending, completion, remark, is_valid=bool(remark), kind=kind)
        return remark

    def _as_next_episode(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of a new episode as they follow those of an earlier one.

        System and user messages at the beginning become one user message, which first states the
        reward of the earlier episode.
        """
        texts, rest = [self._reward_in_words()], list(messages)
        while rest and rest[0].role in ("system", "user"):
            texts.append(rest.pop(0).content)
        return [Message("user", "\n\n".join(texts)), *rest]

    def _reward_in_words(self) -> str:
        """Return the words between two episodes: the reward of one, and the number of the next."""
        if not self._config.prompts.rules:
            return f"reward {self._reward:g} episode {self.episode + 1}"
        return (
            f"That episode is over; its reward is {self._reward:g}. Episode {self.episode + 1} of "
            "the same task begins."
        )

    def _continued(self, end: _End, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return the tokens that messages add after an answer; see `ChatFormat.continuation`."""
        lineage, length = end
        written = [each.as_chat() for each in messages]
        return self._chat.continuation(lineage.segment.tokens[length - 1], written, tools)

    def _pending(
        self, policy_call: PolicyCall, digest: bytes, lineage: _Lineage, tokens: np.ndarray
    ) -> Pending:
        """Return a call, or one of its choices, that waits for the completion of these tokens."""
        config, limit, allowed = self._config, self._limit(policy_call), None
        # A form that cannot be read raises here, so that the refused call leaves nothing behind.
        if (form := self._form(policy_call)) is not None:
            room = config.max_tokens - len(tokens) if config.max_tokens else limit
            allowed = answer_restriction(form, self._chat, max(1, min(limit, room)))
        self._sizes_at_start.setdefault(lineage, len(lineage.segment.tokens))
        is_first = self._first_lineage is None
        self._first_lineage = self._first_lineage or lineage
        # Recompute keys and values that older weights have cached (`Prompt.refresh_kv`).
        wants_fresh = config.refresh_kv == "turn" or (
            config.refresh_kv == "episode" and is_first and self.episode > 0
        )
        prompt = replace(self._prompt(lineage, tokens, limit, wants_fresh), restriction=allowed)
        if (given := policy_call.sampling) is not None:
            own = replace(prompt.sampling, temperature=given.temperature, top_p=given.top_p)
            prompt = replace(prompt, sampling=own)
        return Pending(prompt, policy_call, lineage, digest, self.episode)

    def _limit(self, policy_call: PolicyCall) -> int:
        """Return the largest number of tokens of an answer to a call."""
        limit_of_run = self._config.sampling.max_tokens
        return min(policy_call.max_tokens or limit_of_run, limit_of_run)

    def _cut_in_words(self, policy_call: PolicyCall) -> str:
        """Return a clause for errors: the last answer was cut, and at which limit (`_limit`)."""
        own, requested = self._config.sampling.max_tokens, policy_call.max_tokens
        which = f"transcript.max_action_tokens = {own}"
        if requested and requested < own:
            which = f"the call's own limit of {requested} tokens"
        return f"the policy's last answer was cut at {which}"

    def _prompt(
        self, lineage: _Lineage, tokens: np.ndarray, max_tokens: int, refresh_kv: bool
    ) -> Prompt:
        """Return a prompt of a lineage, with the trial's next seed."""
        self._num_prompts += 1
        stops = self._chat.stop_tokens
        sampling = replace(self._config.sampling, max_tokens=max_tokens, stop_tokens=stops)
        return Prompt(
            lineage.name,
            tokens,
            sampling,
            turn_seed(self._task.seed, self._index, self._num_prompts - 1),
            refresh_kv=refresh_kv,
            deadline_s=self._config.turn_deadline_s,
        )

    def _form(self, policy_call: PolicyCall) -> str | None:
        """Return the answer's form (see `answer_restriction`); `None` if it may be any text."""
        form, names = text_form(policy_call), policy_call.must_call
        if not names and (form is None or not policy_call.tools):
            return form
        functions = (each["function"] for each in policy_call.tools)
        parameters = {
            each["name"]: _without_extra_arguments(each.get("parameters"))
            for each in functions
            if not names or each["name"] in names
        }
        called = tool_form(self._chat, parameters, is_parallel=policy_call.is_parallel)
        return called if names else f"{form} | {called}"

    def _new_lineage(self, policy_call: PolicyCall) -> _Lineage:
        return _Lineage(self._new_context(), _system_message(policy_call.messages))

    def _new_context(self) -> str:
        self._contexts.append(f"{self._name}.{len(self._contexts) + 1}")
        return self._contexts[-1]

    def _add_turn(
        self,
        pending: Pending,
        completion: Completion,
        text: str,
        *,
        is_valid: bool,
        kind: Kind = Kind.ACT,
    ) -> None:
        """Append a prompt and its completion to their lineage, and record the completion as a turn
        of the trial.
        """
        lineage, prompt = pending.lineage, pending.prompt
        tokens = lineage.segment.tokens
        tokens.extend(prompt.tokens[len(tokens) :].tolist())
        start = len(tokens)
        lineage.segment.spans.append((start, completion))
        tokens.extend(completion.tokens.tolist())
        if lineage.number < 0:
            lineage.number = len(self._lineages)
            self._lineages.append(lineage)
            self._new_lineages.discard(lineage)
        self._counts.add(completion, start)
        episode = self.episode
        if kind is Kind.NOTES and not any(turn.is_act_of(episode) for turn in self._turns):
            episode -= 1  # notes before the first action look back on the episode before
        number = sum(turn.kind is kind and turn.episode == episode for turn in self._turns)
        self._turns.append(
            Turn(
                kind=kind,
                episode=episode,
                index=number,
                segment=lineage.number,
                start=start,
                stop=start + len(completion.tokens),
                reward=0.0,
                is_valid=is_valid,
                action=text[:MAX_ACTION_CHARS],
                anchor=pending.digest.hex() if kind is Kind.ACT else "",
                num_reused=completion.num_reused,
            )
        )

    def _until_stop(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, bool]:
        """Return a completion up to the token with which one of the texts is complete, and whether
        there is one. The program never sees the tokens after it, so they are not recorded.
        """
        tokens = completion.tokens.tolist()
        if tokens[-1] in self._chat.stop_tokens:
            tokens.pop()

        def contains_stop(length: int) -> bool:
            text = self._chat.decode(tokens[:length])
            return any(stop in text for stop in stops)

        if not stops or not contains_stop(len(tokens)):
            return completion, False
        # A longer beginning of the answer contains all that a shorter one does, so bisection finds
        # the shortest one that contains a stop.
        length = bisect_left(range(len(tokens) + 1), True, key=contains_stop)
        return replace(
            completion,
            tokens=completion.tokens[:length],
            logprobs=completion.logprobs[:length],
            versions=tuple(run for run in completion.versions if run.start < length),
            drawn_from=completion.drawn_from and completion.drawn_from[:length],
        ), True

    # Episodes.

    def _end_episode(self) -> None:
        """End the episode, and the trial, request a reflection, or go on to the next episode."""
        for turn in self._turns:
            if turn.is_act_of(self.episode):
                lineage = self._lineages[turn.segment]
                self._last_answers[lineage.system_message] = lineage, len(lineage.segment.tokens)
        assert self._first_lineage is not None
        self._main_end = self._last_answers.get(self._first_lineage.system_message)
        growths = [len(each.segment.tokens) - size for each, size in self._sizes_at_start.items()]
        self._longest_growth = max(self._longest_growth, *growths)
        self._sizes_at_start.clear()
        # A completion that arrives after its episode is dropped without `give_up`.
        self._new_lineages.clear()
        won = self._config.stops_on_success and self._facts.is_won([self._reward])
        if self.episode + 1 == self._config.num_episodes or won:
            self.is_over = True
        elif self._config.reflects and self._prepare_reflection():
            self.kind = Kind.REFLECT
        else:
            self._next_episode()

    def _prepare_reflection(self) -> bool:
        """Prepare the prompt of a reflection, and return whether there is one.

        There is none if its context has no room for it, or if a call on its lineage has never
        ended. An empty remark then takes its place, so that remark n is that of episode n.
        """
        assert self._main_end is not None
        lineage, _ = self._main_end
        config, request = self._config, f"{self._reward_of_last()} {self._config.prompts.reflect}"
        new = self._continued(self._main_end, [Message("user", request)], ())
        tokens = _joined((lineage, len(lineage.segment.tokens)), new)
        most = config.max_reflection_tokens
        if lineage.is_busy or (config.max_tokens and len(tokens) + most > config.max_tokens):
            self._reflections.append("")
            return False
        prompt = self._prompt(lineage, tokens, most, refresh_kv=config.refresh_kv == "turn")
        # The program has made no call, so the call has no messages and no conversation's digest.
        self._pending_reflection = Pending(prompt, PolicyCall(()), lineage, b"", self.episode)
        return True

    def _reward_of_last(self) -> str:
        """Return the sentence with the reward of the episode that ended last."""
        if not self._config.prompts.rules:
            return f"reward {self._reward:g}"
        return f"The episode is over; its reward is {self._reward:g}."

    def _next_episode(self) -> None:
        self.episode, self.kind = self.episode + 1, Kind.ACT

    def place(self) -> str:
        """Return the task, the episode and the program's function, as the beginning of an error
        message.
        """
        return (
            f"{self._facts.name}, task {self._task.member}, seed {self._task.seed}, episode "
            f"{self.episode + 1}: run()"
        )


def closing_of(call: Call) -> Call:
    """Return the `close` call of a program, which frees its place for another program."""
    return replace(call, request=msgspec.structs.replace(call.request, method="close"))


def text_form(policy_call: PolicyCall) -> str | None:
    """Return the form of an answer that calls no tool (see `answer_restriction`); None if it may be
    any text.
    """
    if policy_call.schema is not None:
        return json_form(policy_call.schema)
    return None if policy_call.pattern is None else regex_form(policy_call.pattern)


def _without_extra_arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments; if it lists properties, without further ones.

    JSON Schema allows further arguments where it does not forbid them, but a tool refuses arguments
    that it does not know. A schema that allows or forbids them itself is returned as it is.
    """
    parameters = parameters or {"type": "object"}
    closed = {"additionalProperties": False} if "properties" in parameters else {}
    return closed | parameters


def _is_free(end: _End) -> bool:
    """Return whether nothing follows an answer in its lineage, and no call waits on the lineage."""
    return not end[0].is_busy and len(end[0].segment.tokens) == end[1]


def _joined(end: _End | None, new: Sequence[int]) -> np.ndarray:
    """Return the tokens of a sequence up to an end, and new ones: int32."""
    known = () if end is None else end[0].segment.tokens[: end[1]]
    return np.concatenate([np.array(known, np.int32), np.array(new, np.int32)])


def _with_memory(messages: Sequence[Message], memory: str) -> list[Message]:
    """Return messages with a text in place of `{memory}`."""
    return [each._replace(content=each.content.replace(MEMORY, memory)) for each in messages]


def _system_message(messages: Sequence[Message]) -> str:
    """Return the system message with which a conversation begins; "" without one."""
    return messages[0].content if messages and messages[0].role == "system" else ""


def _digests(policy_call: PolicyCall) -> list[bytes]:
    """Return a digest of each beginning of a conversation, by its number of messages."""
    digests = [blake2s(json.dumps(policy_call.tools).encode(), digest_size=16).digest()]
    for message in policy_call.messages:
        digests.append(_next_digest(digests[-1], message))
    return digests


def _next_digest(digest: bytes, message: Message) -> bytes:
    # `repr` also takes texts that UTF-8 cannot encode, and is faster than JSON. Each call digests
    # all of its messages.
    return blake2s(digest + repr(message.identity()).encode(), digest_size=16).digest()


def _sorted_json(text: str) -> str:
    """Return JSON in one form, because a client may send it back with other spaces and another
    order of keys; return other text as it is.
    """
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):  # RecursionError: brackets are nested too deeply
        return text
