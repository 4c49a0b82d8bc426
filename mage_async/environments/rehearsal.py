"""Rehearsal: play a user's environment briefly before any process starts, so that a mistake in the
class is one message then and not many dropped groups minutes later.

A class of the whole protocol plays one episode for each split and seat, and begins it once more for
one invalid action. A class with `reset` and `step` plays a task, restarts it and compares. That
finds mistakes that occur in every trial; others need a test, such as the one that the shipped
environments share (`tests/environments/test_every_environment.py`).
"""

import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.environments.environment import Environment, Outcome, Split
from mage_async.environments.user_calls import (
    Call,
    SlowPlay,
    WholePlay,
    calls_of,
    own_code,
    whole_play,
)
from mage_async.environments.user_class import ResetStep, ResetStepPlay
from mage_async.errors import CallFault, ConfigError
from mage_async.trajectory import Task

_ROUNDING = 1e-9
"""Tolerance of bounds on returns."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Result of a rehearsal."""

    num_steps: int
    """Over both splits, without the steps of restarts."""
    longest: str
    """The longest observation."""


Rehearsal = Generator[Call, Any, Rehearsed]
"""Yields calls and receives their results; a call that failed is thrown into it."""


def is_rehearsed(name: str, environment: Environment) -> bool:
    """Return whether an environment is rehearsed: a user's own, or a slow one."""
    return ":" in name or environment.called != "at_once"


def check_declared(name: str, environment: Environment, num_episodes: int) -> None:
    """Check an environment's declarations without playing it.

    Args:
        num_episodes: episodes of an evaluation, for each of which references are wanted.

    Raises:
        ConfigError: it raised, or a declaration is wrong.
    """
    rehearsal = _Rehearsal(name, environment)
    with own_code(name):
        rehearsal.check_facts()
        for split in ("train", "heldout"):
            rehearsal.check_members(split, num_episodes)


def whole_rehearsal(name: str, environment: Environment) -> Rehearsal:
    """Play a declared and checked environment called `name` against its facts.

    Raises:
        ConfigError: it does not behave as declared.
        CallFault: a call failed.
    """
    rehearsal = _Rehearsal(name, environment)
    with own_code(name):
        for split in ("train", "heldout"):
            for seat in environment.seats():
                member = environment.members(split)[0]
                yield from rehearsal.play(Task(environment.facts.name, member, 0, seat))
    return Rehearsed(rehearsal.num_steps, max(rehearsal.observations, key=len))


class _Rehearsal:
    """Checks of an environment; each method relies on the earlier ones."""

    def __init__(self, name: str, environment: Environment) -> None:
        self._name, self._environment = name, environment
        self._facts = environment.facts
        self.observations: list[str] = []
        """All observations."""
        self.num_steps = 0

    def check_facts(self) -> None:
        """Check the facts, the rules and the seats."""
        facts, seats = self._facts, self._environment.seats()
        for key in ("num_seats", "max_turns", "units"):
            value = getattr(facts, key)
            is_count = isinstance(value, int) and value >= 1
            self._want(is_count, f"facts.{key}", "a whole number from 1", value)
        bounds = facts.min_return, facts.max_return
        wanted = "two numbers in order, or both None"
        self._want(_are_bounds(*bounds), "facts.min_return and max_return", wanted, bounds)
        are_words = _is_names(facts.words) or (facts.has_open_text and facts.words == ())
        self._want(are_words, "facts.words", "a tuple of words", facts.words)
        self._check_text("rules()", self._environment.rules())
        exist = isinstance(seats, Sequence) and set(seats) <= set(range(facts.num_seats))
        wanted = f"a tuple of seats, each below facts.num_seats = {facts.num_seats}"
        self._want(exist and bool(seats), "seats()", wanted, seats)

    def check_members(self, split: Split, num_episodes: int) -> None:
        """Check the task variants and the declarations about them."""
        environment = self._environment
        members = environment.members(split)
        self._want(_is_names(members), f"members({split!r})", "a tuple of names", members)
        first = members[0]
        self._check_text(f"family({first!r})", environment.family(first))
        others = environment.swaps(first, split)
        are_others = _is_names(others) and set(others) <= set(members) - {first}
        wanted = "a tuple of other members of the split"
        self._want(are_others, f"swaps({first!r}, {split!r})", wanted, others)
        known = environment.references(split, num_episodes)
        wanted = f"a dictionary of tuples of {num_episodes} values, one an episode"
        call = f"references({split!r}, {num_episodes})"
        self._want(_are_references(known, num_episodes), call, wanted, known)

    def play(self, task: Task) -> Generator[Call, Any, None]:
        """Play an episode by the script or by random actions; then begin again and try an invalid
        action.
        """
        play = yield from self._begin(task)
        yield from self._play_by_script(play)
        yield from _closed(play)
        again = yield from self._begin(task)
        wanted = f"{play.observation!r} again for the same task and episode"
        is_same = again.observation == play.observation
        self._want(is_same, "play.observation", wanted, again.observation)
        yield from self._act(again, "", is_valid=False)
        yield from _closed(again)

    def _play_by_script(self, play: WholePlay) -> Generator[Call, Any, None]:
        facts, earned = self._facts, list[float]()
        source = random.Random(0)
        script = self._environment.script(source)
        is_script = script is None or hasattr(script, "choose")
        self._want(is_script, "script(source)", "a `Script`, or None", script)
        while legal := play.own.legal_actions():
            wanted = f"over after facts.max_turns = {facts.max_turns} turns"
            self._want(len(earned) < facts.max_turns, "an episode", wanted, "more")
            action = source.choice(legal) if script is None else script.choose(play.own)
            self._want(action in legal, "script(source).choose(play)", f"one of {legal}", action)
            self._check_words("an action", action)
            self._check_text("play.anchor", play.anchor)
            outcome = yield from self._act(play, action, is_valid=True)
            earned.append(outcome.reward)
        self._want(bool(earned), "legal_actions()", "not empty as an episode begins", legal)
        self.num_steps += len(earned)
        least, most = facts.min_return, facts.max_return
        if least is None or most is None:
            return
        within = least - _ROUNDING <= sum(earned) <= most + _ROUNDING
        wanted = f"from facts.min_return = {least:g} to max_return = {most:g}"
        self._want(within, "what an episode earns", wanted, sum(earned))

    def _begin(self, task: Task) -> Generator[Call, Any, WholePlay]:
        play = whole_play(self._environment, task, 0)
        yield from calls_of(play)
        self._check_words("play.observation", play.observation)
        self.observations.append(play.observation)
        return play

    def _act(
        self, play: WholePlay, action: str, *, is_valid: bool
    ) -> Generator[Call, Any, Outcome]:
        play.act(action)
        outcome, call = (yield from calls_of(play)), f"play.act({action!r})"
        assert outcome is not None, "the call answers an action"
        self._want(_is_number(outcome.reward), f"{call}.reward", "a number", outcome.reward)
        wanted = f"{is_valid}, as the action is {'' if is_valid else 'not '}legal"
        self._want(outcome.is_valid == is_valid, f"{call}.is_valid", wanted, outcome.is_valid)
        is_done = not play.own.legal_actions()
        wanted = f"{is_done}, as legal_actions() is {'' if is_done else 'not '}empty"
        self._want(outcome.is_done == is_done, f"{call}.is_done", wanted, outcome.is_done)
        self._check_words(f"{call}.observation", outcome.observation)
        self.observations.append(outcome.observation)
        return outcome

    def _check_words(self, what: str, text: Any) -> None:
        """Check that a text consists of known words, unless text is open."""
        self._check_text(what, text)
        strange = [word for word in text.split() if word not in self._facts.words]
        wanted = "made of facts.words, unless facts.has_open_text"
        self._want(self._facts.has_open_text or not strange, what, wanted, " ".join(strange))

    def _check_text(self, what: str, text: object) -> None:
        self._want(isinstance(text, str), what, "text", text)

    def _want(self, holds: bool, what: str, wanted: str, got: object) -> None:
        if not holds:
            raise ConfigError(f"environment {self._name!r}: {what} must be {wanted}, got {got!r}")


def _closed(play: SlowPlay) -> Generator[Call, Any, None]:
    if (call := play.closing()) is not None:
        call.take((yield call))


def _are_bounds(least: object, most: object) -> bool:
    if not isinstance(least, int | float) or not isinstance(most, int | float):
        return least is None and most is None
    return math.isfinite(least) and math.isfinite(most) and least <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_names(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and bool(value) and all(isinstance(each, str) for each in value)


def _are_references(value: object, num_episodes: int) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(each, Sequence) and len(each) == num_episodes for each in value.values()
    )


# The rehearsal of a class with `reset` and `step`.


NUM_ACTS = 8
"""Largest number of steps in each rehearsed episode."""
_ANY_TEXT = ("1", "a", "hello world", "1 2 3")
"""Actions for a class that lists none: a policy may write anything, and needs an answer."""


@dataclass(frozen=True, slots=True)
class _Played:
    """One episode, or the beginning of one."""

    observation: str
    actions: Sequence[str]
    outcomes: Sequence[Outcome]


def rehearsal(name: str, environment: ResetStep, *, compares: bool) -> Rehearsal:
    """Play the first task of each split, and play it again with the same actions.

    Learning to learn needs the same instance in every episode and for every trial of a group. A
    class that cannot repeat an episode is refused, unless the configuration says that it starts
    afresh on purpose.

    Args:
        name: of the environment, as in the configuration.
        compares: whether the second time must equal the first.

    Raises:
        ConfigError: the class raised outside a call, or does not repeat itself.
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


def _played(
    environment: ResetStep, task: Task, actions: Sequence[str] | None
) -> Generator[Call, Any, _Played]:
    """Play with the given actions, or with actions chosen here; the play is closed in any case.

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


def _chosen(environment: ResetStep, play: ResetStepPlay, source: random.Random) -> str:
    return source.choice(play.legal_actions() or environment.facts.words or _ANY_TEXT)


def _compare(name: str, member: str, first: _Played, again: _Played) -> None:
    """Check that a restart repeated an episode.

    Raises:
        ConfigError: with the first difference.
    """
    pairs: list[tuple[str, Any, Any]] = [("reset", first.observation, again.observation)]
    for action, one, other in zip(first.actions, first.outcomes, again.outcomes, strict=False):
        pairs.append((f"step({action!r})", one, other))
    for call, one, other in pairs:
        if one != other:
            raise ConfigError(
                f"environment {name!r}: task {member} was restarted with the same seed, and {call} "
                f"gave {_short(other)} after {_short(one)}: draw everything from `seed` and "
                '`task`, or set trial.repeats = "fresh" if it is meant to differ'
            )


def _short(text: object) -> str:
    if isinstance(text, Outcome):
        text = (text.observation, text.reward)
    return f"{text!r:.80}"
