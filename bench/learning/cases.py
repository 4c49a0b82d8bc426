"""Define the cases of `bench.learning.shipped`: configurations, controls, and their thresholds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Summary = dict[str, Any]
"""Contents of a run's `summary.json`."""


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration, and the checks that the run of each seed has to pass."""

    name: str
    config: str
    changes: tuple[str, ...]
    checks: dict[str, tuple[Callable[[Summary], float], Callable[[float], bool]]]
    """By the text that is printed: a figure of the run's summary, and whether it is good enough."""


def episode_3(split: str) -> Callable[[Summary], float]:
    """Return a function from a run's summary to its return of episode 3.

    Args:
        split: "heldout", or a control of it: "heldout_blind" plays each episode without memory of
            the earlier ones, "heldout_swapped" meets another hidden task in the last episode.
    """
    return lambda summary: summary["evaluation"][split]["return_by_episode"][2]


def _probing(summary: Summary) -> float:
    """Return the share of probing actions, summed over held-out episodes 1 and 2."""
    return sum(summary["evaluation"]["heldout"]["probes_by_episode"][:2])


def _wall(summary: Summary) -> float:
    return summary["wall_s"]


def _at_most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound


def _at_least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


# Checks of a control in which probing does not pay, so nothing can be learned for episode 3.
_LEARNS_LITTLE = {"held-out episode 3 <= 0.40": (episode_3("heldout"), _at_most(0.40))}
CASES = (
    Case(
        "quickstart",
        "quickstart",
        (),
        {
            "wall <= 120 s": (_wall, _at_most(120.0)),
            "held-out episode 3 >= 0.65": (episode_3("heldout"), _at_least(0.65)),
            "blind <= 0.20": (episode_3("heldout_blind"), _at_most(0.20)),
            "swapped <= 0.20": (episode_3("heldout_swapped"), _at_most(0.20)),
            "log-prob mismatch <= 1e-3": (
                lambda summary: summary["logprob_mismatch"]["max_abs"],
                _at_most(1e-3),
            ),
            "staleness <= bound 1": (lambda summary: summary["staleness"]["max"], _at_most(1.0)),
            "prefix hit rate >= 0.95": (
                lambda summary: summary["prefix_cache"]["hit_rate"],
                _at_least(0.95),
            ),
            "prefix reuse rate >= 0.95": (
                lambda summary: summary["prefix_cache"]["reuse_rate"],
                _at_least(0.95),
            ),
            "granted - trained - dropped - in flight == 0": (
                lambda summary: (
                    summary["trials"]["granted"]
                    - sum(summary["trials"][fate] for fate in ("trained", "dropped", "in_flight"))
                ),
                _at_most(0),
            ),
        },
    ),
    # A control is compared by `GAPS`. Its own check holds for every possible return, and only makes
    # a line of the table.
    Case(
        "single episode",
        "quickstart_single_episode",
        (),
        {"held-out episode 3": (episode_3("heldout"), _at_most(1.0))},
    ),
    Case(
        "scout",
        "scout",
        (),
        {
            "wall <= 90 s": (_wall, _at_most(90.0)),
            "held-out episode 3 >= 0.85": (episode_3("heldout"), _at_least(0.85)),
            "probing in episodes 1 + 2 >= 0.8": (_probing, _at_least(0.8)),
            "swapped <= 0": (episode_3("heldout_swapped"), _at_most(0.0)),
        },
    ),
    Case("scout, differential 0.6", "scout", ("credit.episode_discount=0.6",), _LEARNS_LITTLE),
    Case(
        "scout, cumulative 0.6",
        "scout",
        ("credit.kind=cumulative_paper", "credit.episode_discount=0.6"),
        _LEARNS_LITTLE,
    ),
    Case("scout, single episode", "scout", ("credit.kind=single_episode",), _LEARNS_LITTLE),
    Case(
        "kuhn",
        "kuhn",
        (),
        {
            "wall <= 900 s": (_wall, _at_most(900.0)),
            "held-out episode 3 >= 0.58": (episode_3("heldout"), _at_least(0.58)),
            "blind <= 0.45": (episode_3("heldout_blind"), _at_most(0.45)),
            "swapped <= 0.40": (episode_3("heldout_swapped"), _at_most(0.40)),
        },
    ),
    Case(
        "kuhn, single episode",
        "kuhn_single_episode",
        (),
        {"held-out episode 3": (episode_3("heldout"), _at_most(1.0))},
    ),
    Case(
        "tictactoe",
        "tictactoe",
        (),
        {
            "wall <= 900 s": (_wall, _at_most(900.0)),
            "held-out episode 3 >= 0.36": (episode_3("heldout"), _at_least(0.36)),
            "blind <= 0.33": (episode_3("heldout_blind"), _at_most(0.33)),
            "swapped <= 0.33": (episode_3("heldout_swapped"), _at_most(0.33)),
        },
    ),
    Case(
        "tictactoe, single episode",
        "tictactoe_single_episode",
        (),
        {"held-out episode 3": (episode_3("heldout"), _at_most(1.0))},
    ),
    Case(
        "minesweeper",
        "minesweeper",
        (),
        {
            "wall <= 900 s": (_wall, _at_most(900.0)),
            "held-out episode 3": (episode_3("heldout"), _at_most(16.0)),
        },
    ),
    Case(
        "minesweeper, single episode",
        "minesweeper_single_episode",
        (),
        {"held-out episode 3": (episode_3("heldout"), _at_most(16.0))},
    ),
    Case(
        "minesweeper, warm start",
        "minesweeper",
        ("learner.steps=0",),
        {"held-out episode 3": (episode_3("heldout"), _at_most(16.0))},
    ),
)
GAPS = {
    ("quickstart", "single episode"): 0.30,
    ("kuhn", "kuhn, single episode"): 0.10,
    ("tictactoe", "tictactoe, single episode"): 0.10,
    ("minesweeper", "minesweeper, single episode"): 0.3,
    ("minesweeper", "minesweeper, warm start"): 0.3,
}
"""(case, control): how much higher the case's held-out episode 3 has to be, in every seed. Controls
are RL with single-episode credit and the same number of trials, or the warm start without RL."""
