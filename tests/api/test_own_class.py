"""A class of a script or a notebook becomes a file that other processes import."""

import importlib
import sys
import types
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

import mage_async as mage
from mage_async.results.run_directory import default_name
from mage_async.user_modules import shown_name
from mage_services.api.configuration import address_of, assignments_of

SCRIPT = """
import random
import xml.etree.ElementTree
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import permutations

SIZE = 3
code = open(__FILE__)
code.close()
LOCK = open(__FILE__)

def digits():
    return "123456"

class Lock:
    '''A lock.'''

    legal_actions = tuple(map(" ".join, permutations(digits(), SIZE)))

    def reset(self, seed, task):
        code = random.Random(task).sample(digits(), SIZE)
        self.code = code
        return "closed"

    def step(self, action):
        return "open", 1.0, True

class Easy(Lock):
    max_turns = 5

@dataclass
class Fields(Lock):
    turns: int = 5

class Wrapped(Lock):
    @contextmanager
    def opened(self):
        yield

class Parsing(Lock):
    def step(self, action):
        return xml.etree.ElementTree.fromstring("<a/>").tag, 1.0, True

class Logging:
    def reset(self):
        return __name__

class Outer:
    class Inner:
        def reset(self): ...

class Leaky:
    def reset(self):
        return LOCK.read()

Base = Lock
lookup = lambda: digits()

class Renamed(Base):
    def reset(self, seed, task):
        lookup()
        return super().reset(seed, task)

def decorated(function):
    @wraps(function)
    def inner():
        return function()
    return inner

both = decorated(digits)

class Twice:
    def reset(self):
        return both()

class Turned:
    max_turns, size, seen, alike = 2, SIZE, [], 1
    step = Lock.step

    def reset(self): ...
    def rules(self): ...

def rules(self):
    return digits()

Turned.max_turns, Turned.max_return, Turned.rules = 3, 2.5, rules
Turned.reset = lambda self: "reset later"
Turned.seen.append(1)

SOURCE = random.Random(0)

class Drawing:
    def reset(self):
        return SOURCE.random()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The module of a script that runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "script.py"
    text = SCRIPT.replace("__FILE__", repr(str(file)))
    file.write_text(text)
    module = types.ModuleType("__main__")
    module.__file__ = str(file)
    exec(compile(text, str(file), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("runs", "runs.own_code"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield module
    module.LOCK.close()


def test_a_class_of_a_script_is_written_with_all_that_it_uses_and_nothing_else(script):
    address = address_of(script.Lock)
    module, _, name = address.partition(":")
    assert shown_name(address) == "Lock"  # no digest for people
    assert default_name(address, datetime(2026, 1, 2)) == "Lock-20260102-000000"
    found = getattr(importlib.import_module(module), name)
    assert found is not script.Lock
    assert found.legal_actions == script.Lock.legal_actions
    assert found().reset(0, 1) == "closed"
    text = Path(importlib.import_module(module).__file__).read_text()
    assert "Outer" not in text
    assert "LOCK" not in text
    assert address_of(script.Lock) == address


def imported(address):
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ["Easy", "Fields", "Wrapped", "Renamed"])
def test_a_class_without_a_function_written_in_the_script_is_found(script, name):
    found = imported(address_of(getattr(script, name)))
    assert found().reset(0, 1) == "closed"
    assert vars(found).keys() >= vars(getattr(script, name)).keys() - {"__doc__"}


def test_what_was_set_on_a_class_later_is_written_too(script):
    found = imported(address_of(script.Turned))
    assert (found.max_turns, found.max_return, found.seen) == (3, 2.5, [])
    assert (found().rules(), found().reset()) == ("123456", "reset later")
    text = Path(sys.modules[found.__module__].__file__).read_text()
    assert text.count("Turned.") == 4


def test_a_submodule_that_a_class_uses_is_imported_in_its_file(script):
    address = address_of(script.Parsing)
    text = Path(importlib.import_module(address.partition(":")[0]).__file__).read_text()
    assert "import xml.etree.ElementTree\n" in text
    assert imported(address)().step("") == ("a", 1.0, True)


def test_annotations_that_a_script_does_not_evaluate_may_name_anything(script):
    file = Path("later.py")
    text = "class Early:\n    def reset(self) -> Early | Unknown: ...\n"
    file.write_text(f"from __future__ import annotations\n{text}")
    exec(compile(file.read_text(), file.name, "exec"), vars(script))
    found = imported(address_of(script.Early))
    assert found.reset.__annotations__ == {"return": "Early | Unknown"}


def test_a_class_that_reads_the_name_of_its_module_gets_that_of_its_file(script):
    found = imported(address_of(script.Logging))
    assert found().reset() == found.__module__ != "__main__"


def test_a_file_that_another_process_may_be_importing_is_not_written_again(script):
    address = address_of(script.Lock)
    file = Path(address.partition(":")[0].replace(".", "/") + ".py")
    before = file.stat()
    assert address_of(script.Lock) == address
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_configuration_takes_the_class_itself(script):
    config = mage.configure(keys={"warm_start": None}, environment=script.Lock)
    assert config.environment.name == address_of(script.Lock)
    assert config.warm_start is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Inner", "at the top of a file"),
        ("Leaky", "`LOCK` is a TextIOWrapper"),
        ("Drawing", "`SOURCE` is a Random"),
        ("Twice", "`both` is a function"),
    ],
)
def test_a_class_that_no_file_can_hold_is_refused(script, name, reason):
    found = getattr(script, name, None) or script.Outer.Inner
    with pytest.raises(mage.MageError, match=reason):
        address_of(found)


def test_a_class_of_a_module_is_named_by_its_module():
    assert address_of(mage.Run) == "mage_services.api.run:Run"


def test_keys_are_written_as_toml():
    keys = {"seed": 1, "trial": {"episodes": 2}, "warm_start": None, "a.b": ["x", 'q"'], "c": True}
    keys["d"] = [Path("e/f")]
    keys |= {"e": np.int64(5), "f": [np.float32(0.5), np.bool_(True)]}
    assert assignments_of(keys) == [
        "seed=1",
        "trial.episodes=2",
        'warm_start="none"',
        'a.b=["x", "q\\""]',
        "c=true",
        'd=["e/f"]',
        "e=5",
        "f=[0.5, true]",
    ]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("learner.steps", np.array(5), "learner.steps: a ndarray is no value of a key: give"),
        ("environment.name", object(), "environment, or your class itself, got <obj"),
        (1, 2, r"keys are a mapping of texts to values, .* got \{1: 2\}"),
        ("learner", {"steps": {5}}, "learner.steps: a set is no value"),
        ("doctor.halt", [Decimal(1)], "doctor.halt: a Decimal is no value"),
        ("environment.options", {"most": None}, "options.most: a NoneType .* leave the key out"),
    ],
)
def test_a_value_that_toml_does_not_know_is_an_error_that_names_the_key(key, value, said):
    with pytest.raises(mage.MageError, match=said):
        mage.configure(keys={key: value})


def test_keys_in_the_place_of_the_file_are_answered_with_where_they_belong():
    with pytest.raises(mage.MageError, match=r"got \{'learner.steps': 3\}: pass keys as"):
        mage.configure({"learner.steps": 3})
    with pytest.raises(mage.MageError, match=r"keys are a mapping .* got \['learner.steps=3'\]"):
        mage.configure(keys=["learner.steps=3"])


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("learner.learning_rate", float("nan"), "learner.learning_rate"),
        ("environment.options.odds", [1.0, -float("inf")], r"environment.options.odds\[1\]"),
    ],
)
def test_a_number_that_is_not_finite_is_an_error_that_says_so(key, value, name):
    with pytest.raises(mage.MageError, match=f"`{name}` must be a finite number, got (nan|-inf)$"):
        mage.configure(keys={key: value})


def test_options_hold_tables_in_lists_and_any_text():
    options = {"parts": [{"name": "rps", "options": {"label": 'a "b"\n\x7f'}}], "empty": {}}
    config = mage.configure(keys={"environment.options": options}, environment="mix")
    assert config.environment.options == options


def test_a_wrong_key_is_an_error_that_names_it():
    with pytest.raises(mage.MageError, match=r"learner.stepz.*did you mean"):
        mage.configure(keys={"learner.stepz": 1})
