"""Store the contexts of one trial: append-only token sequences with the sampled tokens marked.

The prompt of turn n + 1 is the prompt of turn n, its completion, and further tokens. An engine
therefore computes each token once, and a learner trains a whole trial as one sequence.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mage_async.completion import Completion
from mage_async.policy_version import VersionRun, append_run, moved
from mage_async.restriction import AllowedSets
from mage_async.trajectory import Kind, Segment, Trial
from mage_async.trials.action_parser import NAMES, ActionParser
from mage_async.trials.chat_format import ChatFormat


@dataclass(slots=True)
class GrowingSegment:
    """Collect the tokens and completions of a segment while it grows."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    spans: list[tuple[int, Completion]] = field(default_factory=list)
    """Completions with their start positions; those of `kept` are not among them."""
    kept: Segment | None = None
    """The finished segment that this one continues, if another process began the trial; `None`:
    this one began empty.
    """

    @classmethod
    def after(cls, kept: Segment) -> "GrowingSegment":
        """Return a growing segment that begins with the tokens of a finished one."""
        return cls(array("i", kept.tokens.tolist()), kept=kept)

    def close(self) -> Segment:
        """Return the segment so far, for training."""
        is_sampled = np.zeros(len(self.tokens), bool)
        logprobs = np.zeros(len(self.tokens), np.float32)
        runs: list[VersionRun] = []
        drawn_from: list[np.ndarray | None] = []
        if (kept := self.kept) is not None:
            is_sampled[: len(kept.tokens)] = kept.is_sampled
            logprobs[: len(kept.tokens)] = kept.logprobs
            runs += kept.versions
            drawn_from += kept.allowed or [None] * int(kept.is_sampled.sum())
        for start, completion in self.spans:
            stop = start + len(completion.tokens)
            is_sampled[start:stop] = own = completion.is_sampled()
            logprobs[start:stop] = completion.logprobs
            sets = completion.drawn_from or [None] * len(own)
            drawn_from += [each for each, is_own in zip(sets, own, strict=True) if is_own]
            for run in completion.versions:
                append_run(runs, moved(run, start))
        tokens, allowed = np.array(self.tokens, np.int32), AllowedSets.of(drawn_from)
        return Segment(tokens, is_sampled, logprobs, tuple(runs), allowed)


class Transcript:
    """Store the contexts of one trial as tokens.

    For each turn, call `open` (a new context) or `add_message` (the same context), sample from the
    prompt `tokens()`, then call `receive`.
    """

    def __init__(self, chat: ChatFormat, parser: ActionParser) -> None:
        self._chat, self._parser = chat, parser
        self._segments: list[GrowingSegment] = []
        self._kind = Kind.ACT
        """Kind of the turn that is sampled next, or was sampled last."""
        self._forced = ""
        """Closing tag, or its rest, that the transcript adds to the last completion."""

    def resume(self, trial: Trial) -> None:
        """Continue the contexts of a trial, in which nothing follows the last turn."""
        self._segments = [GrowingSegment.after(segment) for segment in trial.segments]
        turn = trial.turns[-1]
        sampled = trial.segments[turn.segment].tokens[turn.start : turn.stop].tolist()
        self._forced = self._closing(turn.kind, sampled, self._chat.decode(sampled))

    def open(self, message: str, kind: Kind) -> None:
        """Start a new context with a user message."""
        self._segments.append(GrowingSegment())
        self._append(self._chat.opening(message, self._parser.prefill(kind)))
        self._kind = kind

    def reopen(self, message: str, kind: Kind, kept_from: int) -> None:
        """Start a new context with a user message and the tokens of the current context from
        `kept_from` on. In the new context they belong to the prompt, so none is trained on twice.

        Args:
            kept_from: start of a completion of the current context. The prompt of this completion
                ended with the opening tag of `kind`, which the new context writes again.
        """
        kept = self._segments[-1].tokens[kept_from:].tolist()
        self.open(message, kind)
        self._append(kept)

    def opening_length(self, message: str, kind: Kind) -> int:
        """Return the number of tokens of a new context that begins with a user message."""
        return len(self._chat.opening(message, self._parser.prefill(kind)))

    def add_message(self, message: str, kind: Kind, answers: Sequence[str] = ()) -> None:
        """Append a user message to the current context.

        Args:
            answers: answers to the tool calls of the last turn, appended in place of the message;
                empty: there were no calls.
        """
        self._append(self._message_tokens(message, kind, answers))
        self._kind = kind

    def length_with(self, message: str, kind: Kind, answers: Sequence[str] = ()) -> int:
        """Return the number of tokens that the context would have after `add_message`."""
        return self.num_tokens + len(self._message_tokens(message, kind, answers))

    def max_added_tokens(self, message: str, kind: Kind, after: Kind = Kind.ACT) -> int:
        """Return the largest number of tokens that a message adds to a context after a turn of this
        kind.
        """
        # Before the message come at most a whole closing tag and, as -1 is no stop token, the
        # tokens that end the turn.
        forced = f"</{NAMES[after]}>"
        return len(self._chat.answer(-1, forced, message, self._parser.prefill(kind)))

    def close(self, message: str) -> None:
        """Close the current context with a last user message that has no answer."""
        last = self._segments[-1].tokens[-1]
        self._append(self._chat.ending(last, self._forced, message))

    def receive(self, completion: Completion) -> tuple[int, str | None]:
        """Append a completion.

        Returns:
            Its start position, and the text between its tags, or `None` without tags. With tools,
            the text of an action is the whole completion. The stop token is in neither.
        """
        segment = self._segments[-1]
        start, ids = len(segment.tokens), completion.tokens.tolist()
        segment.spans.append((start, completion))
        self._append(ids)
        text = self._chat.decode_completion(ids)
        if not self._parser.prefill(self._kind):
            text = self._chat.opened_thinking(completion) + text
        self._forced = self._closing(self._kind, ids, text)
        return start, self._parser.parse(self._kind, text)

    def tokens(self) -> np.ndarray:
        """Return the current context: int32 [T]."""
        return np.array(self._segments[-1].tokens, np.int32)

    @property
    def num_tokens(self) -> int:
        """Length of the current context."""
        return len(self._segments[-1].tokens)

    @property
    def num_segments(self) -> int:
        """Number of contexts so far."""
        return len(self._segments)

    def segments(self) -> tuple[Segment, ...]:
        """Return all contexts for training."""
        return tuple(segment.close() for segment in self._segments)

    def _closing(self, kind: Kind, ids: Sequence[int], text: str) -> str:
        """Return the text that the transcript adds after a completion.

        After a stop token it adds no closing tag, which would stand outside the assistant's turn.
        """
        return "" if self._chat.is_stopped(ids) else self._parser.closing(kind, text)

    def _message_tokens(self, message: str, kind: Kind, answers: Sequence[str]) -> tuple[int, ...]:
        last = self._segments[-1].tokens[-1]
        if answers:
            return self._chat.tool_answers(last, answers)
        return self._chat.answer(last, self._forced, message, self._parser.prefill(kind))

    def _append(self, ids: tuple[int, ...] | list[int]) -> None:
        self._segments[-1].tokens.extend(ids)
