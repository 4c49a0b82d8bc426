"""Experts that advise at each action: the environment's best script, or recorded trials."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from mage_async.environments.environment import Environment, Play, Script
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.methods.method import Adviser
from mage_async.trajectory import Kind, Task

MAX_ACTION_CHARS = 1024
"""Characters of an expert's action."""


@dataclass(frozen=True, slots=True)
class ScriptedExpert:
    """A script as an adviser."""

    script: Script

    def action(self, play: Play, episode: int, done: Sequence[str]) -> str:
        """Return the choice of the script.

        Raises:
            EnvironmentFault: the choice is no text, or a longer one than `MAX_ACTION_CHARS`.
        """
        chosen: object = self.script.choose(play)
        if not isinstance(chosen, str) or len(chosen) > MAX_ACTION_CHARS:
            raise EnvironmentFault(
                f"an expert's action is text of at most {MAX_ACTION_CHARS:,} characters, "
                f"got {chosen!r:.60}"
            )
        return chosen


def scripted(environment: Environment, task: Task, index: int) -> Adviser | None:
    """Return the environment's best scripted player; None: it has none."""
    # A user's class may declare `script` alone.
    choice = getattr(environment, "best_script", environment.script)
    script = choice(random.Random(f"{task.seed}/{index}/expert"))
    return None if script is None else ScriptedExpert(script)


class _Turn(msgspec.Struct):
    episode: int
    kind: str
    action: str


class _Row(msgspec.Struct):
    """The fields that are read of a line of `mage journal --export FILE.jsonl`."""

    environment: str
    member: str
    seat: int
    seed: int
    reward_by_episode: list[float]
    turns: list[_Turn]


Place = tuple[Task, int, tuple[str, ...]]
"""A task, an episode, and the actions of the episode so far, which determine the state."""


@dataclass(frozen=True, slots=True)
class RecordedExperts:
    """Recorded trials as advisers, by task and earlier actions. Of several episodes that were
    recorded the one of the highest return counts.
    """

    actions: Mapping[Place, str]

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read trials as `mage journal --export FILE.jsonl` writes them.

        Raises:
            ConfigError: the file cannot be read, or does not hold recorded trials.
        """
        try:
            lines = file.read_bytes().splitlines()
            rows = [msgspec.json.decode(line, type=_Row) for line in lines if line.strip()]
        except (OSError, UnicodeError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f'methods.stepagent.source = "{file}" is neither "script" nor a file of recorded '
                f"trials, as mage journal --export FILE.jsonl writes it: {error}"
            ) from None
        return cls(_best(rows))

    def __call__(self, environment: Environment, task: Task, index: int) -> Adviser:
        """Return an adviser for a trial."""
        return _RecordedExpert(self.actions, task)


@dataclass(frozen=True, slots=True)
class _RecordedExpert:
    actions: Mapping[Place, str]
    task: Task

    def action(self, play: Play, episode: int, done: Sequence[str]) -> str | None:
        """Return the recorded action."""
        return self.actions.get((self.task, episode, tuple(done)))


def _best(rows: Sequence[_Row]) -> dict[Place, str]:
    """Return actions by place; better episodes overwrite worse ones."""
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
