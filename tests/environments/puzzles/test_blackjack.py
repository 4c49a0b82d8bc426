"""Blackjack with a stacked deck: hands that repeat, and what they are worth."""

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games import blackjack
from mage_async.environments.games.blackjack import (
    MAX_HITS,
    Blackjack,
    best_hits,
    deal,
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
    with pytest.raises(EnvironmentFault, match="no deck is called 'deck-512', as is "):
        Blackjack().begin(Task("blackjack", "deck-512", 0), 0)
