"""A method from outside the package: a file with a class, turned on by its table."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from mage_async.algorithm import InProcessRun, prepare
from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import ConfigError, MageError
from mage_async.learning.packing import credited
from mage_async.methods.catalogue import method_class
from mage_async.methods.method import Methods, overriding
from mage_async.results.metrics import check_names
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_services.learner.trainer_thread import Training
from tests.helpers.pages import ROOT, python_blocks

SOURCE = '''
from mage_async.config.section import NonNegative, Section
from mage_async.errors import ConfigError
from mage_async.methods.method import Method


class Settings(Section):
    """Pay turns for their place in the episode."""

    wage: NonNegative = 0.25
    """Reward of each turn."""


class Wages(Method):
    """Adds a reward to each turn, and counts the batches that it has seen."""

    Settings = Settings
    metrics = {"wages_paid": ("reward", "Rewards that this method added to the batch.")}
    num_batches = 0

    def check(self):
        if self.config.trial.episodes > 3:
            raise ConfigError("wages are paid in trials of at most 3 episodes")

    def turn_rewards(self, trials):
        return [[self.settings.wage] * len(trial.turns) for trial in trials]

    def batch_metrics(self, trials):
        return {"wages_paid": self.settings.wage * sum(len(trial.turns) for trial in trials)}

    def begin(self, state, version):
        self.num_batches = int(state or b"0")

    def learn(self, groups):
        self.num_batches += 1

    def state(self):
        return str(self.num_batches).encode()
'''
SMALL = (
    "warm_start=none",
    "admission.groups_per_step=2",
    "admission.trials_per_group=4",
    "learner.minibatches=1",
    "learner.steps=2",
    "learner.checkpoint_every=1",
    "credit.kind=single_episode",
    "evaluation.every=0",
    "evaluation.final_trials=4",
)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The method by its name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "wages.py").write_text(SOURCE)
    threads = torch.get_num_threads()
    yield "wages:Wages"
    torch.set_num_threads(threads)
    sys.modules.pop("wages", None)


def configured(name: str | None, *changes: str) -> Config:
    return config_file.load(config_file.find(None), [*SMALL, *changes], name)


def test_a_file_turns_it_on_and_its_own_struct_types_the_table(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    quickstart = config_file.find(None).read_text()
    file.write_text(quickstart + f'\n[methods."{name}"]\nwage = 0.5\n')
    config = config_file.load(file)
    assert config.methods == {name: {"wage": 0.5}}
    assert config_file.loads(config_file.dump(config)) == config
    assert overriding(config, "turn_rewards") == [name]
    assert configured(name).methods == {name: {"wage": 0.25}}
    for key, sentence in (("wage=-1", "must be at least 0.0, got -1"), ("wagge=1", "did you mean")):
        with pytest.raises(ConfigError, match=rf"--set methods\.{name}\.{key}: .*{sentence}"):
            configured(None, f"methods.{name}.{key}")


def test_two_trainers_are_refused_and_one_guidance_is_made_room_for(
    name: str, tmp_path: Path
) -> None:
    for own, tokens in (("one", 5), ("two", 7)):
        hooks = "    def trainer(self, model, chat): ...\n"
        hooks += f"    def guidance_tokens(self): return {tokens}\n"
        (tmp_path / f"{own}.py").write_text(SOURCE + hooks)
    alone = configured("one:Wages", "engine.max_tokens=512")
    check(alone)
    both = replace(alone, methods={"two:Wages": {}, **alone.methods})
    assert Methods(both).guidance_tokens() == 7
    with pytest.raises(
        ConfigError, match=r"two:Wages and methods.one:Wages both replace the train"
    ):
        check(both)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [("nobody:Wages", "cannot import 'nobody'"), ("wages:Nobody", "has no class `Nobody`")],
)
def test_a_class_that_is_not_there_is_named(name: str, other: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"method '{other}': .*{sentence}"):
        configured(other)


def test_its_check_is_asked_before_a_run(name: str) -> None:
    check(configured(name, "engine.max_tokens=512"))
    with pytest.raises(ConfigError, match="wages are paid in trials of at most 3 episodes"):
        check(configured(name, "trial.episodes=4", "engine.max_tokens=512"))


def test_a_loss_of_its_own_is_reason_to_keep_groups_of_equal_rewards(
    name: str, tmp_path: Path
) -> None:
    source = SOURCE.replace("turn_rewards(self, trials)", "loss_term(self)")
    (tmp_path / "imitation.py").write_text(source)
    changes = ("engine.max_tokens=512", "admission.replaced_groups=1")
    check(configured(None, *changes))
    with pytest.raises(ConfigError, match=r"replaced_groups must be 0 with .* a loss of its own"):
        check(configured("imitation:Wages", *changes))


def test_the_method_of_the_documents_pays_each_turn_its_wage(name: str, tmp_path: Path) -> None:
    _, source, _ = python_blocks(ROOT / "docs" / "methods.md")
    (tmp_path / "wages.py").write_text(source)
    config = configured(name, f"methods.{name}.wage=0.5")
    run = InProcessRun(config, prepare(config, tmp_path))
    batches = []
    run.train(batches.extend)
    plain = credited(batches, configured(None)).returns
    assert (credited(batches, config).returns - plain >= 0.5).all()


def test_the_term_of_the_documents_lowers_the_probability_of_sampled_tokens(
    name: str, tmp_path: Path
) -> None:
    *_, source = python_blocks(ROOT / "docs" / "methods.md")
    (tmp_path / "modest.py").write_text(source)
    config, run = configured("modest:Modest"), RunDirectory(tmp_path / "run")
    run.root.mkdir()
    prepare(config, tmp_path).rename(run.policy)
    groups, changes = InProcessRun(config, run.policy).play_batch(), []
    for weight in (0, 1000):
        config = configured("modest:Modest", f'methods."modest:Modest".weight={weight}')
        training = Training.of(run, config, None)
        first, second = (training.step(groups)["confidence"] for _ in range(2))
        changes.append(second - first)
    assert 0 < first < 1
    assert changes[1] < min(0.0, changes[0])


def test_it_pays_turns_and_learns_in_the_loop_of_the_algorithm(name: str, tmp_path: Path) -> None:
    config = configured(name, f"methods.{name}.wage=0.5")
    run = InProcessRun(config, prepare(config, tmp_path))
    batches = []
    run.train(batches.extend)
    plain = credited(batches, configured(None)).returns
    paid = credited(batches, config).returns
    assert (paid - plain >= 0.5).all()
    assert run.methods.states() == {name: b"2"}
    again = Methods(config)
    again.begin(run.methods.states(), 2)
    assert again.digests() == run.methods.digests()


def test_its_metrics_stand_in_the_line_of_a_step(name: str, tmp_path: Path) -> None:
    config, run = configured(name), RunDirectory(tmp_path / "run")
    run.root.mkdir()
    prepare(config, tmp_path).rename(run.policy)
    groups = InProcessRun(config, run.policy).play_batch()
    metrics = Training.of(run, config, None).step(groups)
    num_turns = sum(len(trial.turns) for group in groups for trial in group.trials)
    assert metrics["wages_paid"] == 0.25 * num_turns
    check_names(metrics, Methods(config).metric_names())


WRONG = """
import torch
from mage_async.methods.method import Method


class Short(Method):
    def turn_rewards(self, trials):
        return [[0.1] for _ in trials]


class Lazy(Method):
    def turn_rewards(self, trials):
        return ((torch.tensor(0.5) for _ in trial.turns) for trial in trials)

    def batch_metrics(self, trials):
        return {"paid": torch.tensor(0.5)}


class NaN(Method):
    def turn_rewards(self, trials):
        return [[float("nan")] * len(trial.turns) for trial in trials]


class Metric(Method):
    def batch_metrics(self, trials):
        return {"odd": trials.missing}


class Taken(Method):
    def batch_metrics(self, trials):
        return {"loss": 1.0}


class Term(Method):
    def loss_term(self):
        return self

    def prepare(self, batch, reference, frozen):
        return None

    def loss(self, prepared, inputs, scale):
        return inputs.logprobs()[0], torch.zeros(1)


class Raises(Term):
    def loss(self, prepared, inputs, scale):
        return inputs.logits


class Plain:
    pass


class Types(Method):
    def horizon(self, version, horizon): return 3
    def self_play_share(self): return 50
    def guidance(self, number, task): return "look left"
    def guidance_tokens(self): return 2.5
    def evaluation_guidance(self, task, record=None): return {}
    def advisers(self): return "nobody"
    def state(self): return {"paid": 1}
    def record(self): return [1]
    def guide_demonstration(self, task): return True
    def early_share(self): return "all"
    def roles(self): return "ab"
    def trained_kinds(self, version): return "act"
    def trainer(self, model, chat): return True
    def frozen_policy(self): return 1
    def batch_metrics(self, trials): return [("paid", 1.0)]


class Typo(Method):
    def turn_reward(self, trials):
        return None


class Table(Method):
    class Settings:
        wage = 1.0


class Arguments(Method):
    def __init__(self):
        pass


class Check(Method):
    def check(self):
        return self.settings.wage
"""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("Plain", "inherit mage_async.methods.method.Method, whose docstrings say"),
        ("Typo", r"nothing calls its method `turn_reward` \(did you mean `turn_rewards`\?\)"),
        ("Table", "inherit mage_async.config.section.Section"),
        ("Arguments", r"takes 1 positional argument but 4 were given"),
        ("Check", r"check: .*wrong_method.py, line \d+: AttributeError"),
    ],
)
def test_a_method_that_cannot_be_made_is_named_before_a_run(
    name: str, tmp_path: Path, wrong: str, said: str
) -> None:
    (tmp_path / "wrong_method.py").write_text(WRONG)
    with pytest.raises(ConfigError, match=rf"method 'wrong_method:{wrong}'[:,] .*{said}"):
        check(configured(f"wrong_method:{wrong}"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("Short", "turn_rewards: return a list for each of the 8 trials, with a finite reward for"),
        ("NaN", "turn_rewards: return a list for each of the 8 trials"),
        ("Metric", r"batch_metrics: .*wrong_method.py, line \d+: AttributeError"),
        ("Term", r"loss: return a scalar, and .*; got tensors of 1 and 1 dimensions"),
        ("Raises", r"loss: .*wrong_method.py, line \d+: AttributeError"),
        ("Taken", "metric 'loss' of a method has the name of a metric of every run: "),
    ],
)
def test_a_hook_that_raises_or_returns_something_else_is_named(
    name: str, tmp_path: Path, wrong: str, said: str
) -> None:
    (tmp_path / "wrong_method.py").write_text(WRONG)
    config, run = configured(f"wrong_method:{wrong}"), RunDirectory(tmp_path / "run")
    run.root.mkdir()
    prepare(config, tmp_path).rename(run.policy)
    groups = InProcessRun(config, run.policy).play_batch()
    with pytest.raises(MageError, match=said) as caught:
        Training.of(run, config, None).step(groups)
    assert caught.value.is_deterministic, "the learner is not started again"
    assert wrong == "Taken" or str(caught.value).startswith(f"method 'wrong_method:{wrong}', ")


def test_a_hook_that_returns_another_type_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "wrong_method.py").write_text(WRONG)
    (method,) = Methods(configured("wrong_method:Types"))
    own = vars(method_class("wrong_method:Types"))
    hooks = {name: each for name, each in own.items() if not name.startswith("__")}
    assert len(hooks) == 15
    for hook, function in hooks.items():
        given = [None] * (len(signature(function).parameters) - 1)  # without `self`
        with pytest.raises(ConfigError, match=f"'wrong_method:Types', {hook}: return .*, got .*"):
            getattr(method, hook)(*given)


def test_rewards_may_come_one_by_one_and_numbers_as_tensors(name: str, tmp_path: Path) -> None:
    (tmp_path / "wrong_method.py").write_text(WRONG)
    config, run = configured("wrong_method:Lazy"), RunDirectory(tmp_path / "run")
    run.root.mkdir()
    prepare(config, tmp_path).rename(run.policy)
    metrics = Training.of(run, config, None).step(InProcessRun(config, run.policy).play_batch())
    assert type(metrics["paid"]) is float


@pytest.mark.slow
def test_a_whole_run_plays_trains_and_replays_with_it(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mage_async.launch"]
    run = RunDirectory(tmp_path / "run")
    changes = [part for change in SMALL for part in ("--set", change)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    begin = ["--run-dir", str(run.root), "--actors", "1"]
    # Without a checkpoint, the resumed run trains both steps again, with the method that it drops.
    without = ["--set", f"methods.{name}=none", "--set", "learner.steps=3"]
    for arguments in (
        [*begin, "--method", name, *changes],
        ["replay", str(run.root)],
        [*begin, "--resume", *without],
    ):
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(run.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line.get("wages_paid", 0) > 0 for line in lines] == [True, True, False]
    assert json.loads(run.learner.read_text())["version"] == 3
