"""A rehearsal: a class of the user's own is played a little before any process starts.

A mistake in the class is said in one sentence then, and not by groups that are dropped minutes
later.

The rehearsal plays one scripted episode for each split and seat, and one invalid action. That finds
mistakes of every trial; mistakes of some trials need a test, such as the one that our environments
share (`tests/environments/test_every_environment.py`).
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.environments.environment import Environment, Outcome, Play, Split
from mage_async.environments.user_code import own_code
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

_PLAY = ("chance", "observation", "anchor", "legal_actions", "act")
_ROUNDING = 1e-9


def rehearse(name: str, environment: Environment, num_episodes: int) -> None:
    """Play an environment called `name` against its facts.

    Args:
        num_episodes: of an evaluation; references are wanted for each.

    Raises:
        ConfigError: it raised, or is not what it declares.
    """
    check_declared(name, environment, num_episodes)
    rehearsal = _Rehearsal(name, environment)
    with own_code(name):
        for split in ("train", "heldout"):
            for seat in environment.seats():
                rehearsal.play(Task(environment.facts.name, environment.members(split)[0], 0, seat))


def check_declared(name: str, environment: Environment, num_episodes: int) -> None:
    """Check what an environment says of itself, without playing it; otherwise as `rehearse`."""
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

    def play(self, task: Task) -> None:
        """An episode by script, then what another answers to no action at all."""
        play, again = self._begin(task), self._begin(task)
        wanted = f"{play.observation!r} again for the same task and episode"
        is_same = again.observation == play.observation
        self._want(is_same, "play.observation", wanted, again.observation)
        self._play_by_script(play)
        self._act(again, "", is_valid=False)

    def _play_by_script(self, play: Play) -> None:
        facts, earned = self._facts, list[float]()
        script = self._environment.script(random.Random(0))
        self._want(hasattr(script, "choose"), "script(source)", "a `Script`", script)
        while legal := play.legal_actions():
            wanted = f"over after facts.max_turns = {facts.max_turns} turns"
            self._want(len(earned) < facts.max_turns, "an episode", wanted, "more")
            action = script.choose(play)
            self._want(action in legal, "script(source).choose(play)", f"one of {legal}", action)
            self._spoken("an action", action)
            self._text("play.anchor", play.anchor)
            earned.append(self._act(play, action, is_valid=True).reward)
        self._want(bool(earned), "legal_actions()", "not empty as an episode begins", legal)
        least, most = facts.min_return, facts.max_return
        if least is None or most is None:
            return
        within = least - _ROUNDING <= sum(earned) <= most + _ROUNDING
        wanted = f"from facts.min_return = {least:g} to max_return = {most:g}"
        self._want(within, "what an episode earns", wanted, sum(earned))

    def _begin(self, task: Task) -> Play:
        play = self._environment.begin(task, 0)
        is_play = all(hasattr(play, each) for each in _PLAY)
        self._want(is_play, "begin(task, 0)", f"a `Play`, with {', '.join(_PLAY)}", play)
        self._spoken("play.observation", play.observation)
        return play

    def _act(self, play: Play, action: str, *, is_valid: bool) -> Outcome:
        outcome, call = play.act(action), f"play.act({action!r})"
        self._want(isinstance(outcome, Outcome), call, "an `Outcome`", outcome)
        self._want(_is_number(outcome.reward), f"{call}.reward", "a number", outcome.reward)
        wanted = f"{is_valid}, as the action is {'' if is_valid else 'not '}legal"
        self._want(outcome.is_valid == is_valid, f"{call}.is_valid", wanted, outcome.is_valid)
        is_done = not play.legal_actions()
        wanted = f"{is_done}, as legal_actions() is {'' if is_done else 'not '}empty"
        self._want(outcome.is_done == is_done, f"{call}.is_done", wanted, outcome.is_done)
        self._spoken(f"{call}.observation", outcome.observation)
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
