"""Track the sequences of a completion server: which cached keys and values each prompt may read.

A completion server such as SGLang finds cached keys and values by equal tokens, whichever weights
computed them. Every request therefore names a *KV version*, and finds only keys and values of
requests with the same one. The KV version of a sequence is the policy version that is loaded when
the sequence begins; a prompt with `refresh_kv` replaces it by the version that is loaded then:

    engine.cache_rule    `refresh_kv`
    keep                 never: a sequence reads its own keys and values, of any version, to its end
    refresh_at_episode   at the first turn of an episode
    isolate              at every turn

A new sequence therefore never begins with keys and values that older weights computed. Keys and
values under a KV version were computed by that policy version or by newer ones. A token's
`VersionRun.kv` is the KV version under which it was sampled.
"""

from dataclasses import dataclass

import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.errors import RunError
from mage_async.inference.prefix_cache import common_length
from mage_async.policy_version import VersionRun, append_run, moved


@dataclass(frozen=True, slots=True)
class Opened:
    """Report the cached keys and values that a prompt may read."""

    kv_version: int
    """Version whose cached keys and values the prompt may read."""
    num_known: int
    """Number of leading tokens of this sequence that were computed before, under any KV version."""
    is_extension: bool
    """Whether the prompt begins with all earlier tokens of its sequence."""


@dataclass(slots=True)
class _Sequence:
    """Hold a sequence's KV version, and its tokens so far."""

    kv_version: int
    tokens: np.ndarray
    num_computed: int = 0
    """Number of leading tokens whose keys and values have been computed; forced tokens at the end
    have none."""


class ServerPrefixes:
    """Hold KV version and tokens of every sequence until its release, by `Prompt.context`."""

    def __init__(self) -> None:
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, prompt: Prompt, version: int) -> Opened:
        """Register a prompt that arrives while `version` is loaded."""
        new = _Sequence(version, prompt.tokens[:0])
        known = self._sequences.setdefault(prompt.context, new)
        if prompt.refresh_kv:
            known.kv_version = version
        common = common_length(known.tokens, prompt.tokens)
        # The last prompt token is always computed, for its logits.
        computed = min(common, known.num_computed, len(prompt.tokens) - 1)
        return Opened(known.kv_version, computed, common == len(known.tokens))

    def reopen(self, prompt: Prompt, version: int) -> int:
        """Return the KV version for a prompt that is sent again after `version` was loaded."""
        known = self._sequences.get(prompt.context)
        if known is None:
            return version
        if prompt.refresh_kv:
            known.kv_version = version
        return known.kv_version

    def discard_kv(self, version: int) -> None:
        """Record that the server died and lost its cache; `version` computes all later keys."""
        for known in self._sequences.values():
            known.kv_version = version

    def close(self, prompt: Prompt, completion: np.ndarray, num_computed: int) -> None:
        """Append the completion of a prompt, int32 [n], to its sequence.

        Args:
            num_computed: Number of leading tokens, of prompt and completion together, whose keys
                and values the server has computed.
        """
        known = self._sequences.get(prompt.context)
        if known is not None:
            # A turn of forced tokens alone computes nothing: keys of the prefix that the prompt
            # shares with the previous tokens remain known.
            shared = min(known.num_computed, common_length(known.tokens, prompt.tokens))
            known.tokens = np.concatenate([prompt.tokens, completion])
            known.num_computed = max(shared, num_computed)

    def release(self, context: str) -> None:
        """Forget a sequence."""
        self._sequences.pop(context, None)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Hold the result of one request, which is a part of a turn's completion or all of it.

    Shapes: `n` sampled tokens.
    """

    tokens: np.ndarray
    """int32 [n]; empty if the request was aborted before its first token."""
    logprobs: np.ndarray
    """float32 [n], in nats."""
    versions: tuple[VersionRun, ...]
    """Version runs; `start` counts from the piece's first token."""
    num_cached: int
    """Number of tokens of the request that the server found in its cache."""
    is_aborted: bool = False
    """Whether the server aborted the request, which may then have fewer tokens than its budget."""


class TurnRequests:
    """Make the requests of one turn, from its prompt to its completion.

    A turn needs more than one request if weights were loaded in between (the server then aborts the
    request and returns the tokens sampled so far), or if the server stopped at a token that is no
    stop token of the prompt. The tokens so far become part of the next request's prompt.

    A restricted turn needs a request for each token that it samples, because only the first token
    of a request has a set of allowed tokens: if requests overlap, the server does not know the
    last token when it computes the next one. Forced tokens need none.

    `tokens`, `budget` and `allowed` are the next request, and `receive` takes its result. Once
    `is_done`, `completion` returns the turn's completion. After the server's death, `restart`
    begins again.
    """

    def __init__(self, prompt: Prompt, max_tokens: int) -> None:
        """Take the bound `max_tokens` on prompt and completion together."""
        self.prompt = prompt
        self._max_new = min(prompt.sampling.max_tokens, max_tokens - len(prompt.tokens))
        self.restart()

    def restart(self) -> None:
        """Discard the tokens so far, because the server died or its weights were lost."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._runs: list[VersionRun] = []
        self._drawn_from: list[np.ndarray | None] = []
        """See `Completion.drawn_from`."""
        self._node = 0
        """Node of the prompt's trie that the completion has reached."""
        self._num_recomputed = 0
        """Number of tokens that later requests of this turn had to compute again."""
        self._num_reused: int | None = None
        """Number of cached tokens that the first request with a token found; None before it."""
        self.num_computed = 0
        """Number of leading tokens, of prompt and completion together, whose keys and values this
        turn has computed or found."""
        self._append_forced()

    @property
    def is_done(self) -> bool:
        """Whether the completion is complete."""
        trie = self.prompt.restriction
        if trie is not None:
            return trie.is_end(self._node)
        return self._has_stopped() or self.budget() == 0

    def tokens(self) -> np.ndarray:
        """Return the prompt of the next request: int32 [T]."""
        return np.concatenate([self.prompt.tokens, np.array(self._tokens, np.int32)])

    def budget(self) -> int:
        """Return the number of tokens that the next request may sample."""
        return self._max_new - len(self._tokens) if self.prompt.restriction is None else 1

    def allowed(self) -> np.ndarray | None:
        """Return the tokens that the next request samples from, int32 ascending; None for all."""
        trie = self.prompt.restriction
        return None if trie is None else trie.allowed(self._node)

    def receive(self, piece: Piece) -> None:
        """Add the result of the request.

        Raises:
            RunError: the result has no token although the request was not aborted, more tokens than
                `budget`, or a token that was not allowed.
        """
        count, name = len(piece.tokens), f"context {self.prompt.context!r}"
        if not 0 <= count <= self.budget() or not (count or piece.is_aborted):
            raise RunError(
                f"{name}: the server sampled {count} tokens, and 1 to {self.budget()} were "
                "requested"
            )
        if not count:
            # The server reports no cached tokens for a request that it aborted in its queue.
            return
        if self._num_reused is None:
            self._num_reused = piece.num_cached
        else:
            self._num_recomputed += max(0, self.num_computed - piece.num_cached)
        allowed = self.allowed()
        if allowed is not None and piece.tokens[0] not in allowed:
            raise RunError(
                f"{name}: the server sampled token {piece.tokens[0]}, which is not one of the "
                f"{len(allowed)} allowed ones; set sampling.restricted = false"
            )
        for run in piece.versions:
            append_run(self._runs, moved(run, len(self._tokens)))
        # Key and value of a request's last token are computed only by the next request.
        self.num_computed = len(self.prompt.tokens) + len(self._tokens) + count - 1
        self._tokens += piece.tokens.tolist()
        self._logprobs += piece.logprobs.tolist()
        if self.prompt.restriction is not None:
            self._drawn_from.append(allowed)
            self._node = self.prompt.restriction.after(self._node, self._tokens[-1])
            self._append_forced()

    def completion(self, opened: Opened, version: int) -> Completion:
        """Return the completion of the turn.

        Args:
            opened: Result of `ServerPrefixes.open` for the turn's prompt.
            version: Version that a completion gets if all of its tokens were forced.
        """
        num_prompt, runs = len(self.prompt.tokens), self._runs
        if self._num_reused is None:  # no token was sampled, because all were forced
            runs, reused = [VersionRun(0, version, version)], num_prompt
        else:
            if runs and runs[0].start:
                # Forced tokens before the first sampled one belong to the version that sampled it.
                runs = [moved(runs[0], -runs[0].start), *runs[1:]]
            reused = min(self._num_reused, num_prompt - 1)
        is_stopped = self.prompt.restriction is not None or self._has_stopped()
        return Completion(
            np.array(self._tokens, np.int32),
            np.array(self._logprobs, np.float32),
            tuple(runs),
            "stop" if is_stopped else "length",
            reused,
            max(0, opened.num_known - reused) + self._num_recomputed,
            opened.is_extension,
            tuple(self._drawn_from) if self.prompt.restriction else None,
        )

    def _append_forced(self) -> None:
        """Append the tokens that follow without a choice in a restricted completion."""
        if self.prompt.restriction is not None:
            tokens, self._node = self.prompt.restriction.forced(self._node)
            self._tokens += tokens
            self._logprobs += [0.0] * len(tokens)
            self._drawn_from += [None] * len(tokens)

    def _has_stopped(self) -> bool:
        """Return whether the last token so far is one at which the prompt stops."""
        return bool(self._tokens) and self._tokens[-1] in self.prompt.sampling.stop_tokens
