"""Both seats of a game, played from outside."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.environments.catalogue import load
from mage_async.environments.environment import AGENT, RIVAL, Duel, Environment, Outcome
from mage_async.environments.kuhn.duel import Hand, KuhnDuel
from mage_async.environments.kuhn.game import Kuhn
from mage_async.environments.openspiel.engine import engine
from mage_async.trajectory import Task

ENVIRONMENTS = {name: load(name) for name in ("kuhn", "rps", "tictactoe", "openspiel")}
ENVIRONMENTS["tictactoe-news"] = load("tictactoe", view="news")
NAMES = tuple(ENVIRONMENTS)


def begin(environment: Environment, seed: int, seat: int, episode: int = 0) -> Duel:
    duel = environment.duel(Task(environment.facts.name, "policy-0", seed, seat), episode)
    assert duel is not None
    return duel


def played(duel: Duel, source: random.Random) -> tuple[list[list[str]], list[float], int]:
    """Random play, one action in eight invalid: what each side heard, earned; and turns."""
    heard: list[list[str]] = [[], []]
    earned, turns, asked = [0.0, 0.0], 0, {AGENT: False, RIVAL: False}

    def hear(side: int) -> Outcome:
        outcome = duel.hear(AGENT if side == 0 else RIVAL)
        heard[side].append(outcome.observation)
        earned[side] += outcome.reward
        return outcome

    while (side := duel.turn) is not None:
        outcome = hear(side)
        assert not outcome.is_done
        asked[side] = True
        legal = duel.legal_actions()
        assert legal
        duel.act("nonsense" if source.random() < 1 / 8 else source.choice(list(legal)))
        turns += 1
    for side in (0, 1):
        assert hear(side).is_done
    assert all(asked.values())
    assert not duel.legal_actions()
    return heard, earned, turns


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**40), episode=st.integers(0, 3), play=st.integers(0, 999))
def test_a_duel_ends_within_its_facts_and_says_only_known_words(
    name: str, seed: int, episode: int, play: int
) -> None:
    environment = ENVIRONMENTS[name]
    facts = environment.facts
    for seat in environment.seats():
        duel = begin(environment, seed, seat, episode)
        heard, earned, turns = played(duel, random.Random(play))
        assert turns <= 2 * facts.max_turns
        assert all(facts.min_return <= each <= facts.max_return for each in earned)
        if not facts.has_open_text:
            words = {word for side in heard for said in side for word in said.split()}
            assert words <= set(facts.words)
        again = played(begin(environment, seed, seat, episode), random.Random(play))
        assert again == (heard, earned, turns)


@pytest.mark.parametrize("name", ["kuhn", "tictactoe", "tictactoe-news", "openspiel"])
def test_what_one_side_wins_the_other_loses(name: str) -> None:
    for seed in range(50):
        _, earned, _ = played(begin(ENVIRONMENTS[name], seed, seed % 2), random.Random(seed))
        assert sum(earned) == 0


def test_both_seats_of_rock_paper_scissors_see_each_other() -> None:
    duel = begin(ENVIRONMENTS["rps"], 0, 0)
    for mine, theirs in (("rock", "paper"), ("nonsense", "rock"), ("rock", "lizard")):
        assert duel.turn == RIVAL  # who is asked first does not see what the other does
        duel.act(theirs)
        assert duel.hear(AGENT).observation == ""
        duel.act(mine)
        outcomes = duel.hear(AGENT), duel.hear(RIVAL)
        said = tuple((each.observation, each.reward, each.is_valid) for each in outcomes)
        if mine == "nonsense":
            wanted = ("opp rock invalid", -1.0, False), ("opp invalid win", 1.0, True)
        elif theirs == "lizard":
            wanted = ("opp invalid win", 1.0, True), ("opp rock invalid", -1.0, False)
        else:
            wanted = ("opp paper lose", -1.0, True), ("opp rock win", 1.0, True)
        assert said == wanted


def test_against_one_who_plays_a_rule_a_duel_says_what_the_play_says() -> None:
    environment = Kuhn(hands=3)
    source = random.Random(0)
    for seed in range(200):
        member = source.choice(environment.members("train"))
        task = Task("kuhn", member, seed, seed % 2)
        play = environment.begin(task, 0)
        deals = [(each.seat, (each.card, each.opponent_card)) for each in play._deals]
        hands = [Hand(seat, cards) for seat, cards in deals]
        duel = KuhnDuel(engine().load_game("kuhn_poker"), hands, play.chance)
        rivals = [(each.opponent_bets, each.opponent_calls) for each in play._deals]
        said = _rule_moves(duel, rivals)
        assert said.observation == play.observation
        while play.legal_actions():
            assert duel.legal_actions() == play.legal_actions()
            assert duel.anchor(AGENT) == play.anchor
            action = source.choice([*play.legal_actions(), "nonsense"])
            wanted = play.act(action)
            duel.act(action)
            assert _rule_moves(duel, rivals) == wanted
        assert duel.turn is None


def _rule_moves(duel: KuhnDuel, rivals: list[tuple[int, int]]) -> Outcome:
    """Let the rival do what the rule would; what the agent hears then."""
    while duel.turn == RIVAL:
        bets, calls = rivals[duel._hand]
        words = duel.legal_actions()
        duel.act(words[calls if words[0] == "fold" else bets])
    return duel.hear(AGENT)


def test_an_environment_without_a_second_seat_has_no_duel() -> None:
    assert load("scout").duel(Task("scout", "x", 0), 0) is None
