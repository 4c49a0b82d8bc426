"""Two roles in one context: which one computes a token, and whose gradient it has."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mage_async.completion import Prompt, Sampling, with_roles
from mage_async.config import config_file
from mage_async.config.schema import Lora
from mage_async.errors import PolicyError
from mage_async.inference.architecture import read_architecture
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler
from mage_async.inference.weight_fingerprint import probe_tokens, with_both_roles
from mage_async.inference.weights import as_weights
from mage_async.learning import trainer
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.forward import head_inputs, hidden_states
from mage_async.learning.lora import (
    add_adapters,
    load_adapters,
    merged_tensors,
    save_adapters,
    trained_tensors,
)
from mage_async.learning.packing import TokenRow, TrainingSequence
from mage_async.learning.trainer import Trainer
from mage_async.policy.snapshot import Snapshot
from mage_async.policy.weight_digest import probe_logprobs
from tests.helpers.random_models import in_double, random_model, sequence

TOKENS = np.arange(3, 43, dtype=np.int32)

ROLES = EXPLORE, EXPLOIT = ("explore", "exploit")


def adapted(*, is_fresh: bool = False, roles: tuple[str, str] | None = ROLES) -> PreTrainedModel:
    """A model whose two adapters change what it computes, each otherwise."""
    model = random_model("Qwen3")
    add_adapters(model, Lora(rank=4, alpha=8.0), 0, roles=roles)
    source = torch.Generator().manual_seed(1)
    for tensor in {} if is_fresh else trained_tensors(model).values():
        tensor.normal_(0.0, 0.1, generator=source)
    model.set_attn_implementation(PACKED_ATTENTION)
    return model


def adapter(model: PreTrainedModel, role: str) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.named_parameters() if f".{role}." in name}


def changes(border: int | None) -> tuple[int, ...]:
    return () if border is None else (border,)


@torch.no_grad()
def hidden(model: PreTrainedModel, second_role_from: int | None) -> torch.Tensor:
    row = TokenRow.of([with_roles(TOKENS, changes(second_role_from))], torch.device("cpu"))
    return hidden_states(model, row)


@torch.no_grad()
def logprobs(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Of all tokens but the first, of either role: float32 [T - 1]."""
    predicted = [np.arange(1, len(tokens))]
    row = TokenRow.of([tokens], torch.device("cpu"), predicted=predicted)
    return head_inputs(model, row, 1.0).logprobs()[0].numpy()


def engine_of(model: PreTrainedModel, folder: Path, *, slots: int = 4) -> Model:
    """An engine's model with the weights that a learner publishes."""
    model.config.save_pretrained(folder)
    shape = read_architecture(folder)
    weights = as_weights(merged_tensors(model), shape, "the model")
    return Model(shape, weights, slots=slots, max_tokens=64)


def test_equal_adapters_are_one_adapter_whoever_computes_a_token() -> None:
    model, single = adapted(), adapted(roles=None)
    for name, tensor in trained_tensors(single).items():
        for role in (EXPLORE, EXPLOIT):
            trained_tensors(model)[name.replace(".default.", f".{role}.")].copy_(tensor)
    for border in (None, 0, 17, 40):
        assert torch.allclose(hidden(model, border), hidden(single, None), atol=1e-4)


def test_a_token_is_computed_by_its_own_adapter_and_reads_all_before_it() -> None:
    model = adapted()
    whole = {border: hidden(model, border) for border in (None, 0, 17)}
    assert torch.equal(whole[17][:17], whole[None][:17])
    assert (whole[17][17:] - whole[None][17:]).abs().max() > 0.01
    assert (whole[17][17:] - whole[0][17:]).abs().max() > 0.01
    for role, first, last in ((EXPLOIT, 0, 17), (EXPLORE, 0, 40)):
        for tensor in adapter(model, role).values():
            tensor.data.zero_()
        same = (hidden(model, 17) == whole[17]).all(1)
        assert same[first:last].all() == (role == EXPLOIT)
        assert not same[17:].any()


def test_the_engine_draws_with_the_learners_log_probs_across_the_border(tmp_path: Path) -> None:
    model = adapted()
    scheduler = Scheduler(engine_of(model, tmp_path))
    context, border = TOKENS[:9], None
    for turn in range(4):
        border = len(context) - 4 if turn == 2 else border
        sampling = Sampling(max_tokens=3)
        scheduler.submit(Prompt("a", context, sampling, turn, role_changes=changes(border)))
        found = []
        while not found:
            found = scheduler.advance()
        (_, completion), *_ = found
        assert completion.num_reused == (0 if turn == 0 else len(context) - 5)
        assert (completion.tokens >= 0).all()
        context = np.concatenate([context, completion.tokens])
        own = logprobs(model, with_roles(context, changes(border)))[-len(completion.tokens) :]
        np.testing.assert_allclose(completion.logprobs, own, atol=2e-5)
        context = np.concatenate([context, TOKENS[:4]])
    assert np.abs(own - logprobs(model, context)[-7:-4]).max() > 0.01


def test_keys_of_one_role_are_not_lent_to_the_other(tmp_path: Path) -> None:
    scheduler = Scheduler(engine_of(adapted(), tmp_path))
    reused = []
    for name, border in (("a", None), ("b", 0), ("c", 6), ("d", 6), ("e", 0)):
        scheduler.submit(Prompt(name, TOKENS[:20], Sampling(), 0, role_changes=changes(border)))
        reused.append(scheduler.advance()[0][1].num_reused)
    assert reused == [0, 0, 6, 19, 19]


def test_a_receipt_scores_both_roles(tmp_path: Path) -> None:
    model = adapted()
    tokens = with_both_roles(probe_tokens(64))
    assert (tokens < 0).tolist() == [False] * 16 + [True] * 16
    engine = engine_of(model, tmp_path, slots=1).score(tokens).numpy()
    np.testing.assert_allclose(engine, probe_logprobs(model).numpy(), atol=2e-5)
    names = {place.name for place in Snapshot.of(model, 1).places}
    assert {"model.norm.weight", "role1.model.layers.0.mlp.up_proj.weight"} <= names
    assert len([name for name in names if name.startswith("role1.")]) == 7 * 3


def test_what_the_second_role_has_alone_is_refused_by_name(tmp_path: Path) -> None:
    model = adapted()
    model.config.save_pretrained(tmp_path)
    named = [*merged_tensors(model), ("role1.model.extra", torch.zeros(1))]
    with pytest.raises(PolicyError, match=r"the first role has no model\.extra"):
        as_weights(named, read_architecture(tmp_path), "w")


def test_a_second_role_has_no_embedding_or_last_norm_of_its_own(tmp_path: Path) -> None:
    model = adapted()
    model.config.save_pretrained(tmp_path)
    named = dict(merged_tensors(model))
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        more = named | {f"role1.{name}": named[name]}
        with pytest.raises(PolicyError, match=rf"its own {name}, which belongs to no layer"):
            as_weights(more.items(), read_architecture(tmp_path), "w")


def played(advantages: tuple[float, float], length: int = 30) -> TrainingSequence:
    """Two turns, the second of the last episode; all begin with the same twelve tokens."""
    part = sequence(length)
    part.tokens[:12] = TOKENS[:12]
    part.tokens[:] = with_roles(part.tokens, (6 + length % 5,))
    return TrainingSequence(
        part.tokens, part.places, part.sampled, part.turn_lengths, torch.tensor(advantages)
    )


def gradients(
    advantages: tuple[float, float], *changes: str, lengths: tuple[int, ...] = (30,)
) -> dict[str, torch.Tensor]:
    """Of one update in float64, by the name of the adapter's tensor."""
    settings = ["learner.minibatches=1", "learner.grad_clip=1e9", "learner.entropy=0", *changes]
    settings += ["learner.final_entropy=0", "learner.correction=none"]
    config = config_file.load(config_file.find(None), settings)
    model = in_double(adapted()).train()
    parts = [played(advantages, length) for length in lengths]
    Trainer(model, config).step(parts)
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def largest(found: dict[str, torch.Tensor], role: str) -> float:
    return max(float(one.abs().max()) for name, one in found.items() if f".{role}." in name)


@pytest.mark.parametrize("checkpointed", ["false", "true"])
def test_each_adapter_follows_the_losses_of_its_own_tokens(checkpointed: str) -> None:
    how = f"learner.activation_checkpointing={checkpointed}"
    explorers, exploiters, both = (
        gradients(given, how) for given in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    )
    assert largest(explorers, EXPLORE) > 1e-4 < largest(exploiters, EXPLOIT)
    assert largest(explorers, EXPLOIT) == largest(exploiters, EXPLORE) == 0.0
    for name, gradient in both.items():
        own = explorers if f".{EXPLORE}." in name else exploiters
        assert (gradient - own[name]).abs().max() < 1e-12


@pytest.mark.parametrize("changes", [(), ("learner.max_tokens_per_microbatch=80",)])
def test_an_opening_is_shared_as_far_as_the_role_is_the_same(changes: tuple[str, ...]) -> None:
    lengths = (30, 36, 32, 41)  # the second role takes over at 6, 7, 8 and 7
    apart = gradients((1.0, -0.7), lengths=lengths)
    shared = gradients((1.0, -0.7), "learner.shared_opening=true", *changes, lengths=lengths)
    sequences = [played((0.0, 0.0), length).tokens for length in lengths]
    row = TokenRow.of(sequences, torch.device("cpu"), shares_opening=True)
    assert row.boundaries.opening == 6
    for name, gradient in apart.items():
        assert (gradient - shared[name]).abs().max() < 1e-10


def test_what_is_left_out_is_what_the_exploiters_loss_would_do_to_the_explorer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = gradients((0.0, 1.0))
    monkeypatch.setattr(trainer, "backward", lambda model, loss, *rest: loss.backward())
    whole = gradients((0.0, 1.0))
    assert largest(whole, EXPLORE) > 1e-4
    for name in adapter(adapted(), EXPLOIT):
        assert (own[name] - whole[name]).abs().max() < 1e-12


def test_two_adapters_are_saved_as_peft_reads_them_and_loaded(tmp_path: Path) -> None:
    model, other = adapted(), adapted(is_fresh=True)
    save_adapters(model, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [EXPLOIT, EXPLORE]
    load_adapters(other, tmp_path)
    assert torch.equal(hidden(other, 17), hidden(model, 17))
    with pytest.raises(PolicyError, match=r"'default': turn on the methods"):
        load_adapters(adapted(roles=None), tmp_path)
