"""The policy a run begins from, where it is cloned from scripts under adapters."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from mage_async.config import config_file
from mage_async.errors import DeterministicFailure
from mage_async.policy.prepare import prepare_policy

if TYPE_CHECKING:
    from mage_async.policy.warm_start import Progress

WARM_START = (
    *("warm_start.steps=2", "warm_start.trials=4", "warm_start.batch_size=4"),
    *("warm_start.gate=1.0", "warm_start.cache=false", "warm_start.episodes=1"),
)
SHUT = ("warm_start.gate=0.1", "warm_start.max_steps=3", "warm_start.episodes=2")


def test_a_pretrained_model_is_cloned_under_adapters_and_merged(tmp_path: Path) -> None:
    tiny = config_file.load(config_file.find(None), ["warm_start=none"])
    assert prepare_policy(tiny, tmp_path / "tiny", "build", print) == "built here"
    changes = [f"policy.source={tmp_path / 'tiny'}", "policy.lora.rank=2", *WARM_START]
    config = config_file.load(config_file.find(None), [*changes, "transcript.forced_tags=both"])
    said: list[Progress] = []
    prepare_policy(config, tmp_path / "cloned", "build", said.append)
    assert [(progress.step, math.isfinite(progress.gate)) for progress in said] == [
        (1, False),
        (2, True),
    ]
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("tiny", "cloned")
    )
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert {name.rpartition("layers.")[0] for name in moved} == {"model."}
    assert not any("norm" in name for name in moved)
    assert len(moved) == 7 * 2


def test_a_warm_start_that_does_not_look_back_says_what_to_raise(tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), [*WARM_START, *SHUT])
    with pytest.raises(DeterministicFailure, match=r"after 3 steps .* raise warm_start.steps = 2,"):
        prepare_policy(config, tmp_path / "policy", "build", lambda progress: None)
