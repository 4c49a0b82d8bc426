"""A snapshot is the weights as they were, byte for byte, in the form of a safetensors file."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.policy.snapshot import Snapshot, read_snapshot


def model(*, is_tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        tie_word_embeddings=is_tied,
    )
    return Qwen3ForCausalLM(config)


def test_safetensors_reads_the_weights_back_bit_for_bit(tmp_path) -> None:
    trained = model(is_tied=False)
    trained.model.norm.to(torch.bfloat16)  # a model of two types: wide ones come first
    wanted = {name: one.clone() for name, one in trained.state_dict().items()}
    Snapshot.of(trained, 7).write(tmp_path / "v7.safetensors")
    found = load_file(tmp_path / "v7.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
    with safe_open(tmp_path / "v7.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["version"]) == ("pt", "7")


def test_a_model_that_goes_on_training_does_not_change_what_is_published(tmp_path) -> None:
    trained = model(is_tied=True)
    before = trained.model.norm.weight.detach().clone()
    snapshot = Snapshot.of(trained, 1)
    with torch.no_grad():
        trained.model.norm.weight.add_(1.0)
    snapshot.write(tmp_path / "v1.safetensors")
    found = load_file(tmp_path / "v1.safetensors")
    assert torch.equal(found["model.norm.weight"], before)
    assert "lm_head.weight" not in found  # it is the embedding


def test_half_a_file_has_another_name(tmp_path) -> None:
    Snapshot.of(model(is_tied=True), 1).write(tmp_path / "v1.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["v1.safetensors"]


def test_a_written_snapshot_is_mapped_as_one_buffer_of_tensors(tmp_path) -> None:
    trained = model(is_tied=False)
    trained.model.norm.to(torch.bfloat16)
    Snapshot.of(trained, 1).write(tmp_path / "v1.safetensors")
    places, data = read_snapshot(tmp_path / "v1.safetensors")
    wanted = trained.state_dict()
    assert {place.name for place in places} == wanted.keys()
    assert [place.start for place in places] == [0, *(place.end for place in places[:-1])]
    assert places[-1].end == len(data)
    for place in places:
        found = data[place.start : place.end].view(place.dtype).reshape(place.shape)
        assert torch.equal(found, wanted[place.name])
