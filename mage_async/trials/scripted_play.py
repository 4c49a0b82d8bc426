"""Play trials by a script instead of a policy, in the same transcripts: for warm starts, for the
known returns of scripts, and for a lower bound on the context that a trial needs.
"""

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast, runtime_checkable

import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.environments.environment import Environment, Play, Script, Split
from mage_async.environments.games.game import TrialScript
from mage_async.environments.mix import Mix, component_of
from mage_async.errors import CallFault, ConfigError
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Guidance, Kind, Task, Trial, Turn
from mage_async.trials.action_parser import NAMES, ActionParser
from mage_async.trials.chat_format import ChatFormat, Message, Tokens, Tools
from mage_async.trials.duels import TrialInProgress, begin_trial, make_calls
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialRun, TrialStart


@dataclass(slots=True)
class GuidedScript:
    """Follow guidance in the first episode, and otherwise another script.

    The other script chooses in every state, even if its choice is not used, so that it sees the
    whole trial.
    """

    script: Script
    guidance: Mapping[str, str]
    """Advised action by state."""
    _first: Play | None = None
    """The play of the first episode."""

    def choose(self, play: Play) -> str:
        """Return the next action."""
        if self._first is None:
            self._first = play
        action = self.script.choose(play)
        advised = self.guidance.get(play.anchor) if play is self._first else None
        return action if advised is None or advised not in play.legal_actions() else advised


class RandomScript:
    """Choose any legal action, or any declared word if a turn lists no actions.

    Args:
        words: declared words of the environment; may be empty.
    """

    def __init__(self, source: random.Random, words: Sequence[str]) -> None:
        self._source, self._words = source, words

    def choose(self, play: Play) -> str:
        """Return the next action.

        Raises:
            ConfigError: the environment declares neither legal actions nor words.
        """
        if choices := play.legal_actions() or self._words:
            return self._source.choice(choices)
        raise ConfigError(
            "random play needs to know what an action may be: declare `legal_actions`, "
            "`legal_pattern` or `words`"
        )


@runtime_checkable
class TurnReader(Protocol):
    """Read the turns of a trial and their rewards: a protocol of scripts that need them."""

    def read(self, turns: Sequence[Turn], episode: int, answer: Callable[[], str]) -> None:
        """Read the turns of the trial so far, before each choice.

        Args:
            episode: Number of the current episode.
            answer: Returns the text after the last turn's completion, which may end with the next
                observation; "" where a new context begins.
        """
        ...


Player = Callable[[Environment, random.Random], Script | None]
"""Makes the script that plays a trial of an environment."""


def own_script(environment: Environment, source: random.Random) -> Script | None:
    """Return the environment's own script."""
    return environment.script(source)


def random_play(environment: Environment, source: random.Random) -> Script:
    """Return a script that chooses any legal action."""
    return RandomScript(source, environment.facts.words)


SHARES_NOTED = (0.5, 1.0)
"""Shares of the facts in a context that a script writes into notes. Each trial draws one of them.
So a policy that clones the script has read notes of both kinds, and RL can find that complete notes
earn more.
"""
MAX_PIECE = 4
"""Largest number of words in a piece of the context. If a game states no facts, notes are made of
such pieces."""


class NoteTaker:
    """Write the notes of one scripted trial."""

    def __init__(self, script: Script, chat: ChatFormat, source: random.Random) -> None:
        self._script, self._chat, self._source = script, chat, source
        self._share_noted = source.choice(SHARES_NOTED)

    def write(self, context: Sequence[int], words: Sequence[int], room: int) -> list[int]:
        """Return notes of at most `room` tokens: facts that the context holds or, if the game
        states no facts, pieces of the context.

        Args:
            context: token ids.
            words: token ids of the environment's words in the context, in their order.
        """
        facts = self._script.facts() if isinstance(self._script, TrialScript) else None
        if facts is None:
            return self._pieces(words, room)
        # The context holds a fact if the fact's ids follow one another in it. They are searched for
        # as text: ",7,12," in ",3,7,12,5,".
        text = f",{','.join(map(str, context))},"
        ids = [self._chat.encode(f" {fact}") for fact in facts]
        contained = [each for each in ids if f",{','.join(map(str, each))}," in text]
        kept: list[int] = []
        for each in reversed(contained):  # the newest are kept if not all fit
            if self._source.random() < self._share_noted and len(kept) + len(each) <= room:
                kept[:0] = each
        return kept

    def _pieces(self, seen: Sequence[int], room: int) -> list[int]:
        """Return words of the context in their order, drawn as pieces of 1 to `MAX_PIECE`
        neighbouring words.
        """
        kept = set[int]()
        while len(kept) < min(room, len(seen)):
            first = self._source.randrange(len(seen))
            stop = first + self._source.randint(1, MAX_PIECE)
            kept.update(range(first, min(stop, len(seen))))
        return [seen[place] for place in sorted(kept)][:room]


def scripted_trial(
    environment: Environment,
    task: Task,
    index: int,
    config: TrialConfig,
    chat: ChatFormat,
    guidance: Guidance | None = None,
    player: Player = own_script,
) -> Trial:
    """Return a trial in which a script of the environment chooses every action.

    A remark is made of words of its context, so that the policy learns to write short and true
    remarks. A reflection repeats the last words of the environment in the context; notes have some
    of the facts that the context holds (`NoteTaker`).

    Args:
        guidance: advice with which the prompts begin, and which the script follows in the first
            episode; None: no advice.
        player: makes the script that chooses the actions.
    """
    source = random.Random(f"{task.seed}/{index}/script")
    part = component_of(environment, task.member)
    script = player(part, source)
    assert script is not None, "callers check that the environment has a script"
    reader = script if isinstance(script, TurnReader) else None
    config = config.with_guidance(guidance)
    run = TrialRun(TrialStart(environment, task, index, config, chat, "script"))
    words = word_tokens(part, chat)
    notes = NoteTaker(script, chat, random.Random(f"{task.seed}/{index}/notes"))
    # Guidance only replaces actions: the script itself reads the turns and states facts for notes.
    if guidance is not None:
        script = GuidedScript(script, dict(guidance.decisions))
    try:
        make_calls(run)  # calls the environment's methods, here and after each answer
        context = ""
        while (prompt := run.next_prompt()) is not None:
            if reader is not None:
                is_continued = prompt.context == context
                after = prompt.tokens[run.turns[-1].stop :] if is_continued else prompt.tokens[:0]
                reader.read(run.turns, run.episode, partial(chat.decode, after.tolist()))
            context = prompt.context
            answer = _answer(run, prompt, script, words, chat, config.parser, notes)
            run.receive(_completion(answer))
            make_calls(run)
        return run.trial()
    finally:
        # After a whole trial nothing is left to close.
        for call in run.abandon():
            with suppress(CallFault):
                call.now()


def word_tokens(environment: Environment, chat: ChatFormat) -> frozenset[int]:
    """Return the ids of the environment's words that are a single token."""
    encoded = (chat.encode(f" {word}") for word in environment.facts.words)
    return frozenset(ids[0] for ids in encoded if len(ids) == 1)


def random_task(environment: Environment, split: Split, source: random.Random) -> Task:
    """Draw a task uniformly over task variants and seats.

    In a mix, a component is drawn first, with probability proportional to its share.
    """
    name = environment.facts.name
    if isinstance(environment, Mix):
        (part,) = source.choices(environment.parts, [part.share for part in environment.parts])
        task = random_task(part.environment, split, source)
        return replace(task, environment=name, member=part.member(task.member))
    members, seats = environment.members(split), environment.seats()
    return Task(name, source.choice(members), source.getrandbits(40), source.choice(seats))


def random_trials(
    environment: Environment, config: TrialConfig, chat: ChatFormat, source: random.Random, num: int
) -> list[TrialInProgress]:
    """Begin trials of random training tasks, each the only one of its group."""
    tasks = [random_task(environment, "train", source) for _ in range(num)]
    return [
        begin_trial(TrialStart(environment, task, 0, config, chat, str(number)))
        for number, task in enumerate(tasks)
    ]


def _answer(
    run: TrialRun,
    prompt: Prompt,
    script: Script,
    words: Collection[int],
    chat: ChatFormat,
    parser: ActionParser,
    notes: NoteTaker,
) -> list[int]:
    """Return the completion of a script: its action or, for a remark, words of the prompt."""
    if run.kind is Kind.ACT:
        action = script.choose(run.play)
        if parser.is_whole_completion(Kind.ACT):
            return list(chat.encode(action))
        return _tagged(parser, Kind.ACT, list(chat.encode(f" {action}")), chat)
    context = cast("list[int]", prompt.tokens.tolist())
    seen = [token for token in context if token in words]
    room = prompt.sampling.max_tokens - 1  # one token is left for the closing tag
    last = seen[-room:] if room else []  # `seen[-0:]` would be all of it
    remark = notes.write(context, seen, room) if run.kind is Kind.NOTES else last
    return _tagged(parser, run.kind, remark, chat)


def _tagged(parser: ActionParser, kind: Kind, inside: list[int], chat: ChatFormat) -> list[int]:
    """Add the tags around an action or a remark, except those that the transcript writes."""
    opening = [] if parser.prefill(kind) else list(chat.encode(f"<{NAMES[kind]}>"))
    leaves_open = kind is Kind.ACT and parser.forced == "both"
    closing = [] if leaves_open else list(chat.encode(f"</{NAMES[kind]}>"))
    return opening + inside + closing


def _completion(ids: list[int]) -> Completion:
    """Return tokens as a completion of version 0, with log-probs of 0."""
    tokens = np.array(ids, np.int32)
    runs = (VersionRun(0, 0, 0),)
    return Completion(tokens, np.zeros(len(ids), np.float32), runs, "stop", 0)


# A lower bound on the context that a trial needs.


NUM_TRIALS = 3
"""Number of scripted trials that are measured; the shortest of them counts. A configuration without
room for the shortest trial can complete no group, while a trial that is too long costs one group.
"""
_MARKS = re.compile(r"(<\|user\|>|<\|assistant\|>|</?action>|</?remark>)")
"""Roles and tags in the text that `_render` writes; each counts as one word."""


def shortest_context(environment: Environment, config: TrialConfig, chat: ChatFormat) -> int:
    """Return a lower bound, in tokens, on the context length that a trial needs.

    Each scripted trial needs its longest prompt and one sampled token; the result is the minimum
    over `NUM_TRIALS` of them. No tokenizer is needed: a word, a tag or a role counts as one token,
    because no known tokenizer joins words across a space, and every chat template writes the role.

    Args:
        environment: one that has a script of its own.
        config: made for the same `chat`.
        chat: `chat_in_words()`.
    """
    source = random.Random(0)
    tasks = [random_task(environment, "train", source) for _ in range(NUM_TRIALS)]
    trials = [scripted_trial(environment, task, 0, config, chat) for task in tasks]
    return min(max(turn.start for turn in trial.turns) + 1 for trial in trials)


def chat_in_words() -> ChatFormat:
    """Return a chat format in which each word is a token, numbered in order of appearance."""
    ids: dict[str, int] = {}

    def tokenize(text: str) -> Tokens:
        words = (word for part in _MARKS.split(text) for word in part.split())
        return Tokens(tuple(ids.setdefault(word, len(ids)) for word in words))

    def decode(tokens: Sequence[int]) -> str:
        words = list(ids)
        return " ".join(words[token] for token in tokens)

    return ChatFormat(tokenize, decode, _render, stop_tokens=())


def _render(messages: list[Message], opens: bool, tools: Tools) -> str:
    """Return messages as text, each after its role; with `opens`, the assistant's turn begins at
    the end. Tools add no text.
    """
    text = "".join(f"<|{each['role']}|> {each['content']}" for each in messages)
    return text + ("<|assistant|>" if opens else "")
