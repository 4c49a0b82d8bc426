"""The protocol of an environment, and the facts each one declares.

An `Environment` is stateless and cheap; a `Play` is one episode of a task, the only thing that
changes. Chance is explicit: every draw goes through `Chance`, which is seeded by (task, episode)
and remembers what it drew, so a play can be written down, compared and repeated. Nothing here knows
of tokens, tags or models.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from mage_async.trajectory import Task

Split = Literal["train", "heldout"]
Ladders = Mapping[str, Sequence[Mapping[str, Any]]]
"""Ladders of harder tasks: of each rung its options, by the name of an option."""
Called = Literal["at_once", "in_threads", "in_turn"]
"""How a trial calls `begin` and `act`: on its own event loop, which they may not hold up; in
threads, each within `environment.step_deadline_s`; or so too, but one call after another, as an
engine needs whose state is the whole process's.
"""
Side = Literal[0, 1]
"""A side of a duel: `AGENT`, which is trained, or `RIVAL`."""
AGENT: Side = 0
RIVAL: Side = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What an environment promises; one generic test plays each against its own facts."""

    name: str
    num_seats: int
    max_turns: int
    """Most turns of the agent in one episode; a play is done by then."""
    min_return: float | None
    max_return: float | None
    """Bounds on the agent's return in one episode; None where they are unknown."""
    units: int
    """Returns are reported per unit: rounds, hands, dials of one episode."""
    has_chance: bool
    words: tuple[str, ...]
    """Every word that observations and actions are made of; the first is an action."""
    has_open_text: bool = False
    """Observations and actions may hold any other words too: it takes a model that reads."""
    wins_above: float = 0.0
    """An episode with a larger return is won."""
    loses_below: float = 0.0
    """An episode with a smaller return is lost; what is neither is drawn."""
    example: str = ""
    """An action, where the first word alone is none."""

    def bounds(self) -> tuple[float, float]:
        """Least and most return of an episode, where that has been checked to be known."""
        assert self.min_return is not None, "bounds are checked before a population is rated"
        assert self.max_return is not None, "bounds are checked before a population is rated"
        return self.min_return, self.max_return

    def is_won(self, episode_return: float) -> bool:
        """Whether an episode with this return reached its goal, or beat its opponent."""
        return episode_return > self.wins_above

    def is_lost(self, episode_return: float) -> bool:
        """Whether an episode with this return is lost: without an opponent, every one not won."""
        return episode_return < self.loses_below


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an action led to, seen from the agent's seat."""

    observation: str
    reward: float
    is_valid: bool = True
    is_done: bool = False
    tool_answers: tuple[str, ...] = ()
    """The observation as answers to the calls of the turn, where the environment has tools."""
    info: str = field(default="", compare=False)
    """What a reader of the run may want to know of the step, which the agent is not told: a JSON
    object made by `info_text`, or empty.
    """


PENDING = Outcome("", 0.0)
"""The outcome of an action whose effect is unknown until a rival has acted, or a call has returned.
"""

MAX_OBSERVATION_CHARS = 100_000
"""Longer observations are faults: no context holds them, and every process would copy them."""


def fault_of_text(said: object) -> str | None:
    """Why something cannot be an observation, to follow the place it came from; None: it can."""
    if not isinstance(said, str):
        return f"must return text as observation, got a value of type {type(said).__name__}"
    if len(said) > MAX_OBSERVATION_CHARS:
        return f"returned {len(said):,} characters of text: at most {MAX_OBSERVATION_CHARS:,} fit"
    try:
        said.encode()
    except UnicodeEncodeError:
        return "returned text with half of a surrogate pair, which no tokenizer reads"
    return None


@dataclass(slots=True)
class Chance:
    """The luck of one episode: a seeded source that remembers each draw."""

    seed: int
    episode: int
    draws: list[str] = field(default_factory=list)
    _source: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._source = random.Random(f"{self.seed}/{self.episode}")

    def choose(self, name: str, weights: Sequence[float]) -> int:
        """Draw an index with probability proportional to `weights`; `name` says what for."""
        index = self._source.choices(range(len(weights)), weights)[0]
        self.draws.append(f"{name}={index}")
        return index


class Play(Protocol):
    """One episode of a task, from its first observation to its end."""

    chance: Chance

    @property
    def observation(self) -> str:
        """What the agent sees before its first action."""
        ...

    @property
    def anchor(self) -> str:
        """The current state without memory of earlier episodes; equal states have equal anchors."""
        ...

    def legal_actions(self) -> Sequence[str]:
        """What the agent may do now; empty when the episode is done. One whose `is_whole` is False
        holds more than it lists.
        """
        ...

    def act(self, action: str) -> Outcome:
        """Take an action of the agent, then all others until it is the agent's turn again.

        An illegal action is an outcome too (`is_valid=False`), with a reward inside the declared
        bounds.
        """
        ...


class Duel(Protocol):
    """One episode in which a rival is asked for actions, as the agent is.

    Each side is told what a `Play` would tell the agent in its seat, in the same words.
    """

    chance: Chance

    @property
    def turn(self) -> Side | None:
        """Whose action is wanted; None when the episode is done."""
        ...

    def anchor(self, side: Side) -> str:
        """As `Play.anchor`, from a side."""
        ...

    def legal_actions(self) -> Sequence[str]:
        """What the side whose turn it is may do; empty when the episode is done."""
        ...

    def act(self, action: str) -> None:
        """Take the action of the side whose turn it is."""
        ...

    def hear(self, side: Side) -> Outcome:
        """What a side was told since it heard last: before its first action that is the episode's
        first observation, later what its last action led to. Ask when it is its turn, or all is
        done.
        """
        ...


class Script(Protocol):
    """A scripted agent of one trial, for warm starts and references; it may remember earlier
    episodes.
    """

    def choose(self, play: Play) -> str:
        """The next action."""
        ...


Belief = Callable[[Sequence[Play]], Mapping[str, float]]
"""The plays of a trial, in order, to how probable each member is after what they have shown, where
all were equally likely. The true one is never impossible.
"""


class Environment(Protocol):
    """The rules: observations, actions, rewards, and the members that may be hidden."""

    facts: Facts
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of tools; an action is then the whole completion, with its calls."""
    called: Called = "at_once"
    """How a trial calls `begin` and `act`. The catalogue makes it "in_threads" for a class of a
    user's own that does not say it.
    """
    ladders: Ladders = MappingProxyType({})
    """Options in order of difficulty, by the name of an option that all rungs of a ladder have:
    `mage evaluate --harder` plays those above the run's own.
    """

    def members(self, split: Split) -> tuple[str, ...]:
        """Names of the hidden opponents (or codes) of a split; the two splits are disjoint."""
        ...

    def family(self, member: str) -> str:
        """The kind a member belongs to, for reports."""
        ...

    def seats(self) -> tuple[int, ...]:
        """Seats the agent may take."""
        ...

    def rules(self) -> str:
        """The rules in plain words, for a model that reads."""
        ...

    def begin(self, task: Task, episode: int) -> Play:
        """Start an episode. The same task and episode always begin the same way."""
        ...

    def duel(self, task: Task, episode: int) -> Duel | None:
        """As `begin`, with a rival in the opponent's seat instead of the task's member.

        None, as by default: there is no seat for one.
        """
        return None

    def script(self, source: random.Random) -> Script | None:
        """A scripted agent with a style drawn from `source`, for one trial; None: there is none,
        and so no warm start.
        """
        ...

    def expert(self, source: random.Random) -> Script | None:
        """The best scripted agent there is, whose actions the policy's are compared with. By
        default `script`, whose style is drawn.
        """
        return self.script(source)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Members that can take `member`'s place in the `swapped` control: what was learned must
        not help.
        """
        ...

    def laid_out(self, said: str) -> str:
        """An observation in lines, as a model that reads is told it: a board by rows. By default it
        stays as it is.
        """
        return said

    def reached(self, play: Play) -> str | None:
        """The member whose goal an episode has come to with its last action, whatever goal it has
        itself: with that member the same actions would have been a success. Hindsight relabelling
        (`sac.hindsight`) asks for it. None, as by default: the state is no goal.
        """
        return None

    def is_probe(self, action: str) -> bool:
        """Whether an action only buys information; reports count them. By default none does."""
        return False

    def belief(self, split: Split) -> Belief | None:
        """The exact Bayes filter over a split's members; None where there is none."""
        return None

    def best_return(self, member: str) -> float:
        """Expected return of an episode for a player that knows the member from the start; where
        that is unknown, the declared maximum.
        """
        return self.facts.bounds()[1]

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Known values per unit and episode (random, Nash or minimax, best response, i.i.d. retry),
        by name.
        """
        ...
