"""Codes of boxes: the button of each box, which codes are held out, and the exact values."""

import itertools
from collections.abc import Iterator, Sequence

from mage_async.environments.environment import Split

BUTTONS = ("left", "right")
BOXES = ("red", "green", "blue", "gold", "black", "white")

Code = tuple[str, ...]
"""The button that opens each box."""

_HELDOUT = {
    3: ("lll",),
    4: ("llll", "llrr"),
    5: ("lllll", "lllrr", "llrlr", "lrllr"),
    6: ("llllll", "lllrlr", "llrlrr", "llrrrl", "lrllrr", "lrlrrl", "lrrlll", "lrrrlr"),
}
"""Held-out codes by the number of boxes, each with its complement: every button is equally frequent
in both splits, and two boxes tell as little of one another as a quarter of the codes allows.
"""
NUM_BOXES = tuple(_HELDOUT)


def codes_of(num_boxes: int) -> dict[Split, tuple[Code, ...]]:
    """All codes, a quarter of them held out."""
    every = tuple(itertools.product(BUTTONS, repeat=num_boxes))
    heldout = {each for short in _HELDOUT[num_boxes] for each in _with_complement(short)}
    return {
        "train": tuple(code for code in every if code not in heldout),
        "heldout": tuple(code for code in every if code in heldout),
    }


def alike(codes: Sequence[Code], near: Code, differ: int) -> tuple[Code, ...]:
    """The codes that differ from one in at most so many boxes."""
    return tuple(
        code
        for code in codes
        if sum(one != other for one, other in zip(code, near, strict=True)) <= differ
    )


def complement(code: Code) -> Code:
    """The other button of each box."""
    return tuple(BUTTONS[1 - BUTTONS.index(button)] for button in code)


def best_first_episode(codes: Sequence[Code]) -> float:
    """Most that a player who knows only these codes earns in one episode, on average.

    It is told each box's button, and names what most of the codes have that still fit.
    """
    num_boxes = len(codes[0])
    right = sum(
        max(sum(code[box] == button for code in alike) for button in BUTTONS)
        for box in range(num_boxes)
        for alike in _alike(codes, box)
    )
    return right / (len(codes) * num_boxes)


def _alike(codes: Sequence[Code], box: int) -> Iterator[list[Code]]:
    """The codes in groups that are equal before a box."""
    for _, group in itertools.groupby(sorted(codes), key=lambda code: code[:box]):
        yield list(group)


def _with_complement(short: str) -> tuple[Code, Code]:
    code = tuple(next(each for each in BUTTONS if each[0] == letter) for letter in short)
    return code, complement(code)
