"""Kuhn poker: its hands, and its values against OpenSpiel's own solvers."""

import itertools
import random
from collections import Counter
from operator import attrgetter
from typing import Any

import pyspiel
import pytest
from open_spiel.python import policy
from open_spiel.python.algorithms import best_response as spiel_best_response
from open_spiel.python.algorithms import cfr, expected_game_score, exploitability

from mage_async.environments.games.kuhn import (
    ARCHETYPES_HELDOUT,
    ARCHETYPES_TRAIN,
    CONTRASTS_HELDOUT,
    CONTRASTS_TRAIN,
    FAMILY_HELDOUT,
    FAMILY_TRAIN,
    NASH,
    UNIFORM,
    Kuhn,
    OpponentModel,
    Seen,
    Strategy,
    best_response,
    hindsight,
    one_episode,
    references,
    value,
    value_in_seat,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

ALL = FAMILY_TRAIN + FAMILY_HELDOUT + ARCHETYPES_TRAIN + ARCHETYPES_HELDOUT
GAME = pyspiel.load_game("kuhn_poker")


class Spiel(policy.Policy):
    """A player of ours as OpenSpiel's policy, in both seats."""

    def __init__(self, player: Strategy) -> None:
        super().__init__(GAME, [0, 1])
        self._player = player

    def action_probabilities(self, state: Any, player_id: int | None = None) -> dict[int, float]:
        seat = state.current_player() if player_id is None else player_id
        cards, spoken = state.history()[:2], state.history()[2:]
        style = self._player.in_seat(seat)
        active = (style.calls if 1 in spoken else style.bets)[cards[seat]]
        return {0: 1 - active, 1: active}


def hands(member: str, actions: list[str], cards: list[tuple[str, str]], **options: Any) -> Any:
    """Play a hand, in the seat and with the cards found by trying seeds; say all that is said."""
    kuhn = Kuhn(**options)
    names = ("jack", "queen", "king")
    wanted = [
        draw
        for card, other in cards
        for draw in (f"my card={names.index(card)}", f"opponent's card={names.index(other)}")
    ]
    for seed in itertools.count():
        play = kuhn.begin(Task("kuhn", member, seed), 0)
        dealt = [draw for draw in play.chance.draws if "card" in draw]
        if dealt[: len(wanted)] == wanted:
            return [play.observation, *(play.act(action) for action in actions)]


@pytest.mark.parametrize(
    ("member", "actions", "cards", "said", "rewards"),
    [
        ("maniac", ["check", "call"], ("king", "jack"), "shown jack win two", [0, 2]),
        ("maniac", ["check", "fold"], ("jack", "king"), "lose one", [0, -1]),
        ("folder", ["bet"], ("jack", "king"), "opp fold win one", [1]),
        ("station", ["bet"], ("jack", "king"), "opp call shown king lose two", [-2]),
        ("folder", ["check"], ("queen", "jack"), "opp check shown jack win one", [1]),
        ("folder", ["call"], ("queen", "jack"), "invalid lose two", [-2]),
    ],
)
def test_hands_end_as_the_rules_say(
    member: str, actions: list[str], cards: tuple[str, str], said: str, rewards: list[float]
) -> None:
    observation, *outcomes = hands(member, actions, [cards], opponents="archetypes")
    assert observation == f"you first {cards[0]}"
    assert outcomes[-1].observation.startswith(f"{said} you second")
    assert [each.reward for each in outcomes] == rewards


def test_seats_alternate_within_an_episode_from_the_tasks() -> None:
    for seat, positions in ((0, "first second first"), (1, "second first second")):
        play = Kuhn().begin(Task("kuhn", "bet-none-call-none", 5, seat), 0)
        said = play.observation
        while play.legal_actions():
            said += " " + play.act(play.legal_actions()[0]).observation
        assert [word for word in said.split() if word in ("first", "second")] == positions.split()


def test_cards_of_a_folded_hand_stay_hidden() -> None:
    for seed in range(200):
        play = Kuhn().begin(Task("kuhn", "bet-queen-king-call-king", seed, seed % 2), 0)
        source = random.Random(seed)
        while play.legal_actions():
            hand = play.duel.hand
            action = source.choice(play.legal_actions())
            said = play.act(action).observation
            ended = play.duel.hand > hand
            folds = action == "fold" or "opp fold" in said.split(" you ")[0]
            assert ("shown" in said) == (ended and not folds)


def test_a_groups_trials_get_the_same_deals_whatever_they_do() -> None:
    task, draws = Task("kuhn", "semi", 4), set()
    for first in (True, False):
        play = Kuhn("archetypes").begin(task, 1)
        while legal := play.legal_actions():
            play.act(legal[not first])
        draws.add(tuple(play.chance.draws))
    assert len(draws) == 1


def test_the_family_is_split_as_written_down() -> None:
    names = {each.name for each in FAMILY_TRAIN + FAMILY_HELDOUT}
    assert (len(FAMILY_TRAIN), len(FAMILY_HELDOUT), len(names)) == (24, 8, 32)
    styles = {(each.first.bets, each.first.calls) for each in FAMILY_HELDOUT}
    assert styles == {
        ((0, 1, 0), (0, 0, 1)),
        ((1, 1, 0), (0, 0, 0)),
        ((0, 1, 1), (0, 1, 1)),
        ((0, 1, 0), (0, 1, 1)),
        ((1, 1, 1), (0, 0, 0)),
        ((0, 0, 0), (0, 0, 1)),
        ((0, 0, 1), (0, 0, 1)),
        ((0, 0, 0), (1, 1, 1)),
    }


def test_unknown_opponents_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Kuhn("experts")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "kuhn: `opponents` must be 'family' or 'archetypes' or 'contrasts' or 'mage', got 'experts'"
    )


@pytest.mark.parametrize("hands", [0, 5, True])
def test_hands_have_a_bound_because_the_exact_references_take_ever_longer(hands: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Kuhn(hands=hands)
    assert str(caught.value) == f"kuhn: `hands` must be a whole number from 1 to 4, got {hands}"


def test_stakes_multiply_what_a_chip_earns_and_say_nothing() -> None:
    plain, dear = Kuhn("contrasts", redeals=False), Kuhn("contrasts", redeals=False, stakes=50)
    stakes = [dear.stake(member) for member in dear.members("train")]
    assert (min(stakes), max(stakes), len(set(stakes))) == (1.0, 50.0, len(stakes))
    for member, stake in zip(dear.members("train"), stakes, strict=True):
        task = Task("kuhn", member, 7)
        one, other = plain.begin(task, 0).act("bet"), dear.begin(task, 0).act("bet")
        assert (other.observation, other.reward) == (one.observation, stake * one.reward)


@pytest.mark.parametrize("redeals", [True, False])
def test_references_are_paid_at_the_stakes(redeals: bool) -> None:
    kuhn = Kuhn("archetypes", 2, redeals, stakes=50)
    members, known = kuhn.members("heldout"), kuhn.references("heldout", 1)
    best = sum(kuhn.best_return(member) for member in members) / len(members) / 2
    assert known["best_response" if redeals else "hindsight"][0] == pytest.approx(best)
    stakes = {member: kuhn.stake(member) for member in members}
    nash = sum(stakes[each.name] * value(NASH, each) for each in ARCHETYPES_HELDOUT) / len(members)
    assert known["nash"][0] == pytest.approx(nash)
    # Who knows less earns less; each is more than what the same plays earn at stakes of 1.
    names = ("nash", "best_fixed", "without_memory", "best_response")
    earned = [known[name][0] for name in names]
    assert earned == sorted(earned)
    plain = Kuhn("archetypes", 2, redeals).references("heldout", 1)
    assert all(known[name][0] > plain[name][0] for name in names[1:])


def test_the_best_fixed_play_heeds_the_stakes() -> None:
    # Against one opponent alone the stake is a factor, and a stake of nearly 0 leaves it out.
    dear, cheap = ARCHETYPES_TRAIN[:2]
    assert one_episode((dear,), 2, (3.0,)) == pytest.approx(3 * one_episode((dear,), 2))
    alone = one_episode((dear, cheap), 2, (1.0, 1e-9))
    assert alone == pytest.approx(one_episode((dear,), 2) / 2)


def test_contrasts_are_split_so_that_no_way_to_bet_or_call_tells_the_split() -> None:
    assert (len(CONTRASTS_TRAIN), len(CONTRASTS_HELDOUT)) == (12, 4)
    for part in (attrgetter("first.bets"), attrgetter("first.calls")):
        counts = [Counter(map(part, split)) for split in (CONTRASTS_TRAIN, CONTRASTS_HELDOUT)]
        assert [set(each.values()) for each in counts] == [{3}, {1}]


@pytest.mark.parametrize("redeals", [True, False])
def test_an_episode_has_deals_of_its_own_or_the_first_ones_again(redeals: bool) -> None:
    kuhn, task = Kuhn("archetypes", 2, redeals), Task("kuhn", "semi", 3)
    luck = {tuple(kuhn.begin(task, episode).chance.draws) for episode in range(5)}
    assert (len(luck) > 1) == redeals
    assert ("hindsight" in kuhn.references("train", 3)) == (not redeals)


@pytest.mark.parametrize("member", [*ARCHETYPES_HELDOUT, *CONTRASTS_HELDOUT], ids=str)
def test_hindsight_is_the_best_of_all_ways_to_play_a_deal_again(member: Strategy) -> None:
    opponents = "contrasts" if member in CONTRASTS_HELDOUT else "archetypes"
    kuhn, total, num_seeds = Kuhn(opponents, 1, redeals=False), 0.0, 2000
    for seed in range(num_seeds):
        task = Task("kuhn", member.name, seed, seed % 2)
        total += max(_played(kuhn, task, plan) for plan in itertools.product((0, 1), repeat=2))
    assert abs(total / num_seeds - hindsight((member,))) < 4 * 1.5 / num_seeds**0.5


def _played(kuhn: Kuhn, task: Task, plan: tuple[int, ...]) -> float:
    play, total = kuhn.begin(task, 0), 0.0
    for choice in plan:
        if legal := play.legal_actions():
            total += play.act(legal[choice]).reward
    return total


def _mean_return(kuhn: Kuhn, skill: float, num_trials: int) -> list[float]:
    """Per hand and episode, against the held-out opponents in turn."""
    members, sums = CONTRASTS_HELDOUT, [0.0, 0.0, 0.0]
    for seed in range(num_trials):
        script = kuhn.script(random.Random(seed))
        script.skill = skill
        task = Task("kuhn", members[seed % 4].name, seed, seed // 4 % 2)
        for episode in range(3):
            play = kuhn.begin(task, episode)
            while play.legal_actions():
                sums[episode] += play.act(script.choose(play)).reward / 2 / num_trials
    return sums


def test_a_script_that_reads_its_opponent_wins_more_when_the_deals_come_again() -> None:
    kuhn = Kuhn("contrasts", 2, redeals=False)
    known = kuhn.references("heldout", 1)
    first, _, last = _mean_return(kuhn, 1.0, 400)
    assert first + 0.1 < last < known["hindsight"][0] + 0.1


@pytest.mark.parametrize(("called", "bluffs"), [(0, True), (1, False)])
def test_a_model_of_the_opponent_bluffs_against_those_who_fold(called: int, bluffs: bool) -> None:
    model = OpponentModel(CONTRASTS_TRAIN)
    for hand in range(3):
        model.learn((0, hand), Seen(0, 2, has_called=called, shown=1 if called else None))
    assert model.bets_or_calls((1, 0), Seen(0, 0)) is bluffs


def test_the_belief_after_hundreds_of_hands_is_still_a_probability() -> None:
    model = OpponentModel(FAMILY_TRAIN)
    for hand in range(300):
        model.learn((0, hand), Seen(0, 2, has_called=0))
    assert model.belief().sum() == pytest.approx(1.0)


def test_our_equilibrium_is_one_and_openspiels_solver_finds_its_value() -> None:
    assert exploitability.exploitability(GAME, Spiel(NASH)) == pytest.approx(0.0, abs=1e-12)
    assert value_in_seat(NASH, NASH, 0) == pytest.approx(-1 / 18)
    solver = cfr.CFRSolver(GAME)
    for _ in range(300):
        solver.evaluate_and_update_policy()
    average = solver.average_policy()
    root = GAME.new_initial_state()
    found = expected_game_score.policy_value(root, [average, average])[0]
    assert found == pytest.approx(-1 / 18, abs=2e-3)


@pytest.mark.parametrize("opponent", ALL, ids=lambda each: each.name)
def test_values_are_those_of_openspiel(opponent: Strategy) -> None:
    root, theirs = GAME.new_initial_state(), Spiel(opponent)
    best = [
        spiel_best_response.BestResponsePolicy(GAME, seat, theirs).value(root) for seat in (0, 1)
    ]
    assert best_response((opponent,)) == pytest.approx(sum(best) / 2)
    for player in (NASH, UNIFORM):
        for seat in (0, 1):
            policies = [Spiel(player), theirs] if seat == 0 else [theirs, Spiel(player)]
            scores = expected_game_score.policy_value(root, policies)
            assert value_in_seat(player, opponent, seat) == pytest.approx(scores[seat])


def test_best_responses_are_those_of_the_recipe() -> None:
    best = {each.name: best_response((each,)) for each in ARCHETYPES_TRAIN}
    expected = {
        "folder": 1.0,
        "bluffer": 0.833,
        "valuestation": 0.417,
        "station": 0.333,
        "maniac": 0.333,
        "tight": 0.25,
        "slowplay": 0.167,
        "nash": 0.0,
    }
    assert best == pytest.approx(expected, abs=5e-4)
    train, heldout = references(FAMILY_TRAIN, 3), references(FAMILY_HELDOUT, 3)
    assert train["best_response"] == pytest.approx(0.510, abs=5e-4)
    assert heldout["best_response"] == pytest.approx(0.427, abs=5e-4)
    assert train["best_fixed"] == pytest.approx(0.240, abs=5e-4)


def test_more_is_known_of_the_opponent_the_more_is_won() -> None:
    for members in (FAMILY_TRAIN, FAMILY_HELDOUT, ARCHETYPES_TRAIN):
        values = references(members, 3)
        assert values["random"] < values["nash"] < values["best_fixed"]
        assert values["best_fixed"] < values["without_memory"] < values["best_response"]
    hands = [one_episode(FAMILY_TRAIN, num_hands) for num_hands in (1, 2, 3)]
    assert hands == sorted(hands)
    assert one_episode(FAMILY_TRAIN[:1], 3) == pytest.approx(best_response(FAMILY_TRAIN[:1]))


def test_an_episode_pays_what_the_values_say() -> None:
    kuhn, opponent = Kuhn("archetypes"), ARCHETYPES_HELDOUT[1]
    source, total, num_episodes = random.Random(0), 0.0, 4000
    for seed in range(num_episodes):
        play = kuhn.begin(Task("kuhn", opponent.name, seed, seed % 2), 0)
        while legal := play.legal_actions():
            total += play.act(source.choice(legal)).reward
    expected = value(UNIFORM, opponent)
    spread = 1.5 / (3 * num_episodes) ** 0.5  # chips of a hand have a deviation below 1.5
    assert abs(total / num_episodes / 3 - expected) < 4 * spread
