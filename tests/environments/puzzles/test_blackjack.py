"""Blackjack with a stacked deck: hands that repeat, and what they are worth."""

import itertools

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games import blackjack
from mage_async.environments.games.blackjack import (
    MAX_HITS,
    Blackjack,
    BlackjackPick,
    best_hits,
    deal,
    hand_total,
    should_hit,
)
from mage_async.errors import EnvironmentFault
from mage_async.trajectory import Task

SPLITS: tuple[Split, ...] = ("train", "heldout")


def expected_return() -> float:
    """Return the expected return per hand of the best player of unknown hands."""
    begun = [
        (one * two * three, first + second, shows)
        for first, one in blackjack._CARDS
        for second, two in blackjack._CARDS
        for shows, three in blackjack._CARDS
    ]
    earned = sum(chance * blackjack._value(total, shows, 0) for chance, total, shows in begun)
    return earned / sum(
        chance * blackjack._winnable(total, shows, 0) for chance, total, shows in begun
    )


def test_a_hand_is_the_same_whatever_was_done_before() -> None:
    game = Blackjack()
    first, second = (game.begin(Task("blackjack", "deck-7", seed), seed) for seed in range(2))
    while first.number == 0:
        said_first = first.act("hit").observation
    said_second = second.act("stand").observation
    assert said_first.partition("second")[2] == said_second.partition("second")[2] != ""


def test_a_bust_loses_also_where_the_dealer_is_bust() -> None:
    game = Blackjack()
    play = game.begin(Task("blackjack", "deck-3", 0), 0)
    assert play.observation == "first seventeen dealer ten"
    outcome = play.act("hit")
    assert outcome.observation == "bust dealer bust lose second twelve dealer four"
    assert outcome.reward == -1


def test_what_is_no_action_loses_the_hand() -> None:
    outcome = Blackjack().begin(Task("blackjack", "deck-3", 0), 0).act("fold")
    assert (outcome.reward, outcome.is_valid) == (-1, False)
    assert outcome.observation.startswith("invalid dealer bust lose second")


def test_every_hand_can_be_won_and_totals_end_with_the_first_bust() -> None:
    hands = [hand for number in range(300) for hand in deal(f"deck-{number}", 3)]
    for hand in hands:
        assert max(hand.results()) == 1
        assert hand.dealer >= 17
        assert all(total <= 21 for total in hand.totals[:-1])
        assert hand.totals[-1] > 21 or len(hand.totals) == MAX_HITS + 1


def test_the_best_play_of_unknown_hands_earns_what_its_value_says() -> None:
    hands = [deal(f"test-{number}", 1)[0] for number in range(4000)]
    played = sum(hand.result(best_hits(hand)) for hand in hands) / len(hands)
    assert played == pytest.approx(expected_return(), abs=0.035)  # 2.9 standard errors
    assert expected_return() == pytest.approx(0.6478, abs=1e-4)


def test_the_best_play_of_unknown_hands_is_that_of_a_person() -> None:
    assert should_hit(5, 10, 0)
    assert should_hit(12, 10, 0)
    assert not should_hit(18, 10, 0)
    assert not should_hit(5, 10, MAX_HITS)


@pytest.mark.parametrize("split", SPLITS)
def test_a_solver_that_remembers_comes_near_to_knowing_the_deck(split: Split) -> None:
    known = Blackjack().references(split, 3)
    first, *_, last = known["solver"]
    # A hand has at most `MAX_HITS` numbers of hits that have not won, and is won after them.
    assert Blackjack().references(split, MAX_HITS + 2)["solver"][-1] == 1.0
    assert known["random"][0] < known["without_memory"][0]
    assert first == pytest.approx(known["without_memory"][0], abs=0.1)
    assert last > 0.9
    assert known["known"] == (1.0, 1.0, 1.0)


def test_swapped_decks_do_not_look_alike() -> None:
    game = Blackjack()
    for member in game.members("heldout")[:20]:
        for other in game.swaps(member, "heldout"):
            pairs = zip(game.hands(member), game.hands(other), strict=True)
            assert all((a.totals[0], a.shows) != (b.totals[0], b.shows) for a, b in pairs)


def test_an_unknown_deck_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="no deck is called 'deck-512'; one is called "):
        Blackjack().begin(Task("blackjack", "deck-512", 0), 0)


def test_an_ace_counts_eleven_unless_that_is_bust() -> None:
    hands = [(1, 10), (1, 9, 1), (1, 10, 10), (1, 1), (10, 6, 5)]
    assert [hand_total(hand) for hand in hands] == [21, 21, 21, 12, 21]


def test_cards_are_picked_from_where_they_lie_in_all_episodes() -> None:
    game = BlackjackPick()
    table = game.table("deck-3")
    for episode in range(2):
        play = game.begin(Task("blackjack_pick", "deck-3", 0), episode)
        assert play.observation == "dealer ten player two ace total thirteen"
        outcome = play.act("ab")
        assert (outcome.observation, outcome.reward) == ("eight total twenty one", 0.0)
        assert not play.act("ab").is_valid
        outcome = play.act("stand")
        assert (outcome.observation, outcome.reward) == ("dealer ten seven win", 1.0)
    assert (table.dealer, table.player, table.face_down["ab"]) == ((10, 7), (2, 1), 8)


def test_who_does_not_stand_in_time_loses() -> None:
    play = BlackjackPick(turns=2).begin(Task("blackjack_pick", "deck-3", 0), 0)
    outcomes = [play.act("no"), play.act("ab")]
    assert outcomes[1].observation == "eight total twenty one over dealer ten seven lose"
    assert [(each.reward, each.is_done) for each in outcomes] == [(0.0, False), (0.0, True)]


def test_every_deck_can_be_won_unless_the_dealer_has_21() -> None:
    game = BlackjackPick()
    for member in game.members("train"):
        table = game.table(member)
        cards = sorted((*table.dealer, *table.player, *table.face_down.values()))
        assert cards == sorted([*range(1, 11), 10, 10, 10] * 4)
        dealer = hand_total(table.dealer)
        assert dealer >= 17
        # With real cards, not values alone.
        values = list(table.face_down.values())
        picks = (pick for count in range(4) for pick in itertools.combinations(values, count))
        can_win = any(dealer < hand_total((*table.player, *pick)) <= 21 for pick in picks)
        assert can_win == (dealer < 21) == game.best_return(member)


@pytest.mark.timeout(30)
def test_a_deck_is_judged_soon_however_many_cards_may_be_taken() -> None:
    game, shorter = BlackjackPick(turns=48), BlackjackPick()
    for member in game.members("heldout"):
        assert game.best_return(member) == shorter.best_return(member)


def test_a_solver_that_remembers_wins_more_decks_later() -> None:
    known = BlackjackPick().references("heldout", 3)
    assert known["random"][0] < 0.05 < known["solver_without_memory"][0] < 0.4
    assert known["solver_without_memory"][0] == known["solver"][0] < known["solver"][2] - 0.2
