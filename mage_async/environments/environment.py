"""Define the protocol that every environment follows.

An `Environment` holds what does not change: the rules, the task variants (what a task hides, such
as an opponent or a maze) and their split, and its declarations about itself (`Facts`). A trial is a
few episodes of one task. `Environment.begin` starts a `Play`, which is one of these episodes and
the only object with state. All chance goes through `Chance`, which is seeded by task and episode
and records its draws, so that an episode can be written down, compared and repeated.

Environments know nothing of tokens, chat formats or models.
"""

import math
import numbers
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeGuard, TypeVar

from mage_async.errors import ConfigError, has_lone_surrogate
from mage_async.trajectory import MAX_NAME_CHARS, Task

Split = Literal["train", "heldout"]
"""Set of task variants: those to train on, or those held out."""
Ladders = Mapping[str, Sequence[Mapping[str, Any]]]
"""Ladders of increasingly hard tasks: for each ladder's name, the options of every rung, easiest
first. The rungs of a ladder differ in one option: the one with the ladder's name or, if no option
has it, the first.
"""
CallMode = Literal["at_once", "in_threads", "in_turn"]
"""How a trial calls `begin` and `act`. `at_once`: on its own event loop, so the calls must be fast.
`in_threads`: in a thread, each call within `environment.step_deadline_s` seconds. `in_turn`: in a
thread, one call at a time in the whole process, as an engine with global state needs.
"""

_ROUNDING = 1e-6
"""Tolerance of comparisons with the bounds on returns, as a share of the larger one: that of sums
in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Declare properties of an environment.

    `tests/environments/test_every_environment.py` plays each environment against its own facts.
    """

    name: str
    num_seats: int = 1
    """Number of players. A seat is the index of a player; `Environment.seats` returns those that
    the agent may take.
    """
    max_turns: int
    """Upper bound on the agent's turns in one episode."""
    min_return: float | None
    max_return: float | None
    """Bounds on the agent's return in one episode; None if they are unknown."""
    units: int = 1
    """Number of equal parts of an episode (rounds, hands, dials); reports divide returns by it."""
    has_chance: bool = False
    """Whether episodes draw from `Chance`."""
    words: tuple[str, ...]
    """All words that occur in observations and actions; the first one is an action, or `example`
    gives one.
    """
    has_open_text: bool = False
    """Whether observations and actions may hold words outside `words`, which only a language model
    with an open vocabulary can read.
    """
    has_wins: bool = True
    """Whether episodes are won and lost; if not, pages show returns alone."""
    wins_above: float = 0.0
    """Return above which an episode is won."""
    loses_below: float = 0.0
    """Return below which an episode is lost; an episode that is neither won nor lost is drawn."""
    win_reward: float | None = None
    """Threshold on a turn's reward: an episode is won if one of its turns earns at least this, and
    otherwise lost. None: the return decides, by `wins_above` and `loses_below`.

    Needed if the return cannot separate wins from losses, because penalties may lower the return of
    a won episode below that of a lost one.
    """
    example: str = ""
    """An example of an action, if the first of `words` is not a whole action."""

    def bounds(self) -> tuple[float, float]:
        """Return the least and the largest return of an episode; both must be declared.

        Ratings need them; `mage_async/assembly.py` refuses a run with ratings and without bounds.
        """
        assert self.min_return is not None, "a run with ratings has bounds, as is checked"
        assert self.max_return is not None, "a run with ratings has bounds, as is checked"
        return self.min_return, self.max_return

    def allows(self, earned: float) -> bool:
        """Return whether the return of an episode lies within the declared bounds, with a tolerance
        for rounding.

        Without bounds it may have any value. `rehearsal.py` refuses one bound without the other.
        """
        least, most = self.min_return, self.max_return
        if least is None or most is None:
            return True
        tolerance = _ROUNDING * max(abs(least), abs(most))
        return least - tolerance <= earned <= most + tolerance

    def is_won(self, rewards: Sequence[float]) -> bool:
        """Return whether an episode whose turns earned these rewards reached its goal or beat its
        opponent.
        """
        if self.win_reward is not None:
            return any(reward >= self.win_reward for reward in rewards)
        return sum(rewards) > self.wins_above

    def is_lost(self, rewards: Sequence[float]) -> bool:
        """Return whether an episode whose turns earned these rewards is lost."""
        if self.win_reward is not None:
            return not self.is_won(rewards)
        return sum(rewards) < self.loses_below


@dataclass(slots=True)
class Chance:
    """Draw the random events of one episode, and record the draws."""

    seed: int
    episode: int
    draws: list[str] = field(default_factory=list)
    """Draws so far, each as `name=index`."""
    _source: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._source = random.Random(f"{self.seed}/{self.episode}")

    def choose(self, name: str, weights: Sequence[float]) -> int:
        """Draw an index with probability proportional to `weights` and record it under `name`."""
        index = self._source.choices(range(len(weights)), weights)[0]
        self.draws.append(f"{name}={index}")
        return index


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the result of one action, from the agent's seat."""

    observation: str
    reward: float
    """Reward of the action, in the units of the environment."""
    is_valid: bool = True
    """Whether the action was legal."""
    is_done: bool = False
    tool_answers: tuple[str, ...] = ()
    """Results of the turn's tool calls, in an environment with tools; together they are the
    observation.
    """
    info: str = field(default="", compare=False)
    """Diagnostics of the step for readers of the run, which the agent does not see: a JSON object
    made by `info_text`, or "".
    """


PENDING = Outcome("", 0.0)
"""Outcome that stands in for the real one until the opponent has acted or the environment's call
has returned.
"""

MAX_OBSERVATION_CHARS = 100_000
"""Largest number of characters of an observation. No context holds more, and every process would
have to copy it.
"""


MAX_REWARD = 1e15
"""Largest absolute value of a reward. If the squares of rewards left the range of floats, all
advantages would be 0."""


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value, such as a reward, is a finite number, in the range of floats."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # of a whole number with hundreds of digits
        return False


def short_value(value: Any) -> str:
    """Return a value as short text for an error message: a number, a text or None as it is written
    in Python, and any other value by its type.
    """
    # The `repr` of another object may be long, or raise. It may have an address in memory, and then
    # the message would differ each time that the same error is raised.
    is_plain = value is None or isinstance(value, numbers.Real | str)
    return f"{value!r:.60}" if is_plain else f"a value of type {type(value).__name__}"


def reward_fault(value: object) -> str | None:
    """Return why `value` is no valid reward, as the end of an error message; None if it is."""
    if not is_finite(value):
        return f"must return a finite reward, got {short_value(value)}"
    if abs(value) > MAX_REWARD:
        return f"returned a reward of {float(value):g}: scale it to at most {MAX_REWARD:g}"
    return None


def observation_fault(value: object) -> str | None:
    """Return why `value` is no valid observation, as the end of an error message; None if it is."""
    if not isinstance(value, str):
        return f"must return text as observation, got a value of type {type(value).__name__}"
    if len(value) > MAX_OBSERVATION_CHARS:
        return f"returned {len(value):,} characters of text: at most {MAX_OBSERVATION_CHARS:,} fit"
    if has_lone_surrogate(value):
        return "returned text with half of a surrogate pair, which no tokenizer reads"
    return None


class Play(Protocol):
    """Play one episode of a task, from its first observation to its end."""

    chance: Chance

    @property
    def observation(self) -> str:
        """The observation before the agent's first action."""

    @property
    def anchor(self) -> str:
        """The current state, without memory of earlier episodes. Equal states have equal anchors,
        which is how GiGPO groups turns.
        """

    def legal_actions(self) -> Sequence[str]:
        """Return the agent's legal actions; empty when the episode is done.

        A sequence with an attribute `is_whole = False` lists only some of the legal actions; `in`
        is true for all of them.
        """

    def act(self, action: str) -> Outcome:
        """Apply the agent's action, then every other move until it is the agent's turn again.

        An illegal action yields an outcome with `is_valid=False` and a reward within the declared
        bounds.
        """


class Script(Protocol):
    """Act as a scripted agent for one trial, for warm starts and reference returns. It may remember
    earlier episodes.
    """

    def choose(self, play: Play) -> str:
        """Return the next action."""


Belief = Callable[[Sequence[Play]], Mapping[str, float]]
"""Bayes filter: maps the plays of a trial, in order, to the posterior probability of each task
variant under a uniform prior. The posterior of the true variant is never 0.
"""


class Environment(Protocol):
    """Describe a set of task variants that share rules, observations, actions and rewards.

    A task variant ("member" in the names below) is the part of a task that is hidden and the same
    in all episodes of a trial: an opponent, a code, a maze. Inherit from this class and override
    the methods whose body is empty; the others have defaults.
    """

    facts: Facts
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of tools. With tools, an action is the whole completion, including its tool
    calls.
    """
    called: CallMode = "at_once"
    """How a trial calls `begin` and `act`. The catalogue sets "in_threads" for a user's class that
    does not declare it.
    """
    ladders: Ladders = MappingProxyType({})
    """Ladders of increasingly hard options; `mage evaluate --harder` plays the rungs above the
    run's own.
    """

    def members(self, split: Split) -> tuple[str, ...]:
        """Return the names of a split's task variants; the two splits are disjoint."""

    def family(self, member: str) -> str:
        """Return the kind of a task variant, by which reports group returns."""

    def seats(self) -> tuple[int, ...]:
        """Return the seats that the agent may take."""

    def rules(self) -> str:
        """Return the rules in plain words, for the prompt of a language model."""

    def begin(self, task: Task, episode: int) -> Play:
        """Start an episode. The same task and episode number always start the same episode."""

    def script(self, source: random.Random) -> Script | None:
        """Return a scripted agent for one trial, its style drawn from `source`; None if there is
        none. A warm start clones it or, where there is none, win-stay, lose-shift
        (`mage_async/trials/win_stay.py`).
        """

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the task variants that can replace `member` in the `swapped` control, a kind of
        trial whose last episode plays another variant: knowledge of `member` must not help there.
        """

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return known returns by name (random, Nash or minimax, best response, ...): a value for
        each episode of a trial, divided by `Facts.units`.
        """

    def duel(self, task: Task, episode: int) -> "Duel | None":
        """Start an episode in which a policy takes the seat of the task's scripted opponent.

        The default is None: the game has no seat for a second policy.
        """
        return None

    def best_script(self, source: random.Random) -> Script | None:
        """Return the best scripted agent, whose actions are compared with the policy's. The default
        is `script`.
        """
        return self.script(source)

    def laid_out(self, observation: str) -> str:
        """Return an observation with line breaks for a language model, such as a board by rows. The
        default leaves it unchanged.
        """
        return observation

    def reached(self, play: Play) -> str | None:
        """Return the task variant whose goal the last action reached, even if this task has another
        goal; None, the default, if it reached none.

        Hindsight relabelling uses it: for that variant, the same actions would have been a success.
        """
        return None

    def is_probe(self, action: str) -> bool:
        """Return whether an action only buys information; reports count such actions."""
        return False

    def belief(self, split: Split) -> Belief | None:
        """Return the exact Bayes filter over a split's task variants; `None` if there is none."""
        return None

    def best_return(self, member: str) -> float:
        """Return the expected episode return of the best player that knows the task variant from
        the start. The default is the declared maximum.
        """
        return self.facts.bounds()[1]


# Duels: episodes in which two policies play each other.

Side = Literal[0, 1]
"""One side of a duel: `AGENT`, which is trained, or `OPPONENT`."""
AGENT: Side = 0
OPPONENT: Side = 1
"""The two sides of a duel; lists by side are indexed by them."""


def other(side: Side) -> Side:
    """Return the other side."""
    return 0 if side else 1


class Duel(Protocol):
    """Play one episode in which a policy also chooses the opponent's actions.

    Each side observes the words that a `Play` would show to the agent in that side's seat.
    """

    chance: Chance

    @property
    def turn(self) -> Side | None:
        """The side to act; `None` when the episode is done."""

    def anchor(self, side: Side) -> str:
        """Return the current state as a side sees it; see `Play.anchor`."""

    def legal_actions(self) -> Sequence[str]:
        """Return the legal actions of the side to act; empty when the episode is done."""

    def act(self, action: str) -> None:
        """Apply the action of the side to act."""

    def observe(self, side: Side) -> Outcome:
        """Return everything that a side has observed and earned since its last call.

        Before a side's first action this is the episode's first observation, later the outcome of
        its last action. Call it when it is the side's turn or when the episode is done.
        """


class DuelSides(Duel):
    """Collect what each side observes and earns until `observe` is called for that side; base class
    of duels.
    """

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self._words: tuple[list[str], list[str]] = [], []
        self._rewards, self._are_valid = [0.0, 0.0], [True, True]

    def observe(self, side: Side) -> Outcome:
        """Return everything that a side has observed and earned since its last call."""
        text = " ".join(self._words[side])
        outcome = Outcome(text, self._rewards[side], self._are_valid[side], self.turn is None)
        self._words[side].clear()
        self._rewards[side], self._are_valid[side] = 0.0, True
        return outcome

    def _show(self, side: Side, *words: str) -> None:
        """Add words to a side's next observation."""
        self._words[side].extend(word for word in words if word)

    def _pay(self, side: Side, reward: float) -> None:
        """Add a reward to a side's next outcome."""
        self._rewards[side] += reward

    def _mark_invalid(self, side: Side) -> None:
        """Record that the side's last action was illegal."""
        self._are_valid[side] = False


class DuelPlay:
    """Play a duel as a `Play`, in which the task's scripted opponent answers the agent.

    Args:
        duel: The episode, in which the opponent may be the first to act.
        reply: Called to let the opponent act once.
    """

    def __init__(self, duel: Duel, reply: Callable[[], None]) -> None:
        self.chance, self._duel, self._reply = duel.chance, duel, reply
        self.observation = self._go_on().observation

    @property
    def anchor(self) -> str:
        """The current state as the agent sees it."""
        return self._duel.anchor(AGENT)

    def legal_actions(self) -> Sequence[str]:
        """Return the agent's legal actions; empty when the episode is done."""
        return self._duel.legal_actions()

    def act(self, action: str) -> Outcome:
        """Apply the agent's action, then the opponent's until it is the agent's turn again."""
        assert self._duel.turn is not None, "the episode is done"
        self._duel.act(action)
        return self._go_on()

    def _go_on(self) -> Outcome:
        """Let the opponent act until it is the agent's turn; return what the agent has observed."""
        while self._duel.turn == OPPONENT:
            self._reply()
        return self._duel.observe(AGENT)


# A user's class divides its own tasks (`members` in `user_class.py`), and so do the loaders
# (`NumberedTasks` in `loaders/loader.py`); the functions below divide those of a shipped game.

HELDOUT_EVERY = 4
"""One in this many task variants, or tasks of another library, is held out."""
V = TypeVar("V")
"""Type of what a game hides, such as a code or an opponent."""
Splits = Mapping[Split, Mapping[str, V]]
"""For each split, its task variants by name."""


def hold_out(variants: Mapping[str, V]) -> Splits[V]:
    """Divide task variants into the two splits; the first quarter is held out, rounded down: of
    fewer than four variants none.
    """
    items = list(variants.items())
    num_heldout = len(items) // HELDOUT_EVERY
    return {"train": dict(items[num_heldout:]), "heldout": dict(items[:num_heldout])}


def split_by(variants: Mapping[str, V], is_heldout: Callable[[V], object]) -> Splits[V]:
    """Divide task variants into the two splits by a predicate."""
    heldout = {name: hidden for name, hidden in variants.items() if is_heldout(hidden)}
    train = {name: hidden for name, hidden in variants.items() if name not in heldout}
    return {"train": train, "heldout": heldout}


def named(names: Iterable[str]) -> dict[str, str]:
    """Return task variants whose value is their name, from which a game derives the rest."""
    return {name: name for name in names}


def numbered(noun: str, count: int) -> Splits[str]:
    """Return the splits of `count` variants named `noun-0`, `noun-1`, …, from whose names a game
    generates the rest.
    """
    return hold_out(named(f"{noun}-{number}" for number in range(count)))


def check_disjoint(name: str, train: Sequence[str], heldout: Sequence[str]) -> None:
    """Check that the two splits of an environment share no task variant.

    Raises:
        ConfigError: the splits share a variant, which the message names.
    """
    if shared := set(train) & set(heldout):
        raise ConfigError(
            f"{name}: {min(shared)!r} cannot be trained on and held out: let `members(split)` "
            "return other names for each split"
        )


def check_names(name: str, members: Iterable[str]) -> None:
    """Check that the names of an environment's task variants can be sent in messages.

    Raises:
        ConfigError: a name is empty, too long, or has half of a surrogate pair.
    """
    for each in members:
        # UTF-8 cannot encode a lone surrogate.
        is_halved = has_lone_surrogate(each)
        if is_halved or not 1 <= len(each) <= MAX_NAME_CHARS:
            has = "half of a surrogate pair" if is_halved else len(each)
            raise ConfigError(
                f"{name}: a task's name has 1 to {MAX_NAME_CHARS} characters of Unicode, and "
                f"{each[:60]!r} has {has}: let `members(split)` list short texts, or objects "
                "whose `__str__` returns one"
            )


# Checks of the options that an environment takes. Error messages name the allowed values.


def check_whole(environment: str, name: str, value: object, least: int, most: int) -> None:
    """Check that an option is a whole number within bounds.

    Raises:
        ConfigError: the option is no whole number, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"{environment}: `{name}` must be a whole number from {least} to {most}, got {value!r}"
        )


def check_flag(environment: str, name: str, value: object) -> None:
    """Check that an option is true or false.

    Raises:
        ConfigError: the option is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{environment}: `{name}` must be true or false, got {value!r}")


def check_one_of(environment: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Check that an option is one of a few values.

    Raises:
        ConfigError: the option has another value.
    """
    if value not in choices:
        known = " or ".join(repr(each) for each in choices)
        raise ConfigError(f"{environment}: `{name}` must be {known}, got {value!r}")


def check_texts(environment: str, name: str, value: object) -> None:
    """Check that an option is a list of texts.

    Raises:
        ConfigError: the option is no list, or not all its elements are texts.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{environment}: `{name}` must be a list of texts, got {value!r}")
