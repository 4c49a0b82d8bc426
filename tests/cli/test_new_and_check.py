"""What `mage new` writes runs as it is, and `mage check` says what a class declares and lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  Imported in a test, its log would go to the captured stderr for good.

from mage_async.environments.catalogue import load
from mage_async.environments.rehearsal import compare_heldout
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault, ConfigError
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
    for name in ("vault", "bad", "open_text", "slow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["new", "vault"]) == 0
    monkeypatch.chdir(tmp_path / "vault")
    return tmp_path / "vault"


@pytest.mark.parametrize("name", ["random", "json", "numpy", "jinja2", "class", "Vault"])
def test_a_name_that_python_or_a_package_uses_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 2
    assert f"'{name}' " in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


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
        "legal_actions 3, such as red",
        "  script        no warm start",
        "the first 5 turns",
        "  <|user|> episode 1 room 1<|assistant|><action>",
        "  random   +",
        "  win-stay +",
        "8 held-out tasks compared with 19 trained ones: each hides something that none",
        "ready: ",
    ):
        assert part in said


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


PATTERN = """
class Pair:
    \"\"\"Name a pair of letters.\"\"\"

    legal_pattern = "[a-c] [a-c]"
    words = ("a", "b", "c", "pair", "no", "yes")
    max_turns = 2

    def reset(self, seed, task):
        self.pair = f"{'abc'[task % 3]} {'abc'[task % 2]}"
        return "pair"

    def step(self, action):
        is_right = action == self.pair
        return "yes" if is_right else "no", float(is_right), is_right
"""


def test_nothing_is_concluded_from_players_that_ignore_a_pattern(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (vault / "pairs.py").write_text(PATTERN)
    assert main(["check", "pairs:Pair"]) == 0
    said = capsys.readouterr().out
    assert "  legal_pattern [a-c] [a-c]  " in said
    assert "write words that need not match `legal_pattern`" in said
    assert "held-out tasks are not compared: no player here writes texts of `legal_" in said
    assert "never earned anything" not in said
    assert "nothing that matters is hidden" not in said


def test_a_class_without_any_declaration_is_checked_for_a_pretrained_model(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (vault / "open_text.py").write_text(OPEN)
    assert main(["check", "open_text:Open"]) == 0
    said = capsys.readouterr().out
    assert "words         open text: only a pretrained model can play" in said
    assert "no turns are shown: random play needs to know what an action may be" in said
    assert "  win-stay not played: " in said
    assert "earns no more than random play" not in said
    assert "held-out tasks are not compared: no `legal_actions` and no `words` say" in said


def test_what_a_class_declares_as_none_is_not_declared(
    vault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = "    legal_actions = None\n\n    def script(self, source):\n        return None\n"
    (vault / "open_text.py").write_text(OPEN + "\n" + none)
    assert main(["check", "open_text:Open"]) == 0
    said = capsys.readouterr().out
    assert "legal_actions any text is an action" in said
    assert "script        no warm start by a script" in said


def test_play_that_would_take_long_is_not_begun(
    vault: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "BUDGET_S", 0.1)
    source = (vault / "vault.py").read_text()
    slow = source.replace("        pays = ", "        time.sleep(0.05)\n        pays = ")
    assert slow != source
    (vault / "slow.py").write_text(slow.replace("class", "import time\n\n\nclass", 1))
    assert main(["check", "slow:Vault", "--set", 'trial.memory="reflection"']) == 0
    said = capsys.readouterr().out
    assert "  win-stay not played: its rule is found in 448 trials, about " in said
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
    assert "all trained tasks answer alike" in alike.sentence()
    assert "each hides something" in new.sentence()
    assert "1 of them hides what a" in new._replace(num_known=1).sentence()
    assert "declare `members(split)`" in new._replace(num_known=8).sentence()


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
