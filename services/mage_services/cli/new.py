"""`mage new NAME`: write a folder with an environment of one's own to begin with."""

import argparse
import importlib.util
import keyword
import sys
from pathlib import Path

from mage_async.errors import ConfigError, RunError

HELP = "Write an environment of your own to begin with: a class, its keys, a test and a README."

ENVIRONMENT = '''"""The environment CLASS: change it into your own. `mage check` looks at it."""

import random
from itertools import product

BUTTONS = ("red", "green", "blue")


class CLASS:
    """Walk through three rooms. In each room one of the buttons red, green and blue pays a coin,
    the same one in every episode. Find out which, and then press only those."""

    legal_actions = BUTTONS  # the policy samples from these alone
    words = (*BUTTONS, "room", "1", "2", "3", "coin", "nothing", "end")  # all that is ever said
    max_turns, min_return, max_return = 3, 0.0, 3.0

    def members(self, split):  # what is hidden, by name; the two splits have none in common
        codes = ["-".join(code) for code in product(BUTTONS, repeat=3)]
        random.Random(0).shuffle(codes)
        return codes[:19] if split == "train" else codes[19:]

    def reset(self, seed, task):  # task is one of the members, the same in all episodes of a trial
        self.paying, self.room = task.split("-"), 0
        return "room 1"

    def step(self, action):  # returns an observation, a reward, and whether the episode is over
        pays = action == self.paying[self.room]
        self.room += 1
        is_over = self.room == len(self.paying)
        found = "coin" if pays else "nothing"
        return f"{found} {'end' if is_over else f'room {self.room + 1}'}", float(pays), is_over
'''
"""Text of the module of a new environment; `CLASS` and `NAME` are replaced."""
SETTINGS = """# Keys of `mage train --config NAME.toml`; `mage config KEY` explains one.

[environment]
name = "NAME:CLASS"

[policy]
kind = "tiny"

[learner]
steps = 80
"""
"""Text of the configuration of a new environment."""
TEST = '''"""What must be true of the environment, whatever the policy does.

The first test knows the three rooms: write your own in its place when you change the class. The
others play random actions, and hold for any class with `members`, `words`, and `legal_actions` or
`legal_pattern`.
"""

import random

import pytest
from mage_async.environments.legal_pattern import matching_texts

from NAME import CLASS

TRAIN, HELDOUT = (CLASS().members(split) for split in ("train", "heldout"))


def legal_actions(environment):
    if pattern := getattr(environment, "legal_pattern", None):
        return matching_texts(pattern, CLASS.words)
    return environment.legal_actions


def played(task, *actions):
    environment = CLASS()
    return [environment.reset(0, task), *map(environment.step, actions)]


def played_at_random(task, seed):
    environment, source = CLASS(), random.Random(seed)
    steps, is_over = [(environment.reset(0, task), 0.0)], False
    while not is_over and len(steps) <= CLASS.max_turns:
        action = source.choice(legal_actions(environment))
        observation, reward, is_over, *_ = environment.step(action)
        steps.append((observation, reward))
    return steps


def test_the_hidden_buttons_pay_and_others_do_not():
    _, first, second, last = played("red-blue-red", "red", "red", "red")
    assert [reward for _, reward, _ in (first, second, last)] == [1.0, 0.0, 1.0]
    assert [is_over for _, _, is_over in (first, second, last)] == [False, False, True]


@pytest.mark.parametrize("task", [TRAIN[0], HELDOUT[0]])
def test_a_task_begins_and_goes_on_the_same_way_again(task):
    for seed in range(20):
        assert played_at_random(task, seed) == played_at_random(task, seed)


def test_only_declared_words_are_said():
    for seed, task in enumerate([*TRAIN, *HELDOUT]):
        said = " ".join(observation for observation, _ in played_at_random(task, seed))
        assert set(said.split()) <= set(CLASS.words)


def test_no_task_is_both_trained_on_and_held_out():
    assert not set(TRAIN) & set(HELDOUT)
'''
"""Text of the tests of a new environment."""
README = """# NAME

An environment for mage_async: `NAME.py` holds the class CLASS, `NAME.toml` the keys of a run.

    mage check --config NAME.toml   # what the class declares, what a model reads, what chance earns
    mage train --config NAME.toml   # trains the tiny model; a model of your own with
                                    # --set policy.source=DIR --set learner.steps=20
    pytest                          # what must be true of the class

`mage evaluate RUN_DIR` measures a run again, and `mage view runs` shows it in a browser.
"""
"""Text of the `README.md` of a new environment."""
FILES = {"NAME.py": ENVIRONMENT, "NAME.toml": SETTINGS, "test_NAME.py": TEST, "README.md": README}
"""Texts by file; NAME and CLASS stand for the names of the module and of the class."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the name."""
    parser.epilog = (
        "The folder NAME is made in the current one. Its README has the three commands that "
        "follow: mage check, mage train and pytest."
    )
    text = "name of the folder and of the module, such as vault; the class is then Vault"
    parser.add_argument("name", metavar="NAME", help=text)


def run(given: argparse.Namespace) -> int:
    """Write the folder.

    Raises:
        ConfigError: the name cannot be that of a module, or there is a module of this name.
        RunError: the folder is there already, or cannot be written.
    """
    name = given.name
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise ConfigError(
            f"{name!r} cannot be a module of Python: write it in small letters, digits and "
            "underscores, such as number_lock"
        )
    if _is_taken(name):
        raise ConfigError(
            f"{name!r} is a module of Python or of an installed package, which would be imported "
            f"in place of the new one: choose another name, such as my_{name}"
        )
    class_name = "".join(part.capitalize() for part in name.split("_"))
    folder = Path(name)
    try:
        folder.mkdir()
        for file, text in FILES.items():
            written = text.replace("NAME", name).replace("CLASS", class_name)
            (folder / file.replace("NAME", name)).write_text(written)
    except OSError as error:
        advice = "; choose another name" if isinstance(error, FileExistsError) else ""
        raise RunError(f"{folder}: cannot be written: {error.strerror}{advice}") from error
    print(f"wrote {', '.join(file.replace('NAME', name) for file in FILES)} into {folder}")
    print(f"next: cd {folder} && mage check --config {name}.toml")
    return 0


def _is_taken(name: str) -> bool:
    """Return whether a module of this name exists already, which Python would import in place of
    the new one, because a run searches the current folder last.
    """
    if name in sys.stdlib_module_names or name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    # A folder without an `__init__.py`, such as one that `mage new` made, has no origin.
    return spec is not None and spec.origin is not None
