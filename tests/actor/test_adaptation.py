"""What the recorded trials of a measurement say about its game."""

from pathlib import Path
from typing import Any

import pytest

from mage_async.assembly import trial_config_of
from mage_async.config.schema import Config
from mage_async.environments.catalogue import load
from mage_async.trials.chat_format import ChatFormat
from mage_services.actor.adaptation import Game, Measurement, Outcome, Record
from mage_services.actor.rollout import Retries
from tests.helpers.known_players import SignedBoxes

NUM_TASKS = 12
NOBODY: Any = None
"""In place of an engine and workers: every trial is recorded already."""


@pytest.mark.parametrize(("reward_of_tries", "has_chance"), [(0.5, False), (0.25, True)])
def test_equal_actions_that_earn_differently_in_two_arms_show_chance(
    chat: ChatFormat, tmp_path: Path, reward_of_tries: float, has_chance: bool
) -> None:
    environment, record = load(SignedBoxes), Record(tmp_path)
    game = Game("boxes", environment, trial_config_of(Config(), environment, chat, 3))
    measurement = Measurement(
        [game], chat, NOBODY, record, NOBODY, num_tasks=NUM_TASKS, at_once=1, retries=Retries(0)
    )
    for number in range(NUM_TASKS):
        for arm in ("own", "blind", "swapped", "noise"):
            outcome = Outcome([0.5] * 3, False, 0, 3, 9, 2, [["left"]] * 3)
            record.add_outcome(f"boxes/{number}/{arm}", outcome)
        for each in range(3):
            outcome = Outcome([reward_of_tries], False, 0, 1, 9, 0, [["left"]])
            record.add_outcome(f"boxes/{number}/retry/{each}", outcome)
    assert {each.has_chance for each in measurement.returns("boxes")} == {has_chance}
