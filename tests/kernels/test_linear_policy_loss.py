"""The single-pass policy loss against fp64 autograd, and by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mage_kernels import Surrogate, TokenData, linear_policy_loss
from mage_kernels.surrogate import token_derivatives
from tests.helpers.random_heads import (
    Head,
    plain_logprob,
    plain_policy_loss,
    random_head,
    relative_error,
)

PLAIN: dict[str, Any] = {}
ALL_TERMS: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 1.5,
    "kl_coefficient": 0.1,
}


def token_data(arguments: Head, *, device: str, with_reference: bool) -> tuple[TokenData, Tensor]:
    """Anchor and reference policies near the current one, and a mask; NaN outside the mask."""
    generator = torch.Generator().manual_seed(3)
    num_tokens = len(arguments.tokens)

    def noise(size: float) -> Tensor:
        return (torch.randn(num_tokens, generator=generator) * size).to(device)

    logprob = plain_logprob(*arguments.double())[0].float()
    mask = torch.rand(num_tokens, generator=generator) < 0.6
    rates = 0.05 * torch.rand(num_tokens, generator=generator).to(device)
    fields = [noise(1.0), logprob + noise(0.3), logprob + noise(0.5), rates]
    for field in fields:
        field[~mask.to(device)] = float("nan")
    return TokenData(*(fields if with_reference else fields[:2])), mask


def single_pass(
    arguments: Head, data: TokenData, mask: Tensor, normaliser: float, terms: dict[str, Any]
):
    """Loss with gradients."""
    hidden, head = (tensor.clone().requires_grad_() for tensor in arguments[:2])
    result = linear_policy_loss(
        hidden,
        head,
        arguments.tokens,
        data,
        Surrogate(**terms),
        normaliser,
        arguments.inverse_temperature,
        mask=mask,
    )
    result.loss.backward()
    return result._replace(loss=result.loss.detach()), hidden.grad, head.grad


def two_pass(
    arguments: Head, data: TokenData, mask: Tensor, normaliser: float, terms: dict[str, Any]
):
    """The same in fp64 by autograd."""
    arguments = arguments.double()
    hidden, head = (tensor.clone().requires_grad_() for tensor in arguments[:2])
    rows = mask.to(hidden.device)
    tokens, scale = arguments.tokens[rows], arguments.inverse_temperature
    losses = plain_policy_loss(
        hidden[rows], head, tokens, data.rows(rows), Surrogate(**terms), scale
    )
    loss = losses.sum() / normaliser
    loss.backward()
    return loss.detach(), hidden.grad, head.grad


@pytest.mark.parametrize("terms", [PLAIN, ALL_TERMS])
def test_loss_and_gradients_are_those_of_fp64(
    device: str, terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(device, monkeypatch)
    arguments = random_head(300, 520, 64, device=device, inverse_temperature=1.6)
    data, mask = token_data(arguments, device=device, with_reference=bool(terms))
    result, d_hidden, d_head = single_pass(arguments, data, mask, 50.0, terms)
    loss, true_d_hidden, true_d_head = two_pass(arguments, data, mask, 50.0, terms)
    assert float(result.loss) == pytest.approx(float(loss), rel=1e-4)
    assert relative_error(d_hidden, true_d_hidden) <= 6e-3
    assert relative_error(d_head, true_d_head) <= 6e-3
    assert (d_hidden[~mask.to(device)] == 0).all()
    assert (result.logprob[~mask.to(device)] == 0).all()


def small_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for few tokens."""
    from mage_kernels import chunked, dispatch

    monkeypatch.setattr(chunked, "CHUNK_BYTES", 1)
    if dispatch.BACKEND.fused_devices:
        from mage_kernels.fused import head_autograd as fused

        monkeypatch.setattr(fused, "CHUNK_ROWS", 128)


def test_a_scaled_loss_has_scaled_gradients(device: str) -> None:
    arguments = random_head(40, 300, 64, device=device)
    data, mask = token_data(arguments, device=device, with_reference=False)
    _, d_hidden, d_head = single_pass(arguments, data, mask, 10.0, PLAIN)
    hidden, head = (tensor.clone().requires_grad_() for tensor in arguments[:2])
    result = linear_policy_loss(hidden, head, arguments.tokens, data, Surrogate(), 10.0, mask=mask)
    (4 * result.loss).backward()
    assert torch.equal(hidden.grad, 4 * d_hidden)
    assert torch.equal(head.grad, 4 * d_head)


def test_two_halves_of_a_batch_add_up_to_the_whole(device: str) -> None:
    arguments = random_head(80, 300, 64, device=device)
    data, mask = token_data(arguments, device=device, with_reference=True)
    whole, _, d_head = single_pass(arguments, data, mask, 30.0, ALL_TERMS)
    parts = []
    for rows in (slice(40), slice(40, 80)):
        some = Head(arguments.hidden[rows], arguments.head, arguments.tokens[rows])
        parts.append(single_pass(some, data.rows(rows), mask[rows], 30.0, ALL_TERMS))
    assert float(parts[0][0].loss + parts[1][0].loss) == pytest.approx(float(whole.loss), rel=1e-4)
    assert relative_error(parts[0][2] + parts[1][2], d_head.double()) <= 8e-3


def test_a_batch_without_a_counted_token_costs_nothing_and_gives_zeros(device: str) -> None:
    arguments = random_head(5, 300, 64, device=device)
    data, _ = token_data(arguments, device=device, with_reference=True)
    mask = torch.zeros(5, dtype=torch.bool)
    result, d_hidden, d_head = single_pass(arguments, data, mask, 7.0, ALL_TERMS)
    assert result.loss == 0
    assert (d_hidden == 0).all()
    assert (d_head == 0).all()


def test_without_gradients_the_loss_is_the_same(device: str) -> None:
    arguments = random_head(40, 300, 64, device=device)
    data, mask = token_data(arguments, device=device, with_reference=True)
    result, _, _ = single_pass(arguments, data, mask, 10.0, ALL_TERMS)
    with torch.no_grad():
        silent = linear_policy_loss(*arguments[:3], data, Surrogate(**ALL_TERMS), 10.0, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(silent, result, strict=True))


def test_two_runs_give_the_same_bits(device: str) -> None:
    arguments = random_head(150, 300, 64, device=device)
    data, mask = token_data(arguments, device=device, with_reference=True)
    first, second = (single_pass(arguments, data, mask, 10.0, ALL_TERMS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))


# Log-ratio to the anchor, advantage; then loss and derivative by log-prob. Clipped to 0.8 .. 1.25,
# dual clip 2.
BY_HAND = [
    pytest.param(0.0, 1.0, -1.0, -1.0, id="on policy, the gradient is minus the advantage"),
    pytest.param(math.log(2), 1.0, -1.25, 0.0, id="a good token is pushed up only so far"),
    pytest.param(math.log(0.5), 1.0, -0.5, -0.5, id="but always pulled back up"),
    pytest.param(math.log(0.5), -1.0, 0.8, 0.0, id="a bad token is pushed down only so far"),
    pytest.param(math.log(1.5), -1.0, 1.5, 1.5, id="but always pulled back down"),
    pytest.param(math.log(4), -1.0, 2.0, 0.0, id="unless dual clip gives it up"),
    pytest.param(30.0, -1.0, 2.0, 0.0, id="a ratio out of bounds has no gradient"),
    pytest.param(0.3, 0.0, 0.0, 0.0, id="no advantage, no loss"),
]


@pytest.mark.parametrize(("log_ratio", "advantage", "loss", "slope"), BY_HAND)
def test_one_token_by_hand(
    device: str, log_ratio: float, advantage: float, loss: float, slope: float
) -> None:
    numbers = Surrogate(clip_low=0.2, clip_high=0.25, dual_clip=2.0)
    found_loss, d_logprob = one_token(device, numbers, log_ratio, advantage, None)
    assert found_loss == pytest.approx(loss, abs=1e-5)
    assert d_logprob == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("distance", [0.0, 1e-3, -0.1, 0.2, 2.0, -3.0])
def test_the_kl_term_pulls_towards_the_reference(device: str, distance: float) -> None:
    """By hand: k3 = e^d - d - 1 with d = reference - logprob, whose derivative is 1 - e^d."""
    numbers = Surrogate(kl_coefficient=1.0)
    loss, slope = one_token(device, numbers, 0.0, 0.0, distance)
    assert loss == pytest.approx(math.expm1(distance) - distance, rel=1e-4, abs=1e-6)
    assert slope == pytest.approx(-math.expm1(distance), rel=1e-4, abs=1e-6)


def one_token(
    device: str, numbers: Surrogate, log_ratio: float, advantage: float, distance: float | None
) -> tuple[float, float]:
    """Loss of one token whose log-prob is -1, and its derivative."""
    from mage_kernels import dispatch

    def tensor(value: float) -> Tensor:
        return torch.tensor([value], device=device)

    logprob = tensor(-1.0)
    frozen = None if distance is None else logprob + distance
    data = TokenData(tensor(advantage), logprob - log_ratio, frozen)
    if dispatch.BACKEND.fused_devices:
        from mage_kernels.fused.head_kernels import surrogate_gradient

        losses, slope, _ = surrogate_gradient(logprob, tensor(2.0), data, numbers, tensor(1.0))
    else:
        losses, slope, _ = token_derivatives(logprob, tensor(2.0), data, numbers)
    return float(losses), float(slope)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3])
def test_a_bonus_pays_for_the_entropy_of_each_token(device: str, rate: float) -> None:
    arguments = random_head(40, 300, 64, device=device)
    data, mask = token_data(arguments, device=device, with_reference=False)
    with_bonus = data._replace(entropy_rates=torch.full((40,), rate, device=device))
    ours = single_pass(arguments, with_bonus, mask, 10.0, {})
    plain = single_pass(arguments, data, mask, 10.0, {})
    bonus = rate * float(plain[0].entropy.sum()) / 10.0
    assert float(ours[0].loss) == pytest.approx(float(plain[0].loss) - bonus, rel=1e-4)
    _, d_hidden, d_head = two_pass(arguments, with_bonus, mask, 10.0, {})
    assert relative_error(ours[1], d_hidden) <= 6e-3
    assert relative_error(ours[2], d_head) <= 6e-3


def test_each_token_may_have_a_temperature_of_its_own(device: str) -> None:
    arguments = random_head(40, 300, 64, device=device)
    data, mask = token_data(arguments, device=device, with_reference=False)
    by_row = torch.where(torch.arange(40, device=device) % 3 == 0, 1 / 1.5, 0.8)
    ours = single_pass(arguments._replace(inverse_temperature=by_row), data, mask, 10.0, {})
    column = by_row[mask.to(by_row.device)][:, None]
    tempered = arguments._replace(inverse_temperature=column)
    loss, d_hidden, d_head = two_pass(tempered, data, mask, 10.0, {})
    assert float(ours[0].loss) == pytest.approx(float(loss), rel=1e-4)
    assert relative_error(ours[1], d_hidden) <= 6e-3
    assert relative_error(ours[2], d_head) <= 6e-3
    assert float(single_pass(arguments, data, mask, 10.0, {})[0].loss) != float(ours[0].loss)


def test_a_kl_term_without_a_reference_is_refused() -> None:
    arguments = random_head(5, 30, 8, device="cpu")
    data, _ = token_data(arguments, device="cpu", with_reference=False)
    with pytest.raises(ValueError, match="needs reference_logprobs"):
        linear_policy_loss(*arguments[:3], data, Surrogate(kl_coefficient=0.1), 1.0)


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ({"clip_low": 1.5}, "clip_low must lie in 0..1"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1 or None, got 0.5"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(numbers: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Surrogate(**numbers)
