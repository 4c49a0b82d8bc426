"""What both seats of self-play are compared with, by hand."""

from dataclasses import replace

import pytest

from mage_async.config.config_file import find, load
from mage_async.config.schema import Transcript
from mage_async.credit.turn_table import build_table
from mage_async.learning.advantages import turn_advantages
from mage_async.tasks.league import ITSELF
from mage_async.trajectory import Group, Trial
from tests.helpers.credits import CREDITS, credit_of
from tests.helpers.populations import trial


def seats(index: int, reward: float) -> list[Trial]:
    """Both seats of a play of one episode with one action each; what one wins the other loses."""
    one, other = trial(ITSELF, [reward], index), trial(ITSELF, [-reward], index + 1)
    return [one, replace(other, task=other.task.from_other_seat())]


def test_each_seat_is_compared_with_itself_alone() -> None:
    """Three plays pay the first seat 2, 2 and -1: 1 on the mean, so 1, 1, -2 and the opposite; the
    root mean square of either seat is the root of 2.
    """
    plays = [each for index, paid in ((0, 2.0), (2, 2.0), (4, -1.0)) for each in seats(index, paid)]
    config = load(find("kuhn"), ["advantage.epsilon=0.0"], "both_seats")
    table = build_table(
        [Group(0, 0, tuple(plays))],
        credit_of(CREDITS["single_episode"]),
    )
    found = turn_advantages(
        table, config.advantage, Transcript(max_action_tokens=1, max_reflection_tokens=1), "cpu"
    )
    root = 2**0.5
    wanted = [1 / root, -1 / root, 1 / root, -1 / root, -2 / root, 2 / root]
    assert found.tolist() == pytest.approx(wanted)
