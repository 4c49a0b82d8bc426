"""Hangman: what letters show and cost."""

import random

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games.hangman import SHORT_WORDS, WORDS, Hangman, random_return
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

SPLITS: tuple[Split, ...] = ("train", "heldout")


def test_letters_show_where_they_stand_and_others_cost_a_life() -> None:
    play = Hangman(lives=3).begin(Task("hangman", "cold", 0), 0)
    assert play.observation == "blank blank blank blank"
    outcomes = [play.act(letter) for letter in ("o", "x", "o", "c", "l", "d")]
    assert [each.observation for each in outcomes] == [
        "hit blank o blank blank",
        "miss blank o blank blank",
        "invalid blank o blank blank",
        "hit c o blank blank",
        "hit c o l blank",
        "hit c o l d won",
    ]
    assert [each.reward for each in outcomes] == pytest.approx([0.25, -1 / 3, -1 / 3, *[0.25] * 3])
    assert [each.is_valid for each in outcomes] == [True, True, False, True, True, True]
    assert not play.legal_actions()


def test_the_last_life_ends_the_episode() -> None:
    play = Hangman(lives=2).begin(Task("hangman", "cold", 0), 0)
    assert [play.act(letter).observation for letter in "xy"] == [
        "miss blank blank blank blank",
        "miss blank blank blank blank lost",
    ]


def test_words_have_four_different_letters_and_a_quarter_is_held_out() -> None:
    assert all(len(set(word)) == 4 == len(word) for word in WORDS)
    assert len(set(WORDS)) == len(WORDS)
    train, heldout = (Hangman(words=40).members(split) for split in SPLITS)
    assert (len(train), len(heldout)) == (30, 10)


def test_swaps_have_few_letters_of_the_word() -> None:
    hangman = Hangman()
    for member in hangman.members("heldout"):
        assert all(not set(other) & set(member) for other in hangman.swaps(member, "heldout"))


def test_the_value_of_random_letters_is_exact() -> None:
    source, hangman, total = random.Random(0), Hangman(), 0.0
    for number in range(2000):
        play = hangman.begin(Task("hangman", "cold", number), 0)
        while legal := play.legal_actions():
            total += play.act(source.choice(legal)).reward
    assert random_return(6) == pytest.approx(total / 2000, abs=0.03)


def test_a_solver_that_remembers_needs_no_letter_too_many_later() -> None:
    known = Hangman().references("heldout", 3)
    assert known["random"][0] < known["solver_without_memory"][0] < 0.6
    assert known["solver"][0] == pytest.approx(known["solver_without_memory"][0])
    assert known["solver"][2] == pytest.approx(1.0, abs=0.01)


def test_an_impossible_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="hangman: `lives` must be a whole number from 1 to 20"):
        Hangman(lives=0)


def test_saying_the_word_alone_pays_and_every_action_is_a_turn() -> None:
    game = Hangman(says_word=True, turns=6)
    play = game.begin(Task("hangman", "cup", 0), 0)
    outcomes = [play.act(each) for each in ("c", "u", "p", "cat", "nonsense", "cup")]
    assert [each.observation for each in outcomes] == [
        "hit c blank blank",
        "hit c u blank",
        "hit c u p",
        "miss c u p",
        "invalid c u p",
        "hit c u p won",
    ]
    assert [each.reward for each in outcomes] == [0.0] * 5 + [1.0]
    lost = game.begin(Task("hangman", "cup", 0), 0)
    assert [lost.act(each).is_done for each in "abdefg"] == [False] * 5 + [True]


def test_states_in_which_other_words_were_said_have_other_anchors() -> None:
    game = Hangman(says_word=True, turns=6)
    plays = [game.begin(Task("hangman", "cup", 0), 0) for _ in range(3)]
    for play, words in zip(plays, (("cat", "dog"), ("dog", "cat"), ("cat", "sun")), strict=True):
        assert all(play.act(word).is_valid for word in words)
    first, same, other = plays
    assert first.anchor == same.anchor != other.anchor


def test_short_words_have_three_letters_and_differ() -> None:
    assert {len(word) for word in SHORT_WORDS} == {3}
    assert len(set(SHORT_WORDS)) == len(SHORT_WORDS) == 107
    known = Hangman(says_word=True).references("heldout", 2)
    assert known["random"][0] < 0.2 < 0.9 < known["solver_without_memory"][0] <= known["solver"][1]
