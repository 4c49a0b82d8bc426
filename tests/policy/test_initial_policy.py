"""The policy a run begins from, where it is cloned from scripts under adapters."""

import importlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mage_async import algorithm
from mage_async.assembly import check_keys, environment_of, with_warm_start
from mage_async.config import config_file
from mage_async.config.schema import Config, FromData, FromScript, FromWinStay, Tiny
from mage_async.errors import ConfigError, DeterministicFailure
from mage_async.inference.chat_files import load_chat
from mage_async.learning import optimizer
from mage_async.policy import initial_policy
from mage_async.policy import warm_start as warm_start_module
from mage_async.policy.demonstrations import (
    Example,
    _gate_without_memory,
    best_trials,
    examples_to_clone,
    read_examples,
    untimed,
)
from mage_async.policy.initial_policy import policy_key, prepare_policy
from mage_async.policy.load import build_tiny, load_policy
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.policy.warm_start import warm_start
from mage_async.trials.chat_format import ChatFormat
from mage_async.user_modules import cache_folder
from mage_services.api.start_to_report import check_start
from mage_services.learner.resume import _warm_start_lock
from mage_services.processes import run_lock
from tests.helpers.random_models import SPACE_SCHEMES, save_spaced_chat

if TYPE_CHECKING:
    from mage_async.policy.warm_start import Progress

WARM_START = (
    *("warm_start.steps=2", "warm_start.trials=4", "warm_start.batch_size=4"),
    *("warm_start.gate=1.0", "warm_start.cache=false", "warm_start.episodes=1"),
)
QUICKSTART = config_file.find(None)
SHUT = ("warm_start.gate=0.1", "warm_start.max_steps=3", "warm_start.episodes=2")


def test_a_pretrained_model_is_cloned_under_adapters_and_merged(tmp_path: Path) -> None:
    tiny = config_file.load(config_file.find(None), ["warm_start=none"])
    assert prepare_policy(tiny, tmp_path / "tiny", print) == "built here"
    # In 16 bits, which are the default on some processors, weights without adapters are rounded.
    changes = [f"policy.source={tmp_path / 'tiny'}", "policy.lora.rank=2", "policy.dtype=float32"]
    changes += ["transcript.forced_tags=both"]
    config = config_file.load(config_file.find(None), [*changes, *WARM_START])
    said: list[Progress] = []
    prepare_policy(config, tmp_path / "cloned", said.append)
    # The gate compares episodes, and there is one.
    assert [(progress.step, math.isnan(progress.gate)) for progress in said] == [
        (1, True),
        (2, True),
    ]
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("tiny", "cloned")
    )
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert {name.rpartition("layers.")[0] for name in moved} == {"model."}
    assert not any("norm" in name for name in moved)
    assert len(moved) == 7 * 2


@pytest.mark.parametrize(
    ("changed", "tolerance"),
    [("learner.max_tokens_per_microbatch=600", 1e-5), ("policy.dtype=bfloat16", 0.02)],
)
def test_cloning_in_micro_batches_or_in_16_bits_under_adapters_has_the_same_losses(
    tmp_path: Path, changed: str, tolerance: float
) -> None:
    tiny = config_file.load(config_file.find(None), ["warm_start=none"])
    prepare_policy(tiny, tmp_path / "tiny", print)
    source = [f"policy.source={tmp_path / 'tiny'}", "policy.lora.rank=16", *WARM_START]
    # Four examples have some 500 tokens each.
    source += [
        "transcript.forced_tags=both",
        "engine.max_tokens=600",
        "learner.shared_opening=false",
        "learner.max_tokens_per_microbatch=0",
    ]
    losses: list[list[float]] = []
    for number, settings in enumerate(([], [changed])):
        config = config_file.load(
            config_file.find(None), [*source, "policy.dtype=float32", *settings]
        )
        said: list[Progress] = []
        prepare_policy(config, tmp_path / f"cloned {number}", said.append)
        losses.append([progress.loss for progress in said])
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    assert losses[0] != losses[1]


def test_a_warm_start_whose_gate_stays_shut_ends_and_says_so(tmp_path: Path) -> None:
    config = config_file.load(config_file.find(None), [*WARM_START, *SHUT])
    said: list[Progress] = []
    prepare_policy(config, tmp_path / "policy", said.append)
    recorded = json.loads((tmp_path / "policy" / "warm_start.json").read_bytes())
    assert len(said) == 3
    assert "of the first one's, above warm_start.gate = 0.1" in recorded["fault"]
    assert recorded["cure"].startswith("Raise warm_start.steps = 2;")


def cloned(
    directory: Path, weights: list[float], steps: int, **more: float
) -> "tuple[Progress, PreTrainedModel]":
    """Clone one short context with each weight of its tokens; one context a step."""
    words, policy = environment_of(config_file.load(QUICKSTART)).facts.words, Tiny()
    build_tiny(policy, words, 0, directory)
    model, tokens = load_policy(directory, "float32", "cpu"), np.arange(5)
    examples = [Example(tokens, np.full(5, each, np.float32), tokens * 0 - 1) for each in weights]
    warm = FromScript(steps=steps, batch_size=1, gate=1.0, **more)
    return warm_start(model, examples, Config(warm_start=warm), lambda progress: None), model


def test_a_step_of_a_warm_start_whose_gradient_is_not_finite_changes_nothing(
    tmp_path: Path,
) -> None:
    progress, model = cloned(tmp_path / "one_bad", [1.0, math.inf], steps=8)
    assert 0 < progress.num_skipped < 8
    assert all(weight.isfinite().all() for weight in model.parameters())
    alone, _ = cloned(tmp_path / "good", [1.0, 1.0], steps=8)
    assert alone.num_skipped == 0


def test_a_warm_start_that_teaches_nothing_says_what_to_change(tmp_path: Path) -> None:
    idle, _ = cloned(tmp_path / "idle", [1.0], steps=50, learning_rate=1e-9)
    assert "and that of its first was" in idle.fault
    assert idle.cure.startswith("Raise warm_start.learning_rate = 1e-09 or")
    learned, _ = cloned(tmp_path / "learned", [1.0], steps=50)
    assert (learned.fault, learned.cure) == ("", "")
    risen = warm_start_module._fault(FromScript(), [1.0] * 25 + [9.0] * 25, [])
    assert risen[1] == "Lower warm_start.learning_rate = 0.002."
    for off in (FromScript(gate=1.0), FromData()):
        assert warm_start_module._fault(off, [1.0], [1.01]) == ("", "")


def test_a_gate_that_is_shut_is_removed_only_where_frequencies_of_words_do_not_open_it() -> None:
    def cure(by_frequency: float) -> str:
        warm, losses = FromScript(), [2.0] * 25 + [1.0] * 25
        return warm_start_module._fault(warm, losses, [1.0, 0.9], by_frequency)[1]

    assert cure(0.9).endswith("no model comes below the gate: then set it to 1.0.")
    assert cure(0.47).endswith(": the frequencies of words alone lead to a ratio of 0.47.")


def test_a_win_stay_that_is_not_looked_up_is_no_lesson() -> None:
    def fault(*gates: float) -> str:
        return warm_start_module._fault(FromWinStay(), [2.0] * 25 + [1.0] * 25, gates)[0]

    assert "is still 0.98 of that on tried ones (first 1.00)" in fault(1.0, 0.98)
    assert fault(1.0, 0.7) == fault(0.5, 0.5) == fault() == ""


def test_the_decays_of_a_warm_start_are_set_as_those_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[object]()
    step = warm_start_module.step_if_finite

    def watched(made: torch.optim.Optimizer, *given: Any) -> torch.Tensor:
        seen.extend((group["betas"], group["weight_decay"]) for group in made.param_groups)
        return step(made, *given)

    monkeypatch.setattr(warm_start_module, "step_if_finite", watched)
    monkeypatch.setattr(optimizer, "BETA1", 0.5)
    cloned(tmp_path, [1.0], steps=1)
    assert seen == [((0.5, 0.95), 0.01)]


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        (["learner.device=cuda:1"], "cpu"),
        (["policy.kind=pretrained", "policy.source=model"], "cpu"),
        (["policy.kind=pretrained", "policy.source=model", "learner.device=cuda:1"], "cuda:1"),
    ],
)
def test_a_pretrained_model_is_warm_started_on_the_learners_device(
    changes: list[str], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        """Ends the warm start when it loads its model."""

    def load(directory: Path, dtype: str, device: str) -> None:
        raise Stop(device)

    build_tiny(
        Tiny(), environment_of(config_file.load(QUICKSTART)).facts.words, 0, tmp_path / "model"
    )
    monkeypatch.setattr(initial_policy, "load_policy", load)
    monkeypatch.chdir(tmp_path)
    few = ("warm_start.kind=script", "warm_start.trials=4", "warm_start.cache=false")
    config = config_file.load(QUICKSTART, [*changes, *few])
    with pytest.raises(Stop, match=device):
        prepare_policy(config, tmp_path / "policy", lambda progress: None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_warm_start_loses_the_same_on_a_gpu(tmp_path: Path) -> None:
    build_tiny(Tiny(), (), 0, tmp_path)
    examples = [Example(np.arange(6), np.ones(6, np.float32), np.zeros(6, np.int64))] * 2
    losses = [
        warm_start_module._losses(
            load_policy(tmp_path, "float32", device), examples, shares_opening=False
        )[0].cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


def test_a_warm_start_whose_gradients_are_never_finite_fails(tmp_path: Path) -> None:
    with pytest.raises(DeterministicFailure, match=r"gradients of 3 steps .* lower warm_start"):
        cloned(tmp_path / "bad", [math.nan], steps=3)
    with pytest.raises(DeterministicFailure, match="gradients of 25 steps"):
        cloned(tmp_path / "long", [math.nan], steps=100)


def test_further_examples_are_cloned_once_the_rate_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(Tiny(), (), 0, tmp_path)
    seen = list[list[bool]]()
    split = warm_start_module.split_minibatch

    def recorded(examples: list[Example], *given: Any, **keys: Any) -> Any:
        seen.append([each.is_further for each in examples])
        return split(examples, *given, **keys)

    monkeypatch.setattr(warm_start_module, "split_minibatch", recorded)
    tokens = np.arange(5)
    first = Example(tokens, np.ones(5, np.float32), tokens * 0)
    warm = FromWinStay(max_stable_steps=3, steps=4, batch_size=16)
    examples = [first, replace(first, is_further=True)]
    model = load_policy(tmp_path, "float32", "cpu")
    warm_start(model, examples, Config(warm_start=warm), lambda progress: None)
    assert [any(each) for each in seen] == [False] * 3 + [True] * 4


OWN = '''
from cards import CARDS

class Own:
    """Name the card."""

    words = (*CARDS, "go", "right", "wrong")
    legal_actions = CARDS
    max_turns = 2

    def __init__(self, size=2):
        self.size = size

    def script(self, source):
        return lambda observation: source.choice(CARDS)

    def reset(self, seed, task):
        import chance
        self.card = CARDS[chance.draw(task, self.size)]
        return "go"

    def step(self, action):
        found = action == self.card
        return "right" if found else "wrong", float(found), found
'''
FILES = {
    "own_cards.py": OWN,
    "cards.py": 'CARDS = ("ace", "king", "9")\n',
    "chance/__init__.py": "from .drawing import draw\n",
    "chance/drawing.py": "def draw(task, size):\n    return task % size\n",
}


def test_a_changed_class_never_gets_the_model_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = tmp_path / "own", list[str]()
    (folder / "chance").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def prepare(*changes: str) -> str:
        for name in ("own_cards", "cards", "chance", "chance.drawing"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        given = ("environment.name=own_cards:Own", "warm_start.cache=true", *changes)
        config = config_file.load(config_file.find(None), [*WARM_START, *given])
        found.append(prepare_policy(config, tmp_path / str(len(found)), lambda at: None))
        return found[-1].partition(" ")[0]

    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "unrelated.py").write_text("")
    assert prepare() == "warm-started"
    assert prepare() == "from"
    (folder / "unrelated.py").write_text("changed = 1\n")
    assert prepare() == "from"
    for name, text in FILES.items():
        (folder / name).write_text(f"{text}\n# changed\n")
        assert prepare() == "warm-started", name
        assert prepare() == "from", name
    assert prepare("environment.options.size=3") == "warm-started"
    (folder / "own_cards.py").write_text(OWN.replace('"go"', '"start"'))
    assert prepare() == "warm-started"
    (folder / "own_cards.py").write_text(f"{OWN}\n# changed\n")
    assert prepare() == "from"


def test_a_scripted_trial_is_played_again_after_a_fault_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    fails = "        if next(CALLS) == 5:\n            raise ConnectionError\n"
    source = OWN.replace("        import chance\n", fails).replace(
        "chance.draw(task, self.size)", "0"
    )
    cards = "from itertools import count\nCALLS, CARDS = count(), ('ace', 'king')"
    (tmp_path / "lost_cards.py").write_text(source.replace("from cards import CARDS", cards))
    config = config_file.load(
        config_file.find(None), [*WARM_START, "environment.name=lost_cards:Own"]
    )
    config, tiny = with_warm_start(config), tmp_path / "tiny"
    build_tiny(config.policy, environment_of(config).facts.words, 0, tiny)
    played = [
        [
            each.tokens.tolist()
            for each in examples_to_clone(config, config.warm_start, tiny, untimed)[0]
        ]
        for _ in range(2)
    ]
    assert played[0] == played[1], "the lost trial is cloned too"


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", MagicMock(side_effect=KeyError))
    folder = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}" / "mage_async"
    assert cache_folder() == folder


def test_a_warm_start_is_cached_beside_what_a_killed_process_of_the_same_number_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_file.load(QUICKSTART, [*WARM_START, "warm_start.cache=true"])
    recent, old, other = (
        cache_folder() / name
        for name in (f".{policy_key(config)}.{os.getpid()}", f".{'0' * 24}.abc", ".other.abc")
    )
    for each in (recent, old, other):
        (each / "copy").mkdir(parents=True)
    for each in (old, other):
        os.utime(each, (0.0, 0.0))
    assert prepare_policy(config, tmp_path / "one", lambda at: None) == "warm-started here"
    assert [each.exists() for each in (recent, old, other)] == [True, False, True]
    assert prepare_policy(config, tmp_path / "two", lambda at: None).startswith("from the cache")


def test_what_is_said_of_a_warm_start_is_said_of_the_cached_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = ("transcript.rules=true", "warm_start.kind=data", "warm_start.cache=true")
    path = f"warm_start.path={data_set(tmp_path, {'messages': MESSAGES})}"
    config = config_file.load(QUICKSTART, [*WARM_START, *given, path, "engine.max_tokens=2000"])
    for name, made in (("one", "warm-started here"), ("two", "from the cache of an earlier warm")):
        origin = prepare_policy(config, tmp_path / name, lambda at: None)
        assert origin.startswith(made)
        assert "1 of 1 rows lack the rules" in origin


@pytest.mark.parametrize("fails", [False, True])
def test_of_processes_with_the_same_warm_start_one_makes_it_and_the_others_wait(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run_lock, "WAITING_S", 0.01)
    config = config_file.load(QUICKSTART, [*WARM_START, "warm_start.cache=true"])
    clone, made, said, has_said = initial_policy._clone, list[str](), list[str](), Event()

    def note(line: str) -> None:
        said.append(line)
        if line.endswith(" s"):
            has_said.set()

    def clone_slowly(*given: Any) -> "Progress":
        made.append("clone")
        if len(made) == 1:
            assert has_said.wait(20), "the other process does not wait"
            if fails:
                raise DeterministicFailure("it fails")
        return clone(*given)

    def prepared(name: str) -> str:
        with _warm_start_lock(config, note):
            return prepare_policy(config, tmp_path / name, lambda at: None)

    monkeypatch.setattr(initial_policy, "_clone", clone_slowly)
    with ThreadPoolExecutor(2) as threads:
        one, other = (threads.submit(prepared, name) for name in ("one", "other"))
    origins = [each.result() for each in (one, other) if not each.exception()]
    assert sorted(origins)[-1].startswith("warm-started here")
    assert (len(origins), len(made)) == ((1, 2) if fails else (2, 1))
    assert said[0].startswith("waiting for another process that makes the same warm start")


def test_a_warm_start_that_cannot_be_cached_says_so_and_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").touch()  # as a home that cannot be written, for an administrator too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    config = config_file.load(QUICKSTART, [*WARM_START, "warm_start.cache=true"])
    origin = prepare_policy(config, tmp_path / "one", lambda at: None)
    assert origin.startswith("warm-started here, not cached: [Errno 20] Not a directory")
    assert (tmp_path / "one" / "model.safetensors").is_file()


def test_the_key_of_a_warm_start_has_every_setting_that_changes_the_cloned_trials() -> None:
    def key(*changes: str) -> str:
        return policy_key(config_file.load(QUICKSTART, list(changes)))

    for change in ("engine.max_tokens=300", "trial.strategy=episode", "trial.memory=reflection"):
        assert key(change) != key(), change
    assert key("trial.episodes=1") == key("learner.steps=7") == key()
    for change in (
        "sampling.temperature=0.1",
        "sampling.top_p=0.9",
        "sampling.top_k=3",
        "sampling.restricted=false",
        "sampling.strategy_temperature=2.0",
        "engine.max_contexts=81",
    ):
        assert key(change) == key(), "a script samples nothing"
        assert key("warm_start=best", change) != key("warm_start=best"), change


def test_a_run_in_one_process_gets_a_new_model_when_class_options_or_program_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_process_cards.py").write_text(OWN.replace("from cards", "from one_cards"))
    (tmp_path / "one_cards.py").write_text(FILES["cards.py"])
    (tmp_path / "chance").mkdir()
    for name in ("chance/__init__.py", "chance/drawing.py"):
        (tmp_path / name).write_text(FILES[name])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = ("environment.name=one_process_cards:Own", "warm_start=none")

    def prepared(*changes: str) -> Path:
        for name in ("one_process_cards", "one_cards", "chance", "chance.drawing"):
            sys.modules.pop(name, None)
        return algorithm.prepare(config_file.load(QUICKSTART, [*given, *changes]), tmp_path)

    found = [prepared()]
    assert prepared("learner.steps=7") == found[0]
    found.append(prepared("environment.options.size=3"))
    (tmp_path / "one_cards.py").write_text(f"{FILES['cards.py']}\n# changed\n")
    found.append(prepared())
    monkeypatch.setattr("mage_async.policy.initial_policy.source_digest", lambda: "another program")
    found.append(prepared())
    assert len(set(found)) == 4


def test_a_warm_start_that_fails_in_one_process_leaves_no_model_behind(tmp_path: Path) -> None:
    config = [*WARM_START, *SHUT, "warm_start.learning_rate=1e38"]
    config = config_file.load(config_file.find(None), config)
    for _ in range(2):
        with pytest.raises(DeterministicFailure, match="gradients of 2 steps"):
            algorithm.prepare(config, tmp_path)


SHORT = (*WARM_START, "evaluation.every=0", "warm_start.trials=8")


@pytest.mark.parametrize("kind", ["script", "random", "best"])
def test_each_kind_of_play_warm_starts_a_model(tmp_path: Path, kind: str) -> None:
    config = config_file.load(config_file.find(None), [f"warm_start={kind}", *SHORT])
    said: list[Progress] = []
    assert prepare_policy(config, tmp_path / "policy", said.append) == "warm-started here"
    assert [progress.step for progress in said] == [1, 2]
    assert (tmp_path / "policy" / "model.safetensors").is_file()


def test_only_a_warm_start_of_scripts_needs_one() -> None:
    given = ["environment.name=kuhn", "warm_start=random"]
    assert config_file.load(config_file.find(None), given).warm_start.gate == 1.0
    assert config_file.load(config_file.find(None)).warm_start.gate == 0.8
    none = config_file.load(config_file.find(None), ["warm_start=none"])
    assert none.warm_start is None


def test_the_best_trials_are_those_with_the_best_last_episode(tmp_path: Path) -> None:
    config = config_file.load(
        config_file.find(None), ["warm_start=best", *SHORT, "warm_start.episodes=2"]
    )
    config = msgspec.structs.replace(
        config, warm_start=msgspec.structs.replace(config.warm_start, trials=20, kept=0.25)
    )
    words = environment_of(config).facts.words
    build_tiny(config.policy, words, config.seed, tmp_path / "tiny")
    chat = load_chat(tmp_path / "tiny")
    every, best = (
        best_trials(config, rules, tmp_path / "tiny", chat)
        for rules in (msgspec.structs.replace(config.warm_start, kept=1.0), config.warm_start)
    )
    assert (len(every), len(best)) == (20, 5)
    last = [trial.episode_rewards()[-1] for trial in every]
    assert [trial.episode_rewards()[-1] for trial in best] == sorted(last)[-5:]


MESSAGES = [
    {"role": "user", "content": "rock"},
    {"role": "assistant", "content": "<action> paper"},
    {"role": "user", "content": "scissors"},
    {"role": "assistant", "content": "<action> rock"},
]


def data_set(folder: Path, *rows: object) -> Path:
    file = folder / "data" / "train.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def tiny_chat(tmp_path: Path) -> ChatFormat:
    save_tokenizer(build_tokenizer(("rock", "paper", "scissors")), tmp_path)
    return load_chat(tmp_path)


def test_what_the_assistant_says_is_cloned_and_a_text_whole(
    tmp_path: Path, tiny_chat: ChatFormat
) -> None:
    file = data_set(tmp_path, {"messages": MESSAGES}, {"text": "rock paper"})
    chat, text = read_examples(str(file.parent), tiny_chat, 100)
    said = [token for token, weight in zip(chat.tokens, chat.weights, strict=True) if weight]
    assert tiny_chat.decode(said) == "<action> paper<action> rock"
    assert tiny_chat.decode(chat.tokens.tolist()) == (
        "<|user|> rock<|assistant|><action> paper<|user|> scissors<|assistant|><action> rock"
    )
    assert set(text.weights) == {1.0}
    assert len(read_examples(str(file), tiny_chat, 5)[0].tokens) == 5


@pytest.mark.parametrize("scheme", SPACE_SCHEMES)
def test_a_text_is_cloned_with_the_ids_of_the_whole_string(tmp_path: Path, scheme: str) -> None:
    template = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    tokenizer = save_spaced_chat(tmp_path, scheme, template)
    file = data_set(tmp_path, {"text": "[INST] 7"})
    (text,) = read_examples(str(file), load_chat(tmp_path), 100)
    assert text.tokens.tolist() == tokenizer.encode("[INST] 7", add_special_tokens=False).ids


@pytest.fixture
def thinking_chat(tiny_chat: ChatFormat, tmp_path: Path) -> ChatFormat:
    """Qwen3's way: an answer begins with an empty thinking, which earlier answers lose."""
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}"
        "<think></think>{% endif %}{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"
    )
    return load_chat(tmp_path)


def test_a_conversation_is_cloned_as_a_trial_has_it_if_a_template_rewrites_earlier_turns(
    tmp_path: Path, thinking_chat: ChatFormat
) -> None:
    (example,) = read_examples(str(data_set(tmp_path, {"messages": MESSAGES})), thinking_chat, 100)
    answers = ("<action> paper<|endoftext|>", "<action> rock<|endoftext|>")
    said = [token for token, weight in zip(example.tokens, example.weights, strict=True) if weight]
    assert thinking_chat.decode(said) == "".join(answers)
    asked = (
        f"<|user|>{each}<|endoftext|><|assistant|><think></think>" for each in ("rock", "scissors")
    )
    assert thinking_chat.decode(example.tokens.tolist()) == "".join(
        text for pair in zip(asked, answers, strict=True) for text in pair
    )


@pytest.mark.parametrize("content", ["", None])
def test_tool_calls_of_a_row_are_cloned_as_text(
    tmp_path: Path, tiny_chat: ChatFormat, content: str | None
) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"box": 1}}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    (example,) = read_examples(
        str(data_set(tmp_path, {"messages": [MESSAGES[0], answer]})), tiny_chat, 200
    )
    assert tiny_chat.decode(example.tokens.tolist()) == (
        "<|user|> rock<|assistant|><tool_call>\n"
        '{"name": "look", "arguments": {"box": 1}}\n</tool_call>'
    )


def test_a_row_that_a_template_refuses_is_named(tmp_path: Path, thinking_chat: ChatFormat) -> None:
    thought = {"role": "assistant", "content": "<think>rock?</think>paper"}
    file = data_set(tmp_path, {"messages": MESSAGES}, {"messages": [MESSAGES[0], thought]})
    with pytest.raises(ConfigError, match=r"line 2: the chat template writes <think> before"):
        read_examples(str(file), thinking_chat, 100)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "rock"},
            "line 1: a row must have `messages`, a list of tables with `role`",
        ),
        ([1], "line 1: a row must have `messages`"),
        (
            {"messages": [{"role": "user"}]},
            "line 1: a message must be a table with `role`",
        ),
        *(
            (
                {"messages": [MESSAGES[1] | {"tool_calls": calls}]},
                "line 1: a tool call must have a function with a `name`",
            )
            for calls in (1, [1], [{"function": "look"}], [{"function": {"name": None}}])
        ),
        (
            {"messages": [MESSAGES[1] | {"reasoning_content": "hm"}]},
            "line 1: `reasoning_content` is not cloned",
        ),
        ({"text": "\ud800 rock"}, "line 1: a text has half of a surrogate pair, which no tok"),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "line 1: a text has half of a surrogate pair",
        ),
        (
            {"messages": [MESSAGES[0], {"role": "bot", "content": "rock"}]},
            "line 1: no message has the role 'assistant', whose words are cloned: its roles are "
            "'user', 'bot'",
        ),
        (
            {"messages": [{"role": "user", "content": "rock " * 100}, MESSAGES[1]]},
            "line 1: the assistant says nothing in the first 100 tokens",
        ),
    ],
)
def test_a_row_that_cannot_be_cloned_is_named(
    tmp_path: Path, tiny_chat: ChatFormat, row: object, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_examples(str(data_set(tmp_path, row)), tiny_chat, 100)


def test_rows_are_checked_before_a_run_and_must_begin_as_its_contexts(
    tmp_path: Path, tiny_chat: ChatFormat
) -> None:
    def config(*rows: object) -> Config:
        keys = (f"warm_start.path={data_set(tmp_path, *rows)}", "warm_start.kind=data")
        keys += ("transcript.rules=true", "engine.max_tokens=2000", "environment.name=rps")
        return config_file.load(config_file.find(None), list(keys))

    with pytest.raises(ConfigError, match=r"line 2: a row must have `messages`"):
        check_start(config({"text": "rock"}, {"prompt": "rock"}))
    with pytest.raises(ConfigError, match=r"no message has the role 'assistant'"):
        check_start(config({"messages": MESSAGES[:1]}))
    with pytest.raises(ConfigError, match=r"the data set has no rows"):
        check_start(config())
    given = config({"messages": MESSAGES}, {"text": environment_of(config({})).rules()})
    assert given.warm_start is not None
    _, origin, _ = examples_to_clone(given, given.warm_start, tmp_path, untimed)
    assert "; 1 of 2 rows lack the rules with which each context of the run begins" in origin


def test_a_gate_that_frequencies_of_words_open_is_named() -> None:
    """The last episode says one thing in nine of ten cases, the first one two as often."""
    episodes = np.repeat([0, 1], 10)
    tokens = np.array([1, 2] * 5 + [1] * 9 + [2])
    example = Example(tokens, np.ones(20, np.float32), episodes)
    said = _gate_without_memory([example], 0.8)
    assert "lead to a ratio of 0.47, and warm_start.gate is 0.8" in said
    assert "lower" not in said
    same = replace(example, tokens=np.array([1, 2] * 5 + [1] * 10))
    assert "of 0.00, and warm_start.gate is 0.8: the final" in _gate_without_memory([same], 0.8)
    assert not _gate_without_memory([example], 0.4)
    assert not _gate_without_memory([replace(example, episodes=episodes * 0)], 0.8)


def test_a_file_may_begin_with_a_bom_and_have_blank_lines_and_other_bytes_are_named(
    tmp_path: Path, tiny_chat: ChatFormat
) -> None:
    file, row = tmp_path / "rows.jsonl", b'{"text": "rock paper"}\n'
    file.write_bytes(b"\xef\xbb\xbf" + row + b" \n" + row + b"\n")
    assert len(read_examples(str(file), tiny_chat, 100)) == 2
    file.write_bytes(row + b"[" * 100_000)
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: not JSON: maximum recursion"):
        read_examples(str(file), tiny_chat, 100)
    file.write_bytes(row + b'{"text": "r\xffck"}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: not UTF-8: .* byte 0xff in pos"):
        read_examples(str(file), tiny_chat, 100)


def test_parquet_is_read_as_json_lines_are(tmp_path: Path, tiny_chat: ChatFormat) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": MESSAGES}]), file)
    (found,) = read_examples(str(file), tiny_chat, 100)
    (wanted,) = read_examples(str(data_set(tmp_path, {"messages": MESSAGES})), tiny_chat, 100)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.weights.tolist() == wanted.weights.tolist()
    whole = file.read_bytes()
    file.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])
    with pytest.raises(ConfigError, match=r"train\.parquet: cannot be read as Parquet: "):
        read_examples(str(file), tiny_chat, 100)


def test_a_model_is_warm_started_on_data_that_must_be_there(tmp_path: Path) -> None:
    file = data_set(tmp_path, {"messages": MESSAGES})
    given = ["warm_start=data", *SHORT]
    config = config_file.load(config_file.find(None), [*given, f"warm_start.path={file}"])
    check_keys(config)
    said: list[Progress] = []
    prepare_policy(config, tmp_path / "policy", said.append)
    assert len(said) == 2
    with pytest.raises(ConfigError, match=r"warm_start.path = '': no data set is there"):
        check_keys(config_file.load(config_file.find(None), given))


@pytest.mark.parametrize("inside", ["", "merged"])
def test_a_run_that_begins_from_a_checkpoint_outlives_it(inside: str, tmp_path: Path) -> None:
    tiny, checkpoint = config_file.load(QUICKSTART, ["warm_start=none"]), tmp_path / "step_000020"
    checkpoint.mkdir()
    prepare_policy(tiny, tmp_path / "tiny", print)
    shutil.copytree(tmp_path / "tiny", checkpoint / inside, dirs_exist_ok=True)
    for name in ("counters.json", "optimizer.pt"):
        (checkpoint / name).write_text("{}")
    config = config_file.load(QUICKSTART, [f"policy.source={checkpoint / inside}"])
    prepare_policy(config, tmp_path / "policy", print)
    shutil.rmtree(checkpoint)
    files = [{each.name for each in (tmp_path / name).iterdir()} for name in ("policy", "tiny")]
    assert files[0] == files[1]
    assert load_policy(tmp_path / "policy", "float32", "cpu")
