"""Rehearse a user's environment: play it briefly before any process starts.

So a mistake in the class gives one error message at once, and not many dropped groups minutes
later. For a class that implements all of `Environment`, one episode is played for each split and
seat, and begun once more to try an invalid action. For a class with `reset` and `step` alone, one
task of each split is played, and played again to check that the episode repeats. This finds
mistakes that occur in every trial. Rarer mistakes need a test, such as the one that the shipped
environments share (`tests/environments/test_every_environment.py`).

`compare_heldout` finds held-out tasks that are the same as training tasks under another name: it
compares what tasks return for the same actions and the same seed.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

from mage_async.environments.agent import AgentTasks
from mage_async.environments.environment import Environment, Outcome, Script, is_finite
from mage_async.environments.user_calls import (
    Call,
    MethodResult,
    SlowPlay,
    WholePlay,
    as_config_error,
    calls_of,
    make_pending_calls,
    new_play,
    whole_play,
)
from mage_async.environments.user_class import SPLITS, ResetStep, ResetStepPlay
from mage_async.errors import CallFault, ConfigError
from mage_async.trajectory import Task
from mage_async.user_modules import place_of

MOST_FAMILIES = 1000
"""Largest number of tasks of a split whose `family` is called before a run starts."""
MOST_SWAPS = 2**20
"""Largest number of pairs of tasks of a split for which `swaps` is checked before a run starts."""
NUM_ACTS, EPISODE_S = 8, 5.0
"""Largest number of steps in each rehearsed episode of a class with `reset` and `step`, and seconds
after which no further step is made.
"""
ANY_TEXT = ("1", "a", "hello world", "1 2 3")
"""Actions for a class that lists none, which must accept any text that a policy writes, and texts
for `is_probe`, which must accept any text too.
"""


class Longest(NamedTuple):
    """Hold the longest observations of a rehearsal, whose length in tokens callers measure."""

    opening: str
    """Longest observation with which an episode began."""
    answer: str
    """Longest observation after an action."""


Rehearsal = Generator[Call, Any, Longest]
"""Generator that yields calls, is sent their results, and returns the longest observations. If a
call fails, its exception is thrown into the generator.
"""


def is_rehearsed(name: str, environment: Environment) -> bool:
    """Return whether an environment is rehearsed: a user's own, one of a loader, or a slow one."""
    # A user's own class is named `module:Class`, and an environment of a loader like
    # `gymnasium:Taxi-v4`. No other name has a colon.
    return ":" in name or environment.called != "at_once"


# The functions below check declarations without playing.


def check_declared(name: str, environment: Environment, num_episodes: int) -> None:
    """Check an environment's declarations without playing it.

    Args:
        num_episodes: Number of episodes of an evaluation, for each of which references are needed.

    Raises:
        ConfigError: a declaration is wrong, or a method of the environment raised.
    """
    with as_config_error(name):
        require = partial(_require, name)
        _check_facts(environment, require)
        for split in SPLITS:
            with as_config_error(name, f"members({split!r})"):
                members = environment.members(split)
            are_names = _are_names(members) or (isinstance(members, tuple) and not members)
            require(are_names, f"members({split!r})", "a tuple of names", members)
            expected = (
                "at least two names: the control `swapped` hides another task than its trial's"
            )
            require(len(members) > 1, f"members({split!r})", expected, members)
            for member in members[:MOST_FAMILIES]:
                with as_config_error(name, f"family({member!r})"):
                    family = environment.family(member)
                require(isinstance(family, str), f"family({member!r})", "text", family)
            known_members, expected = set(members), "a tuple of other members of the split"
            # With n members there are n² pairs. Every `stride`-th member is checked, and not the
            # first ones, because evaluations begin at both ends of the list.
            stride = math.ceil(len(members) ** 2 / MOST_SWAPS)
            for member in members[::stride]:
                with as_config_error(name, f"swaps({member!r}, {split!r})"):
                    others = environment.swaps(member, split)
                are_others = _are_names(others) and set(others) <= known_members - {member}
                require(are_others, f"swaps({member!r}, {split!r})", expected, others)
            with as_config_error(name, f"references({split!r}, {num_episodes})"):
                known = environment.references(split, num_episodes)
            are_known = isinstance(known, Mapping) and all(
                isinstance(each, Sequence)
                and len(each) == num_episodes
                and all(map(_is_number, each))
                for each in known.values()
            )
            expected = f"a dictionary of tuples of {num_episodes} numbers, one per episode"
            require(are_known, f"references({split!r}, {num_episodes})", expected, known)
        # Reports call `is_probe` with illegal actions too: a policy may write any text, or none.
        for action in ("", *ANY_TEXT, environment.facts.example, *environment.facts.words):
            with as_config_error(name, f"is_probe({action!r})"):
                environment.is_probe(action)


def _check_facts(environment: Environment, require: Callable[..., None]) -> None:
    """Check the facts, the rules and the seats."""
    facts, rules, seats = environment.facts, environment.rules(), environment.seats()
    for key in ("num_seats", "max_turns", "units"):
        value = getattr(facts, key)
        is_count = isinstance(value, int) and value >= 1
        require(is_count, f"facts.{key}", "a whole number from 1", value)
    bounds = least, most = facts.min_return, facts.max_return
    # Equal bounds are refused, because ratings and colours divide by their difference.
    are_in_order = _is_number(least) and _is_number(most) and least < most
    expected = "two numbers, the second above the first, or both None"
    require(
        are_in_order or bounds == (None, None), "facts.min_return and max_return", expected, bounds
    )
    are_words = _are_names(facts.words) or (facts.has_open_text and facts.words == ())
    require(are_words, "facts.words", "a tuple of words", facts.words)
    require(isinstance(rules, str), "rules()", "text", rules)
    exist = isinstance(seats, Sequence) and set(seats) <= set(range(facts.num_seats))
    expected = f"a tuple of seats, each below facts.num_seats = {facts.num_seats}"
    require(exist and bool(seats), "seats()", expected, seats)


def _require(name: str, holds: bool, what: str, expected: str, got: object) -> None:
    """Raise a `ConfigError` that says what `what` must be, unless `holds` is true."""
    if not holds:
        raise ConfigError(f"environment {name!r}: {what} must be {expected}, got {got!r}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and is_finite(value)


def _are_names(value: object) -> bool:
    """Return whether a value is a sequence of texts that is not empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return bool(value) and all(isinstance(each, str) for each in value)


# The code below rehearses a class that implements all of `Environment`.


def whole_rehearsal(name: str, environment: Environment) -> Rehearsal:
    """Play the environment `name` and check that it behaves as its facts declare.

    Its declarations must have passed `check_declared`.

    Raises:
        ConfigError: the environment does not behave as declared.
        CallFault: a call failed.
    """
    rehearsal = _WholeRehearsal(name, environment)
    with as_config_error(name):
        for split in SPLITS:
            for seat in environment.seats():
                member = environment.members(split)[0]
                yield from rehearsal.play(Task(environment.facts.name, member, 0, seat))
    return Longest(max(rehearsal.openings, key=len), max(rehearsal.answers, key=len))


class _WholeRehearsal:
    """Play episodes and check them against the facts; collect all observations."""

    def __init__(self, name: str, environment: Environment) -> None:
        self._environment, self._require = environment, partial(_require, name)
        self.openings, self.answers = list[str](), list[str]()

    def play(self, task: Task) -> Generator[Call, Any, None]:
        """Play an episode by the script or by random actions; then begin again and try an invalid
        action.
        """
        play = yield from self._begin(task)
        yield from self._play_by_script(play)
        yield from _close(play)
        again = yield from self._begin(task)
        expected = f"{play.observation!r} again for the same task and episode"
        is_same = again.observation == play.observation
        self._require(is_same, "play.observation", expected, again.observation)
        yield from self._act(again, "", is_valid=False)
        yield from _close(again)

    def _play_by_script(self, play: WholePlay) -> Generator[Call, Any, None]:
        """Play an episode to its end, by the script or by random legal actions."""
        facts, rewards, source = self._environment.facts, list[float](), random.Random(0)
        script = self._environment.script(source)
        is_script = script is None or hasattr(script, "choose")
        self._require(is_script, "script(source)", "a `Script`, or None", script)
        while legal := play.own.legal_actions():
            expected = f"over after facts.max_turns = {facts.max_turns} turns"
            self._require(len(rewards) < facts.max_turns, "an episode", expected, "more")
            action = source.choice(legal) if script is None else script.choose(play.own)
            self._require(action in legal, "script(source).choose(play)", f"one of {legal}", action)
            self._check_words("an action", action)
            self._require(isinstance(play.anchor, str), "play.anchor", "text", play.anchor)
            rewards.append((yield from self._act(play, action, is_valid=True)))
        self._require(bool(rewards), "legal_actions()", "not empty as an episode begins", legal)
        least, most = facts.min_return, facts.max_return
        if least is not None and most is not None:
            expected = f"from facts.min_return = {least:g} to max_return = {most:g}"
            self._require(
                facts.allows(sum(rewards)), "what an episode earns", expected, sum(rewards)
            )

    def _begin(self, task: Task) -> Generator[Call, Any, WholePlay]:
        """Begin an episode, check its first observation, and return it."""
        play = whole_play(self._environment, task, 0)
        yield from calls_of(play)
        self._check_words("play.observation", play.observation)
        self.openings.append(play.observation)
        return play

    def _act(self, play: WholePlay, action: str, *, is_valid: bool) -> Generator[Call, Any, float]:
        """Act, check the outcome, and return the reward."""
        play.act(action)
        outcome, call = (yield from calls_of(play)), f"play.act({action!r})"
        assert outcome is not None, "the call answers an action"
        self._require(_is_number(outcome.reward), f"{call}.reward", "a number", outcome.reward)
        expected = f"{is_valid}, as the action is {'' if is_valid else 'not '}legal"
        self._require(outcome.is_valid == is_valid, f"{call}.is_valid", expected, outcome.is_valid)
        is_done = not play.own.legal_actions()
        # Illegal actions may end an episode too. `legal_actions()` then must be empty as well.
        expected = (
            "True, as legal_actions() is empty"
            if is_done
            else "False, as legal_actions() is not empty (return () once an episode is over)"
        )
        self._require(outcome.is_done == is_done, f"{call}.is_done", expected, outcome.is_done)
        self._check_words(f"{call}.observation", outcome.observation)
        self.answers.append(outcome.observation)
        return outcome.reward

    def _check_words(self, what: str, text: Any) -> None:
        """Check that a text consists of known words, unless text is open."""
        self._require(isinstance(text, str), what, "text", text)
        undeclared = _undeclared_words(self._environment, text)
        expected = "made of facts.words, unless facts.has_open_text"
        self._require(not undeclared, what, expected, " ".join(undeclared))


def _undeclared_words(environment: Environment, text: str) -> list[str]:
    """Return the words of a text that an environment with a closed vocabulary has not declared."""
    facts = environment.facts
    return [] if facts.has_open_text else [each for each in text.split() if each not in facts.words]


def _close(play: SlowPlay) -> Generator[Call, Any, None]:
    """Make the call that closes the object of an ended episode, if the class has one."""
    if (call := play.closing()) is not None:
        call.take((yield call))


# The code below rehearses a class with `reset` and `step`.

_Steps = list[tuple[str, Any]]
"""Calls of an episode in words, each with the observation or the outcome that it gave."""


def rehearsal(
    name: str,
    environment: ResetStep,
    *,
    compares: bool,
    takes_turns: bool,
    now: Callable[[], float],
) -> Rehearsal:
    """Play the first task of each split, and play it again with the same actions, concurrently with
    another task.

    Every episode of a trial, and every trial of a group, must meet the same instance of a task,
    whatever other trials do meanwhile. A class that cannot repeat an episode is therefore refused,
    unless the configuration says that its episodes differ on purpose.

    Args:
        name: Name of the environment in the configuration.
        compares: Whether the first task is played again, and must give the same episode.
        takes_turns: Whether no two objects may be open at once, so that tasks are not played
            concurrently.
        now: Clock, in seconds.

    Raises:
        ConfigError: the class raised outside a call, did not repeat an episode, or returned a word
            that is not among its `words`.
        CallFault: a call failed.
    """
    openings, answers = list[str](), [""]  # "" because every episode may end without an answer
    with as_config_error(name):
        for split in SPLITS:
            task = Task(environment.facts.name, environment.members(split)[0], 0)
            play = environment.begin(task, 0)
            first = yield from _played(play, _in_time(_chooser(name, environment), now))
            openings.append(play.observation)
            # The first step is left out: it is the call of `reset`.
            stepped = [(call, outcome.observation) for call, outcome in first[1:]]
            answers += [observation for _, observation in stepped]
            check_vocabulary(name, environment, [("reset", play.observation), *stepped])
            if not compares:
                continue
            concurrent: _Steps | None = None
            if not takes_turns:
                other = Task(environment.facts.name, environment.members(split)[-1], 0)
                any_action = _in_time(_chooser(name, environment), now)
                concurrent, _ = yield from _interleaved(
                    _played(environment.begin(task, 0), _replay(play.history)),
                    _played(environment.begin(other, 0), any_action),
                )
            if concurrent != first:
                # If the task repeats when it is played alone, the other task has disturbed it.
                alone = yield from _played(environment.begin(task, 0), _replay(play.history))
                _compare(name, task.member, first, alone, ALONE)
                if concurrent is not None:
                    _compare(name, task.member, first, concurrent, CONCURRENTLY)
    return Longest(max(openings, key=len), max(answers, key=len))


def check_vocabulary(name: str, environment: Environment, steps: Sequence[tuple[str, str]]) -> None:
    """Check that the texts of a class with `words` have no other words.

    Args:
        steps: Calls in words, each with a text that it gave.

    Raises:
        ConfigError: a text has another word; the error names the call, and all such words.
    """
    missing = dict.fromkeys(chain(*(_undeclared_words(environment, text) for _, text in steps)))
    if not missing:
        return
    first, *others = missing
    call, observation = next(step for step in steps if first in step[1].split())
    nor = f" (nor {'are' if len(others) > 1 else 'is'} {', '.join(map(repr, others))})"
    raise ConfigError(
        f"environment {name!r}: {call} says {first!r} in {observation!r:.80}, which is not among "
        f"its `words`{nor if others else ''}: the tiny model reads only these. Add "
        f"{'them' if others else 'it'}, with a space around each word and sign, or leave `words` "
        "out for a pretrained model"
    )


class Listener:
    """Note undeclared words and ended episodes of a user's class in the trials of a check; see
    `ResetStep.listener`.

    Args:
        writes_words: Whether legal actions must consist of the class's words too, because these are
            the only tokens of the policy.
        after_call: Called after each call; it may raise an exception, which ends the trial.
    """

    def __init__(
        self, environment: ResetStep, *, writes_words: bool, after_call: Callable[[], None]
    ) -> None:
        self._environment, self._writes_words = environment, writes_words
        self._after_call = after_call
        self._known = set(environment.facts.words)
        self.num_ended = 0
        """Number of episodes that the class itself has ended."""
        self.undeclared: list[tuple[str, str]] = []
        """Calls in words, each with a text that it gave and that has a word which the class does
        not declare. A text whose undeclared words were all noted before is left out."""

    def __call__(self, call: Call, result: MethodResult) -> None:
        """Note the result of a call."""
        self.num_ended += result.outcome.is_done
        if not self._environment.facts.has_open_text:
            self._note(call, "", result.outcome.observation)
            for action in (result.legal_actions or ()) if self._writes_words else ():
                self._note(call, ", legal_actions", action)
        self._after_call()

    def _note(self, call: Call, what: str, text: str) -> None:
        """Note a text if it has a new word that the class does not declare."""
        if new := set(text.split()) - self._known:
            self._known |= new
            line = place_of(getattr(self._environment.kind, call.request.method))
            self.undeclared.append((f"{call.place}{what}{line}", text))


def _chooser(name: str, environment: ResetStep) -> Callable[[ResetStepPlay], str]:
    """Return a function that chooses actions: by the script or, without one, at random."""
    source = random.Random(0)
    if (script := environment.script(source)) is not None:
        return partial(_scripted_action, name, script)
    any_action = environment.facts.words or ANY_TEXT
    return lambda play: source.choice(play.legal_actions() or any_action)


def _in_time(
    choose: Callable[[ResetStepPlay], str], now: Callable[[], float]
) -> Callable[[ResetStepPlay], str | None]:
    """Return a function that chooses actions for `EPISODE_S`, and then returns None."""
    began = now()
    return lambda play: choose(play) if now() - began <= EPISODE_S else None


def _scripted_action(name: str, script: Script, play: ResetStepPlay) -> str:
    """Return the next action of a script without spaces at its ends, as it is read from a turn.

    Raises:
        ConfigError: the action is no text, or would be refused.
    """
    call, action = f"script(source)({play.own_last()!r:.60})", script.choose(play)
    _require(name, isinstance(action, str), call, "text", action)
    action = action.strip()
    listed = ", ".join(repr(play.own(each)) for each in play.legal_actions())
    legal = play.legal_pattern or listed or "any text"
    expected = f"an action that can be taken now ({legal:.200})"
    _require(name, not play.refusal(action), call, expected, play.own(action))
    return action


def _replay(history: Sequence[tuple[str, str]]) -> Callable[[ResetStepPlay], str | None]:
    """Return a function that repeats the actions of an episode, and returns None after the last."""
    actions = iter([action for action, _ in history])
    return lambda play: next(actions, None)


def _played(
    play: ResetStepPlay, choose: Callable[[ResetStepPlay], str | None]
) -> Generator[Call, Any, _Steps]:
    """Play at most `NUM_ACTS` steps, until `choose` returns None; then close the play, even if a
    call or `choose` failed.

    Raises:
        CallFault: a call failed.
        ConfigError: `choose` found no action; a script may raise any other exception too.
    """
    # Not `try … finally`: a generator that is closed before its end must not yield once more.
    try:
        yield from calls_of(play)
        steps: _Steps = [("reset", play.observation)]
        while not play.is_done and len(steps) <= NUM_ACTS and (action := choose(play)) is not None:
            # `act` returns the outcome itself, or the calls made after it return the outcome.
            outcome = play.act(action)
            call = f"step({play.own(action)!r})"
            steps.append((call, (yield from calls_of(play)) or outcome))
    except Exception:  # the border to foreign code, a script; raised again
        yield from _close(play)
        raise
    yield from _close(play)
    return steps


def _interleaved(*plays: Generator[Call, Any, _Steps]) -> Generator[Call, Any, list[_Steps]]:
    """Make one call of each play in turn, and return the steps of each. If one play fails, the
    others are closed.

    Raises:
        CallFault: a call failed.
        ConfigError: a player found no action.
    """
    found: list[_Steps] = [[] for _ in plays]
    # For each play that has not ended, the function that resumes it until its next call.
    go_on: dict[int, Callable[[], Call]] = {
        number: partial(next, play) for number, play in enumerate(plays)
    }
    fault: Exception | None = None
    while go_on:
        for number in list(go_on):
            try:
                call = go_on[number]()
            except StopIteration as end:
                found[number] = end.value
                del go_on[number]
                continue
            except Exception as error:  # the border to foreign code; raised again
                fault = fault or error
                del go_on[number]
                go_on = {each: partial(plays[each].throw, fault) for each in go_on}
                break
            try:
                go_on[number] = partial(plays[number].send, (yield call))
            except CallFault as error:
                go_on[number] = partial(plays[number].throw, error)
    if fault is not None:
        raise fault
    return found


ALONE = (
    "was restarted with the same seed",
    'draw everything from `seed` and `task`, or set trial.repeats = "fresh" if it is meant to '
    "differ",
)
CONCURRENTLY = (
    "was restarted with the same seed while another task was played",
    "keep what an episode changes in `self`, and draw from a `random.Random` of its own: many "
    "objects play at once, and share the class's attributes, globals and `random.seed`; or set "
    "environment.most_open = 1",
)
"""How an episode was repeated, and a remedy if it differed."""


def _compare(name: str, member: str, first: _Steps, again: _Steps, how: tuple[str, str]) -> None:
    """Check that a restart repeated an episode.

    Args:
        how: `ALONE` or `CONCURRENTLY`.

    Raises:
        ConfigError: the episodes differ; the message has the first difference.
    """
    when, remedy = how
    for (call, one), (_, other) in zip(first, again, strict=False):
        if one != other:
            raise ConfigError(
                f"environment {name!r}: task {member} {when}, and {call} "
                f"gave {_short(other)} after {_short(one)}: {remedy}"
            )


def _short(value: object) -> str:
    """Return a value as text of at most 80 characters."""
    shown = (value.observation, value.reward) if isinstance(value, Outcome) else value
    return f"{shown!r:.80}"


# The code below compares held-out tasks with trained ones.

NUM_EPISODES = 12
"""Number of episodes of each compared task, each with other actions. Tasks that differ only in a
hidden code may answer a few guesses alike: 12 episodes tell most of the 120 codes of the lock in
`docs/your_environment.md` apart.
"""
NUM_MORE = 10 * NUM_EPISODES
"""Number of episodes of a second comparison, of tasks with the same trace as a task of the other
split."""
Trace = tuple[tuple[str, float], ...]
"""Observations and rewards of all episodes of a task, in order. Tasks with equal traces count as
the same.
"""


class HeldOut(NamedTuple):
    """Count the held-out tasks that are the same as a trained one."""

    num_train: int
    """Number of trained tasks that were compared."""
    num_heldout: int
    """Number of held-out tasks that were compared."""
    num_kinds: int
    """Number of different traces among the trained tasks."""
    num_known: int
    """Number of held-out tasks with the same trace as a trained task."""

    def sentence(self) -> str:
        """Return the comparison as a sentence for people."""
        heldout = f"{self.num_heldout} held-out task{'s' if self.num_heldout > 1 else ''}"
        trained = f"{self.num_train} trained one{'s' if self.num_train > 1 else ''}"
        compared = f"{heldout} compared with {trained}"
        if self.num_train == 1:
            return f"{compared}, which is too few to tell what is hidden"
        if self.num_kinds == 1:
            return (
                f"{compared}: all trained tasks answer alike where `seed` and the actions are the "
                "same; draw what is hidden from `task`, because `seed` is for chance, in which "
                "held-out tasks hide nothing new; if it is drawn from `task`, random actions do "
                "not reach it, and a policy hardly reaches it at first"
            )
        if not self.num_known:
            return f"{compared}: each hides something that no trained task hides"
        hide = "hides" if self.num_known == 1 else "hide"
        known = f"{self.num_known} of them {hide} what a trained task hides"
        if self.num_known < self.num_heldout:
            return f"{compared}: {known}"
        return (
            f"{compared}: all of them hide what a trained task hides, so a held-out return is that "
            "of known tasks; declare `members(split)` with tasks of their own for each split"
        )


class _OneSeed(ResetStep):
    """Give all tasks of a user's class the same seed, so that they differ in `task` alone."""

    def __init__(self, given: ResetStep) -> None:
        super().__init__(given.kind, given.options, given.origin)
        self.listener = given.listener

    def seed_of(self, task: Task) -> int:
        """Return the same seed for every task."""
        return 0


def compare_heldout(environment: Environment) -> Iterator[HeldOut]:
    """Compare the tasks of the two splits, and yield the result so far after each pair of tasks,
    and after each task that is compared again in more episodes.

    Raises:
        CallFault: a call failed, or is a coroutine that has to wait.
        ConfigError: the environment declares no actions that could be drawn, or an `AgentProgram`
            is the agent.
    """
    if isinstance(environment, AgentTasks):
        raise ConfigError(f"{environment.facts.name}: a program's tasks need a policy to be played")
    if isinstance(environment, ResetStep):
        environment = _OneSeed(environment)
    train, heldout = environment.members("train"), environment.members("heldout")
    # Trained and held-out tasks by their traces.
    groups = defaultdict[Trace, tuple[list[str], list[str]]](lambda: ([], []))
    found = HeldOut(0, 0, 0, 0)
    for number in range(max(len(train), len(heldout))):
        num_train, num_heldout = (min(number + 1, len(each)) for each in (train, heldout))
        num_kinds, num_known = found.num_kinds, found.num_known
        if number < len(train):
            trained, tested = groups[_trace(environment, train[number], NUM_EPISODES)]
            if not trained:
                num_kinds, num_known = num_kinds + 1, num_known + len(tested)
            trained.append(train[number])
        if number < len(heldout):
            trained, tested = groups[_trace(environment, heldout[number], NUM_EPISODES)]
            tested.append(heldout[number])
            num_known += bool(trained)
        found = HeldOut(num_train, num_heldout, num_kinds, num_known)
        yield found
    # A difference between tasks may show only after an action that few of these episodes took, so
    # more are compared.
    for trained, tested in groups.values():
        known, num_others = set[Trace](), found.num_kinds - 1
        for member in trained if tested else ():
            known.add(_trace(environment, member, NUM_MORE))
            found = found._replace(num_kinds=num_others + len(known))
            yield found
        for member in tested if trained else ():
            is_new = _trace(environment, member, NUM_MORE) not in known
            found = found._replace(num_known=found.num_known - is_new)
            yield found


def _trace(environment: Environment, member: str, num_episodes: int) -> Trace:
    """Play a task with random actions that are the same for every task, and return its trace.

    In every second episode an action is often repeated, as where one has to wait for what differs.
    """
    source, facts, found = random.Random(0), environment.facts, list[tuple[str, float]]()
    task = Task(facts.name, member, 0, environment.seats()[0])
    for episode in range(num_episodes):
        play = new_play(environment, task, episode)
        try:
            make_pending_calls(play)
            found.append((play.observation, 0.0))
            is_done, action = False, ""
            repeats = source.random() if episode % 2 else 0.0
            while not is_done:
                if not (choices := play.legal_actions() or facts.words):
                    raise ConfigError(
                        "no `legal_actions`, `legal_pattern` or `words` say what an action may be"
                    )
                if not (repeats and action in choices and source.random() < repeats):
                    action = source.choice(choices)
                outcome = play.act(action)
                # A slow play gives its outcome in a call.
                outcome = make_pending_calls(play) or outcome
                found.append((outcome.observation, outcome.reward))
                is_done = outcome.is_done
        finally:
            if isinstance(play, SlowPlay) and (call := play.closing()) is not None:
                call.now()
    return tuple(found)
