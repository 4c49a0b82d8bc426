"""Play rock-paper-scissors, iterated against one hidden opponent.

Rules: four rounds an episode; a win earns 1, a draw 0, a loss -1. The opponent's rule is hidden: it
repeats a pattern of moves or answers the agent's last move, and starts again in every episode. In
one round of twenty the opponent's move is noise. The noise is drawn in every round, whatever the
agent does, so that all trials of a group have the same random events.

`RpsScript` is the scripted player in the agent's seat that a warm start clones. `BiasedRps` is
another opponent, ORBIT's (arXiv 2602.04089): one that has a favourite move.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import comb
from typing import NamedTuple

import numpy as np

from mage_async.environments.environment import (
    AGENT,
    OPPONENT,
    Belief,
    Chance,
    DuelSides,
    Environment,
    Facts,
    Outcome,
    Play,
    Side,
    Split,
    check_whole,
    numbered,
)
from mage_async.environments.games.game import Game, SoloPlay, TrialScript, facts_of
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

MOVES = ("rock", "paper", "scissors")
"""The moves, by their numbers 0, 1 and 2; move m + 1 (mod 3) beats move m."""
NUM_ROUNDS = 4
"""Number of rounds of an episode."""

NOISE = 0.05
"""Probability that a move of the opponent is drawn uniformly instead."""
_RESULTS = ("draw", "win", "lose")  # by result(): 0, 1, -1

_RULES = """You play rock-paper-scissors against one opponent, four rounds an episode.
Each round choose rock, paper or scissors.
Paper beats rock, scissors beat paper, rock beats scissors.
A win counts 1, a draw 0, a loss or an invalid action -1.
After each round you see the opponent's move and your result.
The opponent follows a rule, which starts anew in each episode; now and then it moves at random."""


@dataclass(frozen=True, slots=True)
class Opponent:
    """Follow a rule: repeat `pattern` or, with a `shift`, play the agent's last move plus `shift`
    (mod 3).
    """

    name: str
    """Name of the task variant: the kind of the rule and its moves, such as `seq-rock-paper-rock`.
    """
    pattern: tuple[int, ...]
    """Moves that are repeated; with a `shift`, the first move alone."""
    shift: int | None = None

    def move(self, turn: int, last: int | None) -> int:
        """Return the move in round `turn` of an episode, after the agent's `last` move."""
        if self.shift is None:
            return self.pattern[turn % len(self.pattern)]
        return self.pattern[0] if last is None else (last + self.shift) % 3

    @property
    def family(self) -> str:
        """The kind of the rule."""
        return self.name.partition("-")[0]


def result(mine: int, theirs: int) -> int:
    """Return 1 if `mine` beats `theirs`, 0 for a draw, -1 for a loss."""
    return (0, 1, -1)[(mine - theirs) % 3]


class Seen(NamedTuple):
    """Record one round from the agent's seat."""

    turn: int
    """Number of rounds played before."""
    last: int | None
    """Last valid move of the agent before the round; an opponent's rule reacts to nothing else."""
    mine: int | None
    """Move of the agent; None if its action was invalid."""
    theirs: int
    """Move of the opponent."""


class RpsPlay:
    """Play four rounds. The anchor, which is equal for equal states, is the moves of this episode:
    all that an opponent's rule can depend on.
    """

    def __init__(self, opponent: Opponent, chance: Chance) -> None:
        self._opponent, self.chance = opponent, chance
        self.observation, self.anchor = "", "start"
        self.turn = 0
        """Number of rounds played."""
        self.last: int | None = None
        """Last valid move of the agent; None before the first."""
        self.opponent_last: int | None = None
        """Last move of the opponent; None before the first."""
        self.seen: list[Seen] = []

    def legal_actions(self) -> Sequence[str]:
        """Return the three moves, until the last round is played."""
        return MOVES if self.turn < NUM_ROUNDS else ()

    def act(self, action: str) -> Outcome:
        """Play a round; an invalid action loses it, and the opponent answers the last valid one."""
        assert self.turn < NUM_ROUNDS, "the episode is done"
        theirs = self._opponent_move()
        mine = MOVES.index(action) if action in MOVES else None
        self.seen.append(Seen(self.turn, self.last, mine, theirs))
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
        """Return the opponent's move: noise, or the move of its rule."""
        is_noise = self.chance.choose("noise", (1 - NOISE, NOISE))
        noise = self.chance.choose("noise move", (1, 1, 1))
        return noise if is_noise else self._opponent.move(self.turn, self.last)


class RpsDuel(DuelSides):
    """Play four rounds without noise; each side observes what `RpsPlay` would show it.

    Both move at once: the opponent chooses first, and the agent observes that move only after its
    own.
    """

    def __init__(self, chance: Chance) -> None:
        super().__init__(chance)
        self._num_left, self._anchors = NUM_ROUNDS, ["start", "start"]
        self._theirs: str | None = None
        """The opponent's action in this round; None while it has not acted."""

    @property
    def turn(self) -> Side | None:
        """The side to act; `None` when the last round is played."""
        if not self._num_left:
            return None
        return OPPONENT if self._theirs is None else AGENT

    def anchor(self, side: Side) -> str:
        """Return the moves of this episode as a side sees them."""
        return self._anchors[side]

    def legal_actions(self) -> Sequence[str]:
        """Return the three moves, until the last round is played."""
        return MOVES if self._num_left else ()

    def act(self, action: str) -> None:
        """Move; an invalid action loses the round, and if both are invalid both lose."""
        assert self._num_left, "the episode is done"
        if self._theirs is None:
            self._theirs = action
            return
        moves, self._theirs = (action, self._theirs), None
        self._num_left -= 1
        self._settle(AGENT, *moves)
        self._settle(OPPONENT, *reversed(moves))

    def _settle(self, side: Side, mine: str, theirs: str) -> None:
        """Show a side the result of a round, and pay it."""
        shown = theirs if theirs in MOVES else "invalid"
        played = mine if mine in MOVES else "invalid"
        self._anchors[side] += f" {played}/{shown}"
        if mine not in MOVES:
            self._mark_invalid(side)
            self._show(side, "opp", shown, "invalid")
            self._pay(side, -1.0)
            return
        won = result(MOVES.index(mine), MOVES.index(theirs)) if theirs in MOVES else 1
        self._show(side, "opp", shown, _RESULTS[won])
        self._pay(side, float(won))


@dataclass(slots=True)
class RpsScript(TrialScript[RpsPlay]):
    """Play one style in all episodes of a trial."""

    style: str
    """`fixed`, `cycle`, `random`, `beat last` or `copy last`; the last two answer the opponent's
    last move.
    """
    first: int
    """Number of the move of `fixed`, and of the first move of `cycle`."""
    step: int
    """Number that `cycle` adds to its move after each round, modulo 3."""

    def facts(self) -> Sequence[str]:
        """Return the opponent's move and the result of each round, in their order: notes keep the
        newest.
        """
        found = []
        for seen in (seen for play in self.plays for seen in play.seen):
            assert seen.mine is not None, "a script makes valid moves"
            found.append(f"opp {MOVES[seen.theirs]} {_RESULTS[result(seen.mine, seen.theirs)]}")
        return found

    def action(self, play: RpsPlay) -> str:
        """Return the next move."""
        return MOVES[self._move(play)]

    def _move(self, play: RpsPlay) -> int:
        """Return the number of the style's next move."""
        if self.style == "fixed":
            return self.first
        if self.style == "cycle":
            return (self.first + play.turn * self.step) % 3
        if self.style == "random" or play.opponent_last is None:
            return self.source.randrange(3)
        # One more beats the opponent's last move; "copy last" adds nothing.
        return (play.opponent_last + (self.style == "beat last")) % 3


class Rps(Environment):
    """Play iterated rock-paper-scissors; the task variant is the opponent, such as
    `seq-rock-paper-rock`.
    """

    facts = Facts(
        name="rps",
        num_seats=2,  # a past policy may take the opponent's (`duel`)
        max_turns=NUM_ROUNDS,
        min_return=-float(NUM_ROUNDS),
        max_return=float(NUM_ROUNDS),
        units=NUM_ROUNDS,
        has_chance=True,
        words=(*MOVES, "opp", "win", "draw", "lose", "invalid"),
    )

    def members(self, split: Split) -> tuple[str, ...]:
        """Return 24 opponents to train on, 12 held out."""
        return tuple(opponent.name for opponent in _SPLITS[split])

    def family(self, member: str) -> str:
        """Return the kind of the opponent's rule: fixed, seq, copy, beat or lose."""
        return _opponent(member).family

    def seats(self) -> tuple[int, ...]:
        """Return the agent's seat: both players move at once, so the game is the same from either
        seat.
        """
        return (0,)

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _RULES

    def begin(self, task: Task, episode: int) -> RpsPlay:
        """Start an episode: the opponent starts its rule again, and the noise is drawn for this
        episode.
        """
        return RpsPlay(_opponent(task.member), Chance(task.seed, episode))

    def duel(self, task: Task, episode: int) -> RpsDuel:
        """Start an episode between two policies."""
        return RpsDuel(Chance(task.seed, episode))

    def script(self, source: random.Random) -> RpsScript:
        """Return a script whose style is drawn for the trial and does not adapt; half of the
        scripts move uniformly.
        """
        style = source.choice(("random",) * 4 + ("fixed", "cycle", "beat last", "copy last"))
        return RpsScript(source, style, source.randrange(3), source.choice((1, 2)))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the opponents against which the moves that beat `member` in every round earn at
        most nothing.
        """
        moves = best_moves(_opponent(member))
        return tuple(other.name for other in _SPLITS[split] if payoff(moves, other) <= 0)

    def belief(self, split: Split) -> Belief:
        """Return the Bayes filter over moves of which one in twenty is noise."""
        return partial(posterior, _SPLITS[split])

    def best_return(self, member: str) -> float:
        """Return the return of the best response, the same against every opponent."""
        return BEST_RESPONSE * NUM_ROUNDS

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return exact values per round and episode, against a uniform draw of the opponents.

        `random` and `nash` play uniformly. `best_response` knows the opponent. `without_memory` is
        the best player that forgets every episode but knows the split's opponents. `bayes`
        remembers, believes that the opponent is one of `train`, and takes the move of greatest
        expected result; it is no upper bound on held-out opponents.
        """
        opponents = _SPLITS[split]
        return {
            "random": (0.0,) * num_episodes,
            "nash": (0.0,) * num_episodes,
            "best_response": (BEST_RESPONSE,) * num_episodes,
            "without_memory": (one_episode(opponents),) * num_episodes,
            "bayes": bayes_greedy(opponents, TRAIN, num_episodes),
        }


def _opponent(member: str) -> Opponent:
    """Return an opponent by name; raise an `EnvironmentFault` if there is none."""
    if member not in _OPPONENTS:
        raise EnvironmentFault(
            f"rps: no opponent is called {member!r}; one is called {TRAIN[0].name!r}"
        )
    return _OPPONENTS[member]


def posterior(opponents: Sequence[Opponent], plays: Sequence[Play]) -> dict[str, float]:
    """Return the probability of each opponent under a uniform prior: a move follows the rule, or is
    one of three by noise.
    """
    likelihoods = np.ones(len(opponents))
    seen = (seen for play in plays if isinstance(play, RpsPlay) for seen in play.seen)
    for turn, last, _, theirs in seen:
        likelihoods *= _likelihood(
            np.array([each.move(turn, last) == theirs for each in opponents])
        )
    probabilities = (likelihoods / likelihoods.sum()).tolist()
    return dict(zip((each.name for each in opponents), probabilities, strict=True))


# The hidden opponents follow. Sequences are split by orbits under x -> x + k (mod 3): all three
# shifts of a sequence are in the same split, so that every move is equally likely in both splits.
# With a random split, a player without any memory earned 0.28 a round from the uneven first moves
# alone.


_SHIFTS = {"copy": 0, "beat": 1, "lose": 2}
"""For each family that reacts, the number added to the agent's last move, modulo 3."""
_TRAIN_ORBITS = ((0, 1, 2), (0, 0, 2), (0, 2, 0), (0, 1, 0), (0, 0, 1))
"""Sequences to train on, one for each orbit."""
_HELDOUT_ORBITS = ((0, 1, 1), (0, 2, 2), (0, 2, 1))
"""Held-out sequences, one for each orbit."""


def _pattern(family: str, pattern: tuple[int, ...]) -> Opponent:
    """Return an opponent named after its family and its moves."""
    name = "-".join((family, *(MOVES[move] for move in pattern)))
    return Opponent(name, pattern, _SHIFTS.get(family))


def _orbits(orbits: tuple[tuple[int, ...], ...]) -> tuple[Opponent, ...]:
    """Return the three shifts of each sequence as opponents."""
    return tuple(
        _pattern("seq", tuple((move + shift) % 3 for move in orbit))
        for orbit in orbits
        for shift in range(3)
    )


def _each_first(family: str) -> tuple[Opponent, ...]:
    """Return the three opponents of a family, by their first move."""
    return tuple(_pattern(family, (first,)) for first in range(3))


TRAIN = _each_first("fixed") + _orbits(_TRAIN_ORBITS) + _each_first("copy") + _each_first("beat")
"""Opponents to train on, 24: the constants, five orbits of sequences, and two families that
react.
"""
HELDOUT = _orbits(_HELDOUT_ORBITS) + _each_first("lose")
"""Held-out opponents, 12: three other orbits, and another family that reacts."""
_SPLITS: dict[Split, tuple[Opponent, ...]] = {"train": TRAIN, "heldout": HELDOUT}
_OPPONENTS = {opponent.name: opponent for opponent in TRAIN + HELDOUT}


def best_moves(opponent: Opponent) -> list[int]:
    """Return the moves that beat the opponent in every round without noise; they are unique."""
    moves: list[int] = []
    for turn in range(NUM_ROUNDS):
        moves.append((opponent.move(turn, moves[-1] if moves else None) + 1) % 3)
    return moves


def payoff(moves: Sequence[int], opponent: Opponent) -> int:
    """Return the return of an episode of fixed moves against an opponent without noise."""
    lasts = (None, *moves)
    return sum(result(mine, opponent.move(turn, lasts[turn])) for turn, mine in enumerate(moves))


# The functions below compute exact values per round. A belief is the likelihood of each of `P`
# opponents of a prior.


_PAYOFFS = np.array([[result(mine, theirs) for theirs in range(3)] for mine in range(3)])
"""Result of each pair of moves, int [3, 3], by [mine, theirs]."""


# A rule answers only the agent's own moves, so an agent that knows it beats every move of the rule
# (`best_moves`). A move by noise is uniform, against which every move earns 0 on average.
BEST_RESPONSE = 1 - NOISE
"""Value of knowing the opponent, whichever it is."""


def _likelihood(follows: np.ndarray) -> np.ndarray:
    """Return the probability of each move: `follows` says which moves are the rule's own. The
    result has the same shape.
    """
    return NOISE / 3 + (1 - NOISE) * follows


@cache
def one_episode(prior: tuple[Opponent, ...]) -> float:
    """Return the value of the best single episode against an unknown opponent, uniform over
    `prior`.
    """
    belief = np.full(len(prior), 1 / len(prior))
    return _best_under(prior, belief, 0, None) / NUM_ROUNDS


def _best_under(
    prior: Sequence[Opponent], belief: np.ndarray, turn: int, last: int | None
) -> float:
    """Return the best return-to-go times the probability of the history; `belief` [P] is not
    normalised.
    """
    if turn == NUM_ROUNDS:
        return 0.0
    moves = np.array([opponent.move(turn, last) for opponent in prior])
    seen = np.array([belief * _likelihood(moves == move) for move in range(3)])
    gains = _PAYOFFS @ seen.sum(1)
    return max(
        float(gains[mine]) + sum(_best_under(prior, after, turn + 1, mine) for after in seen)
        for mine in range(3)
    )


# The functions below compute the value of a greedy Bayes player: it maximises the result of the
# next move alone, and does not plan what to learn. A belief is represented by its misses: for each
# opponent of the prior, the number of observed moves that this opponent would have played by noise
# alone. All courses of an episode are followed at once; those that end with the same belief are
# merged.

_NO_MOVE = 3
"""Number that stands for no last move."""
_RAREST = 1e-6
"""Probability below which a belief is dropped between episodes."""


@cache
def bayes_greedy(
    opponents: tuple[Opponent, ...], prior: tuple[Opponent, ...], num_episodes: int
) -> tuple[float, ...]:
    """Return the value per round of each episode, against a uniform draw of `opponents`, for a
    player with the given prior.

    The player remembers earlier episodes and always takes the move of greatest expected result, so
    it earns what a policy with a perfect memory would earn that does not explore on purpose. If
    `opponents` are not in `prior`, it is no upper bound. Values are exact to 0.001: between
    episodes, beliefs rarer than `_RAREST` are dropped.
    """
    misses = np.zeros((1, len(prior)), np.int16)
    reach = np.full((1, len(opponents)), 1 / len(opponents))
    values: list[float] = []
    for _ in range(num_episodes):
        if values:
            misses, reach = _merge(misses, reach)
        misses, reach, earned = _follow_episode(misses, reach, opponents, prior)
        values.append(earned / NUM_ROUNDS)
    return tuple(values)


def _follow_episode(
    misses: np.ndarray,
    reach: np.ndarray,
    opponents: Sequence[Opponent],
    prior: Sequence[Opponent],
) -> tuple[np.ndarray, np.ndarray, float]:
    """Follow every course of an episode, for `N` beliefs, `P` opponents of the prior and `M`
    opponents of the draw.

    Args:
        misses: Misses of each belief: int16 [N, P].
        reach: Probability that the agent meets opponent m and reaches belief n: float64 [N, M].

    Returns:
        `misses` [81 N, P] and `reach` [81 N, M] after the episode, for the 81 courses of the
        opponent's moves from each belief, and the expected return of the episode.
    """
    last = np.full(len(misses), _NO_MOVE)
    earned = 0.0
    for turn in range(NUM_ROUNDS):
        believed, played = _intended(prior, turn)[last], _intended(opponents, turn)[last]
        mine = _greedy_move(misses, believed)
        seen = [reach * _likelihood(played == move) for move in range(3)]
        for move, after in enumerate(seen):
            earned += float(_PAYOFFS[mine, move] @ after.sum(1))
        misses = np.concatenate([misses + (believed != move) for move in range(3)])
        reach, last = np.concatenate(seen), np.tile(mine, 3)
    return misses, reach, earned


def _intended(opponents: Sequence[Opponent], turn: int) -> np.ndarray:
    """Return the move of each opponent's rule after each last move of the agent: int [4, P]. The
    last row is for no last move (`_NO_MOVE`).
    """
    lasts = (0, 1, 2, None)
    return np.array([[each.move(turn, last) for each in opponents] for last in lasts])


def _greedy_move(misses: np.ndarray, believed: np.ndarray) -> np.ndarray:
    """Return the move of greatest expected result under each belief: int [N]."""
    # Likelihood ratio of one miss: of a move by noise alone to the rule's own move.
    miss = (NOISE / 3) / (1 - NOISE + NOISE / 3)
    belief = miss ** misses.astype(float)
    weight = np.stack([(belief * (believed == move)).sum(1) for move in range(3)], axis=1)
    gains = weight / belief.sum(1, keepdims=True) @ _PAYOFFS.T
    # Rounded, so that the first of equal gains is taken even if their last bits differ.
    best: np.ndarray = np.argmax(gains.round(9), axis=1)
    return best


def _merge(misses: np.ndarray, reach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge equal beliefs, for which only differences of misses matter; drop the rarest."""
    relative = misses - misses.min(1, keepdims=True)
    # Big-endian bytes of a row are in the order of its numbers, and far faster to sort.
    rows = relative.astype(">i2").view(f"V{2 * relative.shape[1]}").ravel()
    _, first, where = np.unique(rows, return_index=True, return_inverse=True)
    kept = relative[first]
    merged = np.zeros((len(kept), reach.shape[1]))
    # Add up the rows of `reach` that belong to equal beliefs.
    np.add.at(merged, where, reach)
    is_common = merged.sum(1) > _RAREST
    return kept[is_common], merged[is_common] / merged[is_common].sum()


# ORBIT's opponents, which draw every move from one hidden distribution.


LEAST_FAVOURED = 0.4
"""Least probability of the move that is drawn first."""
_BIASED_RULES = """You play rock-paper-scissors against one opponent, {rounds} rounds an episode.
Each round choose rock, paper or scissors.
Paper beats rock, scissors beat paper, rock beats scissors.
After each round you see the opponent's move and your result.
You win an episode by winning at least half of its rounds, which earns 1; nothing else does.
The opponent has a favourite move, the same in all episodes."""


class BiasedPlay(SoloPlay):
    """Play rounds against moves drawn with the given weights. The anchor, which is equal for equal
    states, is the numbers of rounds played and won.
    """

    def __init__(self, weights: Sequence[float], rounds: int, chance: Chance) -> None:
        self._weights, self._num_left, self._half, self.chance = weights, rounds, rounds / 2, chance
        self.observation, self._num_won = "", 0
        self.theirs: list[int] = []
        """The opponent's moves of this episode."""

    @property
    def anchor(self) -> str:
        """Numbers of rounds played and won."""
        return f"{len(self.theirs)} {self._num_won}"

    def actions(self) -> Sequence[str]:
        """Return the three moves."""
        return MOVES

    def apply(self, action: str) -> Outcome:
        """Play a round; an invalid action loses it."""
        theirs = self.chance.choose("move", self._weights)
        self.theirs.append(theirs)
        self._num_left -= 1
        is_valid, is_done = action in MOVES, not self._num_left
        won = result(MOVES.index(action), theirs) if is_valid else -1
        self._num_won += won == 1
        reward = float(is_done and self._num_won >= self._half)
        shown = _RESULTS[won] if is_valid else "invalid"
        return Outcome(f"opp {MOVES[theirs]} {shown}", reward, is_valid, is_done)


@dataclass(slots=True)
class BiasedScript(TrialScript[BiasedPlay]):
    """Beat the opponent's most frequent move so far, or play at random."""

    care: float
    """Probability of counting moves."""
    remembers: bool
    """Whether moves of earlier episodes are counted."""

    def action(self, play: BiasedPlay) -> str:
        """Return the next move."""
        plays = self.plays if self.remembers else [play]
        counts = Counter(move for each in plays for move in each.theirs)
        if not counts or self.source.random() >= self.care:
            return self.source.choice(MOVES)
        return MOVES[(counts.most_common(1)[0][0] + 1) % 3]


class BiasedRps(Game[str]):
    """Play rock-paper-scissors against an opponent with a favourite move; the task variant is its
    distribution of moves, such as `opponent-17`.

    One move has probability 0.4 + 0.6 t with t from Beta(2, 2); the other two divide the rest at a
    uniform point, so that one of them may be played more often.

    Args:
        rounds: Number of rounds of an episode.
        opponents: Number of opponents, a quarter of them held out.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(self, rounds: int = 5, opponents: int = 512) -> None:
        check_whole("biased_rps", "rounds", rounds, 1, 100)
        # From 32 on, both splits have opponents with each of the three favourites (`swaps`).
        check_whole("biased_rps", "opponents", opponents, 32, 1_000_000)
        self._rounds = rounds
        words = (*MOVES, "opp", *_RESULTS, "invalid")
        # An episode pays 1 or 0, so it is won above 0.5.
        facts = facts_of("biased_rps", rounds, words, threshold=0.5, has_chance=True)
        super().__init__(facts, numbered("opponent", opponents), "opponent")

    def weights(self, member: str) -> tuple[float, ...]:
        """Return the probabilities of the opponent's moves."""
        source = random.Random(f"biased_rps/{self.variant(member)}")
        first, share = source.randrange(3), source.random()
        most = LEAST_FAVOURED + (1 - LEAST_FAVOURED) * source.betavariate(2, 2)
        rest = [(1 - most) * share, (1 - most) * (1 - share)]
        return (*rest[:first], most, *rest[first:])

    def family(self, member: str) -> str:
        """Return the favourite move."""
        weights = self.weights(member)
        return MOVES[weights.index(max(weights))]

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _BIASED_RULES.format(rounds=self._rounds)

    def begin(self, task: Task, episode: int) -> BiasedPlay:
        """Start an episode, whose moves are drawn for this episode."""
        return BiasedPlay(self.weights(task.member), self._rounds, Chance(task.seed, episode))

    def script(self, source: random.Random) -> BiasedScript:
        """Return a script whose care is drawn for the trial; three in four remember."""
        return BiasedScript(source, source.choice((0.0, 0.5, 0.95)), source.random() < 0.75)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the opponents whose favourite move beats the move that beats the favourite of
        `member`.
        """
        favourite = MOVES[(MOVES.index(self.family(member)) + 2) % 3]
        return tuple(each for each in self.members(split) if self.family(each) == favourite)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return values per episode: `random` and `best_response` are exact, the others are means
        over 200 scripted trials.

        `counts_episode` beats the most frequent move of the episode so far, `counts` the most
        frequent move of the trial so far. `best_response` always beats the favourite.
        """
        best = [self._share_won(max(self.weights(each))) for each in self.members(split)]
        script = partial(BiasedScript, care=1.0)
        return {
            "random": (self._share_won(1 / 3),) * num_episodes,
            **self.measured(
                split,
                num_episodes,
                counts_episode=partial(script, remembers=False),
                counts=partial(script, remembers=True),
            ),
            "best_response": (sum(best) / len(best),) * num_episodes,
        }

    def _share_won(self, chance: float) -> float:
        """Return the probability of winning an episode whose rounds are each won with probability
        `chance`.
        """
        needed = range(-(-self._rounds // 2), self._rounds + 1)  # at least half, rounded up
        return sum(
            comb(self._rounds, won) * chance**won * (1 - chance) ** (self._rounds - won)
            for won in needed
        )
