"""Rock-paper-scissors, iterated against one hidden opponent: four rounds an episode.

In one round of twenty the opponent's move is noise. The noise is drawn in every round, whatever the
agent does, so that all trials of a group meet the same luck.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mage_async.environments.environment import (
    Belief,
    Chance,
    Environment,
    Facts,
    Outcome,
    Play,
    Split,
)
from mage_async.environments.rps.belief import Seen, posterior
from mage_async.environments.rps.duel import RpsDuel
from mage_async.environments.rps.opponents import (
    HELDOUT,
    MOVES,
    NUM_ROUNDS,
    TRAIN,
    Opponent,
    best_moves,
    payoff,
    result,
)
from mage_async.environments.rps.values import NOISE, best_response, references
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

_RESULTS = ("draw", "win", "lose")  # by result(): 0, 1, -1
_NUMBERS = {move: number for number, move in enumerate(MOVES)}
_SPLITS: dict[Split, tuple[Opponent, ...]] = {"train": TRAIN, "heldout": HELDOUT}
_OPPONENTS = {opponent.name: opponent for opponent in TRAIN + HELDOUT}
_NOISE_WEIGHTS = (1 - NOISE, NOISE)
_EQUAL = (1, 1, 1)

_RULES = """You play rock-paper-scissors against one opponent, four rounds an episode.
Each round choose rock, paper or scissors.
Paper beats rock, scissors beat paper, rock beats scissors.
A win counts 1, a draw 0, a loss or an invalid action -1.
After each round you see the opponent's move and your result.
The opponent follows a rule, which starts anew in each episode; now and then it moves at random."""


class RpsPlay:
    """Four rounds. The anchor is the moves of this episode, all that a rule can depend on."""

    __slots__ = (
        *("_opponent", "anchor", "chance", "last"),
        *("observation", "opponent_last", "seen", "turn"),
    )

    def __init__(self, opponent: Opponent, chance: Chance) -> None:
        self._opponent, self.chance = opponent, chance
        self.observation, self.anchor = "", "start"
        self.turn = 0
        self.last: int | None = None
        """The agent's last valid move."""
        self.opponent_last: int | None = None
        self.seen: list[Seen] = []

    def legal_actions(self) -> Sequence[str]:
        """The three moves until the last round is played."""
        return MOVES if self.turn < NUM_ROUNDS else ()

    def act(self, action: str) -> Outcome:
        """Play a round; an invalid action loses it, and the opponent goes by the last valid one."""
        assert self.turn < NUM_ROUNDS, "the episode is done"
        theirs = self._opponent_move()
        mine = _NUMBERS.get(action)
        self.seen.append(Seen(self.turn, self.last, theirs))
        self.turn += 1
        self.opponent_last = theirs
        self.anchor = f"{self.anchor} {action if mine is not None else 'invalid'}/{MOVES[theirs]}"
        is_done = self.turn == NUM_ROUNDS
        if mine is None:
            return Outcome(f"opp {MOVES[theirs]} invalid", -1.0, False, is_done)
        self.last = mine
        reward = result(mine, theirs)
        return Outcome(f"opp {MOVES[theirs]} {_RESULTS[reward]}", float(reward), True, is_done)

    def _opponent_move(self) -> int:
        is_noise = self.chance.choose("noise", _NOISE_WEIGHTS)
        noise = self.chance.choose("noise move", _EQUAL)
        return noise if is_noise else self._opponent.move(self.turn, self.last)


class Rps(Environment):
    """Iterated rock-paper-scissors; the opponent's rule is what a trial has to find out."""

    facts = Facts(
        name="rps",
        num_seats=2,
        max_turns=NUM_ROUNDS,
        min_return=-float(NUM_ROUNDS),
        max_return=float(NUM_ROUNDS),
        units=NUM_ROUNDS,
        has_chance=True,
        words=(*MOVES, "opp", "win", "draw", "lose", "invalid"),
    )

    def members(self, split: Split) -> tuple[str, ...]:
        """24 opponents to train on, 12 held out."""
        return tuple(opponent.name for opponent in _SPLITS[split])

    def family(self, member: str) -> str:
        """fixed, seq, copy, beat or lose."""
        return _opponent(member).family

    def seats(self) -> tuple[int, ...]:
        """Both move at once; the agent's seat is 0."""
        return (0,)

    def rules(self) -> str:
        """The rules in plain words."""
        return _RULES

    def begin(self, task: Task, episode: int) -> RpsPlay:
        """Start an episode: the opponent begins anew, the noise is this episode's."""
        return RpsPlay(_opponent(task.member), Chance(task.seed, episode))

    def duel(self, task: Task, episode: int) -> RpsDuel:
        """Start an episode against a rival."""
        return RpsDuel(Chance(task.seed, episode))

    def script(self, source: random.Random) -> "RpsScript":
        """A style that does not adapt, half the time uniform."""
        style = source.choice(("random",) * 4 + ("fixed", "cycle", "beat last", "copy last"))
        return RpsScript(source, style, source.randrange(3), source.choice((1, 2)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Members against which the moves that beat `member` in every round win nothing."""
        moves = best_moves(_opponent(member))
        return tuple(other.name for other in _SPLITS[split] if payoff(moves, other) <= 0)

    def belief(self, split: Split) -> Belief:
        """The Bayes filter over moves of which one in twenty is noise."""
        return partial(posterior, _SPLITS[split], noise=NOISE)

    def best_return(self, member: str) -> float:
        """The return of the best response."""
        return best_response(_opponent(member)) * NUM_ROUNDS

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Exact values per round and episode, see `rps_values`."""
        return references(_SPLITS[split], TRAIN, num_episodes)


@dataclass(slots=True)
class RpsScript:
    """Plays one style through all episodes of a trial."""

    source: random.Random
    style: str
    first: int
    step: int

    def choose(self, play: Play) -> str:
        """The next move."""
        assert isinstance(play, RpsPlay)
        return MOVES[self._move(play)]

    def _move(self, play: RpsPlay) -> int:
        if self.style == "fixed":
            return self.first
        if self.style == "cycle":
            return (self.first + play.turn * self.step) % 3
        if self.style == "random" or play.opponent_last is None:
            return self.source.randrange(3)
        return (play.opponent_last + (self.style == "beat last")) % 3


def _opponent(member: str) -> Opponent:
    if member not in _OPPONENTS:
        raise EnvironmentFault(
            f"rps: no opponent is called {member!r}, as is e.g. {TRAIN[0].name!r}"
        )
    return _OPPONENTS[member]
