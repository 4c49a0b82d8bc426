"""A class of the user's own: the documentation has one, and mistakes in one are said at once."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mage_async.assembly import check_context_length, check_keys, environment_of
from mage_async.config import config_file
from mage_async.config.schema import Environment as Section
from mage_async.environments.catalogue import load
from mage_async.environments.environment import Environment
from mage_async.errors import ConfigError
from mage_async.user_modules import address_of, own_source
from mage_services.actor.rehearsal_runner import rehearse

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


def checked(name: str, *changes: str) -> list[str]:
    """What is said before a run of this environment starts."""
    config = config_file.load(config_file.find(None), [f"environment.name={name}", *changes])
    said: list[str] = []
    check_keys(config)
    asyncio.run(rehearse(config, name, environment_of(config), said.append))
    check_context_length(config)
    return said


@pytest.mark.usefixtures("folder")
def test_the_example_is_an_environment_that_can_be_run() -> None:
    playing, times, room = checked("buttons:Buttons", "environment.most_open=1")
    assert playing == "rehearsal: playing buttons:Buttons twice with the same seeds"
    assert re.fullmatch(
        r"rehearsal: 4 × begin took .* s each, at most .* s; 8 × act took .* s each, .*", times
    )
    assert room.startswith("rehearsal: the longest trial, 3 × 3 turns, needs about")


def test_a_class_without_a_script_is_rehearsed_for_a_pretrained_model(folder: Path) -> None:
    (folder / "faulty.py").write_text(
        "from buttons import Buttons\n"
        "class Faulty(Buttons):\n    script = lambda self, source: None\n"
    )
    said = checked("faulty:Faulty", "policy.kind=pretrained", "policy.source=none")
    assert "8 × act took" in said[1]


def test_a_class_that_hangs_is_refused_before_any_process_starts(folder: Path) -> None:
    (folder / "faulty.py").write_text(
        "import threading\nfrom buttons import Buttons\n"
        "class Faulty(Buttons):\n"
        "    def begin(self, task, episode):\n        threading.Event().wait()\n"
    )
    sentence = r"seed 0, episode 1: begin\(\) took longer than environment.step_deadline_s = 0.2$"
    with pytest.raises(ConfigError, match=sentence):
        checked("faulty:Faulty", "environment.step_deadline_s=0.2")


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        ("begin = lambda self, task, episode: None", " without chance and observation and anchor"),
        ("script = lambda self, source: None", "has no `script` to warm-start on: write one, or"),
        ("script = lambda self, source: 1", "script(source) must be a `Script`, or None, got 1"),
        ("seats = lambda self: (1,)", "seats() must be a tuple of seats, each below facts.num_se"),
        ("rules = lambda self: None", "rules() must be text, got None"),
        ("swaps = lambda self, *_: ()", "swaps('left-left-left', 'train') must be a tuple of oth"),
        ("references = lambda self, *_: None", "references('train', 3) must be a dictionary of tu"),
        (
            "family = lambda self, member: {'left-left-left': '', HELDOUT[0]: ''}[member]",
            "faulty.py, line 7: KeyError: 'left-right-left'",
        ),
        (
            "references = lambda self, *_: {'bayes': (0.5, 'a', None)}",
            "must be a dictionary of tuples of 3 numbers, one per episode, got {'bayes': (0.5, 'a'",
        ),
        ("members = lambda self, split: 'left'", "members('train') must be a tuple of names, got"),
        (
            "members = lambda self, split: __import__('numpy').array(['a', 'b'])",
            "members('train') must be a tuple of names, got",
        ),
        (
            "facts = replace(FACTS, words=('left', 'right', 'green', 'blue', 'over'))",
            "play.observation must be made of facts.words, unless facts.has_open_text, got 'red'",
        ),
        ("facts = replace(FACTS, words=('left'))", "facts.words must be a tuple of words, got 'l"),
        ("facts = replace(FACTS, units=0)", "facts.units must be a whole number from 1, got 0"),
        ("facts = replace(FACTS, max_turns=2)", "an episode must be over after facts.max_turns ="),
        (
            "facts = replace(FACTS, max_return=0.0)",
            "max_return must be two numbers, the second above",
        ),
        ("facts = replace(FACTS, max_return=0.1)", "what an episode earns must be from facts.min"),
        ("facts = replace(FACTS, min_return=None)", "facts.min_return and max_return must be two"),
        ("begin = plays(act=lambda self, action: None)", " must be an `Outcome`, got None"),
        (
            "begin = plays(act=lambda self, action: Outcome('pays', None))",
            ".reward must be a number, got None",
        ),
        (
            "begin = plays(act=lambda self, action: Outcome('pays', 1.0, True, True))",
            ".is_done must be False, as legal_actions() is not empty (return () once an episode is",
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
        "from buttons import HELDOUT, Buttons, Outcome, Visit\n"
        "FACTS = Buttons.facts\n"
        "def plays(**changed):\n"
        "    return lambda self, *task: type('Play', (Visit,), changed)(*task)\n"
        f"class Faulty(Buttons):\n    {inside}\n"
    )
    with pytest.raises(
        ConfigError, match=f"^environment 'faulty:Faulty':? .*{re.escape(sentence)}"
    ):
        checked("faulty:Faulty", "warm_start=script")


class Defined(Environment):
    """A class of this file."""


def test_a_class_object_stands_for_its_module_and_name() -> None:
    assert Section(name=Defined).name == f"{__name__}:Defined"  # type: ignore[arg-type]
    assert address_of(Defined) == f"{__name__}:Defined"
    with pytest.raises(ConfigError, match=r"lacks `members`"):
        load(Defined)

    class Local:
        """A class that no other process can import."""

    with pytest.raises(ConfigError, match=r"Local' cannot be imported by the processes of a run"):
        load(Local)


SCRIPT = """
from mage_async.config.schema import Environment


class Own:
    pass


print(Environment(name=Own).name)
"""


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]])
def test_a_class_of_a_script_is_imported_by_the_name_of_its_file(
    tmp_path: Path, how: list[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("script:Own\n", 0), done.stderr


def test_a_library_that_is_written_as_python_writes_it_is_recognised() -> None:
    wanted = r"'reasoning_gym:chain_sum': did you mean `reasoning-gym:chain_sum`\?"
    with pytest.raises(ConfigError, match=wanted):
        load("reasoning_gym:chain_sum")


def test_the_source_of_an_installed_class_is_that_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the libraries beside it, which take minutes to read."""
    installed = tmp_path / "site-packages"
    for name, text in (
        ("own_doors/__init__.py", "import own_library\nfrom own_doors import keys\n"),
        ("own_doors/keys.py", "NUMBER = 1\n"),
        ("own_library.py", ""),
    ):
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(text)
    monkeypatch.syspath_prepend(installed)
    before = own_source("own_doors", "environment")
    (installed / "own_library.py").write_text("# edited\n")
    assert own_source("own_doors", "environment") == before
    (installed / "own_doors" / "keys.py").write_text("NUMBER = 2\n")
    assert own_source("own_doors", "environment") != before
