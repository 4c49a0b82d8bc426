"""Experts: what a better player would have done at every action of a trial (StepAgent).

An expert is asked before the environment has seen the policy's action, so both act in the same
state. The expert's action travels with the trial (`ExpertStep`): a learner, or a replay of the
journal, needs neither the environment nor the file that the action came from.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import msgspec

from mage_async.environments.environment import Environment, Play, Script
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import ExpertStep, Kind, Task
from mage_async.trials.action_parser import NAMES, ActionParser
from mage_async.trials.chat_format import ChatFormat

MAX_ACTION_CHARS = 1024
"""Characters of an expert's action."""


class Expert(Protocol):
    """An expert during one trial."""

    def action(self, play: Play, episode: int, done: Sequence[str]) -> str | None:
        """The expert's action; None where the expert knows none.

        Args:
            play: the episode as it stands.
            done: the policy's actions of the episode so far.
        """
        ...


Experts = Callable[[Environment, Task, int], Expert | None]
"""Makes the expert of a trial, from its environment (of a mix, the part), task and number."""


@dataclass(frozen=True, slots=True)
class ScriptedExpert:
    """A script that is asked, but whose actions are not taken."""

    script: Script

    def action(self, play: Play, episode: int, done: Sequence[str]) -> str:
        """What the script chooses.

        Raises:
            EnvironmentFault: that is no text, or too long a one.
        """
        chosen: object = self.script.choose(play)
        if not isinstance(chosen, str) or len(chosen) > MAX_ACTION_CHARS:
            raise EnvironmentFault(
                f"an expert's action is text of at most {MAX_ACTION_CHARS:,} characters, "
                f"got {chosen!r:.60}"
            )
        return chosen


def scripted(environment: Environment, task: Task, index: int) -> Expert | None:
    """The environment's best scripted player; also of a class that declares a script alone."""
    choice = getattr(environment, "expert", environment.script)
    script = choice(random.Random(f"{task.seed}/{index}/expert"))
    return None if script is None else ScriptedExpert(script)


class _Turn(msgspec.Struct):
    episode: int
    kind: str
    action: str


class _Row(msgspec.Struct):
    """What is read of a line of `mage journal --export FILE.jsonl`."""

    environment: str
    member: str
    seat: int
    seed: int
    reward_by_episode: list[float]
    turns: list[_Turn]


Place = tuple[Task, int, tuple[str, ...]]
"""A task, an episode, and the actions of the episode so far: with equal places a play is equal."""


@dataclass(frozen=True, slots=True)
class RecordedExperts:
    """Recorded trials, looked up by task and prefix; of several the one that earned most in its
    episode.
    """

    actions: Mapping[Place, str]

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read trials as `mage journal --export FILE.jsonl` writes them.

        Raises:
            ConfigError: the file cannot be read, or is none of recorded trials.
        """
        try:
            lines = file.read_bytes().splitlines()
            rows = [msgspec.json.decode(line, type=_Row) for line in lines if line.strip()]
        except (OSError, UnicodeError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f'expert.source = "{file}" is neither "script" nor a file of recorded trials, as '
                f"mage journal --export FILE.jsonl writes it: {error}"
            ) from None
        return cls(_best(rows))

    def __call__(self, environment: Environment, task: Task, index: int) -> Expert:
        """The trials of a task."""
        return _RecordedExpert(self.actions, task)


@dataclass(frozen=True, slots=True)
class _RecordedExpert:
    actions: Mapping[Place, str]
    task: Task

    def action(self, play: Play, episode: int, done: Sequence[str]) -> str | None:
        """What was done there."""
        return self.actions.get((self.task, episode, tuple(done)))


def _best(rows: Sequence[_Row]) -> dict[Place, str]:
    """Actions by place; better episodes are written over worse ones."""
    played: list[tuple[float, Task, int, list[str]]] = []
    for row in rows:
        task = Task(row.environment, row.member, row.seed, row.seat)
        for episode, reward in enumerate(row.reward_by_episode):
            acts = [turn for turn in row.turns if turn.kind == Kind.ACT.name.lower()]
            done = [turn.action for turn in acts if turn.episode == episode]
            played.append((reward, task, episode, done))
    played.sort(key=lambda each: each[0])
    return {
        (task, episode, tuple(done[:number])): action
        for _, task, episode, done in played
        for number, action in enumerate(done)
        if len(action) <= MAX_ACTION_CHARS
    }


def expert_step(
    step: ExpertStep,
    start: int,
    said: Sequence[int],
    action: str,
    chat: ChatFormat,
    parser: ActionParser,
) -> ExpertStep:
    """A step with the place where expert and policy part.

    Args:
        start: where in its segment the completion begins.
        said: the completion's tokens.
        action: what was parsed from it.
    """
    parting = _parting(said, action, step.action, chat, parser)
    if parting is None:
        return step
    place, token = parting
    return replace(step, place=start + place, token=token)


def _parting(
    said: Sequence[int], action: str, wanted: str, chat: ChatFormat, parser: ActionParser
) -> tuple[int, int] | None:
    """The first token that differs where the wanted action stands instead of the one that does."""
    first = _first_of_action(said, chat, parser)
    text = chat.decode(said[first:])
    begun = text.lstrip()
    if wanted == action or not action or not begun.startswith(action):
        return None
    lead = text[: len(text) - len(begun)]
    closing = "" if parser.has_tools else f"</{NAMES[Kind.ACT]}>"
    instead = chat.encode(f"{lead}{wanted}{closing}")
    pairs = enumerate(zip(said[first:], instead, strict=False), first)
    return next(((place, other) for place, (own, other) in pairs if own != other), None)


def _first_of_action(said: Sequence[int], chat: ChatFormat, parser: ActionParser) -> int:
    """The number of the completion's token with which the action begins."""
    if parser.has_tools or parser.prefill(Kind.ACT):
        return 0
    tag, text = f"<{NAMES[Kind.ACT]}>", chat.decode(said)
    before = text.find(tag, text.rfind("</think>") + 1) + len(tag)
    lengths = range(len(said) + 1)
    return bisect_left(lengths, before, key=lambda length: len(chat.decode(said[:length])))
