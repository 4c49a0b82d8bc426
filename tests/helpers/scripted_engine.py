"""An engine without a model: says words, and takes the time that a model would take.

With it a person measures an environment or the transport alone, and tests play whole trials in
milliseconds. It follows `Engine` in all that can be seen from outside: versions per token, a
context's cached keys, statistics. Left out are logits and memory: words are drawn from a script or
uniformly, and no context is ever evicted.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import Environment
from mage_async.errors import ConfigError, RunError
from mage_async.inference.scheduler import Statistics
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Kind, Task
from mage_async.trials.action_parser import NAMES, ActionParser
from mage_async.trials.chat_format import ChatFormat

_LAST_TOKENS = 12
"""Enough of a prompt's end to see a tag in it, whatever the tokenizer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is said in one turn: token ids, and the natural log of their probability."""

    tokens: Sequence[int]
    logprob: float


Answers = Callable[[Prompt, int], Answer]
"""A prompt and the number of its turn in its context, from 0, to what is said."""

Pace = Callable[[str], float]
"""The name of a trial to the seconds that each of its turns takes."""


class UniformWords:
    """Draws one of some words by the prompt's seed, each as probable as the others."""

    def __init__(self, chat: ChatFormat, parser: ActionParser, words: Sequence[str]) -> None:
        self._speech, self._words = Speech(chat, parser), tuple(words)

    def __call__(self, prompt: Prompt, turn: int) -> Answer:
        """The words do not depend on the turn's number."""
        word = random.Random(prompt.seed).choice(self._words)
        return Answer(self._speech.say(word, prompt), -math.log(len(self._words)))


class WordsInOrder:
    """Says the n-th of some words in a context's n-th turn, and begins again after the last."""

    def __init__(self, chat: ChatFormat, parser: ActionParser, words: Sequence[str]) -> None:
        self._speech, self._words = Speech(chat, parser), tuple(words)

    def __call__(self, prompt: Prompt, turn: int) -> Answer:
        """Certain, so its log-prob is 0."""
        return Answer(self._speech.say(self._words[turn % len(self._words)], prompt), 0.0)


@dataclass(frozen=True, slots=True)
class Speech:
    """Puts a word between those tags that the transcript does not write itself.

    A turn is a reflection where its prompt ends in the tag of one; where the transcript forces no
    tag, that cannot be seen and every turn is answered with an action.
    """

    chat: ChatFormat
    parser: ActionParser

    def say(self, word: str, prompt: Prompt) -> Sequence[int]:
        """Token ids of a turn that says `word`."""
        end = self.chat.decode(prompt.tokens[-_LAST_TOKENS:].tolist())
        kind = Kind.REFLECT if end.endswith(f"<{NAMES[Kind.REFLECT]}>") else Kind.ACT
        opening = "" if self.parser.prefill(kind) else f"<{NAMES[kind]}>"
        leaves_open = kind is Kind.ACT and self.parser.forced == "both"
        return self.chat.encode(f"{opening} {word}" + ("" if leaves_open else f"</{NAMES[kind]}>"))


@dataclass(frozen=True, slots=True)
class LogNormalPace:
    """Seconds a turn, drawn once a trial: some trials are slow from their first turn to their last.

    They depend on the seed and on the trial's name alone, so they are the same whoever plays it.
    """

    mean_s: float
    sigma: float
    """Standard deviation of the natural log of the seconds; the mean does not depend on it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mean_s <= 0 or self.sigma < 0:
            raise ConfigError(
                "a pace needs mean_s above 0 and sigma of at least 0, "
                f"got {self.mean_s:g} and {self.sigma:g}"
            )

    def __call__(self, trial: str) -> float:
        """Seconds that each turn of a trial takes."""
        location = math.log(self.mean_s) - self.sigma**2 / 2
        return random.Random(f"{self.seed}/{trial}").lognormvariate(location, self.sigma)


def at_once(trial: str) -> float:
    """The pace of turns that take no time."""
    return 0.0


def action_words(environment: Environment, num_tasks: int = 8) -> tuple[str, ...]:
    """The actions that were legal while an environment's own scripts played some train members."""
    source = random.Random(0)
    found: set[str] = set()
    for member in environment.members("train")[:num_tasks]:
        seat = source.choice(environment.seats())
        play = environment.begin(Task(environment.facts.name, member, 0, seat), 0)
        script = environment.script(source)
        while legal := play.legal_actions():
            found.update(legal)
            play.act(script.choose(play))
    return tuple(sorted(found))


@dataclass(slots=True)
class _Context:
    """What the cache of a model would hold of a context."""

    tokens: np.ndarray
    oldest: int
    turns: int


class ScriptedEngine:
    """See the module. A turn's tokens are drawn at its end, by the version that is loaded then."""

    def __init__(self, answers: Answers, pace: Pace = at_once, *, version: int = 0) -> None:
        self._answers, self._pace, self._version = answers, pace, version
        self._contexts: dict[str, _Context] = {}
        self._held: list[int] = []
        self._totals = dict.fromkeys(Statistics.__slots__, 0)
        self._num_running, self._busy_since, self._busy_s = 0, 0.0, 0.0

    async def complete(self, prompt: Prompt) -> Completion:
        """Take the time of a turn, then say something. Cancellation leaves no trace of it."""
        if prompt.rival is not None and prompt.rival not in self._held:
            raise RunError(f"the engine has not loaded version {prompt.rival} as a past version")
        seconds = self._pace(prompt.context.rpartition(".")[0])
        self._begin()
        try:
            await asyncio.sleep(seconds)  # not a poll: this wait is the generation it stands for
        finally:
            self._end()
        return self._draw(prompt)

    async def load(self, version: int, path: Path) -> None:
        """Draw as `version` from here on; there are no weights, so `path` is not read."""
        self._version = version

    async def load_past(self, version: int, path: Path) -> None:
        """Answer for a version beside the current one; `path` is not read."""
        self._held.append(version)

    def release_past(self, version: int) -> None:
        """Do so no more."""
        self._held.remove(version)

    def trim(self) -> None:
        """This engine has no keys and values."""

    def release(self, context: str) -> None:
        """Forget a context."""
        self._contexts.pop(context, None)

    def statistics(self) -> Statistics:
        """What was done so far; `forward_s` is the time in which any turn was under way."""
        running = asyncio.get_running_loop().time() - self._busy_since if self._num_running else 0.0
        now = {"num_contexts": len(self._contexts), "forward_s": self._busy_s + running}
        return Statistics(**self._totals | now)

    async def describe(self) -> str:
        """What is served, in one line."""
        return "scripted engine: no model, no memory"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._contexts.clear()

    def _draw(self, prompt: Prompt) -> Completion:
        held = self._contexts.get(prompt.context)
        reused, is_extension = _reused(held, prompt)
        repeated, oldest = 0, self._version
        if held is not None and prompt.refresh_kv and held.oldest != self._version:
            reused, repeated = 0, reused
        elif held is not None and reused:
            oldest = held.oldest
        turn = 0 if held is None else held.turns
        answer = self._answers(prompt, turn)
        tokens = np.array(answer.tokens[: prompt.sampling.max_tokens], np.int32)
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[0] = answer.logprob
        known = np.concatenate([prompt.tokens, tokens])
        self._contexts[prompt.context] = _Context(known, oldest, turn + 1)
        finish = "stop" if len(tokens) == len(answer.tokens) else "length"
        own = VersionRun(0, self._version, oldest)
        runs = (own if prompt.rival is None else VersionRun(0, prompt.rival, prompt.rival),)
        self._count(len(prompt.tokens), len(tokens), reused, repeated, is_extension)
        return Completion(tokens, logprobs, runs, finish, reused, repeated, is_extension)

    def _count(
        self, prompt: int, drawn: int, reused: int, repeated: int, is_extension: bool
    ) -> None:
        for name, value in {
            "num_completions": 1,
            "num_prompt_tokens": prompt,
            "num_reused_tokens": reused,
            "num_repeated_tokens": repeated,
            "num_extension_faults": not is_extension,
            "num_generated_tokens": drawn,
        }.items():
            self._totals[name] += value

    def _begin(self) -> None:
        if not self._num_running:
            self._busy_since = asyncio.get_running_loop().time()
        self._num_running += 1

    def _end(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._busy_s += asyncio.get_running_loop().time() - self._busy_since


def _reused(held: _Context | None, prompt: Prompt) -> tuple[int, bool]:
    """Prompt tokens with cached keys, and whether the prompt extends its context."""
    if held is None:
        return 0, True
    length = min(len(held.tokens), len(prompt.tokens))
    differs = held.tokens[:length] != prompt.tokens[:length]
    common = int(differs.argmax()) if differs.any() else length
    return min(common, len(held.tokens) - 1, len(prompt.tokens) - 1), common == len(held.tokens)
