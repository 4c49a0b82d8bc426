"""What a config.json may say, and what is refused because it would be computed wrongly."""

import json

import pytest
from transformers import AutoConfig, Gemma3TextConfig, MistralConfig

from mage_async.errors import PolicyError
from mage_async.inference.architecture import read_architecture
from mage_async.policy.load import export_hf
from tests.inference.conftest import FAMILIES

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}


def read(directory, **changes):
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_architecture(directory)


def test_what_is_left_out_has_the_familys_defaults(tmp_path) -> None:
    architecture = read(tmp_path)
    assert (architecture.kv_heads, architecture.head_dim) == (2, 4)
    (kind,) = architecture.layer_kinds
    assert (kind.rotation.kind, kind.rotation.base) == ("default", 10_000.0)
    assert architecture.is_tied is None


def test_a_window_that_is_left_out_is_that_of_transformers_and_null_is_none(tmp_path) -> None:
    (mistral,) = read(tmp_path, model_type="mistral").layer_kinds
    assert mistral.window == MistralConfig().sliding_window == 4096
    (mistral,) = read(tmp_path, model_type="mistral", sliding_window=None).layer_kinds
    assert mistral.window == 0
    slides = ["sliding_attention"] * 5 + ["full_attention"]
    for more in ({}, {"layer_types": slides}):
        kinds = read(tmp_path, model_type="gemma3_text", num_hidden_layers=6, **more).layer_kinds
        assert [kind.window for kind in kinds] == [Gemma3TextConfig().sliding_window] * 5 + [0]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 500.0},
    ],
)
def test_the_rotary_base_is_found_where_transformers_4_and_5_write_it(tmp_path, rope) -> None:
    assert read(tmp_path, **rope).layer_kinds[0].rotation.base == 500.0


def test_the_old_name_of_the_rotary_type_is_known(tmp_path) -> None:
    rotation = (
        read(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}).layer_kinds[0].rotation
    )
    assert (rotation.kind, rotation.factor) == ("linear", 4.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_is_the_same_to_transformers_4_and_5(
    references, family, tmp_path
) -> None:
    reference = references[family]
    if family == "gemma3_text":
        scaling = {"rope_type": "linear", "factor": 8.0}
        reference.model.config.rope_parameters["full_attention"].update(scaling)
    export_hf(reference.model, tmp_path, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert config.rope_parameters == reference.model.config.rope_parameters
    exported = read_architecture(tmp_path)
    # transformers 4 knows no `rope_parameters`.
    written = json.loads((tmp_path / "config.json").read_text())
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_architecture(tmp_path) == exported


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, r"'gpt2' is not served .* llama, mistral, .*\"sglang\""),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn.*default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"json: factor must be .*'linear', got None"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
            "low_freq_factor must be a number above 0 with rope_type 'llama3', got None",
        ),
        ({"rope_theta": "1e4"}, "rope_theta must be a number above 0 .*, got '1e4'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "whole heads"),
        ({"sliding_window": 8}, "needs layer_types"),
        ({"layer_types": ["sliding_attention"]}, "need sliding_window in tokens"),
        ({"layer_types": ["chunked_attention"]}, "'chunked_attention' is not served"),
        ({"layer_types": []}, "layer_types has 0 values, and num_hidden_layers is 1"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 values"),
        ({"model_type": "gemma3_text", "layer_types": []}, "layer_types has 0 values"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "need sliding_window in tokens"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 500.0}},
            "two tables, sliding_attention and full_attention, got {'rope_theta': 500.0}",
        ),
        ({"model_type": "smollm3", "no_rope_layers": []}, "no_rope_layers has 0 values"),
        (
            {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0]},
            "no_rope_layers has 2 values, and num_hidden_layers is 3",
        ),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"bits": 4}}, "no quantised weights"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, changes, says) -> None:
    with pytest.raises(PolicyError, match=says):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": "4"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 1.5},
        {"vocab_size": "32"},
        {"model_type": "gemma3_text", "sliding_window_pattern": 0},
        {"model_type": "mistral", "sliding_window": "64"},
        {"rope_scaling": "yarn"},
        {"rope_parameters": [500.0]},
        {"layer_types": 1},
    ],
)
def test_a_value_of_a_wrong_type_or_below_its_least_is_refused(tmp_path, changes) -> None:
    key, value = list(changes.items())[-1]
    with pytest.raises(PolicyError, match=rf"config\.json: {key} must be .*, got ") as caught:
        read(tmp_path, **changes)
    assert repr(value) in str(caught.value)


def test_entries_of_no_rope_layers_beyond_the_last_layer_are_ignored(tmp_path) -> None:
    three = {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1, 0, 0]}
    kinds = read(tmp_path, **three).layer_kinds
    assert [kind.rotation is not None for kind in kinds] == [True, False, True]


def test_a_folder_without_a_config_is_no_model(tmp_path) -> None:
    with pytest.raises(PolicyError, match=r"no config\.json"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_named(tmp_path, content) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        PolicyError, match=r"config\.json: (cannot be read as JSON|must be a table)"
    ):
        read_architecture(tmp_path)
