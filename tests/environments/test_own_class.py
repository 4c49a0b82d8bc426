"""A class of the user's own: the documentation has one, and mistakes in one are said at once."""

import re
import sys
from pathlib import Path

import pytest

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "your_environment.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(EXAMPLE,) = (block for block in BLOCKS if "class Buttons" in block)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the documentation's example in it; nothing of it stays imported."""
    (tmp_path / "buttons.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("buttons", "faulty"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def checked(name: str) -> None:
    check(config_file.load(config_file.find(None), [f"environment.name={name}"]))


@pytest.mark.usefixtures("folder")
def test_the_example_is_an_environment_that_can_be_run() -> None:
    checked("buttons:Buttons")


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        ("begin = lambda self, task, episode: None", "begin(task, 0) must be a `Play`, with chan"),
        ("script = lambda self, source: None", "script(source) must be a `Script`, got None"),
        ("seats = lambda self: (1,)", "seats() must be a tuple of seats, each below facts.num_se"),
        ("rules = lambda self: None", "rules() must be text, got None"),
        ("swaps = lambda self, *_: ()", "swaps('left-left-left', 'train') must be a tuple of oth"),
        ("references = lambda self, *_: None", "references('train', 3) must be a dictionary of tu"),
        ("members = lambda self, split: 'left'", "members('train') must be a tuple of names, got"),
        (
            "facts = replace(FACTS, words=('left', 'right', 'green', 'blue', 'over'))",
            "play.observation must be made of facts.words, unless facts.has_open_text, got 'red'",
        ),
        ("facts = replace(FACTS, words=('left'))", "facts.words must be a tuple of words, got 'l"),
        ("facts = replace(FACTS, units=0)", "facts.units must be a whole number from 1, got 0"),
        ("facts = replace(FACTS, max_turns=2)", "an episode must be over after facts.max_turns ="),
        ("facts = replace(FACTS, max_return=0.0)", "what an episode earns must be from facts.min"),
        ("facts = replace(FACTS, min_return=None)", "facts.min_return and max_return must be two"),
        ("begin = plays(act=lambda self, action: None)", " must be an `Outcome`, got None"),
        (
            "begin = plays(act=lambda self, action: Outcome('pays', None))",
            ".reward must be a number, got None",
        ),
        (
            "begin = plays(act=lambda self, action: Outcome('pays', 1.0, True, True))",
            ".is_done must be False, as legal_actions() is not empty, got True",
        ),
        ("begin = plays(legal_actions=lambda self: ())", "legal_actions() must be not empty as a"),
        ("begin = plays(observation=property(lambda self: {}['card']))", "KeyError: 'card'"),
    ],
)
def test_what_is_wrong_in_every_trial_is_said_before_any_process_starts(
    folder: Path, inside: str, sentence: str
) -> None:
    (folder / "faulty.py").write_text(
        "from dataclasses import replace\n"
        "from buttons import Buttons, Outcome, Visit\n"
        "FACTS = Buttons.facts\n"
        "def plays(**changed):\n"
        "    return lambda self, *task: type('Play', (Visit,), changed)(*task)\n"
        f"class Faulty(Buttons):\n    {inside}\n"
    )
    with pytest.raises(ConfigError, match=f"^environment 'faulty:Faulty': .*{re.escape(sentence)}"):
        checked("faulty:Faulty")
