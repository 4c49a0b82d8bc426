"""Both ways to the loss give the same, and which correction goes which way."""

from dataclasses import replace

import msgspec
import pytest
import torch

from mage_async.config import config_file
from mage_async.config.schema import AnyCorrection
from mage_async.config.tables import kinds
from mage_async.learning.corrections import Clipped, Decoupled, Tokens
from mage_async.learning.token_loss import HeadInputs, corrected_loss
from mage_kernels import head

RULES = config_file.load(config_file.find(None), []).learner
KINDS = kinds(AnyCorrection)
CLIPPED = [name for name, kind in KINDS.items() if issubclass(kind, Clipped)]
N, D, V = 200, 16, 50
SCALE = 1 / 37


def learner_of(name, kl=0.0, **changes):
    band = (
        {"keep_low": 0.5, "keep_high": 2.0} if "keep_low" in KINDS[name].__struct_fields__ else {}
    )
    return msgspec.structs.replace(RULES, correction=KINDS[name](**band, **changes), kl=kl)


def inputs_of(dtype):
    source = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(rows, D, generator=source, dtype=dtype) for rows in (N, V))
    targets = torch.randint(V, (N,), generator=source)
    return HeadInputs(hidden.requires_grad_(), (0.3 * weight).requires_grad_(), targets, 1 / 0.8)


def tokens_near(inputs):
    """Drawn by two other policies near the current one: every clip and mask meets some of them."""
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        current = inputs.logprobs()[0]

    def normal(size):
        return size * torch.randn(N, generator=source, dtype=current.dtype)

    proximal = current + normal(0.3)
    staleness = torch.randint(6, (N,), generator=source)
    turns = torch.arange(N) // 4
    return Tokens(proximal, proximal, proximal + normal(0.7), normal(1.0), staleness, turns, turns)


def both_ways(rules):
    """The loss in a single pass, and after log-probs."""
    way = corrected_loss(rules)
    return replace(way, is_single_pass=True), replace(way, is_single_pass=False)


def found_by(way, dtype, *, apart=False):
    """Loss, gradients, and all that was made of the tokens."""
    inputs = inputs_of(dtype)
    rates = torch.where(torch.arange(N) % 3 == 0, 0.0, 0.02).to(dtype)
    tokens = tokens_near(inputs)
    found = way(inputs, tokens, rates, SCALE, tokens.proximal - 0.4 if apart else None)
    found.loss.backward()
    made = found.surrogate
    parts = [found.loss, made.losses, made.weights, made.is_clipped, made.is_masked, found.entropy]
    parts.append(found.reference_k3)
    return [part.detach() for part in parts] + [inputs.hidden.grad, inputs.head.grad]


@pytest.mark.parametrize("chunk_bytes", [2**20, 1])
@pytest.mark.parametrize("name", CLIPPED)
def test_both_ways_give_the_same_loss_gradients_and_metrics(name, chunk_bytes, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_bytes)
    ours, theirs = (found_by(way, torch.float64) for way in both_ways(learner_of(name)))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CLIPPED)
def test_both_ways_bound_negative_advantages_and_stay_near_a_reference(name):
    ways = both_ways(learner_of(name, dual_clip=1.5, kl=0.3))
    ours, theirs = (found_by(way, torch.float64, apart=True) for way in ways)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    plain = found_by(both_ways(learner_of(name))[1], torch.float64)
    assert (theirs[1] < plain[1]).any()  # what the bound took from the loss
    assert theirs[6] > 0


def test_the_bound_is_dual_clip_times_the_advantage_where_it_is_negative():
    current = torch.tensor([10.0, 10.0, 0.5]).log()
    tokens = Tokens(
        *(current, torch.zeros(3), torch.zeros(3), torch.tensor([-1.0, 2.0, -1.0])),
        *(torch.zeros(3, dtype=torch.int32), torch.arange(3), torch.arange(3)),
    )
    made = learner_of("none", dual_clip=3.0).correction.surrogate(tokens)
    assert made.losses.tolist() == pytest.approx([3.0, -2 * (1 + RULES.correction.clip_high), 0.8])
    assert made.is_clipped.tolist() == [True, True, True]


def test_only_a_clipped_loss_with_a_weight_has_a_dual_clip():
    without = {name for name, kind in KINDS.items() if "dual_clip" not in kind.__struct_fields__}
    assert (
        without == {"tis", "cispo", "dppo", "m2po", "vcpo"} == set(KINDS) - set(CLIPPED) - {"gspo"}
    )


def test_they_agree_to_single_precision_where_runs_are_made():
    ours, theirs = (found_by(way, torch.float32) for way in both_ways(learner_of("decoupled")))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_pass_gives_the_same_bits_again():
    way, _ = both_ways(learner_of("decoupled"))
    first, second = (found_by(way, torch.float32) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["gspo", "m2po", "tis", "cispo", "dppo"])
def test_losses_that_look_at_current_logprobs_otherwise_are_made_after_them(name):
    way = corrected_loss(learner_of(name))
    assert way.clipped is None
    assert str(way) == "loss after log-probs"


class Halved(Decoupled, tag="own:Halved"):
    """Half of the losses of `decoupled`, under the same weights."""

    def surrogate(self, tokens):
        whole = super().surrogate(tokens)
        return replace(whole, losses=whole.losses / 2)


def test_the_losses_of_a_users_subclass_are_made_after_logprobs():
    assert corrected_loss(msgspec.structs.replace(RULES, correction=Halved())).clipped is None


@pytest.mark.parametrize(("chunk_bytes", "is_single_pass"), [(2**20, False), (1, True)])
def test_the_single_pass_is_taken_where_logits_cannot_be_kept(
    chunk_bytes, is_single_pass, monkeypatch
):
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_bytes)
    way = corrected_loss(learner_of("decoupled"))
    chosen = replace(way, is_single_pass=is_single_pass)
    ours, theirs = (found_by(each, torch.float32) for each in (way, chosen))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert str(way) == (
        "loss in one pass over the LM head, or after log-probs where all logits are kept"
    )


@pytest.mark.parametrize("name", KINDS)
def test_weights_of_a_single_pass_are_known_before_it(name):
    inputs = inputs_of(torch.float64)
    tokens = tokens_near(inputs)
    correct = learner_of(name).correction.surrogate
    is_constant = torch.equal(
        correct(tokens).weights, correct(tokens.at(tokens.proximal - 0.1)).weights
    )
    assert is_constant == (name in CLIPPED and name != "ppo")
