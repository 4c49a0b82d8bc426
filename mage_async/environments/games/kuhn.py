"""Kuhn poker on OpenSpiel's engine, against a hidden opponent.

Rules: an episode is a few hands in alternating seats. Each player has one of three cards and puts
in one chip; a player may bet or check, and call or fold a bet. Rewards are chips. Hidden is the
opponent's way to play, the same in all episodes. In a hand, a player decides at most once before
any bet and at most once after the other player's bet, so a style is three probabilities, one per
card, for each of these decisions. The deals, and what the opponent would do with its card before
and after a bet, are drawn before the first hand, so that all trials of a group have the same luck
whatever they do. Cards are shown only at a showdown.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, get_args

import numpy as np

from mage_async.environments.environment import (
    AGENT,
    OPPONENT,
    Belief,
    Chance,
    DuelPlay,
    DuelSides,
    Facts,
    Outcome,
    Play,
    Side,
    Split,
    other,
)
from mage_async.environments.games.game import Game
from mage_async.environments.games.openspiel_policies import engine
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

CARDS = ("jack", "queen", "king")  # by number

OPEN = ("check", "bet")  # by OpenSpiel's numbers: 0 passes, 1 bets
FACING = ("fold", "call")
POSITIONS = ("first", "second")
CHIPS = {1: "one", 2: "two"}
MOST = 2  # chips that a hand can cost

Opponents = Literal["family", "archetypes", "contrasts", "mage"]

_STRIDE = 5  # neighbours in a split are alike, and shall not have like stakes
"""Step through the opponents when stakes are assigned: neighbours in a split are similar, and shall
not have similar stakes.
"""

_RULES = """You play Kuhn poker against one opponent, {hands} hands an episode.
Who speaks first alternates. The cards are jack, queen and king.
Each player gets one card and puts in one chip.
You may check or bet one more chip; facing a bet, fold or call.
The higher card wins the pot. Cards are shown only where nobody folded.
An invalid action loses two chips and ends the hand.
The opponent plays by a rule of its own, the same in all episodes."""
Three = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Style:
    """Probabilities by card."""

    bets: Three
    """Of betting before any bet."""
    calls: Three
    """Of calling a bet."""


@dataclass(frozen=True, slots=True)
class Player:
    """A way to play either seat."""

    name: str
    family: str
    first: Style
    """Style when it speaks first."""
    second: Style

    def style(self, seat: int) -> Style:
        """Return the style in a seat."""
        return self.second if seat else self.first


@dataclass(frozen=True, slots=True)
class Seen:
    """What a hand has shown of the opponent: everything a player may learn from."""

    seat: int
    """The agent's seat."""
    card: int
    """The agent's card."""
    has_bet: int | None = None
    """Whether it bet before any bet; `None` if it had no such decision."""
    has_called: int | None = None
    """Whether it called a bet; `None` if it had no such decision."""
    shown: int | None = None
    """Its card, after a showdown."""


_SIDES: tuple[Side, Side] = (AGENT, OPPONENT)


@dataclass(frozen=True, slots=True)
class Hand:
    """The luck of one hand of a duel."""

    seat: int
    """The agent's seat."""
    cards: tuple[int, int]
    """Cards of the agent and of the opponent."""


def dealt(chance: Chance, seat: int, num_hands: int) -> list[Hand]:
    """Return the hands of an episode, with alternating seats."""
    hands = []
    for number in range(num_hands):
        card = chance.choose("my card", (1, 1, 1))
        theirs = chance.choose("opponent's card", tuple(int(each != card) for each in range(3)))
        hands.append(Hand((seat + number) % 2, (card, theirs)))
    return hands


class KuhnDuel(DuelSides):
    """A few hands between two policies."""

    hands: Sequence[Hand]
    """The luck of each hand, in the order of play."""
    seeing: Seen
    """What the current hand has shown of the opponent."""
    is_facing_bet: bool
    """Whether a player has bet in the current hand."""

    def __init__(self, game: Any, hands: Sequence[Hand], chance: Chance) -> None:
        super().__init__(chance)
        self._game, self.hands, self.hand = game, hands, 0
        self.seen: list[Seen] = []
        """What the finished hands have shown of the opponent."""
        self._begin_hand()

    @property
    def turn(self) -> Side | None:
        """The side to act; `None` when all hands are played."""
        if self.hand == len(self.hands):
            return None
        is_agents = self._state.current_player() == self.hands[self.hand].seat
        return AGENT if is_agents else OPPONENT

    def anchor(self, side: Side) -> str:
        """Return the current hand as a side sees it."""
        return "done" if self.turn is None else " ".join(self._log[side])

    def legal_actions(self) -> Sequence[str]:
        """Return check and bet, or fold and call."""
        return () if self.turn is None else FACING if self.is_facing_bet else OPEN

    def act(self, action: str) -> None:
        """Speak in a hand; an invalid action loses the hand with two chips, the largest loss."""
        side, words = self.turn, self.legal_actions()
        assert side is not None, "the episode is done"
        if action not in words:
            self._mark_invalid(side)
            self._show(side, "invalid")
            self._show(other(side), "opp invalid")
            self._end_hand(-MOST if side == AGENT else MOST)
            return
        self._show(other(side), f"opp {action}")
        self._log[side].append(action)
        self._log[other(side)].append(f"opp {action}")
        choice = words.index(action)
        if side == OPPONENT:
            shown = {"has_called" if self.is_facing_bet else "has_bet": choice}
            self.seeing = replace(self.seeing, **shown)
        self.is_facing_bet = self.is_facing_bet or choice == 1
        self._state.apply_action(choice)
        if self._state.is_terminal():
            self._settle()

    def _begin_hand(self) -> None:
        hand = self.hands[self.hand]
        self._state, self.is_facing_bet = self._game.new_initial_state(), False
        self.seeing = Seen(hand.seat, hand.cards[AGENT])
        for card in hand.cards if hand.seat == 0 else reversed(hand.cards):
            self._state.apply_action(card)
        self._log: list[list[str]] = []
        for side in _SIDES:
            position = POSITIONS[hand.seat if side == AGENT else 1 - hand.seat]
            text = f"you {position} {CARDS[hand.cards[side]]}"
            self._log.append([str(self.hand), text])
            self._show(side, text)

    def _settle(self) -> None:
        hand = self.hands[self.hand]
        is_fold = self.is_facing_bet and self._state.history()[-1] == 0
        for side in _SIDES:
            self._show(side, "" if is_fold else f"shown {CARDS[hand.cards[other(side)]]}")
        if not is_fold:
            self.seeing = replace(self.seeing, shown=hand.cards[OPPONENT])
        self._end_hand(int(self._state.returns()[hand.seat]))

    def _end_hand(self, chips: int) -> None:
        """Pay `chips` to the agent and the opposite to the opponent."""
        for side in _SIDES:
            won = chips if side == AGENT else -chips
            self._show(side, "win" if won > 0 else "lose", CHIPS[abs(won)])
            self._pay(side, float(won))
        self.seen.append(self.seeing)
        self.hand += 1
        if self.hand < len(self.hands):
            self._begin_hand()


class KuhnPlay(DuelPlay):
    """A few hands against a hidden opponent. The anchor is the current hand."""

    def __init__(
        self,
        game: Any,
        opponent: Player,
        seat: int,
        num_hands: int,
        chance: Chance,
        stake: float = 1.0,
    ) -> None:
        self._hands: list[Hand] = []
        self._answers: list[tuple[int, int]] = []
        """For each hand, whether the opponent would bet, and whether it would call."""
        for number in range(num_hands):
            (hand,) = dealt(chance, seat + number, 1)
            card, style = hand.cards[OPPONENT], opponent.style(1 - hand.seat)
            bets, calls = style.bets[card], style.calls[card]
            will_bet = chance.choose("would bet", (1 - bets, bets))
            will_call = chance.choose("would call", (1 - calls, calls))
            self._hands.append(hand)
            self._answers.append((will_bet, will_call))
        self.duel, self._stake = KuhnDuel(game, self._hands, chance), stake
        super().__init__(self.duel, self._speak)

    @property
    def card(self) -> int:
        """The agent's card in this hand."""
        return self._hands[self.duel.hand].cards[AGENT]

    def act(self, action: str) -> Outcome:
        """Speak in a hand; an invalid action loses the hand with two chips, the largest loss."""
        outcome = super().act(action)
        return replace(outcome, reward=self._stake * outcome.reward)

    def _speak(self) -> None:
        """Let the opponent bet or check, or call or fold, as was drawn for the hand."""
        choice = self._answers[self.duel.hand][self.duel.is_facing_bet]
        self.duel.act(self.duel.legal_actions()[choice])


# A Bayesian model of the opponent, and the scripted player that uses it.


Deal = tuple[int, int]
"""Identifies a deal: number of the episode that dealt it, and number of the hand."""

_SLIP = 0.05
"""Assumed probability that an opponent does the opposite of its style. An opponent of unknown style
is then still read by the nearest known style.
"""
_SIGNS = np.sign(np.subtract.outer(np.arange(3), np.arange(3))).astype(float)
"""float64 [3, 3], [mine, theirs]: 1 where my card wins, -1 where it loses."""


class Reader:
    """Bayesian model of the opponent; it answers as if each hand were the last.

    Args:
        prior: the `P` possible opponents, all equally likely at first.
        slip: probability that an opponent does not follow its style.
    """

    def __init__(self, prior: Sequence[Player], slip: float = _SLIP) -> None:
        styles = [(player.style(0), player.style(1)) for player in prior]
        bets = np.array([[style.bets for style in both] for both in styles], float)
        calls = np.array([[style.calls for style in both] for both in styles], float)
        self._bets = slip + (1 - 2 * slip) * bets
        self._calls = slip + (1 - 2 * slip) * calls
        self._even = np.full(len(prior), 1 / len(prior))
        self._seen: dict[Deal, Seen] = {}
        self._likelihoods: dict[Deal, np.ndarray] = {}

    def learn(self, deal: Deal, seen: Seen) -> None:
        """Add what a hand has shown to what the same deal showed before."""
        known = self._seen.get(deal, seen)
        self._seen[deal] = seen = _joined(known, seen)
        self._likelihoods[deal] = self._weights(self._even, seen).sum(1)

    def belief(self) -> np.ndarray:
        """Return the posterior over the opponents: float64 [P]."""
        weights = np.prod([self._even, *self._likelihoods.values()], axis=0)
        return weights / weights.sum()

    def acts(self, deal: Deal, seeing: Seen) -> bool:
        """Return whether to bet or, if the opponent has bet, to call."""
        known = self._seen.get(deal, seeing)
        others = [each for number, each in self._likelihoods.items() if number != deal]
        weights = self._weights(np.prod([self._even, *others], axis=0), _joined(known, seeing))
        stakes = _SIGNS[seeing.card]
        if seeing.has_bet:
            return _gain(weights, 2 * stakes) > -_sum(weights)
        bets, calls = self._bets[:, 1 - seeing.seat], self._calls[:, 1 - seeing.seat]
        bets = bets if known.has_bet is None else np.full_like(bets, known.has_bet)
        calls = calls if known.has_called is None else np.full_like(calls, known.has_called)
        bet = _gain(weights * calls, 2 * stakes) + _sum(weights * (1 - calls))
        if seeing.seat == 1:
            return bet > _gain(weights, stakes)
        bet_into = weights * bets
        answer = max(_gain(bet_into, 2 * stakes), -_sum(bet_into))
        return bet > _gain(weights * (1 - bets), stakes) + answer

    def _weights(self, belief: np.ndarray, seen: Seen) -> np.ndarray:
        """Return the joint weight of each opponent and its card after a hand: float64 [P, 3]."""
        weights = np.repeat(belief[:, None], 3, axis=1)
        weights[:, seen.card] = 0.0
        if seen.shown is not None:
            weights[:, [card for card in range(3) if card != seen.shown]] = 0.0
        for choice, style in ((seen.has_bet, self._bets), (seen.has_called, self._calls)):
            if choice is not None:
                chances = style[:, 1 - seen.seat]
                weights *= chances if choice else 1 - chances
        return weights


def _joined(known: Seen, seen: Seen) -> Seen:
    """Combine what two plays of one deal have shown."""
    return Seen(
        seen.seat,
        seen.card,
        known.has_bet if seen.has_bet is None else seen.has_bet,
        known.has_called if seen.has_called is None else seen.has_called,
        known.shown if seen.shown is None else seen.shown,
    )


def _gain(weights: np.ndarray, stakes: np.ndarray) -> float:
    return _sum(weights * stakes)


def _sum(weights: np.ndarray) -> float:
    return float(weights.sum())


def posterior(
    members: Sequence[Player], plays: Sequence[Play], *, redeals: bool
) -> dict[str, float]:
    """Return the probability of each opponent after the hands of a trial, under a uniform prior.

    If the deals are repeated, so is the opponent's luck: seeing a deal again adds nothing.
    """
    reader = Reader(members, slip=0.0)
    for episode, play in enumerate(plays):
        assert isinstance(play, KuhnPlay)
        is_open = bool(play.legal_actions())
        duel = play.duel
        for hand, seen in enumerate([*duel.seen, duel.seeing] if is_open else duel.seen):
            reader.learn((episode if redeals else 0, hand), seen)
    shares = reader.belief().tolist()
    return dict(zip((each.name for each in members), shares, strict=True))


@dataclass(slots=True)
class KuhnScript:
    """Bets and calls with fixed probabilities by card or, with skill, as a reader advises.

    The reader sees every hand of the trial, whichever rule chose the actions.
    """

    source: random.Random
    bets: Sequence[float]
    calls: Sequence[float]
    skill: float
    """Share of turns in which the reader decides."""
    reader: Reader
    redeals: bool
    """Whether each episode has its own deals, or all repeat the first one's."""
    _plays: list[KuhnPlay] = field(default_factory=list)

    def choose(self, play: Play) -> str:
        """Return the next action."""
        assert isinstance(play, KuhnPlay)
        self._learn(play)
        words, chances = (FACING, self.calls) if play.duel.is_facing_bet else (OPEN, self.bets)
        if self.source.random() < self.skill:
            return words[self.reader.acts(self._deal(play.duel.hand), play.duel.seeing)]
        return words[self.source.random() < chances[play.card]]

    def _learn(self, play: KuhnPlay) -> None:
        """Pass the hands that ended since the last turn to the reader."""
        if not self._plays or self._plays[-1] is not play:
            if self._plays:
                self._take(self._plays[-1])
            self._plays.append(play)
        self._take(play)

    def _take(self, play: KuhnPlay) -> None:
        for hand, seen in enumerate(play.duel.seen):
            self.reader.learn(self._deal(hand), seen)

    def _deal(self, hand: int) -> Deal:
        return (len(self._plays) if self.redeals else 0, hand)


# The environment.


class Kuhn(Game):
    """Kuhn poker; the task variant is the opponent, such as `bet-jack-call-queen-king` or `maniac`.
    The task's seat is that of the first hand.

    Args:
        opponents: `family`, all 32 patterns that always do the same with a card and call with every
            card above one they call with; `contrasts`, 16 of them whose best responses differ most;
            `archetypes`, 14 named ones; or `mage`, the three of MAGE's code, with its greedy
            equilibrium and a mixed one held out.
        hands: number of hands in an episode.
        redeals: whether each episode has its own deals. Without, a trial repeats the first
            episode's deals and the opponent's luck in them, as LaMer and MAGE restart a game.
        stakes: value of a chip against the most expensive opponent of a split; against the cheapest
            it is 1, and in geometric steps between them. Observations do not change.

    Raises:
        ConfigError: no such opponents, hands or stakes, or OpenSpiel is not installed.
    """

    def __init__(
        self,
        opponents: Opponents = "family",
        hands: int = 3,
        redeals: bool = True,
        stakes: float = 1.0,
    ) -> None:
        if opponents not in get_args(Opponents):
            *known, last = (repr(each) for each in get_args(Opponents))
            raise ConfigError(
                f"kuhn: `opponents` must be {', '.join(known)} or {last}, got {opponents!r}"
            )
        if not isinstance(hands, int) or isinstance(hands, bool) or hands < 1:
            raise ConfigError(f"kuhn: `hands` must be a whole number from 1, got {hands!r}")
        if not isinstance(redeals, bool):
            raise ConfigError(f"kuhn: `redeals` must be true or false, got {redeals!r}")
        is_number = isinstance(stakes, int | float) and not isinstance(stakes, bool)
        if not is_number or not 1 <= stakes < math.inf:
            raise ConfigError(f"kuhn: `stakes` must be a number from 1, got {stakes!r}")
        self._num_hands, self._redeals, self._stakes = hands, redeals, stakes
        self._by_split = _SPLITS[opponents]
        self._players = {each.name: each for split in self._by_split.values() for each in split}
        self._game = engine().load_game("kuhn_poker")
        names = {s: tuple(each.name for each in players) for s, players in self._by_split.items()}
        super().__init__(_facts(hands, stakes), names, "opponent")

    def family(self, member: str) -> str:
        """Return what the opponent calls with; an archetype is its own kind."""
        return self._player(member).family

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _RULES.format(hands=self._num_hands)

    def begin(self, task: Task, episode: int) -> KuhnPlay:
        """Deal the episode's hands, or the first episode's again."""
        chance = Chance(task.seed, episode if self._redeals else 0)
        opponent = self._player(task.member)
        stake = self.stake(task.member)
        return KuhnPlay(self._game, opponent, task.seat, self._num_hands, chance, stake)

    def duel(self, task: Task, episode: int) -> KuhnDuel:
        """Deal the episode's hands, or the first episode's again, to two policies. A chip earns 1,
        whatever the stakes.
        """
        chance = Chance(task.seed, episode if self._redeals else 0)
        return KuhnDuel(self._game, dealt(chance, task.seat, self._num_hands), chance)

    def stake(self, member: str) -> float:
        """Return the value of a chip against an opponent."""
        if self._stakes == 1.0:
            return 1.0
        self.check(member)
        names = next(names for names in self._splits.values() if member in names)
        place = names.index(member) * _STRIDE % len(names)
        return self._stakes ** (place / max(1, len(names) - 1))

    def script(self, source: random.Random) -> KuhnScript:
        """Return a script with a style and a skill drawn for the trial. The styles are reasonable
        in half of the trials, arbitrary in the others.
        """
        bets, calls = (0.3, 0.3, 0.8), (0.1, 0.5, 1.0)
        if source.random() < 0.5:
            any_of = (0.1, 0.5, 0.9)
            bets, calls = (tuple(source.choice(any_of) for _ in CARDS) for _ in range(2))
        skill = source.choice((0.3, 0.6, 0.9))
        reader = Reader(self._by_split["train"])
        return KuhnScript(source, bets, calls, skill, reader, self._redeals)

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return all opponents of the split that call with other cards."""
        family = self.family(member)
        return tuple(each.name for each in self._by_split[split] if each.family != family)

    def belief(self, split: Split) -> Belief:
        """Return the Bayes filter over what each hand has shown, cards and answers."""
        return partial(posterior, self._by_split[split], redeals=self._redeals)

    def best_return(self, member: str) -> float:
        """Return the return of the best response; if deals repeat, of one that knows the
        cards too.
        """
        best = best_response if self._redeals else hindsight
        return best((self._player(member),)) * self._num_hands * self.stake(member)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return exact values per hand and episode; see the function `references`."""
        values = references(self._by_split[split], self._num_hands, redeals=self._redeals)
        return {name: (each,) * num_episodes for name, each in values.items()}

    def _player(self, member: str) -> Player:
        self.check(member)
        return self._players[member]


def _facts(hands: int, stakes: float) -> Facts:
    """Return the facts. Seats alternate, and only the first player can speak twice in a hand."""
    return Facts(
        name="kuhn",
        num_seats=2,
        max_turns=hands // 2 + 2 * (hands - hands // 2),
        min_return=-float(MOST * hands * stakes),
        max_return=float(MOST * hands * stakes),
        units=hands,
        has_chance=True,
        words=(
            *(*OPEN, *FACING, *CARDS, *POSITIONS, *CHIPS.values()),
            *("you", "opp", "shown", "win", "lose", "invalid"),
        ),
    )


# The hidden opponents.


def _player(name: str, family: str, bets: Three, calls: Three) -> Player:
    style = Style(bets, calls)
    return Player(name, family, style, style)


def _cards(chosen: Three) -> str:
    """Return cards as text, such as `queen-king`."""
    return "-".join(itertools.compress(CARDS, chosen)) or "none"


def _pattern(bets: Three, calls: Three) -> Player:
    family = f"call-{_cards(calls)}"
    return _player(f"bet-{_cards(bets)}-{family}", family, bets, calls)


_CALLS: tuple[Three, ...] = ((0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1))
"""A style that calls with a card calls with every higher one."""
_PATTERNS = tuple(
    _pattern((jack, queen, king), calls)
    for jack, queen, king in itertools.product((0, 1), repeat=3)
    for calls in _CALLS
)
_HELDOUT_PATTERNS = (
    "bet-queen-call-king",
    "bet-jack-queen-call-none",
    "bet-queen-king-call-queen-king",
    "bet-queen-call-queen-king",
    "bet-jack-queen-king-call-none",
    "bet-none-call-king",
    "bet-king-call-king",
    "bet-none-call-jack-queen-king",
)

FAMILY_TRAIN = tuple(each for each in _PATTERNS if each.name not in _HELDOUT_PATTERNS)
"""24 of the 32 patterns that always do the same with a card."""
FAMILY_HELDOUT = tuple(each for each in _PATTERNS if each.name in _HELDOUT_PATTERNS)
"""The other 8, drawn once and written out above."""

_CONTRASTING_BETS: tuple[Three, ...] = ((1, 0, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1))
_CONTRASTING_CALLS: tuple[Three, ...] = ((0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1))
_CONTRASTS = {
    (bets, calls): _pattern(_CONTRASTING_BETS[bets], _CONTRASTING_CALLS[calls])
    for bets, calls in itertools.product(range(4), repeat=2)
}
CONTRASTS_TRAIN = tuple(each for (bets, calls), each in _CONTRASTS.items() if (bets + calls) % 4)
"""12 of 16 patterns whose best responses differ most: they bet with weak or with strong cards, and
call with none, the weak, the strong or all cards.
"""
CONTRASTS_HELDOUT = tuple(
    each for (bets, calls), each in _CONTRASTS.items() if not (bets + calls) % 4
)
"""The other 4, a Latin square: each way to bet and each way to call is equally frequent in both
splits.
"""


def _archetype(name: str, bets: Three, calls: Three) -> Player:
    return _player(name, name, bets, calls)


NASH = Player(
    "nash", "nash", Style((1 / 3, 0, 1), (0, 2 / 3, 1)), Style((1 / 3, 0, 1), (0, 1 / 3, 1))
)
"""An equilibrium: the queen calls more often when it spoke first."""
UNIFORM = _archetype("uniform", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

ARCHETYPES_TRAIN = (
    _archetype("folder", (0, 0, 0), (0, 0, 0)),
    _archetype("tight", (0, 0, 1), (0, 0, 1)),
    _archetype("station", (0, 0, 0), (1, 1, 1)),
    _archetype("maniac", (1, 1, 1), (1, 1, 1)),
    _archetype("bluffer", (1, 1, 1), (0, 0, 0)),
    _archetype("slowplay", (0, 0, 0), (0, 0, 1)),
    _archetype("valuestation", (0, 0, 1), (1, 1, 1)),
    NASH,
)
ARCHETYPES_HELDOUT = (
    _archetype("tightman", (1, 1, 1), (0, 0, 1)),
    _archetype("intermediate", (0.5, 0, 1), (0, 0.5, 1)),
    _archetype("loose", (0, 0.5, 1), (0, 1, 1)),
    _archetype("wild", (1, 0, 1), (0, 0, 0)),
    _archetype("passive", (0, 0, 0), (0, 1, 1)),
    _archetype("semi", (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
)

MAGE_TRAIN = (
    _archetype("conservative", (0, 0, 1), (0, 0, 1)),
    _archetype("aggressive", (1, 1, 1), (0, 1, 1)),
    _archetype("intermediate", (0, 1, 1), (0, 0, 1)),
)
"""The population of MAGE's code (arXiv 2603.03680)."""
CFR_GREEDY = Player(
    "cfr-greedy", "cfr-greedy", Style((0, 0, 1), (0, 1, 1)), Style((0, 0, 1), (0, 0, 1))
)
"""The opponent in the validation of MAGE's code: always the most probable move of a solved
equilibrium.
"""
MAGE_HELDOUT = (CFR_GREEDY, NASH)

_SPLITS: dict[Opponents, dict[Split, tuple[Player, ...]]] = {
    "family": {"train": FAMILY_TRAIN, "heldout": FAMILY_HELDOUT},
    "archetypes": {"train": ARCHETYPES_TRAIN, "heldout": ARCHETYPES_HELDOUT},
    "contrasts": {"train": CONTRASTS_TRAIN, "heldout": CONTRASTS_HELDOUT},
    "mage": {"train": MAGE_TRAIN, "heldout": MAGE_HELDOUT},
}


# Exact values in chips per hand. The agent takes both seats equally often. `P` opponents of a
# prior; index 0, 1, 2 of a card: jack, queen, king.


_SEATS = (0, 1)
_DEALS = tuple(itertools.permutations(range(3), 2))
"""Both cards, the agent's first."""
_GoOn = Callable[[np.ndarray], float]
"""Maps an unnormalised belief [P] to the value of the remaining hands."""


def references(
    members: tuple[Player, ...], num_hands: int, *, redeals: bool = True
) -> dict[str, float]:
    """Return values against a uniform draw of `members`, by name.

    `random` and `nash` always play the same; `best_fixed` is the best response to the whole
    mixture, the same in every hand; `without_memory` is the best single-episode player of
    `num_hands` that knows the set of opponents; `best_response` knows the opponent. If deals are
    repeated, `hindsight` also knows the cards and the answers.
    """
    known = {} if redeals else {"hindsight": hindsight(members)}
    return {
        "random": sum(value(UNIFORM, member) for member in members) / len(members),
        "nash": sum(value(NASH, member) for member in members) / len(members),
        "best_fixed": best_response(members),
        "without_memory": one_episode(members, num_hands),
        "best_response": sum(best_response((member,)) for member in members) / len(members),
        **known,
    }


def hindsight(members: tuple[Player, ...]) -> float:
    """Return the value of a repeated hand for a player that knows both cards and what the opponent
    will do.
    """
    return sum(_hindsight(member, seat) for member in members for seat in _SEATS) / 2 / len(members)


def _hindsight(member: Player, seat: int) -> float:
    style, total = member.style(1 - seat), 0.0
    for card, theirs in _DEALS:
        won = _sign(card, theirs)
        answer, bet = max(-1, 2 * won), (1.0, 2.0 * won)  # bet: folded to, called
        for bets, calls in itertools.product((0, 1), repeat=2):
            chance = _chance(style.bets[theirs], bets) * _chance(style.calls[theirs], calls)
            if seat == 0:
                total += chance * max(bet[calls], answer if bets else won)
            else:
                total += chance * (answer if bets else max(bet[calls], won))
    return total / len(_DEALS)


def _chance(active: float, chosen: int) -> float:
    return active if chosen else 1 - active


def value(player: Player, opponent: Player) -> float:
    """Return the expected chips per hand of one way to play against another."""
    return sum(value_in_seat(player, opponent, seat) for seat in _SEATS) / 2


def value_in_seat(player: Player, opponent: Player, seat: int) -> float:
    """Return the expected chips per hand of `player` in `seat`."""
    own, opponents = player.style(seat), opponent.style(1 - seat)
    total = 0.0
    for card, theirs in _DEALS:
        first, second = (own, opponents) if seat == 0 else (opponents, own)
        cards = (card, theirs) if seat == 0 else (theirs, card)
        stake = _first_value(first.bets, first.calls, second.bets, second.calls, cards)
        total += stake if seat == 0 else -stake
    return total / len(_DEALS)


def _first_value(
    first_bets: Sequence[float],
    first_calls: Sequence[float],
    second_bets: Sequence[float],
    second_calls: Sequence[float],
    cards: tuple[int, int],
) -> float:
    """Return the chips of the first player, for one deal."""
    mine, theirs = cards
    sign = _sign(mine, theirs)
    called = second_calls[theirs] * 2 * sign + (1 - second_calls[theirs])
    answered = first_calls[mine] * 2 * sign - (1 - first_calls[mine])
    checked = second_bets[theirs] * answered + (1 - second_bets[theirs]) * sign
    return first_bets[mine] * called + (1 - first_bets[mine]) * checked


def best_response(members: tuple[Player, ...]) -> float:
    """Return the value of the best way to play that is the same in every hand, against a uniform
    draw.
    """
    return one_episode(members, 1)


@cache
def one_episode(members: tuple[Player, ...], num_hands: int) -> float:
    """Return the value per hand of the best play of `num_hands` hands, with alternating seats,
    against an unknown opponent.
    """
    belief = np.full(len(members), 1 / len(members))
    hands = [_HandValue(members, seat) for seat in _SEATS]
    return sum(_best(hands, belief, seat, num_hands) for seat in _SEATS) / 2 / num_hands


def _best(hands: Sequence["_HandValue"], belief: np.ndarray, seat: int, num_left: int) -> float:
    """Return the best return of the remaining hands, times the probability of the history."""
    if not num_left or not belief.any():
        return 0.0
    return hands[seat].value(belief, lambda after: _best(hands, after, 1 - seat, num_left - 1))


class _HandValue:
    """One hand in a seat against `P` opponents, whose `bets` and `calls` are [P, 3]; the second
    index is the card.
    """

    def __init__(self, members: Sequence[Player], seat: int) -> None:
        self._seat = seat
        self._bets = np.array([member.style(1 - seat).bets for member in members], float)
        self._calls = np.array([member.style(1 - seat).calls for member in members], float)

    def value(self, belief: np.ndarray, go_on: _GoOn) -> float:
        """Return the expected chips of this hand and the later ones, under the best play of this
        one.
        """
        return sum(self._with_card(card, belief, go_on) for card in range(3))

    def _with_card(self, card: int, belief: np.ndarray, go_on: _GoOn) -> float:
        weights = np.repeat(belief[:, None] / 6, 3, axis=1)  # [P, 3], of each opponent and its card
        weights[:, card] = 0
        if self._seat == 0:
            check = self._after_check(card, weights, go_on)
            return max(self._bet(card, weights, go_on), check)
        free = weights * (1 - self._bets)
        checked = max(_showdown(card, free, 1, go_on), self._bet(card, free, go_on))
        return checked + _face_bet(card, weights * self._bets, go_on)

    def _after_check(self, card: int, weights: np.ndarray, go_on: _GoOn) -> float:
        free = _showdown(card, weights * (1 - self._bets), 1, go_on)
        return free + _face_bet(card, weights * self._bets, go_on)

    def _bet(self, card: int, weights: np.ndarray, go_on: _GoOn) -> float:
        folded = (weights * (1 - self._calls)).sum(1)
        taken = float(folded.sum()) + go_on(folded)
        return taken + _showdown(card, weights * self._calls, 2, go_on)


def _face_bet(card: int, weights: np.ndarray, go_on: _GoOn) -> float:
    """Return the value of the better of folding and calling a bet."""
    folded = weights.sum(1)
    return max(go_on(folded) - float(folded.sum()), _showdown(card, weights, 2, go_on))


def _showdown(card: int, weights: np.ndarray, stake: int, go_on: _GoOn) -> float:
    """Return the value of showing the cards; each of the opponent's cards leads to a different
    belief.
    """
    return sum(
        stake * _sign(card, theirs) * float(weights[:, theirs].sum()) + go_on(weights[:, theirs])
        for theirs in range(3)
        if theirs != card
    )


def _sign(mine: int, theirs: int) -> int:
    return 1 if mine > theirs else -1
