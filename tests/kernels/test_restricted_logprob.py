"""Log-probs over sets of allowed tokens, against a full softmax under a mask."""

import pytest
import torch

from mage_kernels import restricted_logprob


def problem(dtype: torch.dtype):
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 12, generator=source, dtype=dtype)
    head = torch.randn(40, 12, generator=source, dtype=dtype)
    columns = torch.tensor([2, 3, 11, 17, 39])
    mask = torch.rand(7, 5, generator=source) < 0.5
    mask[:, :2] = True
    targets = torch.tensor([0, 1, 0, 1, 1, 0, 0])
    return hidden, head, columns, mask, targets


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_it_is_the_softmax_of_the_whole_head_under_a_mask(temperature) -> None:
    hidden, head, columns, mask, targets = problem(torch.float64)
    allowed = torch.zeros(7, 40, dtype=torch.bool)
    allowed[:, columns] = mask
    whole = (hidden @ head.T * temperature).masked_fill(~allowed, float("-inf"))
    expected = torch.distributions.Categorical(logits=whole)
    probs = expected.probs[allowed]
    logprob, entropy = restricted_logprob(hidden, head, columns, mask, targets, temperature)
    torch.testing.assert_close(logprob, expected.log_prob(columns[targets]))
    rows = allowed.nonzero()[:, 0]
    own = torch.zeros(7, dtype=torch.float64).index_add(0, rows, -probs * probs.log())
    torch.testing.assert_close(entropy, own)


def test_both_results_have_the_gradients_of_finite_differences() -> None:
    hidden, head, *rest = problem(torch.float64)
    inputs = hidden.requires_grad_(), head.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda one, other: restricted_logprob(one, other, *rest), inputs
    )


def test_sixteen_bit_inputs_are_computed_in_float32() -> None:
    hidden, head, *rest = problem(torch.bfloat16)
    found = restricted_logprob(hidden, head, *rest)
    wide = restricted_logprob(hidden.float(), head.float(), *rest)
    for one, other in zip(found, wide, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_each_row_may_have_a_temperature_of_its_own() -> None:
    arguments = problem(torch.float32)
    by_row = torch.tensor([0.5, 2.0, 1.0, 0.5, 2.0, 1.0, 0.5])
    found = restricted_logprob(*arguments, by_row)
    for inverse_temperature in (0.5, 1.0, 2.0):
        rows = by_row == inverse_temperature
        wanted = restricted_logprob(*arguments, inverse_temperature)
        for own, alone in zip(found, wanted, strict=True):
            assert torch.equal(own[rows], alone[rows])
