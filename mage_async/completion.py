"""What an actor asks of an engine and gets back: token ids in, token ids out, never text."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mage_async.errors import ContextFull, RunError
from mage_async.policy_version import VersionRun

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is drawn. Log-probs are after temperature, before top-p and top-k."""

    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_tokens: int = 1
    stop_tokens: tuple[int, ...] = ()
    """A completion ends with the first of these, which is part of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One turn's whole context."""

    context: str
    """Names the growing context; a later prompt of the same name extends this one and its
    completion.
    """
    tokens: np.ndarray
    """int32 [T]"""
    sampling: Sampling
    seed: int
    """Equal seed, tokens and weights draw the same completion, whatever else is in the batch."""
    fresh_keys: bool = False
    """Recompute cached keys that older weights made."""
    deadline_s: float = math.inf
    """The caller gives the completion up after so many seconds."""
    rival: int | None = None
    """Not the current weights draw it, but those of this version, which the engine holds beside."""
    exploits_from: int | None = None
    """Of a policy with two roles: tokens from this place on, drawn ones too, are computed by the
    exploiter, all before by the explorer; None: by the explorer all.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The tokens drawn for one prompt."""

    tokens: np.ndarray
    """int32 [n], n >= 1"""
    logprobs: np.ndarray
    """float32 [n]"""
    versions: tuple[VersionRun, ...]
    """`start` counts from the completion's first token."""
    finish: FinishReason
    num_reused: int
    """Prompt tokens that were not computed again."""
    num_repeated: int = 0
    """Prompt tokens computed although this context (or a shared prefix) had computed them before.
    """
    is_extension: bool = True
    """False where the prompt did not extend the context of its name."""


EXPLOITER = "exploiter."
"""What stands before the names of weights that the exploiter has for itself, where they are
published beside the explorer's.
"""


def with_roles(tokens: np.ndarray, exploits_from: int | None) -> np.ndarray:
    """Tokens that say their role: from a place on they are the exploiter's, written as `~token`.

    So a token of either role is another token to whatever compares tokens, such as a prefix cache.
    """
    if exploits_from is None:
        return tokens
    return np.concatenate([tokens[:exploits_from], ~tokens[exploits_from:]])


def without_roles(tokens: np.ndarray) -> np.ndarray:
    """The tokens themselves, whatever their role."""
    return np.where(tokens < 0, ~tokens, tokens)


def check_prompt(prompt: Prompt, *, max_tokens: int, vocabulary: int) -> None:
    """Refuse what no engine can draw.

    Args:
        max_tokens: of a context, prompt and completion together.
        vocabulary: token ids are below it.

    Raises:
        ContextFull: there is no room for a token to draw.
        RunError: the prompt cannot be served, now or ever; the text says why.
    """
    num_tokens, sampling, name = len(prompt.tokens), prompt.sampling, prompt.context
    if num_tokens >= max_tokens:
        raise ContextFull(
            f"context {name!r}: a prompt of {num_tokens} tokens does not fit, with a token to "
            f"draw, into engine.max_tokens = {max_tokens}; raise it, or make trials shorter"
        )
    is_drawable = sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0
    if sampling.max_tokens < 1 or not is_drawable or not num_tokens:
        raise RunError(f"context {name!r}: {num_tokens} tokens cannot be sampled by {sampling}")
    if np.maximum.reduce(prompt.tokens.view(np.uint32)) >= vocabulary:  # so are negative ones
        raise RunError(
            f"context {name!r}: token ids from {prompt.tokens.min()} to {prompt.tokens.max()}, but "
            f"the model knows 0 to {vocabulary - 1}; its tokenizer belongs to another model"
        )
