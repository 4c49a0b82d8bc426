"""Adapters on a frozen model: what is trained, merged, saved and refused."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mage_async.config import config_file
from mage_async.config.schema import Lora
from mage_async.errors import PolicyError
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.forward import checkpoint_activations, hidden_states
from mage_async.learning.lora import (
    adapted_layers,
    add_adapters,
    linear_layers,
    load_adapters,
    merged_tensors,
    save_adapters,
    trained_tensors,
)
from mage_async.learning.packing import TokenRow
from mage_async.learning.trainer import Trainer
from mage_async.policy.load import export_hf
from mage_async.policy.model_files import check_targets, outline_of
from mage_async.policy.snapshot import Snapshot
from mage_async.policy.weight_digest import tensor_digests
from tests.helpers.random_models import random_model, sequence

RULES = Lora(rank=4, alpha=8.0)
TOKENS = torch.arange(3, 43)[None]


def adapted(*, is_fresh: bool = False, **changes: object) -> PreTrainedModel:
    """A model whose adapters change what it computes."""
    model = random_model("Qwen3", **changes)
    add_adapters(model, RULES, 0)
    if not is_fresh:
        for tensor in trained_tensors(model).values():
            tensor.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


def trainer_of(model: PreTrainedModel, *changes: str) -> Trainer:
    model.set_attn_implementation(PACKED_ATTENTION)
    config = config_file.load(config_file.find(None), ["learner.minibatches=2", *changes])
    return Trainer(model.train(), config)


def test_fresh_adapters_change_nothing_and_later_ones_do() -> None:
    plain = logits(random_model("Qwen3"))
    assert torch.equal(logits(adapted(is_fresh=True)), plain)
    assert (logits(adapted()) - plain).abs().max() > 0.01


def test_merged_weights_compute_what_the_adapters_do() -> None:
    model, merged = adapted(), random_model("Qwen3")
    merged.load_state_dict(dict(merged_tensors(model)))
    assert (logits(merged) - logits(model)).abs().max() < 1e-6


@pytest.mark.parametrize("is_checkpointed", ["false", "true"])
def test_a_step_trains_the_adapters_alone(is_checkpointed: str) -> None:
    model = adapted()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer = trainer_of(model, f"learner.activation_checkpointing={is_checkpointed}")
    trainer.step([sequence(length) for length in (40, 31, 22)])
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == set(trained_tensors(model))
    assert len(moved) == 2 * 7 * 3
    assert tensor_digests(model).keys() == moved
    assert "of which 22,848 are trained" in trainer.describe()


def test_a_snapshot_has_the_merged_weights_under_the_models_own_names() -> None:
    model = adapted(tie_word_embeddings=True)
    places = {place.name: place for place in Snapshot.of(model, 1).places}
    assert set(places) == set(random_model("Qwen3").state_dict()) - {"lm_head.weight"}
    data = Snapshot.of(model, 1).data
    for name, tensor in merged_tensors(model):
        if name in places:
            found = data[places[name].start : places[name].end].view(tensor.dtype)
            assert torch.equal(found, tensor.flatten())


def test_adapters_of_a_model_in_16_bits_are_float32_and_merged_in_float32() -> None:
    model = random_model("Qwen3").bfloat16()
    add_adapters(model, RULES, 0)
    assert {tensor.dtype for tensor in trained_tensors(model).values()} == {torch.float32}
    assert {tensor.dtype for _, tensor in merged_tensors(model)} == {torch.bfloat16}


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_products_of_adapters_have_the_models_type_and_gradients_their_own(
    is_checkpointed: bool,
) -> None:
    narrow, wide = adapted().bfloat16(), adapted()
    for layer in adapted_layers(narrow).values():
        for part in (layer.lora_A, layer.lora_B):
            part.float()
    row = TokenRow.of([TOKENS[0].numpy()], torch.device("cpu"))
    products = set[torch.dtype]()
    for layer in adapted_layers(narrow).values():
        layer.lora_A.default.register_forward_hook(lambda _, __, out: products.add(out.dtype))
    found, exact = (_gradients(model, row, is_checkpointed) for model in (narrow, wide))
    # Without checkpointing, merged layers have no products of adapters alone.
    assert products == ({torch.bfloat16} if is_checkpointed else set())
    assert {gradient.dtype for gradient in found} == {torch.float32}
    apart = torch.cat([(one - other).flatten() for one, other in zip(found, exact, strict=True)])
    assert 0 < apart.norm() / torch.cat([each.flatten() for each in exact]).norm() < 0.1


def _gradients(model: PreTrainedModel, row: TokenRow, is_checkpointed: bool) -> list[torch.Tensor]:
    model.set_attn_implementation(PACKED_ATTENTION)
    checkpoint_activations(model.train(), is_on=is_checkpointed)
    hidden = hidden_states(model, row).float()
    (hidden * torch.linspace(-1, 1, hidden.shape[1])).sum().backward()
    return [weight.grad for weight in model.parameters() if weight.requires_grad]


def test_the_reference_of_the_kl_term_is_the_model_without_its_adapters() -> None:
    batch = [sequence(length) for length in (40, 31, 22)]
    taught, base = trainer_of(adapted(), "learner.kl=0.5"), trainer_of(random_model("Qwen3"))
    found = taught.micro_batches(batch)[0]
    plain = base.with_proximal(base.micro_batches(batch)[0])
    assert torch.allclose(found.reference, plain.proximal, atol=1e-5)
    assert (found.reference - taught.with_proximal(found).proximal).abs().max() > 0.01
    assert taught.step(batch)["reference_k3"] > 0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft asks for it
def test_peft_loads_the_adapters_and_transformers_the_merged_model(tmp_path: Path) -> None:
    model = adapted()
    save_adapters(model, tmp_path / "adapters")
    export_hf(model, tmp_path, tmp_path / "merged")
    theirs = PeftModel.from_pretrained(random_model("Qwen3"), tmp_path / "adapters")
    assert torch.equal(logits(theirs.eval()), logits(model))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - logits(model)).abs().max() < 1e-6
    ours = adapted(is_fresh=True)
    load_adapters(ours, tmp_path / "adapters")
    assert torch.equal(logits(ours), logits(model))


def test_adapters_of_another_rank_or_of_no_checkpoint_are_one_sentence(tmp_path: Path) -> None:
    save_adapters(adapted(), tmp_path / "adapters")
    other = random_model("Qwen3")
    add_adapters(other, Lora(rank=2), 0)
    with pytest.raises(PolicyError, match="of other layers, or of another rank"):
        load_adapters(other, tmp_path / "adapters")
    with pytest.raises(PolicyError, match=r"was trained without policy\.lora"):
        load_adapters(other, tmp_path / "whole")


@pytest.mark.parametrize("target", ["c_attn", "lm_head", "embed_tokens", "norm"])
def test_a_target_that_takes_no_adapter_is_one_sentence_before_weights_are_read(
    target: str, tmp_path: Path
) -> None:
    model = random_model("Qwen3")
    model.save_pretrained(tmp_path)
    outline = outline_of(tmp_path)
    assert outline.linear() == linear_layers(model)
    with pytest.raises(PolicyError, match=f"qwen3 has no layer '{target}' that takes an adapter"):
        check_targets(outline.model_type, ["q_proj", target], outline.linear())
    with pytest.raises(PolicyError, match="targets is empty: name a layer"):
        check_targets(outline.model_type, [], outline.linear())
