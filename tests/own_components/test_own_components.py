"""One component of each kind from outside the package, in the folder a run is started in."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mage_async.assembly import check, environment_of, own_sources
from mage_async.config import config_file
from mage_async.config.components import REGISTRIES, component_class
from mage_async.config.schema import digest
from mage_async.credit.turn_table import build_table
from mage_async.errors import ConfigError
from mage_async.learning.advantages import turn_advantages
from mage_async.learning.corrections import Tokens
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.league import League
from mage_async.tasks.matchmaking import Draw
from mage_async.trajectory import Group, Kind, Task, Trial, Turn
from tests.helpers.pages import ROOT, python_blocks

OWN = '''
import json
from contextlib import contextmanager

from mage_async.config.section import Positive, Section
from mage_async.credit.returns import Credit, Returns
from mage_async.learning.advantages import Advantage, GroupMean
from mage_async.learning.corrections import Correction, Surrogate, importance, no_token
from mage_async.methods.method import Method
from mage_async.tasks.matchmaking import Matchmaker
from mage_services.tracking.tracker import Tracker
from mage_services.weights.weight_transport import Disk


class Squared(Correction):
    """The policy gradient under a power of the importance weight."""

    power: Positive = 2.0
    """Exponent of the weight."""

    def surrogate(self, tokens):
        weights = importance(tokens) ** self.power
        losses = -weights * tokens.advantages * tokens.logprobs
        return Surrogate(losses, weights, no_token(tokens), no_token(tokens))


class BestEpisode(Credit):
    """Every turn is credited with the best episode."""

    def returns(self, rewards):
        best = max(map(sum, rewards))
        return Returns([[best] * len(each) for each in rewards], [best] * len(rewards))


class Halved(Advantage):
    """Half of the difference from the group's mean."""

    def estimate(self, table, device):
        mean = GroupMean(baseline=["group"], scale="none")
        return mean.estimate(table, device) / 2


class Last(Matchmaker):
    """Always the last name."""

    def choose(self, names, draw):
        return names[-1]


class Lines(Tracker):
    """Write points as lines of JSON."""

    file: str = "lines.jsonl"
    """Name of the file."""

    @contextmanager
    def open(self, run):
        with (run.folder / self.file).open("a") as out:

            def send(points):
                for point in points:
                    out.write(json.dumps([point.step, point.values]) + "\\n")

            yield send


class Elsewhere(Disk):
    """A file per version, in a folder of another name."""

    def folder(self, run):
        return run.root / "elsewhere"


class Doors:
    """One of three doors is open: name it."""

    legal_actions = ("left", "middle", "right")
    words = (*legal_actions, "closed", "open")
    max_turns, min_return, max_return = 2, 0.0, 1.0

    def reset(self, seed, task):
        self.open = self.legal_actions[task % 3]
        return "closed"

    def step(self, action):
        is_open = action == self.open
        return "open" if is_open else "closed", float(is_open), is_open


class Counted(Method):
    """Counts the turns of a batch."""

    class Settings(Section):
        """Keys of the method."""

        weight: Positive = 1.0
        """Counts of a turn."""

    metrics = {"weighted_turns": ("turns", "Weighted number of turns.")}

    def batch_metrics(self, trials):
        return {"weighted_turns": self.settings.weight * sum(len(each.turns) for each in trials)}
'''
SETTINGS = (
    "learner.correction.kind=own_parts:Squared",
    "learner.correction.power=1.5",
    "credit.kind=own_parts:BestEpisode",
    "advantage.estimator=own_parts:Halved",
    "population.matchmaker=own_parts:Last",
    "tracking.own=own_parts:Lines",
    "tracking.own.file=points.jsonl",
    "tracking.wait_s=30",
    "transport.weights=own_parts:Elsewhere",
    "environment.name=own_parts:Doors",
    "warm_start=none",
    'methods."own_parts:Counted".weight=2.0',
)
SMALL = (
    *("learner.steps=2", "admission.groups_per_step=4", "admission.trials_per_group=4"),
    *("evaluation.every=0", "evaluation.final_trials=12"),
)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the components, which is the current one."""
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    component_class.cache_clear()
    return tmp_path


def loaded(*settings: str) -> Any:
    return config_file.load(config_file.find(None), [*SETTINGS, *settings])


def test_a_whole_run_uses_one_of_each(own: Path) -> None:
    """Learner, actors, evaluator and tracker are processes, which read the run's `config.toml`."""
    run = RunDirectory(own / "run")
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run.root)]
    command += ["--actors", "1"]
    for setting in (*SMALL, *SETTINGS):
        command += ["--set", setting]
    safely = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=safely, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    points = [json.loads(line) for line in (run.tracking / "points.jsonl").read_text().splitlines()]
    assert [step for step, values in points if "train/loss" in values] == [1, 2]
    assert list((run.root / "elsewhere").glob("v*.safetensors"))
    samples = [json.loads(line) for line in run.samples.read_text().splitlines()]
    last = environment_of(loaded()).members("train")[-1]
    assert {each["member"] for each in samples if each.get("step")} == {last}
    summary = json.loads(run.summary.read_text())
    assert summary["credit"]["kind"] == "own_parts:BestEpisode"
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    # 16 trials of three episodes with one or two turns each count twice.
    assert all(2 * 48 <= line["weighted_turns"] <= 2 * 96 for line in lines)


@pytest.mark.usefixtures("own")
def test_it_is_written_down_and_read_again_as_the_same() -> None:
    config = loaded()
    assert (config.learner.correction.kind, config.learner.correction.power) == (
        *("own_parts:Squared", 1.5),
    )
    again = config_file.loads(config_file.dump(config))
    assert again == config
    assert digest(again) == digest(config) != digest(loaded("learner.correction.power=3.0"))
    own = ("Doors", "Counted", "BestEpisode", "Halved", "Squared", "Last")
    assert own_sources(config).keys() == {f"own_parts:{name}" for name in own}
    check(config)


def test_to_look_at_a_run_does_not_execute_its_code(own: Path) -> None:
    (own / "config.toml").write_text(config_file.dump(loaded()))
    (own / "own_parts.py").write_text("raise SystemExit")
    del sys.modules["own_parts"]
    component_class.cache_clear()
    config = config_file.load_recorded(own / "config.toml", imports=False)
    assert (config.learner.correction.kind, config.learner.correction.power) == (
        *("own_parts:Squared", 1.5),
    )
    assert "own_parts" not in sys.modules


@pytest.mark.usefixtures("own")
def test_its_loss_is_the_one_it_computes() -> None:
    third = torch.tensor([-1.0, -2.0])
    one = torch.arange(2)
    tokens = Tokens(third, third, third - 1.0, torch.ones(2), torch.zeros(2), one, one)
    found = loaded().learner.correction.surrogate(tokens)
    assert found.losses.tolist() == pytest.approx([-(2.718281828**1.5) * each for each in (-1, -2)])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "learner.correction.power=0",
            "--set learner.correction.power=0: `learner.correction.power` must be greater than 0.0",
        ),
        (
            "learner.correction.powr=1",
            "--set learner.correction.powr=1: unknown key `learner.correction.powr` (did you mean "
            "`learner.correction.power`?)",
        ),
        (
            "learner.correction.two-power=1",
            "--set learner.correction.two-power=1: unknown key `learner.correction.two-power`",
        ),
        (
            "learner.correction=own_parts:Sqared",
            "correction 'own_parts:Sqared': own_parts has no class `Sqared` (did you mean `Sq",
        ),
        (
            "learner.correction=own_parts:Lines",
            "correction 'own_parts:Lines': inherit mage_async.learning.corrections.Correction",
        ),
        ("learner.correction=nowhere:X", "correction 'nowhere:X': cannot import 'nowhere'"),
        (
            "learner.correction=squared",
            "--set learner.correction=squared: `learner.correction.kind` must be one of 'none'",
        ),
    ],
)
def test_what_is_wrong_with_it_is_said_with_its_key(setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(setting)
    assert str(caught.value).startswith(said)


def test_the_credit_and_the_correction_of_the_documents_do_what_they_say(own: Path) -> None:
    (own / "mine.py").write_text(python_blocks(ROOT / "docs" / "methods.md")[0])
    settings = ["credit.kind=mine:Progress", "learner.correction=mine:HalfLife"]
    config = config_file.load(config_file.find(None), settings)
    check(config)
    found = config.credit.checked([[1.0, 0.0], [3.0], [2.0]])
    assert (found.acts, found.scores) == ([[3.0, 3.0], [2.0], [0.0]], [1.0, 2.0, 0.0])
    same, ages = torch.full((3,), -1.0), torch.tensor([0, 4, 8], dtype=torch.int32)
    one = torch.arange(3)
    tokens = Tokens(same, same, same, torch.ones(3), ages, one, one)
    assert config.learner.correction.checked(tokens).losses.tolist() == [1.0, 0.5, 0.25]


WRONG = """
import numpy

from own_parts import *


class Short(Credit):
    def returns(self, rewards):
        return Returns([[sum(each)] for each in rewards], [sum(each) for each in rewards])


class Long(Credit):
    def returns(self, rewards):
        return Returns([[1.0, *each] for each in rewards], [sum(each) for each in rewards])


class Flat(Credit):
    def returns(self, rewards):
        return Returns([reward for each in rewards for reward in each], sum(map(sum, rewards)))


class NaN(Credit):
    def returns(self, rewards):
        return Returns([[float("nan") for _ in each] for each in rewards], [0.0] * len(rewards))


class Signature(Credit):
    def returns(self, trial, discount):
        return Returns(trial, [])


class LaterWrong(Credit):
    def returns(self, rewards):
        acts = [list(each) for each in rewards]
        return Returns(acts[:-1] if rewards[0][0] < 0 else acts, [0.0] * len(rewards))


class Column(Squared):
    def surrogate(self, tokens):
        whole = super().surrogate(tokens)
        return Surrogate(whole.losses[:, None], whole.weights, whole.is_clipped, whole.is_masked)


class Mean(Squared):
    def surrogate(self, tokens):
        return super().surrogate(tokens).losses.mean()


class Detached(Squared):
    def surrogate(self, tokens):
        return super().surrogate(tokens.at(tokens.logprobs.detach()))


class Infinite(Squared):
    def surrogate(self, tokens):
        return super().surrogate(tokens.at(tokens.logprobs / 0.0))


class Old(Squared):
    def surrogate(self, tokens):
        return super().surrogate(tokens.at(tokens.logprobs * (3.0 - tokens.staleness).sqrt()))


class Steep(Squared):
    def surrogate(self, tokens):
        moved = tokens.logprobs - tokens.proximal
        return super().surrogate(tokens.at(tokens.logprobs + moved.abs().sqrt()))


class Nothing(Correction):
    pass


class Table(Halved):
    def estimate(self, table, device):
        return super().estimate(table, device)[:, None]


class OfNumpy(Halved):
    def estimate(self, table, device):
        return table.returns - table.returns.mean()


class Zero(Halved):
    def estimate(self, table, device):
        return super().estimate(table, device) / 0.0


class Typo(Credit):
    def return_(self, rewards):
        return rewards


class HeldOut(Matchmaker):
    def choose(self, names, draw):
        return draw.environment.members("heldout")[0]


class Drawn(Matchmaker):
    def choose(self, names, draw):
        return numpy.random.default_rng(draw.place).choice(names)
"""


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "credit.kind=wrong:Short",
            r"`returns` \(.*wrong.py, line 8\) returned .* for the ",
        ),
        ("credit.kind=wrong:Long", "with a finite number in `acts` for each reward"),
        ("credit.kind=wrong:Flat", r"returned Returns\(acts=\[1.0, 0.0, 1.0"),
        ("credit.kind=wrong:NaN", r"returned Returns\(acts=\[\[nan"),
        ("credit.kind=wrong:Signature", "TypeError: .*missing 1 required positional .*'discount'"),
        ("learner.correction.kind=wrong:Column", r"`losses` of shape \(8, 1\) for 8 tokens"),
        ("learner.correction.kind=wrong:Mean", "returned a Tensor, not a `Surrogate`"),
        ("learner.correction.kind=wrong:Detached", "losses without a gradient"),
        ("learner.correction.kind=wrong:Infinite", "losses that are not finite"),
        (
            "learner.correction.kind=wrong:Old",
            r"not finite: .*, of tokens that are \[0, 1, 2, 3, 9,",
        ),
        ("learner.correction.kind=wrong:Steep", "losses with gradients that are not finite"),
        ("learner.correction.kind=wrong:Nothing", "write its method `surrogate`"),
    ],
)
def test_a_credit_or_correction_that_cannot_work_is_refused_before_a_run(
    own: Path, setting: str, said: str
) -> None:
    (own / "wrong.py").write_text(WRONG)
    config = config_file.load(config_file.find(None), [setting, "admission.lag=8"])
    with pytest.raises(ConfigError, match=f"'{setting.partition('=')[2]}': .*{said}"):
        check(config)


def test_a_class_whose_methods_nothing_calls_is_refused(own: Path) -> None:
    (own / "wrong.py").write_text(WRONG)
    said = r"'wrong:Typo': nothing calls its method `return_` \(did you mean `returns`\?\): over"
    with pytest.raises(ConfigError, match=said):
        config_file.load(config_file.find(None), ["credit.kind=wrong:Typo"])


def test_a_credit_that_goes_wrong_later_is_named(own: Path) -> None:
    (own / "wrong.py").write_text(WRONG)
    config = config_file.load(config_file.find(None), ["credit.kind=wrong:LaterWrong"])
    check(config)
    turns = tuple(Turn(Kind.ACT, k, 0, 0, 0, 1, -1.0, True, "rock", "") for k in range(3))
    trial = Trial(Task("rps", "rock", 7, 0), 0, 3, (), turns)
    with pytest.raises(ConfigError, match=r"credit 'wrong:LaterWrong': `returns` .*returned"):
        build_table([Group(0, 0, (trial,))], config.credit)


@pytest.mark.parametrize(
    ("name", "said"),
    [("Table", r"returned shape \(3, 1\) for 3 turns"), ("Zero", "numbers that are not finite")],
)
def test_an_estimator_that_returns_something_else_is_named(own: Path, name: str, said: str) -> None:
    (own / "wrong.py").write_text(WRONG)
    config = config_file.load(config_file.find(None), [f"advantage.estimator=wrong:{name}"])
    turns = tuple(Turn(Kind.ACT, k, 0, 0, 0, 1, 1.0, True, "rock", "") for k in range(3))
    table = build_table(
        [Group(0, 0, (Trial(Task("rps", "rock", 7, 0), 0, 3, (), turns),))], config.credit
    )
    with pytest.raises(ConfigError, match=rf"'wrong:{name}': `estimate` \(.*{said}"):
        turn_advantages(table, config.advantage, config.transcript, "cpu")


def test_a_matchmaker_chooses_no_heldout_member(own: Path) -> None:
    (own / "wrong.py").write_text(WRONG)
    config = config_file.load(config_file.find(None), ["population.matchmaker=wrong:HeldOut"])
    environment = environment_of(config)
    names, source = environment.members("train"), random.Random(0)
    draw = Draw(0, names[0], source, League(), environment)
    with pytest.raises(ConfigError, match=r"matchmaker 'wrong:HeldOut' chose .*: choose one of"):
        config.population.matchmaker.checked(names, draw)


def test_texts_and_arrays_of_numpy_are_taken(own: Path) -> None:
    (own / "wrong.py").write_text(WRONG)
    settings = ["population.matchmaker=wrong:Drawn", "advantage.estimator=wrong:OfNumpy"]
    config = config_file.load(config_file.find(None), settings)
    environment, names = environment_of(config), ("rock", "paper")
    draw = Draw(0, names[0], random.Random(0), League(), environment)
    assert type(config.population.matchmaker.checked(names, draw)) is str
    turns = tuple(Turn(Kind.ACT, k, 0, 0, 0, 1, 1.0, True, "rock", "") for k in range(3))
    trial = Trial(Task("rps", "rock", 7, 0), 0, 3, (), turns)
    table = build_table([Group(0, 0, (trial,))], config.credit)
    found = turn_advantages(table, config.advantage, config.transcript, "cpu")
    assert found.tolist() == (table.returns - table.returns.mean()).tolist()


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.noun)
def test_every_registered_name_is_the_tag_of_its_class(registry: Any) -> None:
    for name in registry:
        assert registry.load(name).__struct_config__.tag == name
