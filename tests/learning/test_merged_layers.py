"""Layers with merged adapters compute what transformers and peft do, and so do their gradients."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mage_async.config.schema import Lora
from mage_async.inference.model import Model
from mage_async.inference.weights import as_weights
from mage_async.learning import merged_layers as tested
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.forward import checkpoint_activations, head_inputs
from mage_async.learning.lora import add_adapters, merged_tensors, trained_tensors, without_adapters
from mage_async.learning.packing import TokenRow
from tests.inference.conftest import FAMILIES, build

LENGTHS, OPENING = (90, 41, 73), 12
CPU = torch.device("cpu")


def adapted(family: str, targets: str | list[str] = "all-linear") -> PreTrainedModel:
    """Make a random model whose adapters change it."""
    model = build(family)
    model.set_attn_implementation(PACKED_ATTENTION)
    rules = Lora(rank=4, alpha=8.0) if targets == "all-linear" else Lora(rank=4, targets=targets)
    add_adapters(model, rules, 0)
    source = torch.Generator().manual_seed(1)
    for tensor in trained_tensors(model).values():
        tensor.normal_(0.0, 0.05, generator=source)
    checkpoint_activations(model, is_on=False)
    return model


def row(*, shares_opening: bool) -> TokenRow:
    """Lay sequences of different lengths that begin alike."""
    source = np.random.default_rng(0)
    opening = source.integers(3, 40, OPENING)
    sequences = [np.concatenate((opening, source.integers(3, 40, each))) for each in LENGTHS]
    places = [np.arange(OPENING - 2, len(each), 3) for each in sequences]
    return TokenRow.of(sequences, CPU, predicted=places, shares_opening=shares_opening)


def results(model: PreTrainedModel, given: TokenRow) -> Iterator[torch.Tensor]:
    """Yield log-probs, entropies and the gradient of every adapter."""
    model.zero_grad()
    logprobs, entropy = head_inputs(model, given, 0.8).logprobs()
    weights = torch.linspace(-1.0, 1.0, len(logprobs))
    ((logprobs + 0.1 * entropy) * weights).sum().backward()
    yield from (logprobs.detach(), entropy.detach())
    for weight in model.parameters():
        if weight.requires_grad:
            assert weight.grad is not None
            yield weight.grad.clone()


def assert_close(found: Iterator[torch.Tensor], wanted: list[torch.Tensor], share: float) -> None:
    """Compare, with a tolerance relative to the norm of each tensor."""
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= share * other.norm()


def by_operation(model: PreTrainedModel, given: TokenRow) -> list[torch.Tensor]:
    """Compute the results by transformers and peft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mage_async.learning.forward.merged_layers", lambda model: None)
        return list(results(model, given))


@pytest.mark.parametrize("shares_opening", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral without", "qwen2", "qwen3"])
def test_logprobs_and_gradients_are_those_of_transformers_and_peft(
    family: str, shares_opening: bool
) -> None:
    model, given = adapted(family), row(shares_opening=shares_opening)
    assert tested.merged_layers(model) is not None
    assert_close(results(model, given), by_operation(model, given), 2e-5)


def test_some_layers_may_have_no_adapter() -> None:
    model, given = adapted("llama", ["q_proj", "v_proj", "down_proj"]), row(shares_opening=True)
    assert_close(results(model, given), by_operation(model, given), 2e-5)


def test_attention_weights_that_are_not_kept_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, given = adapted("qwen3"), row(shares_opening=True)
    wanted = list(results(model, given))
    monkeypatch.setattr(tested, "MOST_KEPT", 0)
    assert_close(results(model, given), wanted, 1e-6)


def test_a_changed_adapter_and_a_switch_act_in_the_next_forward() -> None:
    model, given = adapted("llama"), row(shares_opening=False)
    first = next(results(model, given))
    with without_adapters(model), torch.no_grad():
        base, _ = head_inputs(model, given, 0.8).logprobs()
    assert (base - first).abs().max() > 1e-3
    for weight in trained_tensors(model).values():
        weight.mul_(1.5)
    assert_close(results(model, given), by_operation(model, given), 2e-5)


def test_a_changed_frozen_weight_acts_in_the_next_forward() -> None:
    model, given = adapted("llama"), row(shares_opening=False)
    next(results(model, given))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "k_proj.base_layer" in name or "norm" in name or "embed" in name:
                weight.mul_(1.1)
    assert_close(results(model, given), by_operation(model, given), 2e-5)


def test_a_matrix_that_changed_before_the_backward_pass_is_an_error() -> None:
    model, given = adapted("llama"), row(shares_opening=False)
    logprobs, _ = head_inputs(model, given, 0.8).logprobs()
    next(iter(trained_tensors(model).values())).mul_(1.5)
    head_inputs(model, given, 0.8).logprobs()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_computes_the_same_logprobs(family: str, tmp_path) -> None:
    model = adapted(family)
    build(family).save_pretrained(tmp_path)
    engine = Model.load(tmp_path, slots=1, max_tokens=128)
    engine.weights = as_weights(merged_tensors(model), engine.architecture, "learner")
    tokens = np.random.default_rng(1).integers(3, 40, 100)
    given = TokenRow.of([tokens], CPU, predicted=[np.arange(1, len(tokens))])
    with torch.no_grad():
        logprobs, _ = head_inputs(model, given, 1.0).logprobs()
    assert (logprobs - engine.score(tokens)).abs().max() < 1e-4


def test_other_models_are_computed_by_operation() -> None:
    assert tested.merged_layers(build("llama")) is None  # no adapters
    model = adapted("llama")
    checkpoint_activations(model, is_on=True)
    assert tested.merged_layers(model) is None
    assert tested.merged_layers(adapted("llama").double()) is None
    for family in ("gemma3_text", "olmo2", "mistral", "smollm3", "qwen2 with windows"):
        assert tested.merged_layers(adapted(family)) is None
