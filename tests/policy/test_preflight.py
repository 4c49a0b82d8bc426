"""What is known of a pretrained policy before a run begins."""

import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer

from mage_async.config import config_file
from mage_async.config.schema import Config, Embedded, Tiny, local_policy
from mage_async.environments.catalogue import load
from mage_async.environments.tools import tool
from mage_async.errors import CallFault, ConfigError, DeterministicFailure, PolicyError
from mage_async.inference.architecture import read_architecture
from mage_async.inference.arithmetic import ARITHMETICS
from mage_async.inference.chat_files import load_chat
from mage_async.inference.weights import read_weights
from mage_async.plan import first_turns
from mage_async.plan.does_it_fit import (
    Size,
    check_files,
    check_shared_memory,
    check_size,
    engine_weight_bytes,
    tiny_size,
    with_deadlines,
)
from mage_async.plan.first_turns import _cure_of_cut_actions, play_first_turns
from mage_async.plan.model_shape import shape_of
from mage_async.policy.load import build_tiny
from mage_async.policy.model_files import outline_of
from mage_async.policy.tiny_tokenizer import SPECIALS, TEMPLATE
from mage_async.trials.duels import TrialInProgress, make_calls
from mage_services.actor import preflight
from mage_services.actor.preflight import PreflightOrder, run_preflight
from mage_services.actor.rehearsal_runner import rehearse_all
from mage_services.cli.check import check
from mage_services.processes import child_process
from mage_services.processes.process import in_time

GB = 10**9


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of random weights, whose answers are hardly ever actions."""
    build_tiny(Tiny(), load("rps").facts.words, 0, tmp_path)
    return tmp_path


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, from which classes of a user's own are imported."""
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def pretrained(directory: Path, *changes: str) -> Config:
    exact = ("policy.dtype=float32", "engine.arithmetic=float32", "evaluation.every=0")
    changes = (f"policy.source={directory}", "engine.max_tokens=2048", *exact, *changes)
    return config_file.load(config_file.find(None), list(changes))


def test_a_policy_without_a_chat_template_is_one_sentence(directory: Path) -> None:
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (directory / file).unlink(missing_ok=True)
    with pytest.raises(PolicyError, match="has no chat template"):
        run_preflight(pretrained(directory), 1, say=print)


def test_weights_that_are_missing_or_cut_short_are_told_before_they_are_loaded(
    directory: Path,
) -> None:
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(PolicyError, match=r"may be cut short: .*; copy it again"):
        run_preflight(pretrained(directory), 1, say=print)
    weights.unlink()
    with pytest.raises(PolicyError, match="name a directory with a model"):
        run_preflight(pretrained(directory), 1, say=print)


def test_weights_in_bin_files_alone_are_refused_with_what_to_do(directory: Path) -> None:
    (directory / "training_args.bin").write_bytes(b"not weights")
    outline_of(directory)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(PolicyError, match=r"in \*\.bin cannot .*\.save_pretrained\(DIR\)"):
        outline_of(directory)


def test_a_directory_with_an_adapter_is_refused_because_engines_would_not_read_it(
    directory: Path,
) -> None:
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(PolicyError, match="merge it into its model with peft's merge_and_unload"):
        outline_of(directory)
    (directory / "config.json").unlink()
    with pytest.raises(PolicyError, match=r"but an adapter: merge it"):
        local_policy(str(directory))


def test_only_files_of_weights_that_an_engine_reads_are_counted(directory: Path) -> None:
    weights = directory / "model.safetensors"
    shutil.copy(weights, directory / "consolidated.safetensors")
    assert outline_of(directory).num_weights == 94_592
    shard = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    weights.rename(directory / "model-1-of-2.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(shard))
    with pytest.raises(PolicyError, match=r"no model-2-of-2\.safetensors: name a directory"):
        outline_of(directory)


@pytest.mark.parametrize("place", ["checkpoint-500", "snapshots/0123"])
def test_a_folder_of_models_is_refused_with_the_name_of_one(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match=rf"give one that it holds, such as .*{place}$"):
        local_policy(str(tmp_path))


def test_the_type_of_a_model_is_checked_before_its_files(directory: Path) -> None:
    config = directory / "config.json"
    (directory / "model.safetensors").unlink()
    for kind, fault in (("gpt_neox", "trained"), ("phi3", "served by the embedded engine")):
        config.write_text(json.dumps({"model_type": kind, "tie_word_embeddings": False}))
        with pytest.raises(PolicyError, match=rf"{kind}' cannot be {fault}: take one .*qwen2"):
            run_preflight(pretrained(directory), 1, say=print)


def test_a_tokenizer_that_does_not_give_texts_back_is_refused(directory: Path) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.train_from_iterator(["<action>sage</action>"], BpeTrainer(show_progress=False))
    tokenizer.save(str(directory / "tokenizer.json"))
    with pytest.raises(PolicyError, match=r"is read as '< action > .* Take a tokenizer with"):
        run_preflight(pretrained(directory), 1, say=print)


def test_a_chat_template_that_is_no_template_is_one_sentence(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for message in messages %}")
    with pytest.raises(PolicyError, match=r"the chat template cannot be read: .*mend it in"):
        run_preflight(pretrained(directory), 1, say=print)


@pytest.mark.slow
def test_a_tiny_policy_on_a_gpu_that_is_not_there_is_refused() -> None:
    config = config_file.load(config_file.find(None), ["learner.device=cuda:99"])
    with pytest.raises(DeterministicFailure, match="PyTorch finds no GPU here"):
        run_preflight(config, 1, say=print)


LINES = """
class Lines:
    rules = "Say a word."
    max_turns = 1

    def reset(self, seed, task):
        return "caf\\u00e9\\tor tea"

    def step(self, action):
        return "over", 1.0, True
"""


def test_characters_that_the_vocabulary_lacks_are_named(
    directory: Path,
    own: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (own / "lines.py").write_text(LINES)
    tokens = ["<unk>", *(chr(number) for number in range(32, 127))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    keys = ("environment.name=lines:Lines", "transcript.max_action_tokens=64")
    config, said = pretrained(directory, *keys), list[str]()
    assert not check_files(config, directory).lost
    rehearse_all(config, said.append)
    assert not any("no token" in line for line in said)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("'|>'", "'|>\\n'"))
    found = check_files(config, directory)
    assert found.lost == (
        "the tokenizer has no token for '\\n', which the text of the chat template, the rules or "
        "the words has: the policy reads <unk> there"
    )
    observed = (
        "the tokenizer has no token for '\\t', 'é', which an observation of 'lines:Lines' has"
    )
    check("lines:Lines", keys={"policy.source": str(directory), "engine.max_tokens": 2048})
    printed = capsys.readouterr().out
    assert f"rehearsal: {observed}" in printed
    assert f"policy: {found.lost}\n" in printed
    report = preflight.PreflightReport(contexts=found)
    monkeypatch.setattr(preflight, "_preflight_in_child", lambda *given: report)
    run_preflight(config, 1, said.append)
    assert f"policy: {found.lost}" in said


@pytest.mark.parametrize(
    ("key", "value", "feature"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantised weights"),
        ("attention_dropout", 0.1, "dropout"),
    ],
)
def test_features_that_config_json_names_are_refused_without_loading_the_model(
    directory: Path, key: str, value: object, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If the check of files passed, this would be called.
    monkeypatch.setattr(preflight, "_preflight_in_child", None)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(PolicyError, match=f"because of its {feature}; choose a model without"):
        run_preflight(pretrained(directory), 1, say=print)


def test_a_context_too_short_for_the_policys_own_tokens_is_refused(directory: Path) -> None:
    found = check_files(pretrained(directory), directory)
    assert found.num_turns == 3 * load("rps").facts.max_turns
    assert found.scripted < found.longest
    short = f"engine.max_tokens={found.scripted - 1}"
    with pytest.raises(ConfigError, match=f"max_tokens must be at least {found.scripted}"):
        check_files(pretrained(directory, short), directory)


@pytest.mark.parametrize("name", ["rps", "tests.helpers.known_players:SignedBoxes"])
def test_strategies_and_reflections_lengthen_the_longest_trial(directory: Path, name: str) -> None:
    keys = (f"environment.name={name}", "transcript.max_reflection_tokens=1000")
    keys += ("engine.max_tokens=8192",)
    num_turns, num_remarks = 3 * load(name).facts.max_turns, 3 + 2
    plain = check_files(pretrained(directory, *keys), directory)
    more = ("trial.memory=history_and_reflection", "trial.strategy=episode")
    found = check_files(pretrained(directory, *keys, *more), directory)
    assert (plain.num_turns, found.num_turns) == (num_turns, num_turns + num_remarks)
    assert num_remarks * 1000 <= found.longest - plain.longest < num_remarks * 1500


def test_reflections_on_earlier_episodes_lengthen_the_context_of_an_own_class(
    directory: Path,
) -> None:
    keys = ("environment.name=tests.helpers.known_players:SignedBoxes",)
    keys += ("transcript.max_reflection_tokens=1000", "engine.max_tokens=8192")
    plain = check_files(pretrained(directory, *keys, "trial.memory=none"), directory)
    found = check_files(pretrained(directory, *keys, "trial.memory=reflection"), directory)
    # The last of three episodes begins with two reflections.
    assert found.longest - plain.longest == 2 * 1000


def test_a_template_without_tools_is_refused_from_the_files_alone(directory: Path) -> None:
    config = pretrained(directory, "environment.name=tests.environments.boxes:Boxes")
    with pytest.raises(PolicyError, match=r"the chat template offers no tools, .*such as Qwen3's"):
        check_files(config, directory)


def test_actions_that_would_be_cut_off_are_refused(directory: Path) -> None:
    keys = ("transcript.max_action_tokens=1", "transcript.forced_tags=none")
    config = pretrained(directory, *keys)
    with pytest.raises(ConfigError, match="max_action_tokens must be at least"):
        check_files(config, directory)


def test_weights_are_counted_from_headers_alone(directory: Path) -> None:
    outline = outline_of(directory)
    assert outline.num_weights == 94_592
    assert outline.kv_token_bytes == tiny_size(Tiny()).kv_token_bytes
    embedding = next(shape for name, shape in outline.tensors.items() if "embed" in name)
    norms = sum(shape[0] for shape in outline.tensors.values() if len(shape) == 1)
    assert tiny_size(Tiny()).num_weights == 94_592 - prod(embedding) - norms
    assert outline.num_in_matrices == tiny_size(Tiny()).num_in_matrices
    (directory / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nothing!")
    with pytest.raises(PolicyError, match="cannot be read as safetensors"):
        outline_of(directory)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
        {"a": {"shape": [1], "data_offsets": ["0", "4"]}},
        {"a": 4},
        {"a": "shape"},
        ["a"],
    ],
)
def test_a_header_that_is_not_one_of_safetensors_is_one_sentence(
    directory: Path, header: object
) -> None:
    written = json.dumps(header).encode()
    file = directory / "model.safetensors"
    file.write_bytes(len(written).to_bytes(8, "little") + written + bytes(4))
    with pytest.raises(PolicyError, match=r"model\.safetensors: cannot be read as safetensors, "):
        outline_of(directory)


def test_a_damaged_file_of_a_tokenizer_is_one_sentence(directory: Path) -> None:
    settings = directory / "tokenizer_config.json"
    for damaged in ("{", "[]"):
        settings.write_text(damaged)
        with pytest.raises(
            PolicyError, match=r"tokenizer_config\.json: (cannot be read as JSON|must be a table)"
        ):
            load_chat(directory)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(PolicyError, match=r"tokenizer\.json: cannot be read as a tokenizer: "):
        load_chat(directory)


def test_of_several_chat_templates_the_default_one_is_read(directory: Path) -> None:
    settings, alone = directory / "tokenizer_config.json", load_chat(directory).opening("rock")
    fields = json.loads(settings.read_text())
    default = fields["chat_template"]
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": default}]
    settings.write_text(json.dumps(fields | {"chat_template": named}))
    assert load_chat(directory).opening("rock") == alone
    settings.write_text(json.dumps(fields | {"chat_template": named[:1]}))
    with pytest.raises(PolicyError, match=r"chat templates \(rag\) none is named default"):
        load_chat(directory)


def test_a_policy_that_is_larger_than_the_memory_is_refused(directory: Path) -> None:
    config = pretrained(directory, "policy.lora=none")
    check_size(config, Size(GB, GB, 0), num_actors=1, memory_bytes=24 * GB)
    with pytest.raises(ConfigError, match=r"learner needs 32\.0 GB .* set policy\.lora\.rank = 16"):
        check_size(config, Size(2 * GB, 2 * GB, 0), num_actors=1, memory_bytes=24 * GB)
    adapted = pretrained(directory, "policy.lora.rank=16")
    check_size(adapted, Size(2 * GB, 2 * GB, 0), num_actors=1, memory_bytes=24 * GB)


@pytest.mark.parametrize(
    ("changes", "num_versions"),
    [
        ((), 3),
        (("admission.lag=4",), 7),
        (("population.rivals=0.5", "population.every=5"), 11),
        (("population.rivals=0.5", "population.every=5", "learner.steps=12"), 6),
        (("learner.steps=1",), 2),
    ],
)
def test_shared_memory_has_to_hold_all_versions_that_are_kept_at_once(
    directory: Path, changes: tuple[str, ...], num_versions: int
) -> None:
    whole = ("policy.lora=none", "learner.steps=200")
    config = pretrained(directory, *whole, "transport.weights.kind=tensor", *changes)
    check_shared_memory(config, GB, num_versions * 4 * GB)
    with pytest.raises(ConfigError, match=rf"the {num_versions} versions of the weights"):
        check_shared_memory(config, GB, num_versions * 4 * GB - 1)
    on_disk = pretrained(directory, *whole, *changes)
    check_shared_memory(on_disk, GB, 0)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ((), "16.0"),
        (("learner.float32_masters=true",), "36.0"),
        (("learner.float32_masters=true", "learner.optimizer_state=8bit"), "24.0"),
    ],
)
def test_float32_masters_of_a_learner_in_bfloat16_are_counted(
    directory: Path, changes: tuple[str, ...], needed: str
) -> None:
    config = pretrained(directory, "policy.lora=none", "policy.dtype=bfloat16", *changes)
    with pytest.raises(ConfigError, match=rf"learner needs {needed} GB"):
        check_size(config, Size(2 * GB, 2 * GB, 0), num_actors=1, memory_bytes=12 * GB)


def test_engines_in_bfloat16_take_half_the_memory_for_their_layers(directory: Path) -> None:
    wide = pretrained(directory, "policy.lora.rank=16")
    narrow = pretrained(directory, "policy.lora.rank=16", "engine.arithmetic=bfloat16")
    size = Size(2 * GB, GB, 0)  # the learner: 8 GB; three engines: 8 or 6 GB each
    with pytest.raises(ConfigError, match=r"3 engines need 24\.0 GB for weights"):
        check_size(wide, size, num_actors=3, memory_bytes=28 * GB)
    check_size(narrow, size, num_actors=3, memory_bytes=28 * GB)


def test_a_learner_on_a_gpu_is_not_counted_in_the_memory_of_this_machine(directory: Path) -> None:
    changes = ("policy.lora=none", "learner.device=cuda:0", "evaluation.every=1")
    config = pretrained(directory, *changes)
    said = r"weights: 2 engines, the evaluator's among them, .* take a smaller policy"
    with pytest.raises(ConfigError, match=said) as error:
        check_size(config, Size(2 * GB, 2 * GB, 0), num_actors=1, memory_bytes=12 * GB)
    assert "learner" not in str(error.value)


def test_the_evaluator_is_not_named_if_its_engine_is_made_after_training(directory: Path) -> None:
    config = pretrained(directory, "evaluation.every=0")
    with pytest.raises(ConfigError, match=r", and 1 engine need 8\.0 GB for weights"):
        check_size(config, Size(2 * GB, 2 * GB, 0), num_actors=1, memory_bytes=12 * GB)


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_weights_of_an_engine_are_counted_as_the_engine_holds_them(
    directory: Path, arithmetic: Literal["float32", "bfloat16"]
) -> None:
    config = pretrained(directory, f"engine.arithmetic={arithmetic}")
    assert isinstance(config.engine, Embedded)
    outline = outline_of(directory)
    held = read_weights(directory, read_architecture(directory), ARITHMETICS[arithmetic])
    counted = engine_weight_bytes(config.engine, outline.num_weights, outline.num_in_matrices)
    # The engine repeats the norms of queries and keys for each head.
    assert counted == pytest.approx(held.num_bytes(), rel=0.005)
    shape = shape_of(config)
    assert (shape.num_weights, shape.num_in_matrices) == (
        outline.num_weights,
        outline.num_in_matrices,
    )


def test_a_hundred_processes_are_counted_even_if_their_policies_are_tiny() -> None:
    config = config_file.load(config_file.find(None), [])
    check_size(config, tiny_size(config.policy), num_actors=4, memory_bytes=4 * GB)
    with pytest.raises(
        ConfigError, match=r"and 22.2 GB for their processes, .*; take fewer --actors"
    ):
        check_size(config, tiny_size(config.policy), num_actors=100, memory_bytes=16 * GB)


def test_contexts_that_are_larger_than_the_memory_are_refused(directory: Path) -> None:
    config = pretrained(directory, "engine.max_contexts=1000000")
    with pytest.raises(ConfigError, match=r"1000000 contexts each, .* lower engine\.max_contexts"):
        run_preflight(config, 1, say=pytest.fail)


def test_a_tiny_policy_of_an_absurd_size_is_refused() -> None:
    config = config_file.load(config_file.find(None), ["policy.hidden_size=1000000"])
    with pytest.raises(ConfigError, match="take a smaller policy"):
        run_preflight(config, 1, say=pytest.fail)


def test_first_turns_count_valid_actions_and_show_one(directory: Path) -> None:
    seconds, said, settled = count(), list[str](), list[int]()

    def settle(trials: Sequence[TrialInProgress]) -> None:
        settled.append(len(trials))
        for trial in trials:
            make_calls(trial)

    seen = play_first_turns(
        pretrained(directory),
        directory,
        lambda: float(next(seconds)),
        settle,
        said.append,
        in_time,
    )
    assert {*settled} == {15}  # of all trials together, so that their calls overlap
    assert seen is not None
    assert said == ["a turn of 15 trials took 1.0 s; now timing an update of the learner"]
    # Five groups of three trials are played at once; each turn takes a second of this clock.
    assert (seen.num_actions, seen.turn_s) == (30, 0.2)
    assert seen.sentence().startswith(f"{seen.num_valid} of 30 actions were valid; here is one")
    assert seen.example


def test_actions_that_were_cut_are_counted_though_the_transcript_closes_them(
    directory: Path,
) -> None:
    def make(trials: Sequence[TrialInProgress]) -> None:
        for trial in trials:
            make_calls(trial)

    config = pretrained(directory, "sampling.restricted=false", "transcript.max_action_tokens=2")
    seen = play_first_turns(config, directory, time.monotonic, make, print, in_time)
    assert seen is not None
    cut = f"; {seen.num_cut} were cut at transcript.max_action_tokens = 2 (raise it, or leave out "
    assert f"{cut}sampling.restricted = false if there are" in seen.sentence()
    few = replace(seen, num_cut=seen.num_actions // 2)
    assert " were cut at transcript.max_action_tokens = 2; here" in few.sentence()


class Called:
    """Call a tool."""

    def reset(self, seed: int, task: int) -> str:
        return "begin"

    @tool
    def look(self) -> str:
        """Look."""
        return "nothing"

    def score(self) -> float:
        return 0.0


class Said:
    """Say anything."""

    def reset(self, seed: int, task: int) -> str:
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "end", 0.0, True


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        (f"{__name__}:Called", "raise it"),
        ("reasoning-gym:chain_sum", "raise it"),
        (f"{__name__}:Said", "raise it, or declare `legal_actions` or a `legal_pattern`"),
    ],
)
def test_cut_actions_are_cured_by_what_their_environment_can_declare(name: str, cure: str) -> None:
    given = [f"environment.name={name}", "policy.kind=pretrained", "policy.source=models/mine"]
    config = config_file.load(config_file.find(None), given)
    kind = {"Called": Called}.get(name.partition(":")[2], Said)
    environment = load(f"{__name__}:{kind.__name__}")
    assert _cure_of_cut_actions(config, environment) == cure


def test_no_turn_of_a_mix_is_played_if_a_part_is_a_program(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_loop.py").write_text("def run(task, base_url):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    parts = 'environment.options.parts=[{name="rps"}, {name="agent:own_loop:run"}]'
    config = pretrained(directory, "environment.name=mix", parts)
    said: list[str] = []
    play = partial(play_first_turns, config, directory, time.monotonic, pytest.fail)
    assert play(said.append, in_time) is None
    assert said == [
        "a program is played by the run alone, so no time is forecast before the first step"
    ]


def test_deadlines_follow_what_a_turn_takes(directory: Path) -> None:
    config = pretrained(directory, "engine.max_contexts=3")
    kept, notes = with_deadlines(config, turn_s=0.1, num_turns=10)
    assert (kept, notes) == (config, [])
    raised, notes = with_deadlines(config, turn_s=1000.0, num_turns=10)
    assert (raised.engine.turn_deadline_s, raised.admission.grant_deadline_s) == (5000.0, 50000.0)
    assert [note.split()[0] for note in notes] == [
        "engine.turn_deadline_s",
        "admission.grant_deadline_s",
    ]


def test_a_fault_that_may_be_gone_at_another_try_does_not_keep_a_run_from_its_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise fault

    said: list[str] = []
    order = PreflightOrder(config_file.as_tables(pretrained(directory)), 1, 0.0)
    monkeypatch.setattr(first_turns, "play_first_turns", fail)
    fault = CallFault("step() raised OSError: connection lost")
    assert not preflight._preflight(order, said.append).sentence
    assert said[-1].endswith("not measured, after a fault that may pass: " + str(fault))
    fault = CallFault("step() raised KeyError", mistake="KeyError in doors.py, line 3")
    with pytest.raises(CallFault, match="KeyError"):
        preflight._preflight(order, said.append)


def test_no_more_first_trials_are_open_than_an_environment_may_have(directory: Path) -> None:
    given = "environment.name=tests.helpers.known_players:SignedBoxes", "environment.most_open=2"
    order = PreflightOrder(config_file.as_tables(pretrained(directory, *given)), 1, 0.0)
    assert "of 4 actions were valid" in preflight._preflight(order, print).sentence


def test_the_supervisor_looks_at_a_policy_through_a_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_process, "WAIT_NOTICE_S", 0.5)
    said: list[str] = []
    config = pretrained(directory)
    assert run_preflight(config, 1, said.append) == config
    assert any("of 30 actions were valid" in line for line in said)
    assert "waiting for the check of the policy: " in capsys.readouterr().err


def test_what_the_process_finds_is_one_sentence(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, file = pretrained(directory), directory / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"use_bidirectional_attention": True})
    )
    with pytest.raises(PolicyError, match="because of its attention to later tokens") as found:
        preflight._preflight(PreflightOrder(config_file.as_tables(config), 1, 0.0), print)
    # A process that finds the same and, unlike the real one, imports no torch for it.
    program = f"""
from mage_async.errors import PolicyError
from mage_services.actor import preflight

def find(*given):
    raise PolicyError({str(found.value)!r})

preflight._preflight = find
preflight.main()
"""
    monkeypatch.setattr(preflight, "module_command", lambda _: [sys.executable, "-c", program])
    with pytest.raises(DeterministicFailure, match=f"^{re.escape(str(found.value))}$"):
        run_preflight(config, 1, say=print)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            "os.kill(os.getpid(), 9)",
            r"it was killed by SIGKILL\. .* no memory left .* smaller policy",
        ),
        ("os.kill(os.getpid(), 6)", "it was killed by SIGABRT: a library warns"),
        ("sys.exit('no such file')", "failed: no such file"),
        ("os._exit(0)", "it ended with exit code 0: a library warns"),
    ],
)
def test_a_process_that_ends_without_findings_is_told_by_how_it_ended(
    directory: Path, monkeypatch: pytest.MonkeyPatch, end: str, told: str
) -> None:
    program = f"import os, sys; print('a library warns', flush=True); {end}"
    monkeypatch.setattr(preflight, "module_command", lambda _: [sys.executable, "-c", program])
    with pytest.raises(DeterministicFailure, match=told):
        run_preflight(pretrained(directory), 1, say=lambda _: None)


def test_a_process_that_ends_before_it_has_its_order_is_told_by_how_it_ended(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*values: Any) -> PreflightOrder:
        time.sleep(1.0)
        return PreflightOrder(*values)

    monkeypatch.setattr(preflight, "module_command", lambda _: ["false"])
    monkeypatch.setattr(preflight, "PreflightOrder", late)
    with pytest.raises(DeterministicFailure, match="it ended with exit code 1"):
        run_preflight(pretrained(directory), 1, say=lambda _: None)


def test_adapters_of_layers_that_do_not_exist_are_refused(directory: Path) -> None:
    config = pretrained(directory, 'policy.lora.targets=["c_attn"]')
    with pytest.raises(PolicyError, match="qwen3 has no layer 'c_attn' that takes an adapter"):
        run_preflight(config, 1, say=pytest.fail)


def test_a_head_that_is_tied_and_declared_untied_is_refused(directory: Path) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(PolicyError, match=r"tie_word_embeddings = false, but no file holds lm_h"):
        run_preflight(pretrained(directory), 1, say=pytest.fail)


def test_a_tiny_policy_plays_in_contexts_of_long_observations(directory: Path) -> None:
    assert read_architecture(directory, max_tokens=40_000).max_positions == 2**16


def test_a_tiny_policy_is_not_looked_at() -> None:
    config = config_file.load(config_file.find(None), [])
    assert run_preflight(config, 1, say=pytest.fail) is config


LOCK = '''
import asyncio, random

class Lock:
    """Guess a digit."""

    async def reset(self, seed, task):
        await asyncio.sleep(0.01)
        self.code = random.Random(task).choice("123")
        return "The lock is closed."

    def step(self, action):
        return "no", float(action == self.code), action == self.code
'''


def test_a_policy_is_looked_at_in_a_class_that_waits_and_has_no_script(
    directory: Path, own: Path
) -> None:
    """By what the child process runs, here in the process of the test."""
    (own / "waiting_lock.py").write_text(LOCK)
    keys = ("environment.name=waiting_lock:Lock", "transcript.max_action_tokens=8")
    config = pretrained(directory, *keys)
    order = preflight.PreflightOrder(config_file.as_tables(config), 1, time.monotonic())
    found = preflight._preflight(order, print)
    assert "actions were valid; 30 were cut at transcript.max_action_tokens = 8 (" in found.sentence


FLAKY = '''
import itertools

CALLS = itertools.count(1)

class Flaky:
    """Say yes or no."""

    legal_actions = ("yes", "no")
    words = ("yes", "no", "well")
    max_turns = 4

    async def reset(self, seed, task):
        return "well"

    async def step(self, action):
        if next(CALLS) in (7, 40):  # in the rehearsal, and in the first turns
            raise ConnectionError("the service did not answer")
        return "well", 0.0, False
'''


def test_calls_that_fail_now_and_then_do_not_keep_a_run_from_its_start(
    directory: Path, own: Path
) -> None:
    (own / "flaky_answers.py").write_text(FLAKY)
    config = pretrained(directory, "environment.name=flaky_answers:Flaky")
    said: list[str] = []
    rehearse_all(config, said.append)
    assert re.match(
        r"rehearsal: flaky, .* raised ConnectionError: .* trial is played again", said[1]
    )
    order = preflight.PreflightOrder(config_file.as_tables(config), 1, time.monotonic())
    assert "actions were valid" in preflight._preflight(order, print).sentence


SLOW = '''
import time

OPEN = []

class Slow:
    """Say yes or no."""

    legal_actions = ("yes", "no")

    def reset(self, seed, task):
        OPEN.append(self)
        return "Well?"

    def close(self):
        OPEN.remove(self)

    def step(self, action):
        time.sleep(0.1)
        return "Well?", 0.0, False
'''


def test_random_play_of_a_slow_class_is_not_waited_for(
    directory: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "slow_class.py").write_text(SLOW)
    monkeypatch.setattr(first_turns, "LATE_S", 0.5)
    config = pretrained(directory, "environment.name=slow_class:Slow")
    order = preflight.PreflightOrder(config_file.as_tables(config), 1, time.monotonic())
    found = preflight._preflight(order, print)
    # Six trials would take a minute, each 96 turns of a tenth of a second.
    assert found.pace is not None
    assert (found.pace.trial_turns, found.pace.scripted_s) == (96.0, 0.0)
    # The thread of random play that was late holds one object.
    assert len(sys.modules["slow_class"].OPEN) <= 1
