"""What can be known of weights from the headers of their files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mage_async.errors import PolicyError
from mage_async.inference.weights import read_error, shape_error, tensor_shapes

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
    assert shape_error(tmp_path / "b.safetensors", wanted) == ""
    half = saved(tmp_path / "c.safetensors", model_norm_weight=torch.ones(4, dtype=torch.bfloat16))
    assert shape_error(half, wanted) == ""


def test_weights_of_another_model_say_which_tensor_differs(tmp_path: Path) -> None:
    wanted = tensor_shapes(saved(tmp_path / "a.safetensors"))
    other = saved(tmp_path / "b.safetensors", model_norm_weight=torch.ones(5))
    said = "weights of another model: model.norm.weight is (5,), and should be (4,)"
    assert shape_error(other, wanted) == f"{other}: {said}"
    more = saved(tmp_path / "c.safetensors", model_extra=torch.ones(1))
    assert shape_error(more, wanted).endswith("model.extra is (1,), and should be None")


def test_a_file_that_was_cut_short_is_seen_in_its_header(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.safetensors")
    assert read_error(file) == ""
    file.write_bytes(file.read_bytes()[:-1])
    assert "cannot be read as safetensors" in read_error(file)
    with pytest.raises(PolicyError, match="cannot be read as safetensors"):
        tensor_shapes(file)
