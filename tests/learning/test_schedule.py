"""Learning rate and entropy bonus over the steps of a run."""

import pytest

from mage_async.config.schema import Learner
from mage_async.learning.optimizer import entropy_coefficient, learning_rate


def test_a_rate_falls_to_its_end_after_the_last_step_so_that_every_step_learns() -> None:
    learner = Learner(steps=4, learning_rate=1.0, final_learning_rate=0.0, warmup_steps=0)
    assert [learning_rate(learner, version) for version in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert learning_rate(learner, 4) == learning_rate(learner, 9) == 0.0
    falling = Learner(steps=2, learning_rate=1.0, final_learning_rate=0.5, warmup_steps=2)
    assert [learning_rate(falling, version) for version in range(2)] == [0.5, 0.75]
    only = Learner(steps=1, learning_rate=1.0, warmup_steps=0)
    assert learning_rate(only, 0) == 1.0


def test_the_entropy_bonus_has_the_same_schedule() -> None:
    learner = Learner(steps=4, entropy=0.1, final_entropy=0.5)
    found = [entropy_coefficient(learner, version) for version in range(4)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4])
