"""A turn on a completion server: one request, or several one after the other.

A turn goes on in another request where weights came between (the request was aborted with what it
had drawn), or where the server stopped at a token that the prompt does not stop at. What was drawn
so far is then part of the next request's prompt, and costs its budget.
"""

from dataclasses import dataclass

import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.errors import RunError
from mage_async.inference.kv_contexts import Opened
from mage_async.policy_version import VersionRun, append_run, moved


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one request drew.

    Shapes: `n` tokens drawn.
    """

    tokens: np.ndarray
    """int32 [n]; 0 where it was aborted before its first"""
    logprobs: np.ndarray
    """float32 [n]"""
    versions: tuple[VersionRun, ...]
    """`start` counts from the piece's first token."""
    num_cached: int
    """Tokens of the request that the server had in its cache."""
    is_aborted: bool = False


class TurnRequests:
    """One turn from its prompt to its completion.

    `tokens()` and `budget()` are the next request; `receive` takes what it drew; when `is_done`,
    `completion()` is the turn's. A turn whose server has died begins again with `restart`.
    """

    def __init__(self, prompt: Prompt, max_tokens: int) -> None:
        """`max_tokens`: of the whole context, prompt and completion."""
        self.prompt = prompt
        self._max_new = min(prompt.sampling.max_tokens, max_tokens - len(prompt.tokens))
        self._pieces: list[Piece] = []
        self._runs: list[VersionRun] = []
        self._num_drawn = 0
        self._num_recomputed = 0

    @property
    def is_done(self) -> bool:
        """The completion is whole."""
        return self._has_stopped() or self.budget() == 0

    def tokens(self) -> np.ndarray:
        """The prompt of the next request: int32 [T]."""
        return np.concatenate([self.prompt.tokens, *(piece.tokens for piece in self._pieces)])

    def budget(self) -> int:
        """Tokens that may still be drawn."""
        return self._max_new - self._num_drawn

    def receive(self, piece: Piece) -> None:
        """Take what the request drew.

        Raises:
            RunError: it drew no token although it was not aborted, or more than were asked for.
        """
        count = len(piece.tokens)
        if not 0 <= count <= self.budget() or not (count or piece.is_aborted):
            raise RunError(
                f"context {self.prompt.context!r}: the server drew {count} tokens where "
                f"1 to {self.budget()} were asked for"
            )
        if self._pieces:
            asked = len(self.prompt.tokens) + self._num_drawn
            self._num_recomputed += max(0, asked - 1 - piece.num_cached)
        for run in piece.versions if count else ():
            append_run(self._runs, moved(run, self._num_drawn))
        self._pieces.append(piece)
        self._num_drawn += count

    def restart(self) -> None:
        """Forget what was drawn: it died with the server, or its weights did."""
        self._pieces.clear()
        self._runs.clear()
        self._num_drawn = self._num_recomputed = 0

    def completion(self, opened: Opened) -> Completion:
        """The whole turn.

        Args:
            opened: what was known of its context before.
        """
        reused = min(self._pieces[0].num_cached, len(self.prompt.tokens) - 1)
        return Completion(
            np.concatenate([piece.tokens for piece in self._pieces]),
            np.concatenate([piece.logprobs for piece in self._pieces]),
            tuple(self._runs),
            "stop" if self._has_stopped() else "length",
            reused,
            max(0, opened.num_known - reused) + self._num_recomputed,
            opened.is_extension,
        )

    def _has_stopped(self) -> bool:
        last = next((p.tokens[-1] for p in reversed(self._pieces) if len(p.tokens)), None)
        return last is not None and int(last) in self.prompt.sampling.stop_tokens
