"""The policy a run begins from, where it is cloned from scripts under adapters."""

import importlib
import math
import shutil
import sys
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


OWN = '''
from cards import CARDS

class Own:
    """Name the card."""

    words = (*CARDS, "go", "right", "wrong")
    legal_actions = CARDS
    max_turns = 2

    def __init__(self, size=2):
        self.size = size

    def script(self, source):
        return lambda observation: source.choice(CARDS)

    def reset(self, seed, task):
        import chance
        self.card = CARDS[chance.draw(task, self.size)]
        return "go"

    def step(self, action):
        found = action == self.card
        return "right" if found else "wrong", float(found), found
'''
FILES = {
    "own_cards.py": OWN,
    "cards.py": 'CARDS = ("ace", "king", "9")\n',
    "chance/__init__.py": "from .drawing import draw\n",
    "chance/drawing.py": "def draw(task, size):\n    return task % size\n",
}


def test_a_changed_class_never_gets_the_model_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = tmp_path / "own", list[str]()
    (folder / "chance").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def prepare(*changes: str) -> str:
        for name in ("own_cards", "cards", "chance", "chance.drawing"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        given = ("environment.name=own_cards:Own", "warm_start.cache=true", *changes)
        config = config_file.load(config_file.find(None), [*WARM_START, *given])
        found.append(prepare_policy(config, tmp_path / str(len(found)), "build", lambda at: None))
        return found[-1].partition(" ")[0]

    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "unrelated.py").write_text("")
    assert prepare() == "warm-started"
    assert prepare() == "from"
    (folder / "unrelated.py").write_text("changed = 1\n")
    assert prepare() == "from"
    for name, text in FILES.items():
        (folder / name).write_text(f"{text}\n# changed\n")
        assert prepare() == "warm-started", name
        assert prepare() == "from", name
    assert prepare("environment.options.size=3") == "warm-started"
    (folder / "own_cards.py").write_text(OWN.replace('"go"', '"start"'))
    assert prepare() == "warm-started"
    (folder / "own_cards.py").write_text(f"{OWN}\n# changed\n")
    assert prepare() == "from"
