"""`linear_logprob` against fp64, and what must hold to the bit.

Sizes: 128 rows and 256 columns are a tile. 200 rows: one and a ragged second. 1003 columns: three
and a ragged fourth. 2600: eleven, so that some of the eight parts of the vocabulary have two tiles
and some none. 96: one and a half steps of the inner loop.
"""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from mage_kernels import dispatch, linear_logprob
from tests.helpers.random_heads import (
    Head,
    exactly_summed_head,
    plain_logprob,
    random_gradients,
    random_head,
    relative_error,
    run,
    truth,
)

KEEP_ALL = 2**40
KEEP_ONE_TILE = 128 * 1003 * 2


@pytest.mark.parametrize(
    ("largest_logit", "inverse_temperature"), [(4.0, 1.0), (32.0, 1 / 0.6), (32.0, 1 / 2)]
)
def test_logprob_and_entropy_are_as_exact_as_promised(
    device: str, largest_logit: float, inverse_temperature: float
) -> None:
    arguments = random_head(
        200,
        2600,
        256,
        device=device,
        largest_logit=largest_logit,
        inverse_temperature=inverse_temperature,
    )
    true_logprob, true_entropy = plain_logprob(*arguments.double())
    logprob, entropy = linear_logprob(*arguments)
    error = logprob.double() - true_logprob
    assert error.abs().max() <= 2e-4
    assert error.square().mean().sqrt() <= 2e-5
    assert error.mean().abs() <= 5e-6  # a phantom column or a lost tail hides in the maximum
    assert (entropy.double() - true_entropy).abs().max() <= 5e-4


@pytest.mark.slow
def test_the_promise_holds_for_wide_heads(device: str) -> None:
    arguments = random_head(130, 515, 4096, device=device, largest_logit=32.0)
    error = linear_logprob(*arguments)[0].double() - plain_logprob(*arguments.double())[0]
    assert error.abs().max() <= 2e-4
    assert error.square().mean().sqrt() <= 2e-5
    assert error.mean().abs() <= 5e-6


@pytest.mark.parametrize("keep_bytes", [0, 128 * 2600 * 2, KEEP_ALL])
def test_gradients_are_within_the_error_of_bf16(device: str, keep_bytes: int) -> None:
    arguments = random_head(200, 2600, 96, device=device, inverse_temperature=1.6)
    gradients = random_gradients(200, device)
    true = truth(arguments, gradients)
    ours = run(arguments, gradients, keep_bytes=keep_bytes)
    theirs = run(arguments, gradients, plain_bf16)
    for name in ("d_hidden", "d_head"):
        error = relative_error(getattr(ours, name), getattr(true, name))
        assert error <= 6e-3
        assert error <= 1.5 * relative_error(getattr(theirs, name), getattr(true, name))


@pytest.mark.parametrize("silent", ["logprob", "entropy"])
def test_a_gradient_into_one_result_alone_is_right(device: str, silent: str) -> None:
    arguments = random_head(40, 300, 64, device=device)
    gradients = random_gradients(40, device)
    zeros = torch.zeros_like(gradients[0])
    wanted = (zeros, gradients[1]) if silent == "logprob" else (gradients[0], zeros)

    hidden, head = (tensor.clone().requires_grad_() for tensor in arguments[:2])
    outputs = linear_logprob(hidden, head, *arguments[2:])
    which = 1 if silent == "logprob" else 0
    outputs[which].backward(gradients[which])
    true = truth(arguments, wanted)
    assert relative_error(hidden.grad, true.d_hidden) <= 6e-3
    assert relative_error(head.grad, true.d_head) <= 6e-3


def test_masked_tokens_give_zero_and_get_zero(device: str) -> None:
    arguments = random_head(200, 300, 64, device=device)
    mask = torch.arange(200) % 3 == 0
    arguments.hidden[~mask.to(device)] = float("nan")
    results = run(arguments, random_gradients(200, device), mask=mask)
    for result in (results.logprob, results.entropy, results.d_hidden):
        assert (result[~mask.to(device)] == 0).all()
        assert result[mask.to(device)].isfinite().all()
    assert results.d_head.isfinite().all()


@pytest.mark.parametrize("num_kept", [1, 5, 131])
def test_leaving_masked_tokens_out_changes_no_bit_of_the_others(device: str, num_kept: int) -> None:
    make = random_head if is_plain() or device == "cuda" else exactly_summed_head
    arguments = make(200, 1003, 96, device=device)
    mask = torch.zeros(200, dtype=torch.bool)
    mask[torch.randperm(200, generator=torch.Generator().manual_seed(2))[:num_kept]] = True
    gradients = [torch.where(mask.to(device), g, 0.0) for g in random_gradients(200, device)]
    alone, together = run(arguments, gradients, mask=mask), run(arguments, gradients)
    mask = mask.to(device)
    assert torch.equal(alone.logprob[mask], together.logprob[mask])
    assert torch.equal(alone.entropy[mask], together.entropy[mask])
    assert torch.equal(alone.d_hidden[mask], together.d_hidden[mask])


@pytest.mark.parametrize("keep_bytes", [0, KEEP_ONE_TILE])
def test_tokens_without_a_gradient_change_no_gradient(device: str, keep_bytes: int) -> None:
    arguments = random_head(200, 1003, 96, device=device)
    gradients = random_gradients(200, device)
    quiet = torch.arange(200, device=device) % 4 != 0
    for gradient in gradients:
        gradient[quiet] = 0.0
    results, true = run(arguments, gradients, keep_bytes=keep_bytes), truth(arguments, gradients)
    assert (results.d_hidden[quiet] == 0).all()
    assert relative_error(results.d_hidden, true.d_hidden) <= 6e-3
    assert relative_error(results.d_head, true.d_head) <= 6e-3


def test_no_gradient_at_all_gives_exactly_zero(device: str) -> None:
    arguments = random_head(20, 300, 64, device=device)
    zeros = torch.zeros(2, 20, device=device)
    results = run(arguments, (zeros[0], zeros[1]))
    assert (results.d_hidden == 0).all()
    assert (results.d_head == 0).all()


@pytest.mark.parametrize("keep_bytes", [0, KEEP_ALL])
def test_two_runs_give_the_same_bits(device: str, keep_bytes: int) -> None:
    arguments, gradients = random_head(150, 520, 64, device=device), random_gradients(150, device)
    first, second = (run(arguments, gradients, keep_bytes=keep_bytes) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_keeping_logits_changes_no_bit_of_the_forward(device: str) -> None:
    arguments = random_head(150, 520, 64, device=device)
    recomputed, kept = linear_logprob(*arguments), linear_logprob(*arguments, keep_bytes=KEEP_ALL)
    assert all(torch.equal(a, b) for a, b in zip(recomputed, kept, strict=True))


def test_the_backward_frees_the_logits_that_were_kept(
    triton_kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mage_kernels.fused.head_autograd import KeptLogits

    empty, kept = KeptLogits.empty, []

    def noted(*sizes: Any) -> KeptLogits:
        made = empty(*sizes)
        kept.append(weakref.ref(made.values))
        return made

    monkeypatch.setattr(KeptLogits, "empty", noted)
    arguments = random_head(150, 520, 64, device=triton_kernels)
    hidden = arguments.hidden.requires_grad_()
    logprob, _ = linear_logprob(hidden, *arguments[1:], keep_bytes=KEEP_ALL)
    assert [each() is None for each in kept] == [False]
    logprob.sum().backward()
    assert [each() is None for each in kept] == [True]


@pytest.mark.parametrize(
    ("num_tokens", "vocabulary"),
    [(1, 1003), (1, 1), (129, 257), (128, 256), (3, 255)],  # around one tile, and far below it
)
def test_odd_shapes_are_no_worse(device: str, num_tokens: int, vocabulary: int) -> None:
    arguments = random_head(num_tokens, vocabulary, 72, device=device)
    arguments.tokens[0] = vocabulary - 1  # the last column of a ragged tile
    gradients = random_gradients(num_tokens, device)
    results, true = run(arguments, gradients), truth(arguments, gradients)
    assert (results.logprob - true.logprob).abs().max() <= 2e-5
    assert (results.entropy - true.entropy).abs().max() <= 2e-5
    assert (results.d_hidden - true.d_hidden).norm() <= 6e-3 * true.d_hidden.norm() + 1e-6
    assert (results.d_head - true.d_head).norm() <= 6e-3 * true.d_head.norm() + 1e-6


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_a_batch_without_a_counted_token_gives_zeros(device: str, num_tokens: int) -> None:
    arguments = random_head(4, 300, 64, device=device)
    arguments = Head(arguments.hidden[:num_tokens], arguments.head, arguments.tokens[:num_tokens])
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    results = run(arguments, random_gradients(num_tokens, device), mask=mask)
    assert results.logprob.tolist() == results.entropy.tolist() == [0.0] * num_tokens
    assert results.d_hidden.shape == (num_tokens, 64)
    assert (results.d_hidden == 0).all()
    assert (results.d_head == 0).all()


def one_hot_rows(device: str, logit: float) -> Head:
    """Row t has `logit` at token t, 0 at the other tokens below 32, `-logit` from there on."""
    hidden = torch.eye(32, 64)
    hidden[:, 32] = 1.0
    head = torch.zeros(300, 64)
    head[:32, :32] = torch.eye(32) * logit
    head[32:, 32] = -logit
    return Head(
        hidden.to(device, torch.bfloat16),
        head.to(device, torch.bfloat16),
        torch.arange(32).to(device),
    )


@pytest.mark.parametrize("keep_bytes", [0, KEEP_ALL])
def test_a_nearly_certain_token_keeps_its_gradient(device: str, keep_bytes: int) -> None:
    arguments = one_hot_rows(device, 12.0)
    gradients = random_gradients(32, device)
    results, true = run(arguments, gradients, keep_bytes=keep_bytes), truth(arguments, gradients)
    assert (results.logprob <= 0).all()
    assert (results.entropy >= 0).all()
    assert (results.logprob - true.logprob).abs().max() <= 2e-6
    # 1 - p is 2e-4, which bf16 cannot tell from 0 once p is written as 1
    assert relative_error(results.d_hidden, true.d_hidden) <= 1e-2


@pytest.mark.parametrize("logit", [80.0, -80.0])
def test_extreme_logits_stay_finite_and_exact(device: str, logit: float) -> None:
    arguments = one_hot_rows(device, logit)
    gradients = random_gradients(32, device)
    results, true = run(arguments, gradients), truth(arguments, gradients)
    assert (results.logprob - true.logprob).abs().max() <= 1e-4
    assert (results.entropy - true.entropy).abs().max() <= 1e-4
    assert all(result.isfinite().all() for result in results)


def test_a_large_vocabulary_is_taken_in_chunks_of_columns(
    triton_kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mage_kernels.fused.head_autograd as fused

    arguments = random_head(150, 1003, 64, device=triton_kernels)
    gradients = random_gradients(150, triton_kernels)
    monkeypatch.setattr(fused, "CHUNK_COLUMNS", 256)
    results, true = run(arguments, gradients, keep_bytes=KEEP_ONE_TILE), truth(arguments, gradients)
    assert relative_error(results.d_hidden, true.d_hidden) <= 6e-3
    assert relative_error(results.d_head, true.d_head) <= 6e-3


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"head": torch.zeros(30, 9)}, r"hidden must be \[T, D\] and head \[V, D\]"),
        ({"head": torch.zeros(30, 8).double()}, "must share a floating dtype"),
        ({"tokens": torch.zeros(4).long()}, r"tokens must be torch.int64 \[5\], got .*\[4\]"),
        ({"tokens": torch.zeros(5)}, r"tokens must be torch.int64 \[5\], got torch.float32"),
        ({"inverse_temperature": 0.0}, "inverse_temperature must be above 0, got 0.0"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], complaint: str) -> None:
    arguments = Head(torch.zeros(5, 8), torch.zeros(30, 8), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=complaint):
        linear_logprob(*arguments._replace(**change))


def test_a_mask_of_another_shape_is_refused() -> None:
    arguments = Head(torch.zeros(5, 8), torch.zeros(30, 8), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"mask must be torch.bool \[5\], got torch.bool \[4\]"):
        linear_logprob(*arguments, mask=torch.ones(4, dtype=torch.bool))


def is_plain() -> bool:
    """Whether this test runs on plain PyTorch."""
    return not dispatch.BACKEND.fused_devices


def plain_bf16(hidden: Tensor, head: Tensor, tokens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What one would write without thinking: logits in bf16, the softmax in fp32."""
    logprobs = ((hidden @ head.T).float() * scale).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, tokens[:, None]).squeeze(1), entropy


def test_each_token_may_have_a_temperature_of_its_own(device: str) -> None:
    arguments = random_head(200, 1003, 96, device=device)
    is_warm = torch.arange(200, device=device) % 3 == 0
    by_row = torch.where(is_warm, 1 / 1.5, 0.8)
    gradients = random_gradients(200, device=device)
    found = run(arguments._replace(inverse_temperature=by_row), gradients)
    d_head = torch.zeros_like(found.d_head, dtype=torch.float64)
    for inverse_temperature, rows in ((1 / 1.5, is_warm), (0.8, ~is_warm)):
        alone = arguments._replace(inverse_temperature=inverse_temperature)
        mask = rows.cpu()
        wanted = run(alone, gradients, mask=mask)
        for name in ("logprob", "entropy", "d_hidden"):
            # The last bit of a sum depends on the processor and its threads, and may round a
            # gradient to a neighbour in bfloat16.
            one, other = getattr(found, name)[rows], getattr(wanted, name)[rows]
            rtol = 2**-7 if one.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6)
        d_head += wanted.d_head.double()
        own = arguments._replace(inverse_temperature=by_row)
        masked = run(own, gradients, mask=mask).d_head
        torch.testing.assert_close(masked, wanted.d_head, rtol=1e-6, atol=1e-6)
    assert relative_error(found.d_head, d_head) < 1e-2
    with pytest.raises(ValueError, match=r"inverse_temperature must be torch.float32 \[200\]"):
        linear_logprob(*arguments[:3], by_row.double())
