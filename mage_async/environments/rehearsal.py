"""A rehearsal: a class of the whole protocol is played a little before any process starts.

A mistake in the class is said in one sentence then, and not by groups that are dropped minutes
later. Its calls are made as in a run, each within a deadline.

The rehearsal plays one episode for each split and seat, and begins it once more for one
invalid action. That finds mistakes of every trial; mistakes of some trials need a test, such as the
one that our environments share (`tests/environments/test_every_environment.py`).
"""

import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.environments.calls import Call, calls_of
from mage_async.environments.environment import Environment, Outcome, Split
from mage_async.environments.user_code import own_code
from mage_async.environments.whole_play import WholePlay, whole_play
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What was seen."""

    num_steps: int
    """Over both splits, without those of restarts."""
    longest: str
    """The longest observation."""


Rehearsal = Generator[Call, Any, Rehearsed]
"""Yields calls, takes what they returned; a call that failed is thrown into it."""


def is_rehearsed(name: str, environment: Environment) -> bool:
    """Whether an environment is played before a run: a user's own, or one that may take long."""
    return ":" in name or environment.called != "at_once"


def whole_rehearsal(name: str, environment: Environment) -> Rehearsal:
    """Play an environment called `name`, whose declarations were checked, against its facts.

    Raises:
        ConfigError: it is not what it declares.
        CallFault: a call failed.
    """
    rehearsal = _Rehearsal(name, environment)
    with own_code(name):
        for split in ("train", "heldout"):
            for seat in environment.seats():
                member = environment.members(split)[0]
                yield from rehearsal.play(Task(environment.facts.name, member, 0, seat))
    return Rehearsed(rehearsal.num_steps, max(rehearsal.said, key=len))


def check_declared(name: str, environment: Environment, num_episodes: int) -> None:
    """Check what an environment says of itself, without playing it.

    Args:
        num_episodes: of an evaluation; references are wanted for each.

    Raises:
        ConfigError: it raised, or is not what it declares.
    """
    rehearsal = _Rehearsal(name, environment)
    with own_code(name):
        rehearsal.check_facts()
        for split in ("train", "heldout"):
            rehearsal.check_members(split, num_episodes)


class _Rehearsal:
    """What is asked of an environment; each method goes on from what those above it found."""

    def __init__(self, name: str, environment: Environment) -> None:
        self._name, self._environment = name, environment
        self._facts = environment.facts
        self.said: list[str] = []
        """Observations."""
        self.num_steps = 0

    def check_facts(self) -> None:
        """What is declared once for all."""
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
        self._text("rules()", self._environment.rules())
        exist = isinstance(seats, Sequence) and set(seats) <= set(range(facts.num_seats))
        wanted = f"a tuple of seats, each below facts.num_seats = {facts.num_seats}"
        self._want(exist and bool(seats), "seats()", wanted, seats)

    def check_members(self, split: Split, num_episodes: int) -> None:
        """Check the members and what is declared about them."""
        environment = self._environment
        members = environment.members(split)
        self._want(_is_names(members), f"members({split!r})", "a tuple of names", members)
        first = members[0]
        self._text(f"family({first!r})", environment.family(first))
        others = environment.swaps(first, split)
        are_others = _is_names(others) and set(others) <= set(members) - {first}
        wanted = "a tuple of other members of the split"
        self._want(are_others, f"swaps({first!r}, {split!r})", wanted, others)
        known = environment.references(split, num_episodes)
        wanted = f"a dictionary of tuples of {num_episodes} values, one an episode"
        call = f"references({split!r}, {num_episodes})"
        self._want(_are_references(known, num_episodes), call, wanted, known)

    def play(self, task: Task) -> Generator[Call, Any, None]:
        """An episode by script, or by any actions, then what another answers to no action."""
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
            self._spoken("an action", action)
            self._text("play.anchor", play.anchor)
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
        self._spoken("play.observation", play.observation)
        self.said.append(play.observation)
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
        self._spoken(f"{call}.observation", outcome.observation)
        self.said.append(outcome.observation)
        return outcome

    def _spoken(self, what: str, said: Any) -> None:
        self._text(what, said)
        strange = [word for word in said.split() if word not in self._facts.words]
        wanted = "made of facts.words, unless facts.has_open_text"
        self._want(self._facts.has_open_text or not strange, what, wanted, " ".join(strange))

    def _text(self, what: str, said: object) -> None:
        self._want(isinstance(said, str), what, "text", said)

    def _want(self, holds: bool, what: str, wanted: str, got: object) -> None:
        if not holds:
            raise ConfigError(f"environment {self._name!r}: {what} must be {wanted}, got {got!r}")


def _closed(play: WholePlay) -> Generator[Call, Any, None]:
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
