"""The sequences of a completion server: which cached keys and values each prompt may read.

Such a server finds cached keys by equal tokens, whichever weights computed them. Every request
therefore names a *key version* and finds only keys under the same name. A sequence takes the
version that is loaded when it begins, and a newer one when a prompt asks for fresh keys:

    engine.cache_rule    fresh keys
    keep                 never: a sequence reads its own keys, of any version, to its end
    refresh_at_episode   at the first turn of an episode
    isolate              at every turn

So a new sequence never begins with keys that older weights computed. Keys under a key version were
computed by that version or by newer ones; it is a token's `VersionRun.kv`.
"""

from dataclasses import dataclass

import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.errors import RunError
from mage_async.inference.prefix_cache import common_length
from mage_async.policy_version import VersionRun, append_run, moved


@dataclass(frozen=True, slots=True)
class Opened:
    """The keys that a prompt may read."""

    key_version: int
    num_known: int
    """Leading tokens that were computed before, under any key version."""
    is_extension: bool
    """Whether the prompt begins with all earlier tokens of its sequence."""


@dataclass(slots=True)
class _Sequence:
    key_version: int
    tokens: np.ndarray


class ServerPrefixes:
    """Key version and tokens of every living sequence, by `Prompt.context`."""

    def __init__(self) -> None:
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, prompt: Prompt, version: int) -> Opened:
        """Register a prompt that arrives while `version` is loaded."""
        known = self._sequences.get(prompt.context)
        if known is None:
            self._sequences[prompt.context] = _Sequence(version, prompt.tokens[:0])
            return Opened(version, 0, True)
        if prompt.fresh_keys:
            known.key_version = version
        common = common_length(known.tokens, prompt.tokens)
        computed = min(common, max(0, len(known.tokens) - 1), len(prompt.tokens) - 1)
        return Opened(known.key_version, computed, common == len(known.tokens))

    def reopen(self, prompt: Prompt, version: int) -> int:
        """Return the key version for a prompt that is sent again after `version` was loaded."""
        known = self._sequences.get(prompt.context)
        if known is None:
            return version
        if prompt.fresh_keys:
            known.key_version = version
        return known.key_version

    def lose_keys(self, version: int) -> None:
        """Note that the server died: all keys are lost, and `version` computes the next ones."""
        for known in self._sequences.values():
            known.key_version = version

    def close(self, prompt: Prompt, completion: np.ndarray) -> None:
        """Append the completion of a prompt, int32 [n], to its sequence."""
        known = self._sequences.get(prompt.context)
        if known is not None:
            known.tokens = np.concatenate([prompt.tokens, completion])

    def release(self, context: str) -> None:
        """Forget a sequence."""
        self._sequences.pop(context, None)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The result of one request.

    Shapes: `n` sampled tokens.
    """

    tokens: np.ndarray
    """int32 [n]; empty if the request was aborted before its first token."""
    logprobs: np.ndarray
    """float32 [n], in nats."""
    versions: tuple[VersionRun, ...]
    """`start` counts from the piece's first token."""
    num_cached: int
    """Tokens of the request that the server found in its cache."""
    is_aborted: bool = False


class TurnRequests:
    """The requests of one turn, from its prompt to its completion.

    A turn needs more than one request if weights were loaded in between (the server then aborts the
    request and returns the tokens sampled so far), or if the server stopped at a token at which the
    prompt does not stop. The tokens so far become part of the next request's prompt.

    `tokens` and `budget` are the next request, and `receive` takes its result. Once `is_done`,
    `completion` returns the turn's completion. After the server's death, `restart` begins again.
    """

    def __init__(self, prompt: Prompt, max_tokens: int) -> None:
        """Take the bound `max_tokens` on prompt and completion together."""
        self.prompt = prompt
        self._max_new = min(prompt.sampling.max_tokens, max_tokens - len(prompt.tokens))
        self._pieces: list[Piece] = []
        self._runs: list[VersionRun] = []
        self._num_drawn = 0
        self._num_recomputed = 0

    @property
    def is_done(self) -> bool:
        """Whether the completion is complete."""
        return self._has_stopped() or self.budget() == 0

    def tokens(self) -> np.ndarray:
        """Return the prompt of the next request: int32 [T]."""
        return np.concatenate([self.prompt.tokens, *(piece.tokens for piece in self._pieces)])

    def budget(self) -> int:
        """Return the number of tokens that may still be sampled."""
        return self._max_new - self._num_drawn

    def receive(self, piece: Piece) -> None:
        """Add the result of the request.

        Raises:
            RunError: it has no token although it was not aborted, or more than `budget`.
        """
        count = len(piece.tokens)
        if not 0 <= count <= self.budget() or not (count or piece.is_aborted):
            raise RunError(
                f"context {self.prompt.context!r}: the server drew {count} tokens where "
                f"1 to {self.budget()} were asked for"
            )
        if self._pieces:
            num_sent = len(self.prompt.tokens) + self._num_drawn
            self._num_recomputed += max(0, num_sent - 1 - piece.num_cached)
        for run in piece.versions if count else ():
            append_run(self._runs, moved(run, self._num_drawn))
        self._pieces.append(piece)
        self._num_drawn += count

    def restart(self) -> None:
        """Discard the tokens so far, because the server died or its weights were lost."""
        self._pieces.clear()
        self._runs.clear()
        self._num_drawn = self._num_recomputed = 0

    def completion(self, opened: Opened) -> Completion:
        """Return the completion of the turn.

        Args:
            opened: result of `ServerPrefixes.open` for its prompt.
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
