"""Define prompts to an engine and its completions: token ids in both directions, never text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mage_async.errors import ContextFull, RunError
from mage_async.policy_version import VersionRun
from mage_async.restriction import Restriction

FinishReason = Literal["stop", "length"]
"""`stop`: ended by a stop token. `length`: ended at `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Describe how a completion is sampled.

    Log-probs are after temperature, before top-p and top-k.
    """

    temperature: float = 1.0
    """0: take the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_tokens: int = 1
    stop_tokens: tuple[int, ...] = ()
    """A completion ends with the first of these tokens, which it includes."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Hold the whole context of one turn."""

    context: str
    """Name under which an engine keeps the keys and values of a growing context. A later prompt of
    this name begins with this prompt and its completion.
    """
    tokens: np.ndarray
    """int32 [T]"""
    sampling: Sampling
    seed: int
    """Equal seed, tokens and weights give the same completion, whatever else is in the batch."""
    refresh_kv: bool = False
    """Whether to recompute those cached keys and values that older weights have computed."""
    deadline_s: float = math.inf
    """Seconds after which the caller abandons the completion."""
    rival: int | None = None
    """Version of the past policy that samples the completion; None: the current weights."""
    role_changes: tuple[int, ...] = ()
    """Ascending indices of the tokens at which the role changes. The first role computes the tokens
    before the first index, the second role those up to the next index, and so on; the role after
    the last index samples the completion. Empty unless a method gives the policy two roles, such as
    planner and executor.
    """
    restriction: Restriction | None = None
    """Token sequences of which the completion must be one, such as the legal actions. The
    completion ends at the end of a sequence; the length and stop tokens of `sampling` are ignored.
    None: any tokens.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Hold the tokens sampled for one prompt."""

    tokens: np.ndarray
    """int32 [n], n >= 1"""
    logprobs: np.ndarray
    """float32 [n], in nats, of the distribution that `Sampling` describes."""
    versions: tuple[VersionRun, ...]
    """Policy versions that sampled the tokens; `start` counts from the completion's first token."""
    finish: FinishReason
    num_reused: int
    """Number of prompt tokens whose keys and values were in the prefix cache."""
    num_repeated: int = 0
    """Number of prompt tokens computed again: their keys and values had been computed before, for
    this context or for another one with the same prefix, and were evicted or are too old.
    """
    is_extension: bool = True
    """False if an earlier prompt has the same `context`, and this prompt does not begin with it and
    its completion."""
    drawn_from: tuple[np.ndarray | None, ...] | None = None
    """For each token the ids that it was sampled from, int32 ascending; None for a forced token,
    which was the only one allowed. The whole field is None if every token was sampled from the
    whole vocabulary.
    """

    def is_sampled(self) -> np.ndarray:
        """Return which tokens were sampled and not forced: bool [n]."""
        if self.drawn_from is None:
            return np.ones(len(self.tokens), bool)
        return np.array([each is not None for each in self.drawn_from], bool)


SECOND_ROLE = "role1."
"""Prefix of the names of the second role's own weights, published with the first role's."""


def with_roles(tokens: np.ndarray, role_changes: Sequence[int]) -> np.ndarray:
    """Mark the tokens of the second role as `~token` (negative), which keeps the roles apart in the
    prefix cache and wherever else tokens are compared.

    Args:
        role_changes: see `Prompt`.
    """
    if not role_changes:
        return tokens
    parts = np.split(tokens, role_changes)
    return np.concatenate([~part if place % 2 else part for place, part in enumerate(parts)])


def without_roles(tokens: np.ndarray) -> np.ndarray:
    """Return the tokens without the marks of their roles."""
    return np.where(tokens < 0, ~tokens, tokens)


def check_prompt(prompt: Prompt, *, max_tokens: int, vocabulary: int) -> None:
    """Refuse a prompt that no engine can complete.

    Args:
        max_tokens: largest context, prompt and completion together.
        vocabulary: number of token ids.

    Raises:
        ContextFull: there is no room for a sampled token, or for the longest legal action.
        RunError: the prompt can never be served; the message says why.
    """
    num_tokens, sampling, name = len(prompt.tokens), prompt.sampling, prompt.context
    longest = prompt.restriction.max_length if prompt.restriction else 1
    if num_tokens + longest > max_tokens:
        what = f"an action of {longest} tokens" if prompt.restriction else "one sampled token"
        raise ContextFull(
            f"context {name!r}: a prompt of {num_tokens} tokens does not fit, with {what}, "
            f"into engine.max_tokens = {max_tokens}; raise it, or make trials shorter"
        )
    is_drawable = sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0
    if sampling.max_tokens < 1 or not is_drawable or not num_tokens:
        raise RunError(f"context {name!r}: {num_tokens} tokens cannot be sampled by {sampling}")
    # As unsigned numbers, negative ids are too large as well. `reduce` is `max` without
    # the overhead of its Python wrapper, which every turn would pay.
    if np.maximum.reduce(prompt.tokens.view(np.uint32)) >= vocabulary:
        raise RunError(
            f"context {name!r}: token ids from {prompt.tokens.min()} to {prompt.tokens.max()}, but "
            f"the model knows 0 to {vocabulary - 1}: take the model's own tokenizer or, if tokens "
            "were added to it, save the model after model.resize_token_embeddings(len(tokenizer))"
        )
