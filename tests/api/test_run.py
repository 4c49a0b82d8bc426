"""A recorded run, looked at and talked to from Python."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace

import pytest
import tomli_w

import mage_async as mage
from mage_async.config import config_file
from mage_async.doctor import Doctor
from mage_async.results.run_files import read_records
from mage_services.api import start_to_report
from mage_services.api.evaluation import evaluate, folder_of
from mage_services.api.hub import write_folder
from mage_services.api.run import framed
from mage_services.cli.main import main
from tests.helpers.recorded_runs import unpack


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return mage.load(unpack("finished", tmp_path_factory.mktemp("runs")).root)


def rows(table):
    """A table as a list of dicts, with or without pandas."""
    return table if isinstance(table, list) else table.to_dict("records")


def test_a_run_says_what_it_measured(run):
    assert "4 of 4 steps" in repr(run)
    assert [row["step"] for row in rows(run.steps())] == [1, 2, 3, 4]
    curve = rows(run.curve())
    assert {row["set"] for row in curve} == {"train", "heldout"}
    assert {row["episode"] for row in curve} == {1, 2, 3}
    last, final = curve[-3:], run.summary["evaluation"]["heldout"]["return_by_episode"]
    assert [row["return"] for row in last] == final
    assert {row["version"] for row in last} == {4}
    assert run.summary["steps"] == 4
    assert run.config.learner.steps == 4


def test_the_trials_of_a_step_are_those_of_its_groups(run):
    trials = list(run.trials(step=2))
    assert len(trials) == 12
    assert {trial["step"] for trial in trials} == {2}
    assert sum(trial["step"] is not None for trial in run.trials()) == 48


def test_a_trial_has_the_log_probs_of_its_tokens_where_they_are_asked_for(run):
    assert "logprobs" not in next(run.trials(step=2))
    trial = next(run.trials(step=2, tokens=True))
    turn, tokenizer = trial["turns"][0], run.policy().tokenizer()
    values = {
        name: trial[name][turn["context"]][turn["start"] : turn["stop"]]
        for name in ("tokens", "logprobs", "is_sampled", "advantages")
    }
    assert tokenizer.decode(values["tokens"]).strip() == turn["completion"].strip()
    assert (values["logprobs"][values["is_sampled"]] < 0).any()
    assert values["advantages"][values["is_sampled"]].tolist() == [turn["advantage"]]


def test_a_step_that_the_journal_does_not_have_is_an_error_with_those_that_it_has(run):
    with pytest.raises(mage.MageError, match=r"no such trial; the journal has steps 1 to 4$"):
        run.trials(step=99)


def test_a_run_that_has_only_begun_has_no_trials_yet(tmp_path):
    begun = unpack("finished", tmp_path)
    shutil.rmtree(begun.policy)
    with pytest.raises(mage.MageError, match=r"the run has no policy yet$"):
        mage.load(begun.root).trials()


@pytest.mark.parametrize("given", [{"trials": 0}, {"trials": -3}, {"trials": 2, "episodes": 0}])
def test_an_evaluation_of_nothing_is_refused(run, given):
    ((name, number),) = [item for item in given.items() if item[1] < 1]
    with pytest.raises(mage.MageError, match=f"^{name} must be at least 1, got {number}$"):
        run.evaluate(**given)


def test_a_table_is_plain_where_neither_pandas_nor_polars_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "polars", None)
    assert framed([{"a": 1}]) == [{"a": 1}]


def test_the_model_and_the_tokenizer_are_those_of_transformers(run):
    policy = run.policy()
    assert policy.version == 4
    assert repr(policy) == f"<mage policy {policy.path}: 4 steps>"
    assert policy.model().config.vocab_size == len(policy.tokenizer())


def test_a_policy_is_talked_to_beside_a_running_loop_and_remembers(run):
    async def talk():
        with run.policy().chat() as chat:
            first = chat("episode 1", temperature=0.0)
            second = chat("opp rock", temperature=0.0)
            chat.reset()
            assert chat("episode 1", temperature=0.0) == first
            with pytest.raises(mage.MageError, match=r"^`temperature` must be a number from 0"):
                chat("opp rock", temperature=-1.0)
            assert chat("opp rock", regex="rock", seed=1) == "<action> rock</action>"
            with pytest.raises(TypeError, match="unexpected keyword argument 'logprobs'"):
                chat("opp rock", logprobs=True)
            chat.close()  # and once more at the end of the block
            return first, second

    first, second = asyncio.run(talk())
    assert first.startswith("<action>")
    assert second.endswith("</action>")


def test_an_evaluation_costs_the_processor_time_since_its_call(tmp_path):
    began = time.process_time()
    assert began > 0
    run = unpack("finished", tmp_path)
    run.config.write_text(run.config.read_text().replace("final_trials = 24", "final_trials = 2"))
    place, config, summary = evaluate(run, episodes=2)
    assert summary["evaluation"]["heldout"]["num_trials"] == 2
    assert 0 < summary["processor_s"] <= time.process_time() - began
    assert config.evaluation.episodes == 2
    assert config_file.load_recorded(place.config) == config


def test_an_evaluation_keeps_the_costs_of_training_that_were_recorded(tmp_path):
    run = unpack("finished", tmp_path)
    recorded = json.loads(run.summary.read_text())
    del recorded["processor_s"]
    run.summary.write_text(json.dumps(recorded))
    run.evaluation.unlink()  # the evaluation of fewer trials would not replace it
    _, _, summary = evaluate(run, trials=2)
    assert summary["wall_s"] == recorded["wall_s"]
    assert "processor_s" not in summary


def test_an_evaluation_with_fewer_trials_does_not_replace_one_with_more(tmp_path):
    run = unpack("finished", tmp_path)
    before = run.evaluation.read_text()
    recorded = json.loads(before)
    assert recorded["sets"]["heldout"]["num_trials"] > 2
    place, _, summary = evaluate(run, trials=2)
    assert run.evaluation.read_text() == before
    assert place.root == run.root / "trials_2"
    assert summary["evaluation"]["heldout"]["num_trials"] == 2
    again, _, _ = evaluate(run, trials=2)
    assert again.root == place.root


@pytest.fixture
def fallen(tmp_path):
    """A run whose checkpoint of step 2 is better than its newest one, of step 4."""
    files = unpack("finished", tmp_path)
    shutil.copytree(files.checkpoints / "step_000004", files.checkpoints / "step_000002")
    better, *others = (json.loads(line) for line in files.curve.read_text().splitlines()[1:])
    assert (better["version"], others) == (2, [])
    better["sets"]["heldout"]["return_by_episode"][-1] = 0.9
    files.curve.write_text(json.dumps(better) + "\n")
    return files


def test_a_checkpoint_is_chosen_by_its_step_or_as_the_best_one(fallen):
    run = mage.load(fallen.root)
    versions = [run.policy(checkpoint=each).version for each in ("newest", "best", 4, 2)]
    assert versions == [4, 2, 4, 2]
    with pytest.raises(mage.MageError, match=r"no checkpoint of step 3; .+ of steps 2, 4$"):
        run.policy(checkpoint=3)


def test_an_older_checkpoint_is_evaluated_into_a_folder_of_its_own_and_pushed_with_that(
    fallen, tmp_path
):
    before = fallen.evaluation.read_text(), fallen.summary.read_text()
    mage.load(fallen.root).evaluate(2, checkpoint="best")
    assert (fallen.evaluation.read_text(), fallen.summary.read_text()) == before
    written = json.loads((fallen.root / "step_2" / "evaluation.json").read_text())
    assert (written["version"], written["chosen_of"]) == (2, 2)
    assert "the best of 2 on held-out tasks" in (fallen.root / "step_2" / "report.html").read_text()
    assert write_folder(fallen, tmp_path / "best", checkpoint="best") == 2
    assert "the best of 2 on held-out tasks" in (tmp_path / "best" / "README.md").read_text()
    mage.load(fallen.root).evaluate(2, checkpoint=2)
    written = json.loads((fallen.root / "step_2" / "evaluation.json").read_text())
    assert "chosen_of" not in written
    assert write_folder(fallen, tmp_path / "pushed", checkpoint="best") == 2
    scores = json.loads((tmp_path / "pushed" / "summary.json").read_text())["evaluation"]
    assert scores["heldout"]["num_trials"] == 2


def test_a_policy_is_played_where_the_loss_that_trained_it_cannot_be_imported(tmp_path):
    run = unpack("finished", tmp_path)
    tables = tomllib.loads(run.config.read_text())
    tables["credit"]["kind"] = "elsewhere:Credit"
    tables["learner"]["correction"] = {"kind": "elsewhere:Loss", "power": 2.0}
    run.config.write_text(tomli_w.dumps(tables))
    loaded = mage.load(run.root)
    assert {row["set"] for row in rows(loaded.evaluate(2))} >= {"train", "heldout"}
    assert loaded.policy().config.learner.correction.kind == "elsewhere:Loss"
    out = str(tmp_path / "adapt")
    assert main(["adapt", "--model", str(run.root), "--trials", "2", "--out", out]) == 0


def test_an_evaluation_says_that_later_steps_are_in_no_checkpoint(tmp_path, capsys):
    run = unpack("finished", tmp_path)
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 9}) + "\n")
    evaluate(run, trials=2)
    said = capsys.readouterr().err
    assert "evaluating step 4, that of the newest checkpoint: the run has trained 9 steps" in said
    assert f"`{run.resume_command}` goes on" in said


def test_a_run_ends_with_its_best_checkpoint_if_the_newest_is_worse(fallen):
    records, said = read_records(fallen), list[str]()
    view = SimpleNamespace(close=lambda summary: None, line=said.append)
    costs = {"wall_s": 1.0, "processor_s": 1.0}
    start_to_report._finish(fallen, Doctor.recorded(records), view, costs, {})
    (line,) = (each for each in said if each.startswith("best checkpoint"))
    assert line.startswith("best checkpoint: step 2: the last episode earned +0.900 on held-out")
    assert f"`mage train --from {fallen.root} --checkpoint 2`" in line


def test_a_new_run_begins_with_the_configuration_and_a_checkpoint_of_another(fallen, capsys):
    command = ["train", "--from", str(fallen.root), "--print-config"]
    assert main([*command, "--checkpoint", "best", "--set", "learner.learning_rate=1e-4"]) == 0
    config, recorded = config_file.loads(capsys.readouterr().out), mage.load(fallen.root).config
    assert config.policy.source == str(fallen.checkpoints / "step_000002")
    assert (config.warm_start, config.learner.learning_rate) == (None, 1e-4)
    assert (config.environment, config.sampling) == (recorded.environment, recorded.sampling)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--from", "RUN", "--resume"], "leave out --resume"),
        (["--from", "RUN", "--config", "scout"], "leave out --config"),
        (["--from", "RUN", "--checkpoint", "3"], "no checkpoint of step 3"),
        (["--resume", "--run-dir", "RUN", "--checkpoint", "best"], "--from RUN_DIR"),
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused(options, sentence, run, capsys):
    options = [str(run.path) if each == "RUN" else each for each in options]
    assert main(["train", *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"environment.name": "boxes"}, "the run's own environment.name 'rps': leave the key out"),
        ({"policy.source": "a/model"}, r"the run's own policy\.kind 'tiny': .* mage train --from "),
        ({"policy.hidden_size": 128}, r"the run's own policy\.hidden_size \d+: leave the key out"),
        ({"policy.lora.rank": 4}, r"the run's own policy\.lora: leave the key out"),
        ({"learner.steps": 3}, "learner.steps must be at least 4, which the run has trained alre"),
        ({"trial.episodes": 4}, "trial.episodes: the run has trained all of its 4 steps"),
    ],
)
def test_a_run_is_not_resumed_as_another_one_and_stays_as_it_is(keys, sentence, run):
    before = run.path.joinpath("config.toml").read_text()
    with pytest.raises(mage.MageError, match=sentence):
        run.resume(keys)
    assert run.path.joinpath("config.toml").read_text() == before


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(mage.MageError, match="no run directory"):
        mage.load(tmp_path)


def test_the_import_is_cheap_and_knows_every_public_name():
    code = (
        "import sys, mage_async as mage; assert not {'torch', 'numpy', 'msgspec'} & {*sys.modules}"
        "; print(*(getattr(mage, name).__doc__ is not None for name in mage.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"True"}
    assert {"train", "Run"} <= {*dir(mage)} == {*mage.__all__}
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mage.trian


def test_evaluations_of_other_environments_and_options_have_folders_of_their_own() -> None:
    assert folder_of("maze", []) == "environment_maze"
    folders = {
        folder_of(name, options)
        for name in ("maze", "my:Game", "my-Game", "a/b")
        for options in ([], ["environment.options.size=5"], ["environment.options.size=6"])
    }
    assert len(folders) == 12
    assert all("/" not in folder and ":" not in folder for folder in folders)
