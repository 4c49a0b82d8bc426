"""Models loaded and saved, and model directories that lack weights."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mage_async.errors import PolicyError
from mage_async.policy.load import check_trainable, export_hf, load_policy
from tests.helpers.random_models import random_model


def written_without(name: str, model: PreTrainedModel, folder: Path) -> Path:
    """A model directory that lacks one weight."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_tied_head_that_is_declared_untied_is_one_sentence(tmp_path: Path) -> None:
    model = random_model("Llama", tie_word_embeddings=False)
    folder = written_without("lm_head.weight", model, tmp_path)
    with pytest.raises(PolicyError, match=r"tie_word_embeddings = false, but no file holds lm_hea"):
        check_trainable(folder)


def test_a_missing_weight_is_no_random_weight(tmp_path: Path) -> None:
    folder = written_without("model.norm.weight", random_model("Qwen3"), tmp_path)
    with pytest.raises(PolicyError, match=r"1 weights are in no file, model\.norm\.weight first"):
        load_policy(folder, "float32", "cpu")


def test_no_progress_bar_is_drawn_over_the_lines_of_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_hf(random_model("Qwen3"), tmp_path, tmp_path)
    load_policy(tmp_path, "float32", "cpu")
    assert capsys.readouterr() == ("", "")
