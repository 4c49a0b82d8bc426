"""What `mage new` writes runs as it is, and `mage check` says what a class declares and lacks."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch  # noqa: F401  Imported in a test, its log would go to the captured stderr for good.

import mage_async as mage
from mage_async import assembly
from mage_async.config import config_file
from mage_async.config.schema import FromWinStay, Tiny
from mage_async.environments import rehearsal
from mage_async.environments.catalogue import load
from mage_async.environments.rehearsal import compare_heldout
from mage_async.environments.user_class import OPTIONAL_PARTS, ResetStep
from mage_async.errors import CallFault, ConfigError
from mage_async.policy.demonstrations import examples_to_clone, untimed
from mage_async.policy.load import build_tiny
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_services.cli import check
from mage_services.cli.main import EXIT_USAGE, main

BAD = """
class Bad:
    \"\"\"Guess.\"\"\"

    def reset(self, seed):
        return "go"

    def step(self, action):
        return "no", 0.0, True
"""
OPEN = """
class Open:
    \"\"\"Say anything.\"\"\"

    max_turns = 2

    def reset(self, seed, task):
        return "go on"

    async def step(self, action):
        return "on", 0.0, False
"""


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a new environment, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("vault", "bad", "open_text", "slow", "rare"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["new", "vault"]) == 0
    monkeypatch.chdir(tmp_path / "vault")
    return tmp_path / "vault"


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a check play and compare fewer trials than a user's, for tests of its other lines."""
    monkeypatch.setattr(check, "NUM_TRIALS", 64)


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch, few_trials: None) -> None:
    """Let a check leave out the search for win-stay and the comparison of held-out tasks."""
    monkeypatch.setattr(check, "SEARCH_S", 0.0)


@pytest.mark.parametrize("name", ["random", "json", "numpy", "jinja2", "class", "Vault"])
def test_a_name_that_python_or_a_package_uses_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 2
    assert f"'{name}' " in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("few_trials")
def test_what_is_written_passes_its_own_tests_and_the_check(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {path.name for path in vault.iterdir()}
    assert names == {"vault.py", "vault.toml", "test_vault.py", "README.md"}
    assert len((vault / "README.md").read_text().splitlines()) <= 11
    lines = [line for line in (vault / "vault.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 25
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=vault
    )
    assert done.returncode == 0
    capsys.readouterr()
    assert main(["check", "--config", "vault.toml"]) == 0
    said = capsys.readouterr().out
    for part in (
        "legal_actions   3, such as red",
        "returns have bounds, with max_return",
        "  script          no warm start",
        "  interchangeable each training task has the same words",
        "the first 5 turns",
        "  <|user|> episode 1 room 1<|assistant|><action>",
        "  random   +",
        "  win-stay +",
        "8 held-out tasks compared with 19 trained ones: each hides something that no trained task",
        "ready: ",
    ):
        assert part in said


@pytest.mark.usefixtures("no_search")
def test_a_class_is_checked_from_python_beside_a_running_loop(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def cell() -> None:
        mage.check(keys={"environment.name": "vault:Vault", "trial.episodes": 2})

    asyncio.run(cell())
    assert "ready: " in capsys.readouterr().out
    (vault / "bad.py").write_text(BAD)
    with pytest.raises(mage.MageError, match=r"reset\(self, seed\) of Bad must be"):
        mage.check("bad:Bad")


@pytest.mark.usefixtures("no_search")
def test_a_check_from_python_leaves_processes_and_signals_of_its_process_alone(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = "import signal, subprocess\n\nchild = subprocess.Popen(['sleep', '60'])\n"
    handler = "handler = signal.getsignal(signal.SIGTERM)\n"
    (vault / "busy_vault.py").write_text(started + handler + (vault / "vault.py").read_text())
    mage.check("busy_vault:Vault")  # a process that is started meanwhile, as of `mage.train`
    module = sys.modules["busy_vault"]
    assert module.child.poll() is None
    module.child.kill()
    module.child.wait()
    assert module.handler == signal.getsignal(signal.SIGTERM)


def test_a_program_is_not_played_and_the_command_that_plays_it_is_named(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (vault / "loop.py").write_text("def run(task, base_url, api_key):\n    return 0.0\n")
    given = ["agent:loop:run", "--set", "policy.source=none", "--set", "policy.lora=none"]
    assert main(["check", *given]) == 0
    said = capsys.readouterr().out
    assert (
        "agent:loop:run is a program, which only a run can play: `mage train "
        "--set=environment.name=agent:loop:run --set=policy.source=none --set=policy.lora=none "
        "--set=learner.steps=1`\nready: "
    ) in said


OTHER = """
class Vault:
    \"\"\"Say the hidden letter.\"\"\"

    legal_actions = ("a", "b", "c")
    words = (*legal_actions, "say", "right", "wrong")
    max_turns = 2

    def members(self, split):
        return ("a", "b") if split == "train" else ("c",)

    def reset(self, seed, task):
        self.letter = task
        return "say"

    def step(self, action):
        is_right = action == self.letter
        return "right" if is_right else "wrong", float(is_right), is_right, False, {}
"""


def test_all_written_tests_but_the_first_hold_for_another_class(vault: Path) -> None:
    def run_tests() -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE"]
        # Python compares times of change in whole seconds, so bytecode could be that of before.
        kept = {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=vault, capture_output=True, text=True, env=os.environ | kept
        )
        return done.stdout

    (vault / "vault.py").write_text(OTHER)
    said = run_tests()
    assert "1 failed, 4 passed" in said
    assert "FAILED test_vault.py::test_the_hidden_buttons_pay" in said
    pattern = OTHER.replace('legal_actions = ("a", "b", "c")', 'legal_pattern = "[abc]"')
    pattern = pattern.replace("(*legal_actions,", '("a", "b", "c",')
    assert "legal_actions" not in pattern
    (vault / "vault.py").write_text(pattern)
    assert "1 failed, 4 passed" in run_tests()
    unknown = OTHER.replace('"wrong")', '"no")')
    (vault / "vault.py").write_text(unknown.replace('else ("c",)', 'else ("b",)'))
    said = run_tests()
    assert "FAILED test_vault.py::test_only_declared_words_are_said" in said
    assert "FAILED test_vault.py::test_no_task_is_both_trained_on" in said


def test_the_name_of_a_new_environment_is_that_of_a_module(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("my-game", "class", "Vault", "../up"):
        assert main(["new", name]) == EXIT_USAGE
        assert "cannot be a module of Python" in capsys.readouterr().err
    os.chdir(vault.parent)
    assert main(["new", "vault"]) == EXIT_USAGE
    assert "vault: cannot be written: File exists" in capsys.readouterr().err


def test_a_mistake_is_what_a_run_would_say(vault: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (vault / "bad.py").write_text(BAD)
    assert main(["check", "bad:Bad"]) == EXIT_USAGE
    assert "mage check: environment 'bad': reset(self, seed) of Bad must be" in (
        capsys.readouterr().err
    )


RECIPES = """
import random
from itertools import product

THINGS, DROPS, WAYS = ("iron", "salt", "wax"), "12345", ("stir", "wait")
RECIPES = [" ".join(each) for each in product(THINGS, DROPS, WAYS)]


class Recipe:
    \"\"\"Find the recipe of a potion: a thing, a number of drops, and a way.\"\"\"

    words = (*THINGS, *DROPS, *WAYS, "potion", "right", "wrong", "more", "fewer", "gold")
    max_turns = 2

    def members(self, split):
        recipes = list(RECIPES)
        random.Random(1).shuffle(recipes)
        return recipes[:24] if split == "train" else recipes[24:]

    def reset(self, seed, task):
        self.recipe = task.split()
        return "potion"

    def step(self, action):
        thing, drops, way = action.split()
        want_thing, want_drops, want_way = self.recipe
        said = ["right" if thing == want_thing else "wrong"]
        said.append("right" if drops == want_drops else "more" if drops < want_drops else "fewer")
        said.append("right" if way == want_way else "wrong")
        is_right = said == ["right"] * 3
        return ("gold" if is_right else " ".join(said)), float(is_right), is_right


class Listed(Recipe):
    legal_actions = tuple(RECIPES)


class Pattern(Recipe):
    legal_pattern = "(iron|salt|wax) [1-5] (stir|wait)"
"""


def test_a_pattern_is_played_and_judged_like_the_list_of_its_actions(
    vault: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "NUM_TRIALS", 64)
    monkeypatch.setattr(check, "BUDGET_S", 600.0)
    monkeypatch.setattr(check, "SEARCH_S", 600.0)
    twice = RECIPES.replace('"gold"', '"gold", "gold"', 1)
    (vault / "recipes.py").write_text(twice)
    said = {}
    for name in ("Pattern", "Listed"):
        assert main(["check", f"recipes:{name}"]) == 0
        said[name] = capsys.readouterr().out
    for beginning in ("  <", "  random ", "  win-stay +", "6 held-out tasks compared with 24"):
        lines = [
            [line for line in each.splitlines() if line.startswith(beginning)]
            for each in said.values()
        ]
        assert lines[0] == lines[1] != []
    assert "each hides something that no trained task hides" in said["Pattern"]
    assert "words lists gold more than once" in said["Pattern"]
    # `mage train` decides by the same trials whether that player is cloned.
    config = config_file.load(config_file.find(None), ["environment.name=recipes:Listed"])
    save_tokenizer(build_tokenizer(assembly.environment_of(config).facts.words), vault)
    warm = FromWinStay(trials=1)
    _, origin, _ = examples_to_clone(config, warm, vault, untimed)
    assert f"  win-stay {origin.partition(': ')[2]}\n" in said["Listed"]
    assert "  legal_pattern   (iron|salt|wax) [1-5] " in said["Pattern"]
    assert "  legal_actions   30, such as " in said["Listed"]
    # Each of the two declarations makes the other one unnecessary.
    assert "any text is an action" not in said["Pattern"]
    assert "no pattern of actions" not in said["Listed"]


def test_a_pattern_that_cannot_be_used_is_refused_before_anything_is_reported(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    never_ends = RECIPES.replace("[1-5] (stir|wait)", "[1-5]+ (stir|wait)")
    assert never_ends != RECIPES
    (vault / "bad.py").write_text(never_ends)
    assert main(["check", "bad:Pattern"]) == EXIT_USAGE
    said = capsys.readouterr()
    assert "declared:" not in said.out
    assert " against " not in said.err
    assert "episode 1: reset(): the legal_pattern '(iron|salt|wax) [1-5]+ (st" in said.err
    assert "matches actions of more than 1,000 characters" in said.err


TOOLS = """
from mage_async.environments.tools import tool


class Shelf:
    \"\"\"One of two drawers holds the ring. Look, then answer with its name.\"\"\"

    max_turns = 3
    words = ("open", "top", "bottom", "ring", "empty")

    def reset(self, seed, task):
        self.drawer = ("top", "bottom")[task % 2]
        self.named = ""
        return "open"

    @tool
    def look(self, drawer: str) -> str:
        \"\"\"Look into a drawer.\"\"\"
        return "ring" if drawer == self.drawer else "empty"

    def answer(self, text):
        self.named = text

    def score(self):
        return float(self.drawer in self.named)
"""


@pytest.mark.usefixtures("no_search")
def test_a_class_with_tools_needs_a_pretrained_model_even_if_it_has_words(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (vault / "bad.py").write_text(TOOLS)
    refusal = (
        "environment 'bad:Shelf' has tools, whose calls only a pretrained model can write: set "
        "policy.kind=pretrained and policy.source"
    )
    # `mage train` refuses the same keys, so the class is shown but not called ready.
    assert main(["check", "bad:Shelf"]) == EXIT_USAGE
    said, error = capsys.readouterr()
    assert re.search(r"  tools +look +only a pretrained model can play", said)
    assert re.search(r"  words +5, such as open +not used: actions are calls of tools", said)
    assert "open text" not in said
    assert "no warm start by a script\n" in said
    assert "nothing is played: no model is on this machine" in said
    assert "  this is a sample: 1,024 training and 256 held-out tasks are declared" in said
    assert "ready: " not in said
    assert refusal in error
    assert main(["check", "bad:Shelf", "--set", "policy.source=a/model"]) == 0
    assert "ready: " in capsys.readouterr().out
    tiny = ["environment.name=bad:Shelf", "policy.kind=tiny"]
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        assembly.check(config_file.load(config_file.find(None), tiny))
    assert main(["check", "bad:Shelf", "--set", "policy.kind=tiny"]) == EXIT_USAGE
    assert refusal in capsys.readouterr().err


@pytest.mark.usefixtures("few_trials")
def test_a_class_without_any_declaration_is_checked_for_a_pretrained_model(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (vault / "open_text.py").write_text(OPEN)
    assert main(["check", "open_text:Open"]) == EXIT_USAGE
    said, error = capsys.readouterr()
    assert "ready: " not in said
    assert 'has no `words`, of which policy.kind = "tiny" is built' in error
    assert "words           open text: only a pretrained model can play" in said
    # The model's first prompt needs no action.
    assert re.search(r"of made-up answers, as the model .*:\n.* Say anything\.\n", said)
    assert " episode 1 go on" in said
    assert "+0" not in said, "what made-up answers earn says nothing"
    assert "  win-stay not played: random play needs to know what an action may be" in said
    assert "earns no more than random play" not in said
    assert "this is a sample" not in said
    assert "held-out tasks are not compared: no `legal_actions`, `legal_pattern` or `words`" in said


def test_each_part_of_a_mix_is_named_above_what_is_said_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = '[{name = "boxes"}, {name = "boxes", label = "unseen", share = 0}]'
    assert main(["check", "mix", "--set", f"environment.options.parts={parts}"]) == 0
    printed = capsys.readouterr().out
    begins = [printed.index(f"part '{label}' of the mix:") for label in ("boxes", "unseen")]
    first_turns = [found.start() for found in re.finditer("the first 5 turns", printed)]
    assert begins[0] < first_turns[0] < begins[1] < first_turns[1]


@pytest.mark.usefixtures("no_search")
def test_tokens_of_a_trial_are_not_counted_without_a_model(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (vault / "open_text.py").write_text(OPEN + "\n    legal_actions = ('left', 'right')\n")
    assert main(["check", "open_text:Open"]) == EXIT_USAGE
    said = capsys.readouterr().out
    assert "no model is on this machine, so the turns below are in the tiny model's chat" in said
    assert "of random play has" not in said


def test_what_a_class_declares_as_none_is_not_declared(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = "    legal_actions, words = None, ()\n    script = lambda self, source: None\n"
    (vault / "open_text.py").write_text(OPEN + "\n" + none)
    assert main(["check", "open_text:Open", "--set", "policy.source=a/model"]) == 0
    said = capsys.readouterr().out
    assert "legal_actions   any text is an action" in said
    assert "words           open text: only a pretrained model can play" in said
    assert "script          no warm start by a script" in said


def test_bounds_that_play_contradicts_and_observations_that_no_context_holds_are_said(
    vault: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "NUM_TRIALS", 8)
    monkeypatch.setattr(check, "SEARCH_S", 0.0)
    (vault / "open_text.py").write_text(
        OPEN.replace('return "on", 0.0', 'return "on " * 1_000, 2.0')
        + "    legal_actions = ('a', 'b')\n    min_return = 0.0\n    max_return = 1.0\n"
    )
    assert main(["check", "open_text:Open", "--set", "policy.source=a/model"]) == 0
    said = capsys.readouterr().out
    assert "an episode earned 4, but the environment declares min_return = 0 and max_" in said
    assert "can start, but correct min_return and max_return first: reports use them" in said
    assert "more rows of this line" in said
    assert "one that has used its share is cut; raise engine.max_tokens, or lower" in said
    assert len(said.splitlines()) < 150


RARE = """
import random
import time


class Rare:
    \"\"\"Pick left or right.\"\"\"

    legal_actions = ("left", "right")
    words = (*legal_actions, "go", "yes", "no")

    def reset(self, seed, task):
        self.side, self.task = random.Random(task).choice(self.legal_actions), task
        return "go"

    def step(self, action):
        if self.task % 16 == 7:
            SOMETIMES
        return ("yes" if action == self.side else "no"), float(action == self.side), True
"""


@pytest.mark.usefixtures("few_trials")
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("raise ValueError('table')", r"raised ValueError: table \(.*/rare.py, line 18, in step: "),
        ("return 'yes', math.nan, True", r"a finite reward, got nan \(.*/rare.py, line 16\)\n"),
        ("return 'jackpot', 0.0, True", r"\(.*/rare.py, line 16\) says 'jackpot' in 'jackpot', w"),
    ],
)
def test_a_class_that_fails_in_one_trial_of_many_is_not_ready(
    vault: Path, capsys: pytest.CaptureFixture[str], code: str, sentence: str
) -> None:
    (vault / "rare.py").write_text(
        RARE.replace("SOMETIMES", code).replace("import time", "import math")
    )
    assert main(["check", "rare:Rare"]) == EXIT_USAGE
    said, error = capsys.readouterr()
    assert re.search(rf"^mage check: not ready: .*task \d+, .* turn 1: step\(.*{sentence}", error)
    assert "ready: " not in said
    assert "  random   +" in said


def test_trials_of_a_class_that_waits_for_a_server_are_played_and_its_faults_left_out(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RARE.replace("SOMETIMES", "raise ConnectionError('no answer')")
    text = text.replace("import time", "import asyncio").replace("def step", "async def step")
    text = text.replace(
        "        if self.task", "        await asyncio.sleep(0.001)\n        if self.task"
    )
    (vault / "rare.py").write_text(text)
    assert main(["check", "rare:Rare"]) == 0
    said = capsys.readouterr().out
    assert "  random   +" in said
    assert "\n  win-stay +" in said
    assert re.search(
        r"^trials left out because of transient faults.* raised ConnectionError: no a", said, re.M
    )


@pytest.mark.usefixtures("no_search")
def test_what_a_class_prints_and_what_is_odd_about_it_are_said_in_a_line_each(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RARE.replace("SOMETIMES", "pass").replace(", True", ", False")
    text = text.replace("float(action == self.side)", "0.0001").replace(
        'return "go"', 'print("x"); return "go"'
    )
    (vault / "rare.py").write_text(text)
    assert main(["check", "rare:Rare"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^the class printed [\d,]+ lines, the first: 'x'$", said, re.MULTILINE)
    assert "\nx\n" not in said
    assert "  random   +0.00320 ±0.00000  +0.00320" in said
    assert "every episode of random play earned +0.0032: if no action" in said
    assert re.search(r"none of \d+ episodes of random play ended by itself: each was tr", said)


def test_a_call_that_hangs_in_one_trial_of_many_ends_the_check_with_its_name(
    vault: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "TOTAL_S", 2.0)
    (vault / "rare.py").write_text(RARE.replace("SOMETIMES", "time.sleep(1000)"))
    assert main(["check", "rare:Rare", "--set", "environment.step_deadline_s=1"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert re.search(
        r"not ready: rare, task \d+, .* turn 1: step\('\w+'\) took longer than env", error
    )


@pytest.mark.usefixtures("no_search")
def test_a_class_may_use_all_of_stdout_and_prints_no_line_between_others(
    vault: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = RARE.replace("SOMETIMES", "pass").replace("import time", "import sys")
    begun = 'sys.stdout.buffer.flush(); sys.stdout.writelines(["x\\n"]); return "go"'
    (vault / "rare.py").write_text(text.replace('return "go"', begun))
    assert main(["check", "rare:Rare"]) == 0
    checked = capfd.readouterr().out
    # The directory of the run, which cannot be written, comes after the rehearsal.
    train = ["train", "--set", "environment.name=rare:Rare", "--run-dir", "/dev/null/run"]
    assert main(train) == EXIT_USAGE
    for said in (checked, capfd.readouterr().out):
        assert re.search(r"the class printed [\d,]+ lines, the first: 'x'$", said, re.MULTILINE)
        assert "\nx\n" not in said


@pytest.mark.usefixtures("no_search")
def test_a_class_that_changes_the_folder_leaves_the_path_of_the_policy_as_it_is(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RARE.replace("SOMETIMES", "pass").replace("import time", "import os")
    (vault / "rare.py").write_text(text.replace('return "go"', 'os.chdir("/"); return "go"'))
    build_tiny(Tiny(), ["left", "right", "go", "yes", "no"], 0, vault / "model")
    checked = ["check", "rare:Rare", "--set", "policy.source=./model"]
    assert main(checked) == 0
    said = capsys.readouterr().out
    assert "  random   +" in said
    assert said.endswith("can start, unless the model fails a check after it is loaded\n")
    assert Path.cwd() == vault
    # A model that `mage train` refuses is not called ready.
    (vault / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(checked) == EXIT_USAGE
    said, error = capsys.readouterr()
    assert "ready: " not in said
    assert "model: a model of type 'gpt2' cannot be trained" in error


def test_processes_that_a_class_leaves_running_end_with_the_command(vault: Path) -> None:
    text = RARE.replace("SOMETIMES", "pass").replace("import time", "import subprocess")
    begun = """if self.task == 0:
            subprocess.Popen(["sleep", "1000"])
        return "go\""""
    (vault / "rare.py").write_text(text.replace('return "go"', begun))
    for command in (["check", "rare:Rare"], ["--set", "environment.name=rare:Rare"]):
        command = [sys.executable, "-m", "mage_async.launch", *command]
        if "check" not in command:
            command += ["--run-dir", "/dev/null/run"]
        # A process that stays would hold the pipe.
        done = subprocess.run(command, cwd=vault, capture_output=True, text=True, timeout=100)
        assert "processes were left running, which are killed: sleep (" in done.stderr


def test_processes_of_a_class_end_with_a_command_that_sigterm_ends(vault: Path) -> None:
    begun = """subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("begun", file=sys.stderr, flush=True)
        time.sleep(60)
        return "go\""""
    text = RARE.replace("SOMETIMES", "pass").replace('return "go"', begun)
    (vault / "rare.py").write_text(f"import subprocess, sys\n{text}")
    command = [sys.executable, "-m", "mage_async.launch", "check", "rare:Rare"]
    checking = subprocess.Popen(command, cwd=vault, stderr=subprocess.PIPE, text=True)
    assert checking.stderr is not None
    while "begun" not in checking.stderr.readline():
        assert checking.poll() is None
    checking.terminate()
    checking.communicate(timeout=60)  # a process that stays would hold the pipe
    assert checking.returncode == -signal.SIGTERM


def test_the_share_of_random_episodes_that_earn_anything_is_said_where_it_is_small(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RARE.replace("SOMETIMES", "return 'yes', float(action == self.side), True")
    text = text.replace('no"), float(action == self.side)', 'no"), 0.0').replace("% 16", "% 64")
    (vault / "rare.py").write_text(text)
    assert main(["check", "rare:Rare"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"  1\.\d% of the episodes of random play earned anything: begin with ea", said
    )


def test_a_class_that_waits_is_checked_in_the_time_that_there_is(
    vault: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "TOTAL_S", 4.2)
    (vault / "rare.py").write_text(
        RARE.replace("SOMETIMES", "pass").replace(
            "        if", "        time.sleep(0.5)\n        if"
        )
    )
    assert main(["check", "rare:Rare"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"  random   \+\S+  \+\S+  \+\S+  \(of 2 in time, too few for an interval\)", said
    )
    assert "±" not in said
    assert re.search(r"  win-stay not played: its rule is found in \d+ trials, about \d+ s", said)
    assert "held-out tasks are not compared: 2 of each split take 48 episodes, about " in said
    # 144 trials wait at the same time, for three steps of half a second each.
    part = re.findall(
        r"up to 144 trials at the same time, .* part of a step is about (\S+) s", said
    )
    assert 1.5 <= float(part[0]) < 3


def test_an_endless_trial_ends_with_the_time_of_the_check(
    vault: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "TOTAL_S", 0.0)
    (vault / "rare.py").write_text(RARE.replace("SOMETIMES", "pass"))
    assert main(["check", "rare:Rare"]) == 0
    said = capsys.readouterr().out
    assert "no turns are shown: the trials of this check have used their 0 s" in said
    assert "  win-stay not played: the trials of this check" in said


def test_play_that_would_take_long_is_not_begun(
    vault: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "BUDGET_S", 0.1)
    monkeypatch.setattr(check, "SEARCH_S", 1.0)
    source = (vault / "vault.py").read_text()
    slow = source.replace("        pays = ", "        time.sleep(0.005)\n        pays = ")
    assert slow != source
    (vault / "slow.py").write_text(slow.replace("class", "import time\n\n\nclass", 1))
    assert main(["check", "slow:Vault", "--set", 'trial.memory="reflection"']) == 0
    said = capsys.readouterr().out
    assert "  win-stay not played: its rule is found in 832 trials, about " in said
    assert "the first context of a trial of random play has " in said


def test_held_out_tasks_that_hide_what_trained_ones_do_are_found(vault: Path) -> None:
    source = (vault / "vault.py").read_text()
    both = source.replace('return codes[:19] if split == "train" else codes[19:]', "return CODES")
    shared = 'CODES = ["x", "y"]\n\n\nclass'
    both = both.replace("class", shared, 1).replace("return CODES", "return [split, split * 2]")
    both = both.replace('task.split("-")', '["red"] * 3')
    (vault / "bad.py").write_text(both)
    first, *_, new = compare_heldout(load("vault:Vault"))
    said = "1 held-out task compared with 1 trained one, which is too few to tell what is hidden"
    assert first.sentence() == said
    assert (new.num_train, new.num_heldout, new.num_known) == (19, 8, 0)
    *_, alike = compare_heldout(load("bad:Vault"))
    assert alike.num_known == alike.num_heldout == 2
    assert "all trained tasks answer alike where `seed` and the actions are" in alike.sentence()
    assert "draw what is hidden from `task`, because `seed` is for chance" in alike.sentence()
    assert "each hides something" in new.sentence()
    assert "1 of them hides what a" in new._replace(num_known=1).sentence()
    assert "declare `members(split)`" in new._replace(num_known=8).sentence()


@pytest.mark.usefixtures("few_trials")
def test_so_few_training_tasks_that_they_are_learned_by_heart_are_counted(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (vault / "vault.py").read_text()
    few = source.replace('codes[:19] if split == "train"', 'codes[:9] if split == "train"')
    assert few != source
    (vault / "few.py").write_text(few)
    for name, is_said in (("few", True), ("vault", False)):
        assert main(["check", f"{name}:Vault"]) == 0
        said = capsys.readouterr().out
        assert ("9 different training tasks are so few" in said) == is_said


def test_tasks_that_one_action_of_many_tells_apart_are_not_the_same() -> None:
    class Door:
        """One of 40 keys opens the door."""

        legal_actions = tuple(map(str, range(40)))

        def members(self, split: str) -> tuple[str, ...]:
            return self.legal_actions[:30] if split == "train" else self.legal_actions[30:]

        def reset(self, seed: int, task: str) -> str:
            self.key = task
            return "door"

        def step(self, action: str) -> tuple[str, float, bool]:
            return "open" if action == self.key else "shut", 0.0, True

    found = list(compare_heldout(ResetStep(Door, {})))
    assert found[29].num_known > 0, "12 episodes are too few for 40 keys"
    assert (found[-1].num_heldout, found[-1].num_known) == (10, 0)
    assert found[29].num_kinds < 15
    assert found[-1].num_kinds > 25, "trained tasks are told apart too"


def test_tasks_that_differ_after_much_waiting_are_told_apart() -> None:
    class Bus:
        """A bus comes at one of twelve minutes."""

        legal_actions = ("wait", "board")

        def reset(self, seed: int, task: int) -> str:
            self.minute, self.comes = 0, 4 + task % 12
            return "minute"

        def step(self, action: str) -> tuple[str, float, bool]:
            self.minute += 1
            is_over = action == "board" or self.minute == 16
            return "early" if self.minute < self.comes else "late", 0.0, is_over

    found = list(islice(compare_heldout(ResetStep(Bus, {})), 20))
    assert found[-1].num_kinds > 1


def test_each_task_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[int]()

    class Trace(str):
        """Counts how often it is looked up."""

        def __hash__(self) -> int:
            hashed.append(1)
            return super().__hash__()

    monkeypatch.setattr(rehearsal, "_trace", lambda _, member, __: Trace(member[-1]))
    *_, last = compare_heldout(load("rps"))
    assert last.num_known > 0
    assert len(hashed) <= 3 * (last.num_train + last.num_heldout)


@pytest.mark.parametrize(
    ("words", "fault"), [((), ConfigError), (("red",), CallFault)], ids=["no words", "it raises"]
)
def test_a_comparison_that_ends_in_an_error_closes_its_object(
    words: tuple[str, ...], fault: type[Exception]
) -> None:
    closed = []

    class Failing:
        """Raise at the first step."""

        def reset(self, seed: int, task: int) -> str:
            return "red"

        def step(self, action: str) -> tuple[str, float, bool]:
            raise KeyError(action)

        def close(self) -> None:
            closed.append(self)

    Failing.words = words
    with pytest.raises(fault):
        next(compare_heldout(ResetStep(Failing, {})))
    assert len(closed) == 1


@pytest.mark.slow
def test_a_training_of_what_is_written_starts_and_ends(vault: Path) -> None:
    command = [sys.executable, "-m", "mage_async.launch", "--config", "vault.toml"]
    for key in ("learner.steps=2", "evaluation.final_trials=16", "evaluation.every=0"):
        command += ["--set", key]
    command += ["--actors", "1", "--run-dir", "run"]
    done = subprocess.run(command, cwd=vault, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 steps" in done.stdout


def test_every_part_that_is_listed_is_known_where_misspelt_ones_are_refused() -> None:
    assert {name for name, _, _ in check.PARTS} <= {*OPTIONAL_PARTS}


def test_a_reset_without_the_episode_is_said_to_draw_the_same_in_all_of_them(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = OPEN.replace("reset(self, seed, task)", "reset(self, seed, task, episode)")
    assert taken != OPEN
    for name, source, is_same in (("same", OPEN, True), ("drawn", taken, False)):
        (vault / f"{name}.py").write_text(source)
        main(["check", f"{name}:Open"])
        same = r"\n  episode +of `reset`: `seed` is the same in all episodes of a trial\n"
        assert bool(re.search(same, capsys.readouterr().out)) == is_same


@pytest.mark.usefixtures("no_search")
def test_legal_actions_that_methods_set_are_declared_and_played(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = OPEN.replace("return", 'self.legal_actions, self.anchor = ["x", "y"], ""; return', 1)
    (vault / "set_later.py").write_text(changed)
    assert main(["check", "set_later:Open"]) == EXIT_USAGE
    said = capsys.readouterr().out
    declared, _, lacking = said.partition("not declared:")
    for name in ("legal_actions", "anchor"):
        assert re.search(rf"\n  {name} +set by a method ", declared)
    assert "legal_" not in lacking
    assert "of random play, as the model" in said
    assert re.search(r"\n  random +[-+]\d", said)
