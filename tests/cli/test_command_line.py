"""One tree of commands: help, errors, spellings, and what a run remembers of its start."""

import errno
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch  # noqa: F401  Imported in a test, its log would go to the captured stderr for good.

import mage_async
from mage_async import launch
from mage_async.admission.policies import POLICIES
from mage_async.config import config_file
from mage_async.errors import ConfigError, RunFailed
from mage_async.results.run_directory import RunDirectory
from mage_services.api import start_to_report
from mage_services.api.start_to_report import _versions
from mage_services.cli import replay
from mage_services.cli.completion import SHELLS
from mage_services.cli.main import COMMANDS, EXIT_FAILED, EXIT_USAGE, main
from mage_services.processes import child_process

HELP_OF_ALL = """
import sys
from mage_services.cli.completion import SHELLS
from mage_services.cli.main import COMMANDS
from mage_services.cli.main import main
for arguments in ([], *([name] for name in COMMANDS)):
    try:
        main([*arguments, "--help"])
    except SystemExit as end:
        assert end.code == 0, arguments
print("torch" in sys.modules, "numpy" in sys.modules)
"""
SHADOW = "raise ImportError('a module of the current directory was imported')\n"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of actors of the runs that were started; no process is."""
    numbers: list[int] = []

    def run_to_end(run: RunDirectory, config: object, *, num_actors: int, cluster: str) -> int:
        numbers.append(num_actors)
        run.metrics.touch()
        return 0

    monkeypatch.setattr(start_to_report, "run_to_end", run_to_end)
    return numbers


def refusal(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line that is wrong gets on stderr."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(arguments))
    assert ended.value.code == EXIT_USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_port_in_use_is_refused_before_a_run_directory_is_written(
    started: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        keys = ["--run-dir", str(tmp_path / "run"), "--set", f"transport.address={address}"]
        assert f"{address} is in use: end the other run" in refusal(["train", *keys], capsys)
    assert not (tmp_path / "run").exists()
    assert not started


def test_ctrl_c_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["check"], "run", interrupt)
    assert main(["check", "rps"]) == 130
    assert capsys.readouterr().err == "mage check: ended by Ctrl-C\n"
    # While modules are imported nothing can be said.
    monkeypatch.setattr("mage_services.cli.main.main", interrupt)
    monkeypatch.setattr(sys, "argv", ["mage", "check"])
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # which `launch.main` sets; restored after the test
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_help_of_every_command_needs_neither_torch_nor_numpy() -> None:
    command = [sys.executable, "-c", HELP_OF_ALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_the_supervisor_starts_without_torch() -> None:
    imports = "import sys, mage_services.api.start_to_report; print('torch' in sys.modules)"
    command = [sys.executable, "-c", imports]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


IMPORT_IN_COMMAND = """
import logging
from mage_services.cli.main import main
main(["completion", "bash"])
import transformers.quantizers
logging.getLogger("torchao").error("an error")
"""


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_a_command_shows_errors_of_libraries_and_no_warnings_of_their_imports() -> None:
    command = [sys.executable, "-c", IMPORT_IN_COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "an error\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = COMMANDS[name].HELP
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert ". " not in sentence
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"usage: mage {name} " in shown
    assert sentence in shown


def test_the_default_matrix_of_an_ablation_and_what_each_rule_guarantees_are_in_its_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["ablate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for default in ("0 1 2 4 8", "slots count drop", "decoupled none ppo", "0 1 2"):
        assert f"(default: {default})" in shown
    assert all(f"{rule.name} ({rule.guarantee})" in shown for rule in POLICIES.values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report", "/nope"], "no run directory; there is no such folder"),
        (["evaluate", "/nope"], "mage evaluate: /nope: no config.toml, so this is no run dir"),
        (["replay", "/nope"], "mage replay: /nope: no config.toml, so this is no run directory"),
        (["journal", "/nope"], "mage journal: /nope: no config.toml"),
        (["play", "/nope"], "mage play: /nope: no config.toml"),
        (["report", "/nope"], "mage report: /nope: no config.toml, so this is no run directory"),
        (["ablate", "--parallel", "0"], "mage ablate: --parallel and --actors must be at least 1"),
        (["train", "--actors", "0"], "mage: actors must be at least 1, got 0"),
        (
            ["--learner", "0"],
            "mage: --set learner.ranks=0: `learner.ranks` must be at least 1, got 0",
        ),
        (["--learner", "2", "--set", "policy.lora.rank=4"], "mage: learner.ranks = 2: policy.lora"),
        (["config", "larner"], "mage config: "),
        (["--resume"], "mage: --resume needs --run-dir, the run to go on with"),
        (["doctor", "a", "--actors", "2"], "mage doctor: --config, --actors and --set need --clus"),
        (["evaluate"], "mage evaluate: the following arguments are required: run_dir; see `mage"),
        (["evaluate", "a", "--trials", "two"], "must be a whole number above 0, got 'two'; see"),
        (["serve", "a", "--port", "70000"], "--port: must be a whole number from 0 to 65535, 0 fo"),
        (
            ["serve-environment", "--port", "-1"],
            "from 0 to 65535, 0 for a free port, got '-1'; see",
        ),
        (["view", "a", "--port", "http"], "from 0 to 65535, 0 for a free port, got 'http'; see"),
        (["chat", "run", "--temperature", "-1"], "must be a number from 0, got '-1'; see"),
        (["--actors"], "mage train: argument --actors: expected one argument; see `mage train"),
        (["trian"], "mage: no command 'trian' (did you mean `train`?); see `mage --help`"),
        (["run"], "mage: no command 'run'; see `mage --help`"),
        (
            ["train", "--steps", "5"],
            "mage train: unknown: --steps 5 (did you mean `--set learner.steps=5`?); see `mage",
        ),
        (["--learning-rate=1"], "(did you mean `--set learner.learning_rate=1`?); see `mage tra"),
        (["--learner.steps"], "(did you mean `--set learner.steps=VALUE`?); see `mage train"),
        (["check", "--set", "learner.steps", "rps", "5"], "`--set learner.steps=5`?); see `mage c"),
        (["--set", "learner.steps", "5"], "unknown: 5 (did you mean `--set learner.steps=5`?); "),
        (["--set", "learner.steps", "=", "5"], "(did you mean `--set learner.steps=5`?); see `m"),
        (["train", "me:Own"], "(did you mean `--set environment.name=me:Own`?); see `mage train"),
        (["train", "learner.steps=5"], "(did you mean `--set learner.steps=5`?); see `mage train"),
        (["--nothing", "5"], "mage train: unknown: --nothing 5; see `mage train --help`"),
        (["report", "run", "--steps", "5"], "mage report: unknown: --steps 5; see `mage report"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    arguments: Sequence[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(arguments, capsys)


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("no"), EXIT_USAGE), (RunFailed("no"), EXIT_FAILED)]
)
def test_a_failure_of_what_had_begun_is_status_1(
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(given: object) -> int:
        raise ExceptionGroup("", [ExceptionGroup("", [error])])

    monkeypatch.setattr(replay, "run", fail)
    assert main(["replay", "run"]) == status
    assert capsys.readouterr().err == "mage replay: no\n"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "no step after them is committed\n"),
        (["--to-step", "3"], "no step after them is committed up to step 3\n"),
    ],
)
def test_a_replay_that_compared_nothing_is_an_error(
    more: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    committed = MagicMock()
    committed.commit.version = 4
    config = config_file.load(config_file.find(None))
    monkeypatch.setattr(config_file, "load_recorded", lambda file: config)
    monkeypatch.setattr("mage_services.journal.reader.check_journal", lambda run: None)
    monkeypatch.setattr("mage_services.journal.reader.open_journal", MagicMock())
    monkeypatch.setattr("mage_async.protocol.journal_records.first_needed", lambda *_: 0)
    monkeypatch.setattr(
        "mage_async.admission.replay.replay", lambda *_: iter([committed] if more else [])
    )
    monkeypatch.setattr("mage_services.learner.rank_processes.RankProcesses", MagicMock())
    training = MagicMock()
    training.of.return_value.trainer.version = 3
    monkeypatch.setattr("mage_services.learner.trainer_thread.Training", training)
    assert main(["replay", str(tmp_path), *more]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "nothing was compared: the weights of step 3 are the oldest" in error
    assert error.endswith(says)


@pytest.mark.parametrize("command", [["evaluate"], ["train", "--resume", "--run-dir"]])
def test_a_folder_of_somebody_else_is_one_sentence(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert main([*command, "/theirs"]) == EXIT_USAGE
    said = "[Errno 13] Permission denied: '/theirs/config.toml'; ask its owner, or take another"
    assert said in capsys.readouterr().err


def test_the_keys_of_one_section_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "learner"]) == 0
    shown = capsys.readouterr().out
    assert "steps = " in shown
    assert "max_staleness" not in shown


@pytest.mark.parametrize("spelling", [[], ["train"]])
def test_without_a_command_mage_trains(
    spelling: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[str]()
    monkeypatch.setattr(
        child_process, "waiting_notice", lambda what: nullcontext(waits.append(what))
    )
    assert main([*spelling, "--config", "scout", "--seed", "3", "--print-config"]) == 0
    wanted = config_file.load(config_file.find("scout"), ["seed=3"])
    assert config_file.loads(capsys.readouterr().out) == wanted
    assert waits == ["imports and the configuration"]


@pytest.mark.parametrize("policy", ["policy.kind=tiny", "policy.source=model"])
def test_what_a_class_prints_is_not_in_the_printed_configuration(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loud.py").write_text(
        'print("hello")\nclass Loud:\n    """Rules."""\n    words = ("a",)\n'
        "    reset = lambda self, seed, task: 'a'\n    step = lambda self, action: ('a', 0.0, True)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loud", raising=False)
    given = ["--set", "environment.name=loud:Loud", "--set", policy]
    assert main([*given, "--print-config"]) == 0
    said = capsys.readouterr()
    assert config_file.loads(said.out).environment.name == "loud:Loud"
    assert said.err == "hello\n"


def test_the_promised_spelling_starts_four_actors(
    tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["launch.py", "--actors", "4", "--learner", "1"])
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == 0
    assert started == [4]
    assert [run.name[:4] for run in (tmp_path / "runs").iterdir()] == ["rps-"]
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_runs_that_are_started_in_the_same_second_have_directories_of_their_own(
    tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start_to_report, "datetime", MagicMock(now=lambda: datetime(2026, 1, 2)))
    for _ in range(3):
        assert main([]) == 0
    name = "rps-20260102-000000"
    assert {run.name for run in (tmp_path / "runs").iterdir()} == {name, f"{name}-2", f"{name}-3"}


def test_a_resumed_run_has_as_many_actors_as_before_unless_told_otherwise(
    tmp_path: Path, started: list[int]
) -> None:
    run = RunDirectory(tmp_path / "run")
    here = ["--run-dir", str(run.root)]
    for arguments in (
        ["--actors", "2"],
        ["--resume"],
        ["--resume", "--actors", "3"],
        ["--resume"],
    ):
        assert main([*here, *arguments]) == 0
    assert started == [2, 2, 3, 3]
    assert json.loads(run.launch.read_text())["actors"] == 3
    run.launch.unlink()
    assert main([*here, "--resume"]) == 0
    assert started[-1] == 4


COIN = """
class Coin:
    'Heads or tails.'
    legal_actions = words = ("heads", "tails")
    max_turns = 1

    def reset(self, seed, task):
        return "heads"

    def step(self, action):
        return "tails", float(action == "heads"), True
"""


def test_a_job_that_is_started_again_by_the_same_command_goes_on_with_its_run(
    tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    again = ["--resume", "--run-dir", str(run.root), "--config", "scout", "--actors", "2"]
    for _ in range(2):
        assert main(again) == 0
    assert config_file.load_recorded(run.config).environment.name == "scout"
    assert started == [2, 2]
    assert "goes on with its own configuration: --config is not" in capsys.readouterr().out


def test_a_start_that_failed_before_it_had_a_policy_is_made_anew_with_a_corrected_file(
    tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    assert main(["--run-dir", str(run.root)]) == 0
    run.metrics.unlink()  # now nothing was made
    again = ["--run-dir", str(run.root), "--config", "scout", "--actors", "2"]
    assert main(again) == EXIT_USAGE
    assert main(["--resume", *again]) == 0
    assert config_file.load_recorded(run.config).environment.name == "scout"
    assert started[1:] == [2]
    assert "neither a policy nor a step to go on with: the run begins" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--cluster", "auto", "--set", "transport.weights=tensor"],
            "with --cluster set transport",
        ),
        (["--cluster", "127.0.0.1:1"], "no Ray cluster answers there, or this machine is not one"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused_before_anything_is_written(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    assert says in refusal([*arguments, "--run-dir", str(tmp_path / "run")], capsys)
    assert not (tmp_path / "run").exists()


def test_a_job_goes_on_though_its_warm_start_was_resolved_to_a_kind_without_its_key(
    tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "coin.py").write_text(COIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    keys = ("environment.name=coin:Coin", "warm_start.gate=0.5")
    again = ["--resume", "--run-dir", "run", "--config", "quickstart"]
    again += [word for key in keys for word in ("--set", key)]
    assert [main(again), main(again)] == [0, 0]
    assert len(started) == 2


@pytest.mark.parametrize("beginning", [[], ["--resume", "--run-dir", "a"], ["--from", "a"]])
def test_a_preset_that_trains_on_stale_tokens_says_so_however_the_run_begins(
    beginning: list[str],
    tmp_path: Path,
    started: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--run-dir", "a"]) == 0
    (tmp_path / "a" / "policy").mkdir()
    assert "stale" not in capsys.readouterr().err
    assert main([*beginning, "--method", "grpo", "--print-config"]) == 0
    assert "--method grpo: stale tokens are trained on" in capsys.readouterr().err


def test_a_refused_start_changes_nothing_of_a_run(tmp_path: Path, started: list[int]) -> None:
    run = RunDirectory(tmp_path / "run")
    assert main(["--run-dir", str(run.root), "--actors", "2"]) == 0
    assert main(["--run-dir", str(run.root), "--actors", "3"]) == EXIT_USAGE
    assert json.loads(run.launch.read_text())["actors"] == 2
    assert started == [2]


def test_a_run_on_another_system_is_refused_before_anything_is_written(
    tmp_path: Path,
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert main(["--run-dir", str(tmp_path / "run")]) == EXIT_USAGE
    assert "a run needs Linux, " in (said := capsys.readouterr().err)
    assert "this system is Darwin: start the run on " in said
    assert started == []
    assert not (tmp_path / "run").exists()


def test_a_start_records_what_runs(tmp_path: Path, started: list[int]) -> None:
    run = RunDirectory(tmp_path / "run")
    assert main(["--run-dir", str(run.root)]) == 0
    versions = json.loads(run.launch.read_text())["versions"]
    assert versions["python"] == platform.python_version()
    assert versions["mage_async"] == mage_async.__version__
    assert {"torch", "transformers"} <= versions.keys()


def test_the_commit_of_a_checkout_is_recorded_with_whether_it_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=b"]
        command = ["git", "-C", str(tmp_path), *named, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert "commit" not in _versions(tmp_path)
    git("init")
    assert "commit" not in _versions(tmp_path), "nothing was committed"
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    git("tag", "-a", "v1", "-m", "a tag")
    commit = git("rev-parse", "HEAD")
    assert _versions(tmp_path)["commit"] == commit
    (tmp_path / "file").write_text("two")
    assert _versions(tmp_path)["commit"] == f"{commit}-dirty"


@pytest.mark.parametrize("module", ["mage_async", "mage_async.launch"])
def test_modules_of_the_current_directory_stand_behind_what_is_installed(
    tmp_path: Path, module: str
) -> None:
    for name in ("numpy", "msgspec", "uvloop", "argparse"):
        (tmp_path / f"{name}.py").write_text(SHADOW)
    (tmp_path / "my_game.py").write_text("from mage_async.environments.games.rps import Rps\n")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, "-m", module, "--set", "environment.name=my_game:Rps"]
    done = subprocess.run(
        [*command, "--print-config"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 'name = "my_game:Rps"' in done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert "print-config" in script or shell == "tcsh"  # shtab completes commands alone there


def test_the_completion_of_bash_is_a_script_that_bash_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_completion_knows_keys_shipped_files_and_methods(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("learner.steps=", "learner.correction", "quickstart", "mage_paper", "harder"):
        assert word in script


def test_the_reader_of_a_completion_may_leave() -> None:
    command = [sys.executable, "-m", "mage_async.launch", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as printing:
        assert printing.stdout is not None
        assert printing.stderr is not None
        printing.stdout.readline()
        printing.stdout.close()
        assert printing.stderr.read() == b""
    assert printing.returncode == 0


def test_a_folder_of_runs_that_is_taken_for_a_run_names_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "a1"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    for folder in (tmp_path, tmp_path / "runs"):
        assert main(["report", str(folder)]) == EXIT_USAGE
        assert f"so this is no run directory; a run lies in {run}" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_a_missing_sglang_is_said_before_the_run_has_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "--set", "engine.kind=sglang", "--run-dir", str(run)]) == 2
    assert 'engine.kind = "sglang" needs SGLang, which is not installed' in capsys.readouterr().err
    assert not run.exists()
