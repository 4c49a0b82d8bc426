"""Keep each context of a trial short enough: compact a context that is full, or cut its episode.

`trial.memory` says whether contexts are compacted. With "notes" the agent writes notes when a
context is full, and the next context begins with them; with "truncation" the next context begins
with the newest turns that fit. A context then has at most `trial.room` tokens. Without compaction
the episodes that are played in one context share its tokens evenly, and an episode that has used up
its share is cut.

Before every turn a context has room for the turn and, where notes are written, for the notes too,
whatever the environment answers. An answer that does not fit any more goes into the next context.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from mage_async.restriction import Restriction
from mage_async.trajectory import Kind
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.transcript import Transcript
from mage_async.trials.trial_config import TrialConfig

TEMPLATE_TOKENS = 16
"""Estimated number of tokens that a message needs besides its text: those that a chat template
writes around it, and one for the beginning of the answer."""

_PIECE = re.compile(r"\S{1,20}")
"""A word, or a part of a text without spaces between its words, such as a Chinese one."""


class NextTurn(NamedTuple):
    """Describe the turn that the next message requests."""

    episode: int
    """Number of its episode, from 0."""
    is_first: bool
    """Whether it is the first turn of its episode."""
    wants_strategy: bool
    """Whether the policy writes a strategy before the action."""
    remarks: Sequence[str]
    """The agent's remarks after each finished episode."""


class _Message(NamedTuple):
    """Record a user message of the current context, with which another context could begin."""

    stop: int
    """Number of tokens of the context before the answer to the message."""
    episode: int
    text: str
    kind: Kind
    """Kind of the turn that answers it."""


class Contexts:
    """Decide where the contexts of one trial begin and end: open them, append messages to them, and
    compact a full one.

    Methods that append a message to the transcript return the kind of the turn that answers it.

    Args:
        legal_actions: returns the legal actions of the next turn as tokens; `None` where actions
            are not restricted.
    """

    def __init__(
        self,
        config: TrialConfig,
        chat: ChatFormat,
        transcript: Transcript,
        legal_actions: Callable[[], Restriction | None],
    ) -> None:
        self._config, self._chat, self._transcript = config, chat, transcript
        self._legal_actions = legal_actions
        self._reserved_tokens, self._share_ends_at = 0, math.inf
        """Used if contexts are not compacted: number of tokens reserved for messages after the
        episode, and length of the context at which the episode has used up its share."""
        self._unanswered = "", ""
        """Outcome and observation with which a context begins once the agent has written its notes.
        """
        self._messages: list[_Message] = []
        """User messages of the current context; recorded for truncation alone."""

    def open(self, outcome: str, observation: str, turn: NextTurn, notes: str = "") -> Kind:
        """Begin a context with an observation.

        Args:
            outcome: the environment's words since the agent's last action, if the observation does
                not hold them.
            notes: the agent's notes, which replace the previous context; "" for none.
        """
        opening = partial(self._opening, outcome, observation, turn)
        fitting = self._shortened_to_fit(notes, opening, turn)
        self._messages.clear()
        return self._send(self._transcript.open, opening(fitting), observation, turn)

    def open_after_notes(self, notes: str, turn: NextTurn) -> Kind:
        """Begin the context for which `compact` requested notes."""
        return self.open(*self._unanswered, turn, notes)

    def append(self, message: str, observation: str, turn: NextTurn) -> Kind:
        """Append a message to the current context.

        Args:
            observation: the part of the message that the action answers.
        """
        return self._send(self._transcript.add_message, message, observation, turn)

    def is_full_with(self, message: str, turn: NextTurn, tool_answers: Sequence[str] = ()) -> bool:
        """Return whether the context has no room for another message and a turn that answers it.

        Args:
            tool_answers: sent in place of the message, each as a message of its own, if there are
                any.
        """
        text, kind = self._with_request(message, turn)
        return self._transcript.length_with(text, kind, tool_answers) > self._longest_prompt()

    def compact(self, outcome: str, observation: str, turn: NextTurn) -> Kind | None:
        """Drop the oldest turns, or request the notes with which the next context begins.

        Args:
            outcome, observation: as in `open`.

        Returns:
            The kind of the next turn; `None` if a new context has no room for outcome and
            observation either, or if contexts are not compacted: then nothing was done.
        """
        config = self._config
        if config.compaction == "none" or not self.fits_alone(outcome, observation, turn):
            return None
        if config.compaction == "truncation":
            return self._truncate(outcome, observation, turn)
        self._unanswered = outcome, observation
        self._transcript.add_message(config.prompts.notes, Kind.NOTES)
        return Kind.NOTES

    def fits_alone(self, outcome: str, observation: str, turn: NextTurn) -> bool:
        """Return whether a new context has room for the longest notes and an observation."""
        length = self._tokens_alone(outcome, observation, turn) + self._tokens_of_opening_notes()
        return length <= self._longest_prompt()

    def lack_of_room(self, observation: str, turn: NextTurn) -> str:
        """Return the reason why a context cannot begin with an observation, with the numbers."""
        parts = (
            (self._tokens_alone("", observation, turn), "its first message"),
            (self._tokens_of_opening_notes(), "the notes in it"),
            (self._turn_tokens(), "a turn"),
            (self._tokens_to_write_notes(), "asking for notes and writing them"),
        )
        needs = ", ".join(f"{tokens} for {what}" for tokens, what in parts if tokens)
        return (
            f"a context needs {sum(tokens for tokens, _ in parts)} tokens ({needs}) and has "
            f"{self._config.room}: raise trial.room (at most engine.max_tokens), or lower "
            "transcript.max_reflection_tokens"
        )

    def keep_room(self, observation: str, episode: int, num_left: int) -> None:
        """Reserve tokens for the messages after the episode that begins: the reflection on it, and
        the first message of each later episode in the same context. Used if contexts are not
        compacted.

        Args:
            observation: first observation of the episode; first observations of later episodes are
                assumed to be as long.
            num_left: episodes of the trial that are still to be played, this one included.
        """
        config, self._reserved_tokens, self._share_ends_at = self._config, 0, math.inf
        if config.reflects:
            request = len(self._chat.encode(config.prompts.reflect))
            self._reserved_tokens += config.max_reflection_tokens + request
        if config.keeps_history:
            beginning = config.prompts.beginning(episode + 1, observation)
            if config.strategy != "none":
                beginning = f"{beginning} {config.prompts.strategy}"
            message = len(self._chat.encode(beginning)) + TEMPLATE_TOKENS
            self._reserved_tokens += (num_left - 1) * message

    def limit_episode(self, num_left: int) -> None:
        """Set the length beyond which `is_full_with` returns True in the episode that has begun, so
        that the caller cuts the episode. Used if contexts are not compacted.

        The episodes that are still to be played in a context share its free tokens evenly. Tokens
        that an episode does not use go to the episodes after it.

        Args:
            num_left: as in `keep_room`.
        """
        config, used = self._config, self._transcript.num_tokens
        if config.compaction == "none" and config.max_tokens:
            num_left = num_left if config.keeps_history else 1
            self._share_ends_at = used + (config.max_tokens - used) / num_left

    def reflection_request(self, outcome: str) -> str:
        """Return the message that requests a reflection; it begins with the outcome of the last
        action if the context has room for that.
        """
        config = self._config
        message = f"{outcome} {config.prompts.reflect}"
        length = self._transcript.length_with(message, Kind.REFLECT)
        is_full = 0 < config.max_tokens < length + self._reserved_tokens
        return config.prompts.reflect if is_full else message

    def _send(
        self, send: Callable[[str, Kind], None], message: str, observation: str, turn: NextTurn
    ) -> Kind:
        """Append a message that requests an action, or a strategy before it.

        Args:
            send: `add_message` or `open` of the transcript.
            observation: the part of the message that the action answers.
        """
        text, kind = self._with_request(message, turn)
        send(text, kind)
        if self._config.compaction == "truncation":
            # A later context may begin with the observation alone, without the rest of the message.
            shortened, _ = self._with_request(observation, turn)
            stop = self._transcript.num_tokens
            self._messages.append(_Message(stop, turn.episode, shortened, kind))
        return kind

    def _with_request(self, message: str, turn: NextTurn) -> tuple[str, Kind]:
        """Return a message as it is sent, with a request for a strategy where one is written, and
        the kind of the turn that answers it.
        """
        if not turn.wants_strategy:
            return message.strip(), Kind.ACT
        return f"{message} {self._config.prompts.strategy}".strip(), Kind.STRATEGY

    def _opening_length(self, opening: str, turn: NextTurn) -> int:
        """Return the tokens of a new context that begins with a message and requests a turn."""
        return self._transcript.opening_length(*self._with_request(opening, turn))

    def _truncate(self, outcome: str, observation: str, turn: NextTurn) -> Kind:
        """Begin a context with the newest turns that fit, and append the next message to it."""
        transcript, prompts, message = self._transcript, self._config.prompts, observation
        if turn.is_first:
            message = f"{outcome} {prompts.beginning(turn.episode, observation)}".strip()
        length = transcript.length_with(*self._with_request(message, turn))
        longest = self._longest_prompt()
        # Message 0 is left out: the current context begins with it, so nothing would be dropped.
        for number, first in enumerate(self._messages[1:], 1):
            opening = prompts.opening(first.episode, first.text, turn.remarks)
            # All later messages move by the difference between the new beginning and the old one.
            shift = transcript.opening_length(opening, first.kind) - first.stop
            if length + shift <= longest:
                transcript.reopen(opening, first.kind, first.stop)
                kept = self._messages[number:]
                self._messages = [each._replace(stop=each.stop + shift) for each in kept]
                return self.append(message, observation, turn)
        return self.open(outcome, observation, turn)

    def _opening(self, outcome: str, observation: str, turn: NextTurn, notes: str = "") -> str:
        opening = self._config.prompts.opening
        return opening(turn.episode, observation, turn.remarks, notes, outcome)

    def _shortened_to_fit(self, notes: str, opening: Callable[[str], str], turn: NextTurn) -> str:
        """Return notes, shortened at their end if a context that begins with all of them has no
        room for the next turn. This happens because notes in a message may be encoded as more
        tokens than the agent sampled.

        Args:
            opening: returns the message that begins a context with some notes.
        """

        def length_up_to(stop: int) -> int:
            return self._opening_length(opening(notes[:stop]), turn)

        longest = self._longest_prompt()
        if not notes or length_up_to(len(notes)) <= longest:
            return notes
        stops = [0, *(piece.end() for piece in _PIECE.finditer(notes))]
        # A binary search, because notes that were sampled at random may have to lose thousands of
        # characters.
        num_fitting = bisect_right(stops, longest, key=length_up_to)
        return notes[: stops[max(0, num_fitting - 1)]]

    def _longest_prompt(self) -> float:
        """Return the largest number of tokens of a prompt after which the context has room for the
        next turn.
        """
        config = self._config
        if config.compaction != "none":
            return config.room - self._turn_tokens() - self._tokens_to_write_notes()
        if not config.max_tokens:
            return math.inf
        return min(
            self._share_ends_at, config.max_tokens - self._reserved_tokens - self._turn_tokens()
        )

    def _tokens_alone(self, outcome: str, observation: str, turn: NextTurn) -> int:
        """Return the tokens of a context that begins with an observation, without notes."""
        return self._opening_length(self._opening(outcome, observation, turn), turn)

    def _turn_tokens(self) -> int:
        """Return the largest number of tokens of a turn: an action, and a strategy before it."""
        config, actions = self._config, self._legal_actions()
        tokens = max(config.sampling.max_tokens, actions.max_length if actions else 0)
        if config.strategy != "none":
            request = self._transcript.max_added_tokens(config.prompts.act, Kind.ACT, Kind.STRATEGY)
            tokens += config.max_reflection_tokens + request
        return tokens

    def _tokens_of_opening_notes(self) -> int:
        """Return the largest number of tokens of the notes that a context begins with; 0 if no
        notes are written.
        """
        config = self._config
        if config.compaction != "notes":
            return 0
        return len(self._chat.encode(f" {config.prompts.noted}")) + config.max_reflection_tokens

    def _tokens_to_write_notes(self) -> int:
        """Return the largest number of tokens of a request for notes and its answer; 0 if no notes
        are written.
        """
        config = self._config
        if config.compaction != "notes":
            return 0
        request = self._transcript.max_added_tokens(config.prompts.notes, Kind.NOTES)
        return request + config.max_reflection_tokens
