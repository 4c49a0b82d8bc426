"""Play Kuhn poker on OpenSpiel's engine, against a hidden opponent.

Rules: an episode is a few hands in alternating seats. Each player has one of three cards and puts
in one chip; a player may bet or check, and call or fold a bet. Rewards are chips. The opponent's
strategy is hidden, and the same in all episodes. In a hand, a player decides at most once before
any bet and at most once after the other player's bet, so a strategy for a seat is three
probabilities, one per card, for each of these decisions. The deals, and the opponent's decision
with its card before and after a bet, are drawn before the first hand, so that all trials of a group
meet the same chance events whatever they do. Cards are shown only at a showdown.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    Outcome,
    Play,
    Side,
    Split,
    check_flag,
    check_one_of,
    check_whole,
    other,
)
from mage_async.environments.games.game import Game, TrialScript, facts_of, is_number
from mage_async.environments.games.openspiel_policies import engine
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

CARDS = ("jack", "queen", "king")  # by number

OPEN = ("check", "bet")  # by OpenSpiel's numbers: 0 passes, 1 bets
FACING = ("fold", "call")
"""Actions after a bet, in the same order: `fold` passes, `call` bets."""
POSITIONS = ("first", "second")
CHIPS = {1: "one", 2: "two"}
"""Words for numbers of chips won or lost."""
MAX_LOSS = 2
"""Largest number of chips that a hand can cost."""

Opponents = Literal["family", "archetypes", "contrasts", "mage"]

_STRIDE = 5
"""Stride through a split by which stakes are assigned to its opponents: neighbours in a split are
similar, and should not have similar stakes.
"""

_RULES = """You play Kuhn poker against one opponent, {hands} hands an episode.
Who speaks first alternates. The cards are jack, queen and king.
Each player gets one card and puts in one chip.
You may check or bet one more chip; facing a bet, fold or call.
The higher card wins the pot. Cards are shown only where nobody folded.
An invalid action loses two chips and ends the hand.
The opponent plays by a rule of its own, the same in all episodes."""
ByCard = tuple[float, float, float]
"""Probabilities for the jack, the queen and the king."""


@dataclass(frozen=True, slots=True)
class SeatStrategy:
    """Hold the strategy of one seat: probabilities by card."""

    bets: ByCard
    """Probability of betting before any bet, by card."""
    calls: ByCard
    """Probability of calling a bet, by card."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Hold a player's strategy for both seats, with its name and kind."""

    name: str
    family: str
    """Kind of the strategy, by which reports group opponents."""
    first: SeatStrategy
    """Strategy for hands in which the player acts first."""
    second: SeatStrategy

    def in_seat(self, seat: int) -> SeatStrategy:
        """Return the strategy for a seat."""
        return self.second if seat else self.first


@dataclass(frozen=True, slots=True)
class Seen:
    """Record what a hand has shown of the opponent; a player learns from nothing else."""

    seat: int
    """Seat of the agent."""
    card: int
    """Card of the agent."""
    has_bet: int | None = None
    """Index of the opponent's action before any bet, in `OPEN`: 1 if it bet, 0 if it checked; None
    if it had no such decision."""
    has_called: int | None = None
    """Index of the opponent's action after a bet, in `FACING`: 1 if it called, 0 if it folded; None
    if it had no such decision."""
    shown: int | None = None
    """Card of the opponent, if there was a showdown."""

    def combined(self, later: "Seen") -> "Seen":
        """Return what this hand and a later one with the same deal have shown together."""
        fields = ("has_bet", "has_called", "shown")
        new = {name: getattr(later, name) for name in fields}
        return replace(self, **{name: each for name, each in new.items() if each is not None})


_SIDES: tuple[Side, Side] = (AGENT, OPPONENT)


@dataclass(frozen=True, slots=True)
class Hand:
    """Hold the chance events of one hand of a duel."""

    seat: int
    """Seat of the agent."""
    cards: tuple[int, int]
    """Cards of the agent and of the opponent."""


def deal(chance: Chance, seat: int) -> Hand:
    """Draw the cards of a hand."""
    card = chance.choose("my card", (1, 1, 1))
    theirs = chance.choose("opponent's card", tuple(int(each != card) for each in range(3)))
    return Hand(seat, (card, theirs))


class KuhnDuel(DuelSides):
    """Play a few hands between two policies."""

    hands: Sequence[Hand]
    """The seat and cards of each hand, in the order of play."""
    seen_now: Seen
    """What the current hand has shown of the opponent so far."""
    is_facing_bet: bool
    """Whether a player has bet in the current hand."""

    def __init__(self, game: Any, hands: Sequence[Hand], chance: Chance) -> None:
        super().__init__(chance)
        self._game, self.hands = game, hands
        self.hand = 0
        """Index of the current hand."""
        self.seen: list[Seen] = []
        """What each finished hand has shown of the opponent."""
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
        """Act in a hand; an invalid action loses the hand with two chips, the largest loss."""
        side, words = self.turn, self.legal_actions()
        assert side is not None, "the episode is done"
        if action not in words:
            self._mark_invalid(side)
            self._show(side, "invalid")
            self._show(other(side), "opp invalid")
            self._end_hand(-MAX_LOSS if side == AGENT else MAX_LOSS)
            return
        self._show(other(side), f"opp {action}")
        self._log[side].append(action)
        self._log[other(side)].append(f"opp {action}")
        choice = words.index(action)
        if side == OPPONENT:
            shown = {"has_called" if self.is_facing_bet else "has_bet": choice}
            self.seen_now = replace(self.seen_now, **shown)
        self.is_facing_bet = self.is_facing_bet or choice == 1
        self._state.apply_action(choice)
        if self._state.is_terminal():
            self._settle()

    def _begin_hand(self) -> None:
        """Deal the next hand, and show each side its seat and card."""
        hand = self.hands[self.hand]
        self._state, self.is_facing_bet = self._game.new_initial_state(), False
        self.seen_now = Seen(hand.seat, hand.cards[AGENT])
        for card in hand.cards if hand.seat == 0 else reversed(hand.cards):
            self._state.apply_action(card)
        self._log: list[list[str]] = []
        """What each side has seen of the current hand."""
        for side in _SIDES:
            position = POSITIONS[hand.seat if side == AGENT else 1 - hand.seat]
            text = f"you {position} {CARDS[hand.cards[side]]}"
            self._log.append([str(self.hand), text])
            self._show(side, text)

    def _settle(self) -> None:
        """End a hand by the rules: show the cards unless a player folded, and pay."""
        hand = self.hands[self.hand]
        is_fold = self.is_facing_bet and self._state.history()[-1] == 0
        for side in _SIDES:
            self._show(side, "" if is_fold else f"shown {CARDS[hand.cards[other(side)]]}")
        if not is_fold:
            self.seen_now = replace(self.seen_now, shown=hand.cards[OPPONENT])
        self._end_hand(int(self._state.returns()[hand.seat]))

    def _end_hand(self, chips: int) -> None:
        """Pay `chips` to the agent and the opposite to the opponent."""
        for side in _SIDES:
            won = chips if side == AGENT else -chips
            self._show(side, "win" if won > 0 else "lose", CHIPS[abs(won)])
            self._pay(side, float(won))
        self.seen.append(self.seen_now)
        self.hand += 1
        if self.hand < len(self.hands):
            self._begin_hand()


class KuhnPlay(DuelPlay):
    """Play a few hands against a hidden opponent. The anchor, which is equal for equal states, is
    the current hand.
    """

    def __init__(
        self,
        game: Any,
        opponent: Strategy,
        seat: int,
        num_hands: int,
        chance: Chance,
        stake: float = 1.0,
    ) -> None:
        self._hands: list[Hand] = []
        self._decisions: list[tuple[int, int]] = []
        """For each hand, whether the opponent would bet (0 or 1), and whether it would call."""
        for number in range(num_hands):
            hand = deal(chance, (seat + number) % 2)
            card, style = hand.cards[OPPONENT], opponent.in_seat(1 - hand.seat)
            bet_chance, call_chance = style.bets[card], style.calls[card]
            will_bet = chance.choose("would bet", (1 - bet_chance, bet_chance))
            will_call = chance.choose("would call", (1 - call_chance, call_chance))
            self._hands.append(hand)
            self._decisions.append((will_bet, will_call))
        self.duel, self._stake = KuhnDuel(game, self._hands, chance), stake
        super().__init__(self.duel, self._let_opponent_act)

    @property
    def card(self) -> int:
        """The agent's card in this hand."""
        return self._hands[self.duel.hand].cards[AGENT]

    def act(self, action: str) -> Outcome:
        """Act in a hand as `KuhnDuel.act` does, and multiply the reward by the stake."""
        outcome = super().act(action)
        return replace(outcome, reward=self._stake * outcome.reward)

    def _let_opponent_act(self) -> None:
        """Let the opponent bet or check, or call or fold, as was drawn for the hand."""
        will_bet, will_call = self._decisions[self.duel.hand]
        choice = will_call if self.duel.is_facing_bet else will_bet
        self.duel.act(self.duel.legal_actions()[choice])


# The code below computes the value of one hand. `weights` is float64 [P, 3]: the joint probability
# of each of P possible opponents and of its card (jack, queen, king). `bets` and `calls` are [P, 3]
# or a number: the probabilities that the opponent bets before any bet, and that it calls a bet.


Chances = np.ndarray | float
"""Probabilities by opponent and card, float64 [P, 3], or one number for all of them."""
_SIGNS = np.sign(np.subtract.outer(np.arange(3), np.arange(3))).astype(float)
"""Sign of the result of a showdown, float64 [3, 3], by [my card, other card]: 1 if my card wins, -1
if it loses.
"""


def _tables(opponents: Sequence[Strategy], seat: int) -> np.ndarray:
    """Return probabilities of betting and of calling in a seat: float64 [2, P, 3]."""
    styles = [opponent.in_seat(seat) for opponent in opponents]
    return np.array([[each.bets for each in styles], [each.calls for each in styles]], float)


def _dealt(belief: np.ndarray, card: int) -> np.ndarray:
    """Return the weights of a hand with `card` for a belief [P]: each deal has probability 1/6."""
    weights = np.repeat(belief[:, None] / 6, 3, axis=1)
    weights[:, card] = 0
    return weights


@dataclass(frozen=True, slots=True)
class _HandValue:
    """Compute the expected chips of the agent's decisions in a hand, with those of the hands after
    it.

    The agent plays optimally or, if `own` is given, by that strategy.
    """

    card: int
    """Card of the agent."""
    later: Callable[[np.ndarray], float] = lambda belief: 0.0
    """Returns the value of the later hands for an unnormalised belief over the opponents, [P]."""
    own: SeatStrategy | None = None

    def hand(self, seat: int, weights: np.ndarray, bets: Chances, calls: Chances) -> float:
        """Return the value of a whole hand, before any decision."""
        chance = self.own.bets[self.card] if self.own else None
        if seat == 0:
            return _decision_value(chance, self.bet(weights, calls), self.check(weights, bets))
        unbet = weights * (1 - bets)
        value = _decision_value(chance, self.bet(unbet, calls), self.showdown(unbet, 1))
        return value + self._face_bet(weights * bets)

    def bet(self, weights: np.ndarray, calls: Chances) -> float:
        """Return the value of betting."""
        return self.showdown(weights * calls, 2) + self.folded(weights * (1 - calls), 1)

    def check(self, weights: np.ndarray, bets: Chances) -> float:
        """Return the value of checking as the player that acts first."""
        return self.showdown(weights * (1 - bets), 1) + self._face_bet(weights * bets)

    def showdown(self, weights: np.ndarray, chips: int) -> float:
        """Return the value of showing the cards."""
        won = float((weights * (chips * _SIGNS[self.card])).sum())
        # Each of the opponent's cards leads to another belief.
        return won + sum(self.later(weights[:, card]) for card in range(3) if card != self.card)

    def folded(self, weights: np.ndarray, chips: int) -> float:
        """Return the value of a fold; `chips` is 1 if the opponent folds, -1 if the agent does."""
        return chips * float(weights.sum()) + self.later(weights.sum(1))

    def _face_bet(self, weights: np.ndarray) -> float:
        """Return the value of deciding between a call and a fold."""
        chance = self.own.calls[self.card] if self.own else None
        return _decision_value(chance, self.showdown(weights, 2), self.folded(weights, -1))


def _decision_value(chance: float | None, active: float, passive: float) -> float:
    """Return the value of a decision from the values of its actions.

    Args:
        chance: Probability of the active action; None if the better action is taken.
        active: Value of a bet or call.
        passive: Value of a check or fold.
    """
    return max(active, passive) if chance is None else chance * active + (1 - chance) * passive


# The code below models the opponent by Bayes' rule; the scripted player follows the model.


Deal = tuple[int, int]
"""Key of a deal: number of the episode that dealt it, and number of the hand."""

_SLIP = 0.05
"""Assumed probability that an opponent does the opposite of its strategy. With it, an opponent of
unknown strategy is still described by the nearest known one.
"""


class OpponentModel:
    """Infer the opponent's strategy from the hands by Bayes' rule, and advise on actions.

    The advice maximises the expected value of the current hand alone, and ignores what an action
    would reveal about the opponent.

    Args:
        prior: Possible opponents, `P` of them, all equally likely at first.
        slip: Probability that an opponent does not follow its strategy.
    """

    def __init__(self, prior: Sequence[Strategy], slip: float = _SLIP) -> None:
        self._tables = [slip + (1 - 2 * slip) * _tables(prior, seat) for seat in (0, 1)]
        self._uniform = np.full(len(prior), 1 / len(prior))
        self._seen: dict[Deal, Seen] = {}
        self._likelihoods: dict[Deal, np.ndarray] = {}

    def learn(self, deal: Deal, seen: Seen) -> None:
        """Add the observations of a hand to those of earlier hands with the same deal."""
        self._seen[deal] = combined = self._seen.get(deal, seen).combined(seen)
        # `belief` multiplies by the prior once. If the likelihood of each hand contained the prior
        # too, the product would underflow.
        self._likelihoods[deal] = self._weights(np.ones_like(self._uniform), combined).sum(1)

    def belief(self) -> np.ndarray:
        """Return the posterior over the opponents: float64 [P]."""
        weights = np.prod([self._uniform, *self._likelihoods.values()], axis=0)
        belief: np.ndarray = weights / weights.sum()
        return belief

    def bets_or_calls(self, deal: Deal, seen_now: Seen) -> bool:
        """Return whether to bet or, if the opponent has bet, to call."""
        known = self._seen.get(deal, seen_now)
        # Leave out the likelihood of this deal: its earlier observations are combined with the
        # current hand below, and would be counted twice.
        others = [each for number, each in self._likelihoods.items() if number != deal]
        weights = self._weights(np.prod([self._uniform, *others], axis=0), known.combined(seen_now))
        value = _HandValue(seen_now.card)
        if seen_now.has_bet:
            return value.showdown(weights, 2) > value.folded(weights, -1)
        bets, calls = self._tables[1 - seen_now.seat]
        # An earlier episode with the same deal may have shown the opponent's decision.
        bets = bets if known.has_bet is None else known.has_bet
        calls = calls if known.has_called is None else known.has_called
        passive = value.check(weights, bets) if seen_now.seat == 0 else value.showdown(weights, 1)
        return value.bet(weights, calls) > passive

    def _weights(self, belief: np.ndarray, seen: Seen) -> np.ndarray:
        """Return the joint weight of each opponent and its card after a hand: float64 [P, 3]."""
        weights = np.repeat(belief[:, None], 3, axis=1)
        weights[:, seen.card] = 0.0
        if seen.shown is not None:
            weights[:, [card for card in range(3) if card != seen.shown]] = 0.0
        choices = (seen.has_bet, seen.has_called)
        for choice, chances in zip(choices, self._tables[1 - seen.seat], strict=True):
            if choice is not None:
                weights *= chances if choice else 1 - chances
        return weights


def posterior(
    opponents: Sequence[Strategy], plays: Sequence[Play], *, redeals: bool
) -> dict[str, float]:
    """Return the probability of each opponent after the hands of a trial, under a uniform prior.

    If episodes repeat their deals, the opponent's decisions are repeated too, so a deal counts
    once.
    """
    model = OpponentModel(opponents, slip=0.0)
    for episode, play in enumerate(plays):
        assert isinstance(play, KuhnPlay)
        seen = [*play.duel.seen, play.duel.seen_now] if play.legal_actions() else play.duel.seen
        for hand, each in enumerate(seen):
            model.learn((episode if redeals else 0, hand), each)
    probabilities = model.belief().tolist()
    return dict(zip((each.name for each in opponents), probabilities, strict=True))


@dataclass(slots=True)
class KuhnScript(TrialScript[KuhnPlay]):
    """Bet and call with fixed probabilities by card, or as a model of the opponent advises.

    The model sees every hand of the trial, whichever rule chose the actions.
    """

    bets: Sequence[float]
    calls: Sequence[float]
    skill: float
    """Probability that the model decides a turn."""
    model: OpponentModel
    redeals: bool
    """Whether each episode has its own deals; if not, all repeat those of the first."""

    def action(self, play: KuhnPlay) -> str:
        """Return the next action."""
        for episode, each in enumerate(self.plays, 1):
            for hand, seen in enumerate(each.duel.seen):
                self.model.learn(self._deal_key(episode, hand), seen)
        words, chances = (FACING, self.calls) if play.duel.is_facing_bet else (OPEN, self.bets)
        if self.source.random() < self.skill:
            deal = self._deal_key(len(self.plays), play.duel.hand)
            return words[self.model.bets_or_calls(deal, play.duel.seen_now)]
        return words[self.source.random() < chances[play.card]]

    def _deal_key(self, episode: int, hand: int) -> Deal:
        """Return the key of the deal of a hand."""
        return (episode if self.redeals else 0, hand)


# The environment.


class Kuhn(Game[Strategy]):
    """Play Kuhn poker; the task variant is the opponent, such as `bet-jack-call-queen-king` or
    `maniac`. The task's seat is that of the first hand.

    Args:
        opponents: Set of opponents: `family`, the 32 deterministic strategies that, if they call
            with a card, call with every higher card too; `contrasts`, 16 of such patterns whose
            best responses differ most; `archetypes`, 14 named ones; or `mage`, the three of MAGE's
            code, with its greedy equilibrium and a mixed equilibrium held out.
        hands: Number of hands in an episode, at most four.
        redeals: Whether each episode has its own deals. If not, a trial repeats the first episode's
            deals and the opponent's decisions in them, as LaMer and MAGE restart a game.
        stakes: Value of a chip against the most expensive opponent of a split. It is 1 against the
            cheapest one, and rises in geometric steps. Observations do not show it.

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
        check_one_of("kuhn", "opponents", opponents, get_args(Opponents))
        # `one_episode`, an exact reference, takes about 20 times as long for each further hand: a
        # few seconds for four hands, and minutes for five.
        check_whole("kuhn", "hands", hands, 1, 4)
        check_flag("kuhn", "redeals", redeals)
        if not is_number(stakes) or stakes < 1:
            raise ConfigError(f"kuhn: `stakes` must be a number from 1, got {stakes!r}")
        self._num_hands, self._redeals, self._stakes = hands, redeals, stakes
        self._game = engine().load_game("kuhn_poker")
        words = (
            *(*OPEN, *FACING, *CARDS, *POSITIONS, *CHIPS.values()),
            *("you", "opp", "shown", "win", "lose", "invalid"),
        )
        # Seats alternate, and only the player that acts first can act twice in a hand.
        max_turns, most = hands + (hands + 1) // 2, float(MAX_LOSS * hands * stakes)
        facts = facts_of(
            "kuhn", max_turns, words, (-most, most), num_seats=2, units=hands, has_chance=True
        )
        self._by_split = _SPLITS[opponents]
        splits = {s: {each.name: each for each in every} for s, every in self._by_split.items()}
        super().__init__(facts, splits, "opponent")

    def family(self, member: str) -> str:
        """Return the kind of an opponent for reports: the cards that it calls with, or the name of
        an archetype.
        """
        return self.variant(member).family

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _RULES.format(hands=self._num_hands)

    def begin(self, task: Task, episode: int) -> KuhnPlay:
        """Deal the episode's hands, or the first episode's again."""
        chance = Chance(task.seed, episode if self._redeals else 0)
        opponent, stake = self.variant(task.member), self.stake(task.member)
        return KuhnPlay(self._game, opponent, task.seat, self._num_hands, chance, stake)

    def duel(self, task: Task, episode: int) -> KuhnDuel:
        """Deal the episode's hands, or the first episode's again, to two policies. A chip earns 1,
        whatever the stakes.
        """
        chance = Chance(task.seed, episode if self._redeals else 0)
        hands = [deal(chance, (task.seat + hand) % 2) for hand in range(self._num_hands)]
        return KuhnDuel(self._game, hands, chance)

    def stake(self, member: str) -> float:
        """Return the value of a chip against an opponent."""
        if self._stakes == 1.0:
            return 1.0
        opponent = self.variant(member)
        split = next(each for each in self._by_split.values() if opponent in each)
        place = split.index(opponent) * _STRIDE % len(split)
        return float(self._stakes ** (place / max(1, len(split) - 1)))

    def script(self, source: random.Random) -> KuhnScript:
        """Return a script with a style and a skill drawn for the trial. The styles are reasonable
        in half of the trials, arbitrary in the others.
        """
        bets, calls = (0.3, 0.3, 0.8), (0.1, 0.5, 1.0)
        if source.random() < 0.5:
            any_of = (0.1, 0.5, 0.9)
            bets, calls = (
                (source.choice(any_of), source.choice(any_of), source.choice(any_of))
                for _ in range(2)
            )
        skill = source.choice((0.3, 0.6, 0.9))
        model = OpponentModel(self._by_split["train"])
        return KuhnScript(source, bets, calls, skill, model, self._redeals)

    def overlap(self, one: Strategy, other: Strategy) -> int:
        """Return 1 if the opponents call with the same cards, else 0."""
        return int(one.family == other.family)

    def belief(self, split: Split) -> Belief:
        """Return the Bayes filter over what each hand has shown: cards and decisions."""
        return partial(posterior, self._by_split[split], redeals=self._redeals)

    def best_return(self, member: str) -> float:
        """Return the return of the best response. If episodes repeat their deals, return that of a
        player that also knows all cards and all decisions of the opponent.
        """
        best = best_response if self._redeals else hindsight
        return best((self.variant(member),)) * self._num_hands * self.stake(member)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return exact values per hand and episode; see the function `references`."""
        opponents = self._by_split[split]
        stakes = tuple(self.stake(each.name) for each in opponents)
        values = references(opponents, self._num_hands, redeals=self._redeals, stakes=stakes)
        return {name: (each,) * num_episodes for name, each in values.items()}


# The hidden opponents.


def _strategy(name: str, bets: ByCard, calls: ByCard, family: str = "") -> Strategy:
    """Return a strategy that is the same in both seats, by default of a family of its own."""
    style = SeatStrategy(bets, calls)
    return Strategy(name, family or name, style, style)


def _cards(chosen: ByCard) -> str:
    """Return cards as text, such as `queen-king`."""
    return "-".join(itertools.compress(CARDS, chosen)) or "none"


def _pattern(bets: ByCard, calls: ByCard) -> Strategy:
    """Return a strategy named after the cards with which it bets and calls."""
    family = f"call-{_cards(calls)}"
    return _strategy(f"bet-{_cards(bets)}-{family}", bets, calls, family)


_CALLS: tuple[ByCard, ...] = ((0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1))
"""Probabilities of calling: each entry calls with every card from some card on."""
_PATTERNS = tuple(
    _pattern((jack, queen, king), calls)
    for jack, queen, king in itertools.product((0, 1), repeat=3)
    for calls in _CALLS
)
"""All 32 opponents that always do the same with the same card."""
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
"""Names of the patterns that are held out."""

FAMILY_TRAIN = tuple(each for each in _PATTERNS if each.name not in _HELDOUT_PATTERNS)
"""Opponents to train on: 24 of the 32 patterns."""
FAMILY_HELDOUT = tuple(each for each in _PATTERNS if each.name in _HELDOUT_PATTERNS)
"""Held-out opponents: the other 8, drawn once and written out above."""

_CONTRASTING_BETS: tuple[ByCard, ...] = ((1, 0, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1))
_CONTRASTING_CALLS: tuple[ByCard, ...] = ((0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1))
_CONTRASTS = {
    (bets, calls): _pattern(_CONTRASTING_BETS[bets], _CONTRASTING_CALLS[calls])
    for bets, calls in itertools.product(range(4), repeat=2)
}
"""The 16 contrasting patterns, by their index in each of the two lists above."""
CONTRASTS_TRAIN = tuple(each for (bets, calls), each in _CONTRASTS.items() if (bets + calls) % 4)
"""Opponents to train on: 12 of 16 patterns whose best responses differ most. They bet with weak or
with strong cards, and call with none, the weak, the strong or all cards.
"""
CONTRASTS_HELDOUT = tuple(
    each for (bets, calls), each in _CONTRASTS.items() if not (bets + calls) % 4
)
"""Held-out opponents: the other 4, a Latin square: each way to bet and each way to call is equally
frequent in both splits.
"""


NASH = Strategy(
    "nash",
    "nash",
    SeatStrategy((1 / 3, 0, 1), (0, 2 / 3, 1)),
    SeatStrategy((1 / 3, 0, 1), (0, 1 / 3, 1)),
)
"""An equilibrium strategy: with a queen it calls more often if it acted first."""
UNIFORM = _strategy("uniform", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

ARCHETYPES_TRAIN = (
    _strategy("folder", (0, 0, 0), (0, 0, 0)),
    _strategy("tight", (0, 0, 1), (0, 0, 1)),
    _strategy("station", (0, 0, 0), (1, 1, 1)),
    _strategy("maniac", (1, 1, 1), (1, 1, 1)),
    _strategy("bluffer", (1, 1, 1), (0, 0, 0)),
    _strategy("slowplay", (0, 0, 0), (0, 0, 1)),
    _strategy("valuestation", (0, 0, 1), (1, 1, 1)),
    NASH,
)
"""Opponents to train on that stand for styles of play."""
ARCHETYPES_HELDOUT = (
    _strategy("tightman", (1, 1, 1), (0, 0, 1)),
    _strategy("intermediate", (0.5, 0, 1), (0, 0.5, 1)),
    _strategy("loose", (0, 0.5, 1), (0, 1, 1)),
    _strategy("wild", (1, 0, 1), (0, 0, 0)),
    _strategy("passive", (0, 0, 0), (0, 1, 1)),
    _strategy("semi", (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
)
"""Held-out opponents that stand for styles of play."""

MAGE_TRAIN = (
    _strategy("conservative", (0, 0, 1), (0, 0, 1)),
    _strategy("aggressive", (1, 1, 1), (0, 1, 1)),
    _strategy("intermediate", (0, 1, 1), (0, 0, 1)),
)
"""Opponents to train on, as in MAGE's code (arXiv 2603.03680)."""
CFR_GREEDY = Strategy(
    "cfr-greedy",
    "cfr-greedy",
    SeatStrategy((0, 0, 1), (0, 1, 1)),
    SeatStrategy((0, 0, 1), (0, 0, 1)),
)
"""Opponent in the validation of MAGE's code, which always takes the most probable move of a solved
equilibrium.
"""
MAGE_HELDOUT = (CFR_GREEDY, NASH)

_SPLITS: dict[Opponents, dict[Split, tuple[Strategy, ...]]] = {
    "family": {"train": FAMILY_TRAIN, "heldout": FAMILY_HELDOUT},
    "archetypes": {"train": ARCHETYPES_TRAIN, "heldout": ARCHETYPES_HELDOUT},
    "contrasts": {"train": CONTRASTS_TRAIN, "heldout": CONTRASTS_HELDOUT},
    "mage": {"train": MAGE_TRAIN, "heldout": MAGE_HELDOUT},
}


# The functions below compute exact values in chips per hand. The agent takes both seats equally
# often.


_SEATS = (0, 1)


def references(
    opponents: tuple[Strategy, ...],
    num_hands: int,
    *,
    redeals: bool = True,
    stakes: tuple[float, ...] = (),
) -> dict[str, float]:
    """Return values against a uniform draw of `opponents`, by name.

    `random` and `nash` always play the same; `best_fixed` is the best response to the whole
    mixture, the same in every hand; `without_memory` is the best player of a single episode of
    `num_hands` hands that knows the set of opponents; `best_response` knows the opponent. If
    episodes repeat their deals, `hindsight` also knows the cards and the opponent's decisions.

    Args:
        stakes: Value of a chip against each opponent; empty if it is 1 against all.
    """
    stakes = stakes or (1.0,) * len(opponents)

    def mean(value_of: Callable[[Strategy], float]) -> float:
        """Return the mean of a value in chips over the opponents, at their stakes."""
        return sum(
            stake * value_of(each) for stake, each in zip(stakes, opponents, strict=True)
        ) / len(opponents)

    known = {} if redeals else {"hindsight": mean(lambda each: hindsight((each,)))}
    return {
        "random": mean(partial(value, UNIFORM)),
        "nash": mean(partial(value, NASH)),
        "best_fixed": one_episode(opponents, 1, stakes),
        "without_memory": one_episode(opponents, num_hands, stakes),
        "best_response": mean(lambda each: best_response((each,))),
        **known,
    }


def value(own: Strategy, opponent: Strategy) -> float:
    """Return the expected chips per hand of one strategy against another."""
    return sum(value_in_seat(own, opponent, seat) for seat in _SEATS) / 2


def value_in_seat(own: Strategy, opponent: Strategy, seat: int) -> float:
    """Return the expected chips per hand of the strategy `own` in `seat`."""
    tables = _tables((opponent,), 1 - seat)
    hands = [_HandValue(card, own=own.in_seat(seat)) for card in range(3)]
    return sum(each.hand(seat, _dealt(np.ones(1), each.card), *tables) for each in hands)


def best_response(opponents: tuple[Strategy, ...]) -> float:
    """Return the value of the best strategy, the same in every hand, against a uniform draw."""
    return one_episode(opponents, 1)


@cache
def one_episode(
    opponents: tuple[Strategy, ...], num_hands: int, stakes: tuple[float, ...] = ()
) -> float:
    """Return the value per hand of the best play of `num_hands` hands, with alternating seats,
    against an unknown opponent.

    Args:
        stakes: Value of a chip against each opponent; empty if it is 1 against all.
    """
    tables = [_tables(opponents, 1 - seat) for seat in _SEATS]

    def best(belief: np.ndarray, seat: int, num_left: int) -> float:
        """Return the value of the remaining hands, times the probability of the hands so far."""
        if not num_left or not belief.any():
            return 0.0
        later = partial(best, seat=1 - seat, num_left=num_left - 1)
        hands = [_HandValue(card, later) for card in range(3)]
        return sum(each.hand(seat, _dealt(belief, each.card), *tables[seat]) for each in hands)

    # Values are linear in the belief, so the prior of each opponent can be multiplied by its stake.
    prior = np.array(stakes or (1.0,) * len(opponents)) / len(opponents)
    return sum(best(prior, seat, num_hands) for seat in _SEATS) / 2 / num_hands


# Cached, because a matchmaker needs the best return against every opponent at each draw.
@cache
def hindsight(opponents: tuple[Strategy, ...]) -> float:
    """Return the value per hand of a player that knows both cards and the opponent's decisions."""
    total = 0.0
    for opponent, seat in itertools.product(opponents, _SEATS):
        style = opponent.in_seat(1 - seat)
        for card, theirs in itertools.permutations(range(3), 2):
            bet_chance, call_chance = style.bets[theirs], style.calls[theirs]
            for will_bet, will_call in itertools.product((0, 1), repeat=2):
                bet_weight = bet_chance if will_bet else 1 - bet_chance
                call_weight = call_chance if will_call else 1 - call_chance
                weights = np.zeros((1, 3))
                weights[0, theirs] = bet_weight * call_weight / 6
                # The decisions are known, so their probabilities are 0 or 1.
                total += _HandValue(card).hand(seat, weights, will_bet, will_call)
    return total / 2 / len(opponents)
