"""Play Blackjack: a few hands from a stacked deck.

Rules: hit for another card or stand; the dealer draws up to 17. The higher total that is not above
21 wins 1, the lower loses 1. The order of the cards is hidden: every episode of a trial deals the
same cards in the same order. Hands that cannot be won are never dealt, so a player that knows the
deck wins every hand.

`BlackjackPick` is another game, ORBIT's (arXiv 2602.04089): one hand, for which the agent picks
cards from a deck that lies face down.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import combinations_with_replacement

from mage_async.environments.environment import Chance, Outcome, Split, check_whole, numbered
from mage_async.environments.games.game import Game, SoloPlay, TrialScript, facts_of, num_equal
from mage_async.trajectory import Task

RANKS = (2, 3, 4, 5, 6, 7, 8, 9, 10)
WEIGHTS = (1, 1, 1, 1, 1, 1, 1, 1, 4)
"""Relative frequency of each rank. A ten is a ten, jack, queen or king; there are no aces."""
MAX_TOTAL = 21
"""Total above which a hand is bust."""
DEALER_STANDS = 17
"""Total at which the dealer stands."""
MAX_HITS = 4
"""Largest number of hits."""

HIT, STAND = "hit", "stand"
ACTIONS = (HIT, STAND)
RESULTS = {1: "win", 0: "draw", -1: "lose"}
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
NUMBERS = (
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
DEALER, BUST, OVER, INVALID = "dealer", "bust", "over", "invalid"

_RULES = """Blackjack, {hands} hands an episode. You see your total and one card of the dealer.
Say hit for another card, or stand. A total above 21 is bust and loses; after four hits you stand.
The dealer draws up to 17. The higher total wins 1, the lower loses 1. Every hand can be won.
Every episode deals the same cards in the same order."""


@dataclass(frozen=True, slots=True)
class Hand:
    """Hold the fixed cards of one hand."""

    totals: tuple[int, ...]
    """Player's total after each number of hits, up to the first total above 21."""
    shows: int
    """Value of the dealer's open card."""
    dealer: int
    """Final total of the dealer."""

    def result(self, num_hits: int) -> int:
        """Return 1, 0 or -1 for standing after `num_hits` hits."""
        return result(self.totals[num_hits], self.dealer)

    def results(self) -> list[int]:
        """Return the result of each number of hits."""
        return [result(total, self.dealer) for total in self.totals]


class BlackjackPlay(SoloPlay):
    """Play hands, one after the other. The anchor, which is equal for equal states, is the number
    of the hand and the number of hits in it.
    """

    def __init__(self, hands: Sequence[Hand], chance: Chance) -> None:
        self._hands, self.chance = hands, chance
        self.number, self.hits = 0, 0
        self.observation = self._dealt()
        self.seen: list[tuple[list[int], int]] = []
        """For each finished hand, the player's totals that were seen, and the dealer's total."""

    @property
    def anchor(self) -> str:
        """Number of the hand, and number of hits in it."""
        return f"{self.number} {self.hits}"

    @property
    def hand(self) -> Hand:
        """The current hand."""
        return self._hands[self.number]

    def actions(self) -> Sequence[str]:
        """Return hit and stand."""
        return ACTIONS

    def apply(self, action: str) -> Outcome:
        """Hit or stand; an invalid action loses the hand."""
        is_valid = action in ACTIONS
        self.hits += action == HIT
        total = self.hand.totals[self.hits]
        shown = _number(total) if is_valid else INVALID
        if action == HIT and total <= MAX_TOTAL and self.hits < MAX_HITS:
            return Outcome(shown, 0.0)
        earned = self.hand.result(self.hits) if is_valid else -1
        ended = f"{DEALER} {_number(self.hand.dealer)} {RESULTS[earned]}"
        self.seen.append((list(self.hand.totals[: self.hits + 1]), self.hand.dealer))
        self.number, self.hits = self.number + 1, 0
        is_done = self.number == len(self._hands)
        observation = f"{shown} {ended} {OVER if is_done else self._dealt()}"
        return Outcome(observation, float(earned), is_valid, is_done)

    def _dealt(self) -> str:
        """Return the text of a new hand: its number, the player's total, the dealer's open card."""
        hand = self.hand
        return f"{ORDINALS[self.number]} {_number(hand.totals[0])} {DEALER} {_number(hand.shows)}"


def _number(total: int) -> str:
    """Return a total in words."""
    if total > MAX_TOTAL:
        return BUST
    return NUMBERS[total - 2] if total <= 20 else "twenty one"


@dataclass(slots=True)
class BlackjackScript(TrialScript[BlackjackPlay]):
    """Play an unknown hand in the best way, and a remembered hand by its remembered cards."""

    care: float
    """Probability of not playing at random."""
    memory: float
    """Probability of using earlier episodes for a hand."""
    _planned_hits: int | None = None
    """Number of hits to take in the current hand; None if no earlier episode is used for it."""

    def action(self, play: BlackjackPlay) -> str:
        """Return hit or stand."""
        if not play.hits:
            uses_memory = self.source.random() < self.memory
            self._planned_hits = self._plan(play) if uses_memory else None
        if self.source.random() >= self.care:
            return self.source.choice(ACTIONS)
        if self._planned_hits is not None:
            return HIT if play.hits < self._planned_hits else STAND
        total = play.hand.totals[play.hits]
        return HIT if should_hit(total, play.hand.shows, play.hits) else STAND

    def _plan(self, play: BlackjackPlay) -> int | None:
        """Return the number of hits that has won or, if none has, one more than the largest number
        that was tried; None in the first episode.
        """
        seen = [each.seen[play.number] for each in self.plays[:-1]]
        if not seen:
            return None
        totals, dealer = max(seen, key=lambda each: len(each[0]))
        results = [result(total, dealer) for total in totals]
        # Every hand can be won. If no total has won yet, a later one does, so the next card is no
        # bust.
        return results.index(1) if 1 in results else len(totals)


class Blackjack(Game[str]):
    """Play Blackjack; the task variant is a deck, such as `deck-17`.

    Args:
        hands: Number of hands in an episode.
        decks: Number of decks, a quarter of them held out.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(self, hands: int = 3, decks: int = 512) -> None:
        check_whole("blackjack", "hands", hands, 1, len(ORDINALS))
        check_whole("blackjack", "decks", decks, 8, 1_000_000)
        self._num_hands = hands
        words = (
            *(*ACTIONS, "one", *NUMBERS, *ORDINALS[:hands]),
            *(*RESULTS.values(), DEALER, BUST, OVER, INVALID),
        )
        returns = (-float(hands), float(hands))
        # A hand ends after `MAX_HITS` hits, if it has not ended before.
        facts = facts_of("blackjack", MAX_HITS * hands, words, returns, units=hands)
        super().__init__(facts, numbered("deck", decks), "deck")

    def family(self, member: str) -> str:
        """Return `easy-N`: the best player without memory wins N hands of the deck."""
        return f"easy-{sum(hand.result(best_hits(hand)) > 0 for hand in self.hands(member))}"

    def hands(self, member: str) -> tuple[Hand, ...]:
        """Return the hands that a deck deals."""
        return deal(self.variant(member), self._num_hands)

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _RULES.format(hands=self._num_hands)

    def begin(self, task: Task, episode: int) -> BlackjackPlay:
        """Deal the first hand."""
        return BlackjackPlay(self.hands(task.member), Chance(task.seed, episode))

    def script(self, source: random.Random) -> BlackjackScript:
        """Return a script whose care and memory are drawn for the trial."""
        care, memory = source.choice((0.5, 0.8)), source.choice((0.0, 0.5, 0.95))
        return BlackjackScript(source, care, memory)

    def overlap(self, one: str, other: str) -> int:
        """Return the number of hands for which both decks show the same cards at first."""
        decks = self.hands(one), self.hands(other)
        return num_equal(*([(hand.totals[0], hand.shows) for hand in hands] for hands in decks))

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return values per hand and episode: `solver` is a mean over 200 scripted trials, the
        others are exact.

        `random` hits and stands with equal probability. `without_memory` plays best while all cards
        are unknown; `solver` does so in the first episode. Later it repeats the number of hits that
        has won, or takes one hit more if none has. `known` knows the deck, and wins every hand.
        """
        hands = [hand for deck in self._splits[split] for hand in self.hands(deck)]
        unknown = sum(hand.result(best_hits(hand)) for hand in hands) / len(hands)
        solver = partial(BlackjackScript, care=1.0, memory=1.0)
        return {
            "random": (sum(map(by_chance, hands)) / len(hands),) * num_episodes,
            "without_memory": (unknown,) * num_episodes,
            **self.measured(split, num_episodes, solver=solver),
            "known": (1.0,) * num_episodes,
        }


def result(total: int, dealer: int) -> int:
    """Return 1 for a win, 0 for a draw, -1 for a loss; a total above 21 always loses."""
    if total > MAX_TOTAL:
        return -1
    if total == dealer:
        return 0
    return 1 if dealer > MAX_TOTAL or total > dealer else -1


@lru_cache(maxsize=4096)
def deal(name: str, num_hands: int) -> tuple[Hand, ...]:
    """Return the hands of a deck; the deck's name is the seed of its stacking."""
    source = random.Random(f"blackjack/{name}")
    return tuple(_hand(source) for _ in range(num_hands))


def _hand(source: random.Random) -> Hand:
    """Draw hands until one can be won, and return it."""
    while True:
        cards = source.choices(RANKS, WEIGHTS, k=2 + MAX_HITS)
        totals = [sum(cards[: 2 + hits]) for hits in range(MAX_HITS + 1)]
        num_not_bust = sum(total <= MAX_TOTAL for total in totals)
        shows = dealer = source.choices(RANKS, WEIGHTS)[0]
        while dealer < DEALER_STANDS:
            dealer += source.choices(RANKS, WEIGHTS)[0]
        hand = Hand(tuple(totals[: num_not_bust + 1]), shows, dealer)
        if max(hand.results()) == 1:
            return hand


def by_chance(hand: Hand) -> float:
    """Return the expected result of a player that hits or stands with equal probability."""
    # From the last number of hits back to none: stand now, or take one hit more.
    *earlier, expected = map(float, hand.results())
    for standing in reversed(earlier):
        expected = 0.5 * standing + 0.5 * expected
    return expected


# The best player of unknown hands, by dynamic programming. A hand is dealt only if some number of
# hits wins it, that is, if its largest total that is not bust beats the dealer's. So the expected
# result of hitting or standing is an average over those continuations c of the cards seen that can
# be dealt:
#
#     sum of P(c) P(winnable | c) result(c)  /  sum of P(c) P(winnable | c)
#
# The functions below compute the numerator. The denominator is the probability that the hand can be
# won given the cards seen. It is the same for hitting and standing, so it need not be known to
# compare them.


_CARDS = tuple((rank, weight / sum(WEIGHTS)) for rank, weight in zip(RANKS, WEIGHTS, strict=True))
"""Each rank with its probability."""


def best_hits(hand: Hand) -> int:
    """Return the number of hits of the best player that does not know the deck."""
    hits = 0
    while hits < len(hand.totals) - 1 and should_hit(hand.totals[hits], hand.shows, hits):
        hits += 1
    return hits


@cache
def should_hit(total: int, shows: int, num_hits: int) -> bool:
    """Return whether another card has a higher expected result than standing, in an unknown
    hand.
    """
    if num_hits == MAX_HITS or total > MAX_TOTAL:
        return False
    return _after_hit(total, shows, num_hits) > _standing(total, shows, num_hits)


@cache
def _value(total: int, shows: int, num_hits: int) -> float:
    """Return the best expected result, times the probability that the hand can be won."""
    standing = _standing(total, shows, num_hits)
    return standing if num_hits == MAX_HITS else max(standing, _after_hit(total, shows, num_hits))


def _after_hit(total: int, shows: int, num_hits: int) -> float:
    """Return `_value` averaged over the next card; a bust loses."""
    # After a bust no further card can win the hand, so it can be won only if `total` itself beats
    # the dealer's. `_winnable` with `MAX_HITS` hits draws no further card.
    return sum(
        chance * _value(total + rank, shows, num_hits + 1)
        if total + rank <= MAX_TOTAL
        else -chance * _winnable(total, shows, MAX_HITS)
        for rank, chance in _CARDS
    )


@cache
def _standing(total: int, shows: int, num_hits: int) -> float:
    """Return the expected result of standing, times the probability that the hand can be won."""
    return sum(
        chance * result(total, dealer) * _win_chance(total, dealer, num_hits)
        for dealer, chance in _dealer_totals(shows)
    )


@cache
def _winnable(total: int, shows: int, num_hits: int) -> float:
    """Return the probability that the hand can be won, after `num_hits` of `MAX_HITS` hits."""
    return sum(
        chance * _win_chance(total, dealer, num_hits) for dealer, chance in _dealer_totals(shows)
    )


@cache
def _win_chance(total: int, dealer: int, num_hits: int) -> float:
    """Return the probability that the largest total that is not bust beats the dealer's."""
    if num_hits == MAX_HITS:
        return float(result(total, dealer) > 0)
    return sum(
        chance * _win_chance(total + rank, dealer, num_hits + 1)
        if total + rank <= MAX_TOTAL
        else chance * _win_chance(total, dealer, MAX_HITS)
        for rank, chance in _CARDS
    )


def _dealer_totals(shows: int, chance: float = 1.0) -> Iterator[tuple[int, float]]:
    """Yield the dealer's final totals with the probability of each way to reach them.

    Args:
        shows: Total of the dealer so far, at first the open card.
        chance: Probability of that total.
    """
    if shows >= DEALER_STANDS:
        yield shows, chance
        return
    for rank, each in _CARDS:
        yield from _dealer_totals(shows + rank, chance * each)


# ORBIT's game: the cards lie face down, and the agent picks which ones to take.


ACE, PLAYER, TOTAL = "ace", "player", "total"
FACE_DOWN = tuple(row + column for row in "abcdef" for column in "abcdefgh")
"""Names of the 48 cards that lie face down."""
_PICK_RULES = """Blackjack with 48 cards face down. You see your two cards, your total and one of
the dealer's two cards. Say stand, or the name of a card to take it.
A card's name has two letters: its row, from a to f, then its column, from a to h.
An ace counts 1, or 11 if the total is then at most 21. A total above 21 is bust and loses.
The dealer takes no card. If you stand with the higher total you win 1; nothing else pays.
You have {turns} turns. The cards, and where they lie, are the same in all episodes."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Hold the cards of a deal, from 1 to 10."""

    dealer: tuple[int, ...]
    player: tuple[int, ...]
    face_down: Mapping[str, int]
    """Cards by their names."""

    def can_win(self, turns: int) -> bool:
        """Return whether the dealer can be beaten with fewer face-down cards than turns, because
        standing takes a turn too.
        """
        dealer = hand_total(self.dealer)
        # Here a value may be taken more often than it lies on the table. A test checks for four
        # turns that the real cards give the same result.
        # A dealer with 21 cannot be beaten, and trying all choices takes too long with many turns.
        return dealer < MAX_TOTAL and any(
            dealer < hand_total((*self.player, *taken)) <= MAX_TOTAL
            for count in range(turns)
            for taken in combinations_with_replacement(sorted(set(self.face_down.values())), count)
        )


def hand_total(cards: Sequence[int]) -> int:
    """Return the total of a hand, where one ace counts 11 unless that is bust."""
    total = sum(cards)
    return total + 10 if 1 in cards and total + 10 <= MAX_TOTAL else total


class PickPlay(SoloPlay):
    """Take cards, then stand. The anchor, which is equal for equal states, is the cards taken."""

    def __init__(self, table: Deal, turns: int, chance: Chance) -> None:
        self._table, self.turns_left, self.chance = table, turns, chance
        self.taken: dict[str, int] = {}
        """Cards taken, by name."""
        shown = f"{DEALER} {_card(table.dealer[0])} {PLAYER} {' '.join(map(_card, table.player))}"
        self.observation = f"{shown} {TOTAL} {_number(self.total())}"

    @property
    def anchor(self) -> str:
        """Names of the cards taken."""
        return " ".join(sorted(self.taken))

    def total(self, *more: int) -> int:
        """Return the agent's total, with `more` cards added."""
        return hand_total((*self._table.player, *self.taken.values(), *more))

    def dealer_total(self) -> int:
        """Return the total of the dealer, which an episode shows at its end."""
        return hand_total(self._table.dealer)

    def actions(self) -> Sequence[str]:
        """Return standing, and the cards that lie face down."""
        return (STAND, *(card for card in FACE_DOWN if card not in self.taken))

    def apply(self, action: str) -> Outcome:
        """Take a card or stand; an invalid action only uses up a turn."""
        self.turns_left -= 1
        is_valid = action in self.actions()
        shown = [] if is_valid else [INVALID]
        if is_valid and action != STAND:
            card = self.taken[action] = self._table.face_down[action]
            shown = [_card(card), TOTAL, _number(self.total())]
        is_bust = self.total() > MAX_TOTAL
        if action != STAND and not is_bust and self.turns_left:
            return Outcome(" ".join(shown), 0.0, is_valid)
        is_won = action == STAND and self.total() > self.dealer_total()
        end = () if action == STAND or is_bust else (OVER,)
        dealer = (DEALER, *map(_card, self._table.dealer), RESULTS[1 if is_won else -1])
        return Outcome(" ".join((*shown, *end, *dealer)), float(is_won), is_valid, is_done=True)


def _card(card: int) -> str:
    """Return a card in words."""
    return ACE if card == 1 else _number(card)


@dataclass(slots=True)
class PickScript(TrialScript[PickPlay]):
    """Take the known card that beats the dealer's total of an earlier episode, else an unknown
    one.
    """

    care: float
    """Probability of not playing at random."""
    remembers: bool
    """Whether earlier episodes are used."""

    def action(self, play: PickPlay) -> str:
        """Return a card or stand."""
        if self.source.random() >= self.care:
            return self.source.choice(play.actions())
        earlier = self.plays[:-1] if self.remembers else []
        # The dealer has at least 17.
        to_beat = play.dealer_total() if earlier else DEALER_STANDS
        if play.total() > to_beat or play.turns_left == 1:
            return STAND
        known = {card: value for each in earlier for card, value in each.taken.items()}
        left = [card for card in FACE_DOWN if card not in play.taken]
        for card in left:
            if card in known and to_beat < play.total(known[card]) <= MAX_TOTAL:
                return card
        return self.source.choice([card for card in left if card not in known] or left)


class BlackjackPick(Game[str]):
    """Play Blackjack with cards face down, of which the agent picks; the task variant is a deck,
    such as `deck-17`.

    The dealer has at least 17, and in some decks 21, which cannot be beaten.

    Args:
        turns: Number of turns of an episode; standing is one.
        decks: Number of decks, a quarter of them held out.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(self, turns: int = 4, decks: int = 512) -> None:
        check_whole("blackjack_pick", "turns", turns, 2, len(FACE_DOWN))
        check_whole("blackjack_pick", "decks", decks, 8, 1_000_000)
        self._turns = turns
        words = (
            *(STAND, *FACE_DOWN, ACE, "one", *NUMBERS, DEALER, PLAYER, TOTAL),
            *(BUST, OVER, RESULTS[1], RESULTS[-1], INVALID),
        )
        facts = facts_of("blackjack_pick", turns, words, threshold=0.5)
        super().__init__(facts, numbered("deck", decks), "deck")

    def table(self, member: str) -> Deal:
        """Return the cards of a deck."""
        return lay_out(self.variant(member))

    def family(self, member: str) -> str:
        """Return the dealer's total, as in `dealer-18`."""
        return f"dealer-{hand_total(self.table(member).dealer)}"

    def rules(self) -> str:
        """Return the rules in plain words."""
        return _PICK_RULES.format(turns=self._turns)

    def begin(self, task: Task, episode: int) -> PickPlay:
        """Show the first cards."""
        return PickPlay(self.table(task.member), self._turns, Chance(task.seed, episode))

    def script(self, source: random.Random) -> PickScript:
        """Return a script whose care is drawn for the trial; three in four remember."""
        return PickScript(source, source.choice((0.5, 0.9)), source.random() < 0.75)

    def overlap(self, one: str, other: str) -> int:
        """Return the number of places with equal cards."""
        return num_equal(*(tuple(self.table(each).face_down.values()) for each in (one, other)))

    def best_return(self, member: str) -> float:
        """Return 1 if the deck can be won, else 0."""
        return float(self.table(member).can_win(self._turns))

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return values per episode: `known` is exact, the others are means over 200 scripted
        trials.

        `random` takes any action. `solver_without_memory` takes unknown cards up to a total above
        17; `solver` knows the cards and the dealer's total of earlier episodes. `known` wins every
        deck that can be won.
        """
        best = [self.best_return(each) for each in self.members(split)]
        return {
            **self.measured(
                split,
                num_episodes,
                random=partial(PickScript, care=0.0, remembers=False),
                solver_without_memory=partial(PickScript, care=1.0, remembers=False),
                solver=partial(PickScript, care=1.0, remembers=True),
            ),
            "known": (sum(best) / len(best),) * num_episodes,
        }


@lru_cache(maxsize=4096)
def lay_out(name: str) -> Deal:
    """Return the cards of a deck; the deck's name is the seed. The dealer has at least 17."""
    source, deck = random.Random(f"blackjack_pick/{name}"), [1, *RANKS, 10, 10, 10] * 4
    dealer = 0
    while dealer < DEALER_STANDS:
        source.shuffle(deck)
        dealer = hand_total(deck[:2])
    cards = dict(zip(FACE_DOWN, deck[4:], strict=True))
    return Deal(tuple(deck[:2]), tuple(deck[2:4]), cards)
