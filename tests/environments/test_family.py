"""The family of small games: what is held out is met nowhere in training, and values are exact."""

import random
import re
from itertools import pairwise

import pytest

from mage_async.environments.game_references import half_widths_of
from mage_async.environments.games.family import (
    ACTIONS,
    ANSWERS,
    HELD_OUT,
    MAX_TURNS,
    STRUCTURES,
    THINGS,
    TRAINED,
    Family,
    Feedback,
    game_of,
)
from mage_async.errors import ConfigError
from mage_async.trajectory import Task


def played(family: Family, member: str, source: random.Random) -> float:
    """The return of random actions in one episode."""
    play, earned = family.begin(Task("family", member, 0), 0), 0.0
    while legal := play.legal_actions():
        earned += play.act(source.choice(legal)).reward
    return earned


def test_there_are_eight_structures_to_train_on_and_three_others() -> None:
    assert (len(TRAINED), len(HELD_OUT)) == (8, 3)
    family = Family()
    assert {family.family(each) for each in family.members("train")} == set(TRAINED)
    other = Family(heldout="structures")
    assert {other.family(each) for each in other.members("heldout")} == set(HELD_OUT)
    named = Family(["trap", "arm"], heldout="structures")
    assert {named.family(each) for each in named.members("train")} == {"trap", "arm"}
    assert {named.family(each) for each in named.members("heldout")} == {"search", "lock"}


def test_each_game_makes_two_tasks() -> None:
    family = Family(["arm", "mapping"], games=8)
    assert [len(family.members(split)) for split in ("train", "heldout")] == [2 * 2 * 8, 2 * 2 * 2]


def test_held_out_words_are_met_nowhere_in_training() -> None:
    for pool in (THINGS, ACTIONS, ANSWERS):
        assert not set(pool["train"]) & set(pool["words"])
    train, words = (
        {
            (look.list_form, look.joint, look.phrasing)
            for member in Family(games=64).members(split)
            for look in [game_of(member).look]
        }
        for split in ("train", "heldout")
    )
    assert not {part for each in train for part in each} & {part for each in words for part in each}


def test_held_out_sizes_are_met_nowhere_in_training() -> None:
    for structure in STRUCTURES.values():
        assert not set(structure.sizes["train"]) & set(structure.sizes["sizes"])


def test_games_of_a_split_differ() -> None:
    """In their look, or in what is hidden: none of 256 comes much more often than others."""
    members = [each for each in Family().members("train") if not each.endswith("~")][:256]
    assert len({(game_of(each).look, game_of(each).hidden) for each in members}) == 256


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_twin_differs_in_nothing_but_what_is_hidden(structure: str) -> None:
    for number in range(20):
        game, twin = (game_of(f"train-{structure}-{number}{end}") for end in ("", "~"))
        assert (game.look, game.rules) == (twin.look, twin.rules)
        assert game.hidden != twin.hidden


@pytest.mark.parametrize("structure", STRUCTURES)
def test_random_play_earns_what_is_computed(structure: str) -> None:
    family = Family([structure], games=8)
    members = family.members("heldout")[:64]
    source, repeats = random.Random(structure), 200
    mean = sum(played(family, each, source) for each in members for _ in range(repeats))
    # The standard deviation of a return in [0, 1] is at most 0.5.
    error = 4 * 0.5 / (len(members) * repeats) ** 0.5
    wanted = family.references("heldout", 1)["random"][0]
    assert mean / (len(members) * repeats) == pytest.approx(wanted, abs=error)


@pytest.mark.parametrize("heldout", ["words", "sizes", "structures"])
def test_memory_is_worth_much_and_the_last_episode_is_nearly_known(heldout: str) -> None:
    known = Family(heldout=heldout).references("heldout", 3)  # type: ignore[arg-type]
    assert known["with_memory"][2] > 0.9
    assert known["with_memory"][2] > known["without_memory"][2] + 0.2
    assert known["without_memory"][0] > known["random"][0] + 0.1
    assert known["with_memory"][0] == pytest.approx(known["without_memory"][0], abs=0.05)
    # Means over trials are shown with their error, exact values without.
    assert half_widths_of(known).keys() == {"with_memory", "without_memory"}


@pytest.mark.parametrize("feedback", ["told", "right_or_wrong"])
def test_an_answer_tells_the_right_action_only_where_it_should(feedback: Feedback) -> None:
    game = game_of("train-mapping-0", feedback)
    play = Family(feedback=feedback).begin(Task("family", "train-mapping-0", 0), 0)
    right = str(game.hidden[0])
    wrong = next(each for each in play.legal_actions() if each != right)
    said = play.act(wrong).observation
    assert (right in said.split(game.look.joint)[0]) == (feedback == "told")


def test_an_invalid_action_of_a_search_is_told_no_side() -> None:
    play = Family().begin(Task("family", "train-search-0", 0), 0)
    joint = play.game.look.joint
    assert "it" not in play.apply("banana").observation.split(joint)[1].split()
    named = play.apply(next(each for each in play.actions() if (each,) != play.game.hidden))
    assert "it" in named.observation.split(joint)[0].split()


def test_no_episode_is_longer_than_declared() -> None:
    source = random.Random(0)
    for name in STRUCTURES:
        for split in ("train", "sizes"):
            for number in range(12):
                family = Family()
                play = family.begin(Task("family", f"{split}-{name}-{number}", 0), 0)
                while legal := play.legal_actions():
                    play.act(source.choice(legal))
                assert len(play.done) <= MAX_TURNS


def test_rising_numbers_of_structures_train_on_what_the_smaller_ones_do() -> None:
    trained = [set(map(Family(n).family, Family(n).members("train"))) for n in (1, 2, 4, 8)]
    assert [len(each) for each in trained] == [1, 2, 4, 8]
    assert all(fewer < more for fewer, more in pairwise(trained))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"structures": 9}, "`structures` must be a whole number from 1 to 8, got 9"),
        ({"structures": 1.5}, "`structures` must be a list of texts, got 1.5"),
        ({"structures": []}, "structures must name at least one, and each once, got []"),
        ({"structures": ["arm", "arm"]}, "each once, got ['arm', 'arm']"),
        ({"structures": ["chess"]}, "family: `structures` must be 'mapping' or 'arm'"),
        (
            {"structures": list(HELD_OUT), "heldout": "structures"},
            "structures must leave out one of search, lock, trap, got search, lock, trap",
        ),
        ({"heldout": "games"}, "`heldout` must be 'words' or 'sizes' or 'structures', got 'games'"),
        ({"feedback": "no"}, "`feedback` must be 'both' or 'told'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Family(**options)  # type: ignore[arg-type]
