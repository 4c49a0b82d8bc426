"""Boxes: what a press tells, which codes are held out, and what memory is worth."""

import random

import pytest

from mage_async.environments.environment import Split
from mage_async.environments.games.boxes import Boxes
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

SPLITS: tuple[Split, ...] = ("train", "heldout")
COUNTS = (3, 4, 5, 6)


def test_a_press_tells_the_right_button_and_the_next_box() -> None:
    play = Boxes().begin(Task("boxes", "left-right-left-left", 0), 0)
    assert play.observation == "red"
    outcomes = [play.act(action) for action in ("left", "left", "push", "right")]
    assert [each.observation for each in outcomes] == [
        "opened red left green",
        "shut green right blue",
        "invalid gold",
        "shut gold left over",
    ]
    assert [each.reward for each in outcomes] == [0.25, 0.0, 0.0, 0.0]
    assert [each.is_valid for each in outcomes] == [True, True, False, True]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_quarter_is_held_out_and_each_button_is_equally_frequent(
    split: Split, count: int
) -> None:
    codes = [member.split("-") for member in Boxes(boxes=count).members(split)]
    assert len(codes) == 2**count * (3 if split == "train" else 1) // 4
    for box in range(count):
        assert sum(code[box] == "left" for code in codes) == len(codes) / 2


@pytest.mark.parametrize("count", COUNTS)
def test_what_was_learned_opens_no_box_of_the_swapped_code(count: int) -> None:
    boxes = Boxes(boxes=count)
    for split in SPLITS:
        for member in boxes.members(split):
            (other,) = boxes.swaps(member, split)
            assert other in boxes.members(split)
            assert not any(a == b for a, b in zip(member.split("-"), other.split("-"), strict=True))


def played(boxes: Boxes, split: Split, slip: float) -> list[float]:
    """Mean returns by episode of a script that remembers, over the codes of a split."""
    returns = [0.0, 0.0]
    members = boxes.members(split) * 100
    for number, member in enumerate(members):
        script = boxes.script(random.Random(number))
        script.slip = slip
        for episode in range(2):
            play = boxes.begin(Task("boxes", member, number), episode)
            while play.legal_actions():
                returns[episode] += play.act(script.choose(play)).reward / len(members)
    return returns


def test_references_are_what_is_reached_without_and_with_memory() -> None:
    boxes = Boxes()
    heldout, train = (boxes.references(split, 2) for split in ("heldout", "train"))
    assert heldout == {
        "random": (0.5, 0.5),
        "without_memory": (0.5, 0.5),
        "with_memory": (0.5, 1.0),
    }
    assert train["without_memory"][0] == pytest.approx((0.5 + 2 / 3 + 0.5 + 2 / 3) / 4)
    assert played(boxes, "heldout", slip=0.0) == pytest.approx([0.5, 1.0], abs=0.05)
    assert played(boxes, "heldout", slip=1.0) == pytest.approx([0.5, 0.5], abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boxes": 7}, "boxes: `boxes` must be a whole number from 3 to 6, got 7"),
        ({"boxes": 4.0}, "boxes: `boxes` must be a whole number from 3 to 6, got 4.0"),
        (
            {"near": "left-right-right-left"},
            "boxes: no held-out code is as near to left-right-right-left as `differ` = 1 says: "
            "raise `differ`, or choose another `near`",
        ),
        (
            {"scripted": "wins"},
            "boxes: `scripted` must be 'remembers' or 'guesses', got 'wins'",
        ),
    ],
)
def test_an_impossible_option_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Boxes(**options)
    assert str(caught.value) == message
