"""Wordle, Mastermind and the number lock: what guesses are told and earn."""

import itertools
import random
from functools import partial

import pytest

from mage_async.environments import catalogue
from mage_async.environments.environment import Environment, Split
from mage_async.environments.game_references import scripted_returns
from mage_async.environments.games.game import num_equal
from mage_async.environments.games.guessing import GuessingScript, Puzzle, random_return
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

NAMES = ("wordle", "mastermind", "numberlock")
SPLITS: tuple[Split, ...] = ("train", "heldout")


def told(name: str, member: str, *guesses: str) -> list[str]:
    play = catalogue.load(name).begin(Task(name, member, 0), 0)
    return [play.act(guess).observation for guess in guesses]


def test_wordle_marks_letters_as_often_as_the_word_has_them() -> None:
    assert told("wordle", "sugar", "grass", "apple") == [
        "g gold r gold a gold s gold s grey",
        "a gold p grey p grey l grey e grey",
    ]
    assert told("wordle", "grass", "sugar", "grass") == [
        "s gold u grey g gold a gold r gold",
        "solved",
    ]
    assert told("wordle", "sheep", "queen") == ["q grey u grey e green e green n grey"]


def test_mastermind_counts_a_colour_once_and_what_is_in_place_first() -> None:
    guesses = ("red blue red", "blue green green", "gold gold gold", "red red blue")
    assert told("mastermind", "red-red-blue", *guesses) == [
        "place one elsewhere two",
        "place none elsewhere one",
        "place none elsewhere none",
        "solved",
    ]


def test_the_lock_tells_what_is_in_place_alone() -> None:
    assert told("numberlock", "one-three-five", "one two five", "three one two") == [
        "place two",
        "place none",
    ]


def test_a_return_is_half_for_places_and_half_for_how_soon() -> None:
    play = catalogue.load("numberlock").begin(Task("numberlock", "one-three-five", 0), 0)
    guesses = ("one two four", "two three four", "nonsense", "one three five")
    rewards = [play.act(guess).reward for guess in guesses]
    assert rewards == pytest.approx([1 / 6, 0, 0, 2 / 6 + 0.5 * 3 / 6])
    at_once = catalogue.load("numberlock").begin(Task("numberlock", "one-three-five", 0), 0)
    assert at_once.act("one three five").reward == 1.0


def test_the_last_turn_says_over_and_ends_the_episode() -> None:
    *_, last = told("mastermind", "red-red-blue", *["gold gold gold"] * 6)
    assert last == "place none elsewhere none over"


@pytest.mark.parametrize("name", NAMES)
def test_a_quarter_is_held_out_and_swaps_share_few_places(name: str) -> None:
    game = catalogue.load(name)
    train, heldout = (game.members(split) for split in SPLITS)
    assert len(heldout) == (len(train) + len(heldout)) // 4
    for member in heldout:
        assert game.swaps(member, "heldout")
        code, swaps = _code(name, member), game.swaps(member, "heldout")
        shared = {x: num_equal(code, _code(name, x)) for x in heldout if x != member}
        assert {shared[x] for x in swaps} == {min(shared.values())}


def _code(name: str, member: str) -> tuple[str, ...]:
    return tuple(member) if name == "wordle" else tuple(member.split("-"))


def test_the_value_of_guessing_at_random_is_exact() -> None:
    """Against all sequences of guesses of a small lock."""
    codes = tuple(itertools.permutations("abc", 2))
    puzzle = Puzzle(codes, "", lambda code, guess: "", turns=3)
    total = 0.0
    for guesses in itertools.product(codes, repeat=3):
        placed = [num_equal(codes[0], guess) for guess in guesses]
        sooner = (3 - placed.index(2)) / 3 if 2 in placed else 0.0
        total += 0.5 * max(placed) / 2 + 0.5 * sooner
    assert random_return(puzzle, codes[:1]) == pytest.approx(total / len(codes) ** 3)


def random_play(game: Environment, num_trials: int) -> list[float]:
    source, members = random.Random(0), game.members("heldout")
    returns = []
    for number in range(num_trials):
        play = game.begin(Task(game.facts.name, members[number % len(members)], number), 0)
        earned = 0.0
        while legal := play.legal_actions():
            earned += play.act(source.choice(legal)).reward
        returns.append(earned)
    return returns


@pytest.mark.parametrize("name", NAMES)
def test_references_are_what_players_reach(name: str) -> None:
    game = catalogue.load(name)
    known = game.references("heldout", 2)
    played = random_play(game, 1500)
    assert known["random"][0] == pytest.approx(sum(played) / len(played), abs=0.03)
    assert known["random"][0] < known["solver_without_memory"][0] < known["solver"][1]
    assert known["solver"][0] == pytest.approx(known["solver_without_memory"][0])
    assert known["solver"][1] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_the_exact_value_lies_within_the_interval_of_a_sampled_one(name: str) -> None:
    game = catalogue.load(name)
    anything = partial(GuessingScript, puzzle=game.puzzle, care=0.0, memory=0.0)
    few, many = (scripted_returns(game, "heldout", 2, anything, count) for count in (100, 400))
    (exact, _) = game.references("heldout", 2)["random"]
    for sampled in (few, many):
        pairs = zip(sampled, sampled.half_widths, strict=True)
        assert all(abs(mean - exact) < 1.5 * half for mean, half in pairs)
    assert 0 < many.half_widths[0] < 0.7 * few.half_widths[0]


def test_the_fewest_codes_still_leave_one_to_swap_with() -> None:
    smallest = (
        catalogue.load("numberlock", dials=2, digits=4),
        catalogue.load("mastermind", pegs=2, colours=3),
        catalogue.load("wordle", words=8),
    )
    for game in smallest:
        for split in SPLITS:
            for code in game.members(split):
                assert set(game.swaps(code, split)) <= set(game.members(split)) - {code}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="`digits` must be more than `dials` = 4, got 4"):
        catalogue.load("numberlock", dials=4, digits=4)
    with pytest.raises(ConfigError, match="wordle: `words` must be a whole number from 8 to 96"):
        catalogue.load("wordle", words=97)
    with pytest.raises(EnvironmentFault, match="no code is called 'stones'; one is called "):
        catalogue.load("wordle").begin(Task("wordle", "stones", 0), 0)


def test_without_repeats_no_code_and_no_guess_has_a_colour_twice() -> None:
    game = catalogue.load("mastermind", colours=6, repeats=False)
    codes = {member for split in SPLITS for member in game.members(split)}
    assert len(codes) == 6 * 5 * 4
    assert all(len(set(code.split("-"))) == 3 for code in codes)
    play = game.begin(Task("mastermind", "red-green-blue", 0), 0)
    assert not play.act("red red blue").is_valid
    with pytest.raises(ConfigError, match="`colours` must be more than `pegs` = 3, got 3"):
        catalogue.load("mastermind", colours=3, repeats=False)


def test_a_win_alone_may_pay_and_the_last_guess_stay_unanswered() -> None:
    options = {"turns": 2, "wins_only": True, "tells_last": False}
    game = catalogue.load("mastermind", **options)
    task = Task("mastermind", "red-red-blue", 0)
    lost, won = game.begin(task, 0), game.begin(task, 0)
    outcomes = [lost.act("red blue blue"), lost.act("red gold blue")]
    assert [each.observation for each in outcomes] == ["place two elsewhere none", "over"]
    assert [each.reward for each in outcomes] == [0.0, 0.0]
    outcomes = [won.act("gold gold gold"), won.act("red red blue")]
    assert [each.reward for each in outcomes] == [0.0, 1.0]
    played = random_play(game, 3000)
    exact = game.references("heldout", 1)["random"][0]
    assert exact == pytest.approx(1 - (63 / 64) ** 2)
    assert exact == pytest.approx(sum(played) / len(played), abs=0.01)


def test_three_guesses_find_one_of_120_codes_in_a_third_of_first_episodes_and_in_all_later() -> (
    None
):
    options = {"turns": 3, "repeats": False, "wins_only": True, "tells_last": False}
    known = catalogue.load("mastermind", colours=6, **options).references("heldout", 3)
    assert known["solver"][0] == pytest.approx(0.365, abs=0.01)
    assert known["solver"][1:] == (1.0, 1.0)


def test_any_five_letters_may_be_a_guess() -> None:
    play = catalogue.load("wordle", any_guess=True).begin(Task("wordle", "sugar", 0), 0)
    answer = "a gold r gold a grey r grey a grey"
    assert (play.act("arara").observation, play.act("ärara").is_valid) == (answer, False)
    assert not play.act("sugars").is_valid
    legal = play.legal_actions()
    assert ("zzzzz" in legal, "zzzz" in legal, legal.is_whole) == (True, False, False)
    assert play.legal_pattern == "[a-z]{5}"


@pytest.mark.parametrize("options", [{}, {"pegs": 5}, {"pegs": 4, "colours": 3}])
def test_the_example_in_the_rules_is_a_guess_that_the_game_accepts(options) -> None:
    environment = catalogue.load("mastermind", **options)
    example = environment.rules().partition("such as: ")[2].partition(".")[0]
    task = Task("mastermind", environment.members("train")[0], 0)
    assert environment.begin(task, 0).act(example).is_valid
