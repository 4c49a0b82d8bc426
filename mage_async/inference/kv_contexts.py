"""The growing contexts of a completion server: which cached keys and values each may read.

Such a server finds cached keys by equal tokens, and does not ask which weights made them. So every
prompt names a *key version*, and finds only keys under the same name. A context takes the version
that is loaded when it begins, and a new one where its prompt wants fresh keys:

    cache rule           a prompt wants fresh keys
    keep                 never: a context reads its own keys to its end, of any version
    refresh_at_episode   at an episode's first turn
    isolate              at every turn

Under no rule does a new context begin with keys that older weights made. What is found under a key
version was made by that version or by newer ones; it is what a token's `VersionRun.kv` says.
"""

from dataclasses import dataclass

import numpy as np

from mage_async.completion import Prompt


@dataclass(frozen=True, slots=True)
class Opened:
    """What a prompt may take from before."""

    key_version: int
    num_known: int
    """Leading tokens that the context has had computed, under whatever key."""
    is_extension: bool


@dataclass(slots=True)
class _Context:
    key_version: int
    tokens: np.ndarray


class KVContexts:
    """Key version and last tokens of every living context."""

    def __init__(self) -> None:
        self._contexts: dict[str, _Context] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def open(self, prompt: Prompt, version: int) -> Opened:
        """A prompt comes while `version` is loaded."""
        known = self._contexts.get(prompt.context)
        if known is None:
            self._contexts[prompt.context] = _Context(version, prompt.tokens[:0])
            return Opened(version, 0, True)
        if prompt.fresh_keys:
            known.key_version = version
        common = _common(known.tokens, prompt.tokens)
        computed = min(common, max(0, len(known.tokens) - 1), len(prompt.tokens) - 1)
        return Opened(known.key_version, computed, common == len(known.tokens))

    def reopen(self, prompt: Prompt, version: int) -> int:
        """The key version of a prompt that is asked again, after `version` was loaded."""
        known = self._contexts.get(prompt.context)
        if known is None:
            return version
        if prompt.fresh_keys:
            known.key_version = version
        return known.key_version

    def lose_keys(self, version: int) -> None:
        """The server has died: no keys are left, and the next ones are made by `version`."""
        for known in self._contexts.values():
            known.key_version = version

    def close(self, prompt: Prompt, completion: np.ndarray) -> None:
        """The prompt was answered with `completion`, int32 [n]."""
        known = self._contexts.get(prompt.context)
        if known is not None:
            known.tokens = np.concatenate([prompt.tokens, completion])

    def release(self, context: str) -> None:
        """Forget a context."""
        self._contexts.pop(context, None)


def _common(known: np.ndarray, tokens: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(known), len(tokens))
    differs = known[:length] != tokens[:length]
    return int(differs.argmax()) if differs.any() else length
