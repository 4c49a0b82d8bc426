"""What ranks save, another number of ranks goes on with."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from mage_async.policy.weight_digest import ROW, word_sum
from mage_services.learner.gang import Gang
from tests.learner.rank_trainings import (
    assert_equal,
    config_of,
    new_run,
    on_one,
    on_ranks,
    saved,
    steps,
)


@pytest.mark.slow  # three learners of several processes
@pytest.mark.timeout(600)
def test_two_ranks_four_two_and_one_process_take_over_from_each_other(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    began = on_one(run)
    steps(began)
    checkpoint = saved(began)
    for count in (2, 4, 2):
        with Gang(run, config_of(f"learner.ranks={count}")) as gang:
            checkpoint = saved(on_ranks(run, gang, checkpoint=checkpoint))
            assert not (checkpoint / "optimizer.pt").exists()
            assert len(list((checkpoint / "optimizer").iterdir())) == count
            assert_equal(began, on_one(run, checkpoint=checkpoint))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_word_sums_of_parts_add_up(dtype: torch.dtype) -> None:
    whole = torch.randn(3 * ROW + 7).to(dtype)
    cuts = [0, 1, ROW - 1, ROW, 2 * ROW + 5, len(whole), len(whole)]
    parts = [word_sum(whole[a:b], a) for a, b in pairwise(cuts)]
    assert int(np.sum([part.numpy() for part in parts])) == int(word_sum(whole))
