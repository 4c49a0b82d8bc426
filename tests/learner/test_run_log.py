"""Which steps of a run leave a trial to read."""

import pytest

from mage_services.learner.run_log import has_sample


@pytest.mark.parametrize("steps", [1, 5, 10, 15, 19, 60, 101])
def test_a_trial_of_ten_steps_is_kept_or_of_every_step_of_fewer(steps: int) -> None:
    kept = [version for version in range(1, steps + 1) if has_sample(version, steps)]
    assert len(kept) == min(10, steps)
    assert kept[-1] == steps
    gaps = [later - sooner for sooner, later in zip([0, *kept], kept, strict=False)]
    assert max(gaps) - min(gaps) <= 1
