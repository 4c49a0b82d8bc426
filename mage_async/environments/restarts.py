"""The rehearsal of a class with `reset` and `step`: a task is played, restarted and compared.

Learning to learn needs the same instance again, in every episode and for every trial of a group.
What cannot be repeated is refused before anything starts, unless the configuration says that an
environment begins afresh on purpose.
"""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.environments.calls import Call, calls_of
from mage_async.environments.environment import Outcome
from mage_async.environments.rehearsal import Rehearsal, Rehearsed
from mage_async.environments.reset_step import ResetStep
from mage_async.environments.reset_step_play import ResetStepPlay
from mage_async.environments.user_code import own_code
from mage_async.errors import CallFault, ConfigError
from mage_async.trajectory import Task

NUM_ACTS = 8
"""Most steps of each rehearsed episode."""
_ANY_TEXT = ("1", "a", "hello world", "1 2 3")
"""Actions for a class that lists none: a policy may write anything, and needs an answer."""


def rehearsal(name: str, environment: ResetStep, *, compares: bool) -> Rehearsal:
    """Play the first task of each split, and play it again by the same actions.

    Args:
        name: of the environment, as the configuration says it.
        compares: whether the second time has to be like the first.

    Raises:
        ConfigError: the class raised in what is no call, or does not repeat itself.
        CallFault: a call failed.
    """
    seen: list[str] = []
    num_steps = 0
    with own_code(name):
        for split in ("train", "heldout"):
            task = Task(environment.facts.name, environment.members(split)[0], 0)
            first = yield from _played(environment, task, None)
            num_steps += len(first.actions)
            seen += [first.observation, *(each.observation for each in first.outcomes)]
            if compares:
                again = yield from _played(environment, task, first.actions)
                _compare(name, task.member, first, again)
    return Rehearsed(num_steps, max(seen, key=len))


@dataclass(frozen=True, slots=True)
class _Played:
    """One episode, or the beginning of one."""

    observation: str
    actions: Sequence[str]
    outcomes: Sequence[Outcome]


def _played(
    environment: ResetStep, task: Task, actions: Sequence[str] | None
) -> Generator[Call, Any, _Played]:
    """Play by actions, or by actions of the rehearsal's own choice; the play is closed in any case.

    Raises:
        CallFault: a call failed.
    """
    play = environment.begin(task, 0)
    try:
        played = yield from _acted(environment, play, actions)
    except CallFault:
        yield from _closed(play)
        raise
    yield from _closed(play)
    return played


def _acted(
    environment: ResetStep, play: ResetStepPlay, actions: Sequence[str] | None
) -> Generator[Call, Any, _Played]:
    source = random.Random(0)
    script = environment.script(source) if actions is None else None
    yield from calls_of(play)
    done, outcomes = list[str](), list[Outcome]()
    while not play.is_done and len(done) < (NUM_ACTS if actions is None else len(actions)):
        if actions is not None:
            action = actions[len(done)]
        elif script is not None:
            action = script.choose(play)
        else:
            action = _chosen(environment, play, source)
        answered = play.act(action)
        outcomes.append((yield from calls_of(play)) or answered)
        done.append(action)
    return _Played(play.observation, done, outcomes)


def _closed(play: ResetStepPlay) -> Generator[Call, Any, None]:
    if (call := play.closing()) is not None:
        call.take((yield call))


def _chosen(environment: ResetStep, play: ResetStepPlay, source: random.Random) -> str:
    return source.choice(play.legal_actions() or environment.facts.words or _ANY_TEXT)


def _compare(name: str, member: str, first: _Played, again: _Played) -> None:
    """Refuse an episode that a restart did not repeat.

    Raises:
        ConfigError: with the first difference.
    """
    said: list[tuple[str, Any, Any]] = [("reset", first.observation, again.observation)]
    for action, one, other in zip(first.actions, first.outcomes, again.outcomes, strict=False):
        said.append((f"step({action!r})", one, other))
    for call, one, other in said:
        if one != other:
            raise ConfigError(
                f"environment {name!r}: task {member} was restarted with the same seed, and {call} "
                f"gave {_short(other)} after {_short(one)}: draw everything from `seed` and "
                '`task`, or set trial.repeats = "fresh" if it is meant to differ'
            )


def _short(said: object) -> str:
    if isinstance(said, Outcome):
        said = (said.observation, said.reward)
    return f"{said!r:.80}"
