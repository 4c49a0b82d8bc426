"""Gymnasium's toy text environments in words: their observations are numbers without a meaning to a
reader, and so are their actions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

_TILES = {b"S": "the start", b"F": "ice", b"H": "a hole", b"G": "the goal"}
_PLACES = ("Red", "Green", "Yellow", "Blue", "in the taxi")


@dataclass(frozen=True, slots=True)
class Toy:
    """One of them in words."""

    rules: str
    actions: tuple[str, ...]
    """By their number."""
    say: Callable[[Any, Any], str]
    """The environment without wrappers, and what it observed."""


def made_with(options: Mapping[str, Any], task: int) -> dict[str, Any]:
    """What an environment is made with; `desc = "random"` is FrozenLake's own random map, the same
    for a task in all its episodes.
    """
    made = dict(options)
    if made.get("desc") == "random":
        size = 8 if made.pop("map_name", "4x4") == "8x8" else 4
        made["desc"] = generate_random_map(size=size, seed=task)
    return made


def _say_taxi(taxi: Any, state: Any) -> str:
    row, column, passenger, destination = taxi.decode(state)
    at = _PLACES[passenger]
    return f"taxi at row {row}, column {column}; passenger {at}; to {_PLACES[destination]}"


def _say_lake(lake: Any, state: Any) -> str:
    row, column = divmod(int(state), lake.ncol)
    return f"row {row}, column {column}: {_TILES[bytes(lake.desc[row, column])]}"


def _say_cliff(cliff: Any, state: Any) -> str:
    row, column = divmod(int(state), cliff.shape[1])
    return f"row {row}, column {column}"


def _say_blackjack(_: Any, observed: Any) -> str:
    mine, dealer, has_ace = (int(each) for each in observed)
    ace = "a usable ace" if has_ace else "no usable ace"
    return f"your sum {mine}, {ace}; the dealer shows {dealer}"


TOYS = {
    "TaxiEnv": Toy(
        "A taxi drives on 5 × 5 squares with walls. Bring the passenger from Red (row 0, column "
        "0), Green (row 0, column 4), Yellow (row 4, column 0) or Blue (row 4, column 3) to one of "
        "the others: +20 there, -1 a step, -10 for a pickup or dropoff that is not possible.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _say_taxi,
    ),
    "FrozenLakeEnv": Toy(
        "Cross a frozen lake from the start in row 0, column 0 to the goal in the last row and "
        "column, which pays 1. A hole ends the episode. The ice may be slippery: a move may then "
        "lead to the side.",
        ("left", "down", "right", "up"),
        _say_lake,
    ),
    "CliffWalkingEnv": Toy(
        "Walk on 4 × 12 squares from row 3, column 0 to row 3, column 11. The squares between the "
        "two in row 3 are a cliff: -100, and back to the start. A step costs 1.",
        ("up", "right", "down", "left"),
        _say_cliff,
    ),
    "BlackjackEnv": Toy(
        "Blackjack: come closer to 21 than the dealer, and not above. A win pays 1, a loss -1.",
        ("stick", "hit"),
        _say_blackjack,
    ),
}
"""By the name of the class."""
