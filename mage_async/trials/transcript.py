"""A trial's growing contexts: append-only tokens, marked as sampled or not.

Turn n + 1's prompt is turn n's prompt, its completion, and more. That is what lets an engine
compute each token once and a learner train a whole trial as one sequence.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mage_async.completion import Completion
from mage_async.policy_version import VersionRun, append_run, moved
from mage_async.trajectory import Kind, Segment
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat


@dataclass(slots=True)
class _Open:
    """A segment while it grows."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    spans: list[tuple[int, Completion]] = field(default_factory=list)

    def close(self) -> Segment:
        """The segment as it is trained on."""
        is_sampled = np.zeros(len(self.tokens), bool)
        logprobs = np.zeros(len(self.tokens), np.float32)
        runs: list[VersionRun] = []
        for start, completion in self.spans:
            stop = start + len(completion.tokens)
            is_sampled[start:stop] = True
            logprobs[start:stop] = completion.logprobs
            for run in completion.versions:
                append_run(runs, moved(run, start))
        return Segment(np.array(self.tokens, np.int32), is_sampled, logprobs, tuple(runs))


class Transcript:
    """The contexts of one trial.

    The order is: `ask` (a new context) or `tell` (in the same one), then `tokens()` is the prompt,
    then `receive`.
    """

    def __init__(self, chat: ChatFormat, parser: ActionParser) -> None:
        self._chat, self._parser = chat, parser
        self._segments: list[_Open] = []
        self._kind = Kind.ACT
        self._forced = ""

    def ask(self, said: str, kind: Kind) -> None:
        """Begin a new context with a user message."""
        self._segments.append(_Open())
        self._append(self._chat.opening(said) + self._prefill(kind))
        self._kind = kind

    def tell(self, said: str, kind: Kind) -> None:
        """Go on in the same context with a user message."""
        last = self._segments[-1].tokens[-1]
        self._append(self._chat.answer(last, self._forced, said, self._parser.prefill(kind)))
        self._kind = kind

    def tell_tool_answers(self, answers: Sequence[str]) -> None:
        """Go on in the same context with what the calls of the last turn led to."""
        last = self._segments[-1].tokens[-1]
        self._append(self._chat.tool_answers(last, answers))
        self._kind = Kind.ACT

    def end(self, said: str) -> None:
        """Close the context with a last user message that is not answered."""
        last = self._segments[-1].tokens[-1]
        self._append(self._chat.ending(last, self._forced, said))

    def receive(self, completion: Completion) -> tuple[int, str | None]:
        """Append a completion; say where it starts and what stands between its tags."""
        segment = self._segments[-1]
        start = len(segment.tokens)
        segment.spans.append((start, completion))
        self._append(completion.tokens.tolist())
        text = self._chat.decode(completion.tokens.tolist())
        self._forced = self._parser.closing(self._kind, text)
        return start, self._parser.parse(self._kind, text)

    def tokens(self) -> np.ndarray:
        """The current context: int32 [T]."""
        return np.array(self._segments[-1].tokens, np.int32)

    @property
    def num_tokens(self) -> int:
        """Length of the current context."""
        return len(self._segments[-1].tokens)

    @property
    def num_segments(self) -> int:
        """How many contexts were begun."""
        return len(self._segments)

    def segments(self) -> tuple[Segment, ...]:
        """All contexts as they are trained on."""
        return tuple(segment.close() for segment in self._segments)

    def _prefill(self, kind: Kind) -> tuple[int, ...]:
        text = self._parser.prefill(kind)
        return self._chat.encode(text) if text else ()

    def _append(self, ids: tuple[int, ...] | list[int]) -> None:
        self._segments[-1].tokens.extend(ids)
