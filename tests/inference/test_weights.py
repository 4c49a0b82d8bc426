"""What can be known of weights from the headers of their files."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mage_async.errors import PolicyError
from mage_async.inference.architecture import read_architecture
from mage_async.inference.arithmetic import Arithmetic
from mage_async.inference.weights import (
    Adapter,
    as_weights,
    check_shapes,
    read_tensors,
    read_weights,
    tensor_shapes,
)

OURS = {"model.norm.weight": torch.ones(4), "model.embed_tokens.weight": torch.ones(8, 4)}


def saved(file: Path, **changed: torch.Tensor) -> Path:
    """Our weights, some of them changed or added; `_` stands for `.` in names."""
    named = {name.replace("_", "."): tensor for name, tensor in changed.items()}
    save_file(OURS | named, file)
    return file


def test_weights_fit_whether_they_hold_a_tied_head_or_not(tmp_path: Path) -> None:
    wanted = tensor_shapes(saved(tmp_path / "a.safetensors"))
    assert wanted == {"model.norm.weight": (4,), "model.embed_tokens.weight": (8, 4)}
    head = {"lm_head.weight": torch.ones(8, 4)}
    save_file(OURS | head, tmp_path / "b.safetensors")
    check_shapes(tmp_path / "b.safetensors", wanted)
    half = saved(tmp_path / "c.safetensors", model_norm_weight=torch.ones(4, dtype=torch.bfloat16))
    check_shapes(half, wanted)


def test_weights_of_another_model_say_which_tensor_differs(tmp_path: Path) -> None:
    wanted = tensor_shapes(saved(tmp_path / "a.safetensors"))
    other = saved(tmp_path / "b.safetensors", model_norm_weight=torch.ones(5))
    said = "weights of another model: model.norm.weight is (5,), and should be (4,)"
    with pytest.raises(PolicyError, match=re.escape(f"{other}: {said}") + "$"):
        check_shapes(other, wanted)
    more = saved(tmp_path / "c.safetensors", model_extra=torch.ones(1))
    with pytest.raises(
        PolicyError, match=re.escape("model.extra is (1,), and should be None") + "$"
    ):
        check_shapes(more, wanted)


def test_a_file_that_was_cut_short_is_seen_in_its_header(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.safetensors")
    tensor_shapes(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PolicyError, match="cannot be read as safetensors"):
        tensor_shapes(file)


@pytest.mark.parametrize("index", ["{", "{}", "[]", '{"weight_map": ["a.safetensors"]}', "\xff"])
def test_an_index_that_names_no_files_is_one_sentence(tmp_path: Path, index: str) -> None:
    saved(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    with pytest.raises(PolicyError, match=r"index\.json: cannot be read as an index of weights: "):
        tensor_shapes(tmp_path)


def test_the_index_of_a_model_that_was_replaced_does_not_count(tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert dict(read_tensors(tmp_path)).keys() == OURS.keys()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_tensor_with_a_value_that_is_no_number_is_named(
    reference, tmp_path: Path, value: float
) -> None:
    tensors = dict(read_tensors(reference.directory))
    broken = tensors["model.norm.weight"].half()
    broken[1] = value
    save_file(tensors | {"model.norm.weight": broken}, tmp_path / "w.safetensors")
    with pytest.raises(PolicyError, match=r"model\.norm\.weight holds values that are NaN or inf"):
        read_weights(tmp_path / "w.safetensors", read_architecture(reference.directory))


def test_a_tensor_that_is_missing_is_named(reference) -> None:
    tensors = dict(read_tensors(reference.directory))
    del tensors["model.norm.weight"]
    said = "w: weights of another model than config.json's: model.norm.weight is missing"
    with pytest.raises(PolicyError, match=re.escape(said) + "$"):
        as_weights(tensors.items(), read_architecture(reference.directory), "w")


@pytest.mark.parametrize(("count", "ending"), [(1, "x0"), (3, "x0, x1, x2"), (4, "x0, x1, x2 …")])
def test_tensors_that_a_model_does_not_have_are_named(reference, count: int, ending: str) -> None:
    tensors = dict(read_tensors(reference.directory))
    tensors |= {f"x{number}": torch.zeros(1) for number in range(count)}
    said = f"w: tensors this model does not have: {ending}"
    with pytest.raises(PolicyError, match=re.escape(said) + "$"):
        as_weights(tensors.items(), read_architecture(reference.directory), "w")


def test_a_machine_without_memory_is_not_called_another_model(reference) -> None:
    class Full(Arithmetic):
        def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("can't allocate memory")

    with pytest.raises(RuntimeError, match=r"^can't allocate memory$"):
        read_weights(reference.directory, read_architecture(reference.directory), Full())


def test_the_memory_of_weights_counts_shared_tensors_once_and_adapters_too(reference) -> None:
    weights = read_weights(reference.directory, read_architecture(reference.directory))
    shared = replace(weights, second_role=weights.layers)
    assert shared.num_bytes() == weights.num_bytes()
    adapter = Adapter(torch.ones(2, 8), ((slice(0, 4), slice(0, 2), torch.ones(4, 2)),))
    adapted = replace(weights, adapters=({"down": adapter},))
    assert adapted.num_bytes() == weights.num_bytes() + 4 * (16 + 8)
