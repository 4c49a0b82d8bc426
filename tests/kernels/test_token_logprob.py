"""Log-probs and entropies of logits that exist already. 4096 columns are a block of the kernel."""

import pytest
import torch
from torch import Tensor

from mage_kernels import reference, token_entropy, token_logprob, token_logprob_and_entropy


def random_logits(num_tokens: int, vocabulary: int, device: str, dtype: torch.dtype):
    """Logits of which some are -inf, tokens among the others, a temperature for each."""
    generator = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(num_tokens, vocabulary, generator=generator)
    logits[:, : vocabulary // 3] = float("-inf")
    tokens = torch.randint(vocabulary // 3, vocabulary, (num_tokens,), generator=generator)
    scale = torch.rand(num_tokens, generator=generator) + 0.5
    return logits.to(device, dtype), tokens.to(device), scale.to(device)


def gradient_of(function, logits: Tensor, *arguments: Tensor, **options: bool) -> Tensor:
    leaf = logits.clone().requires_grad_()
    outputs = function(leaf * 1, *arguments, **options)
    slopes = torch.linspace(-1, 1, len(logits), device=logits.device, dtype=outputs[0].dtype)
    torch.autograd.backward(outputs, [slopes, slopes.flip(0)])
    return leaf.grad


@pytest.mark.parametrize("vocabulary", [1, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_are_those_of_fp64(device: str, vocabulary: int, dtype: torch.dtype) -> None:
    logits, tokens, scale = random_logits(3, vocabulary, device, dtype)
    found = token_logprob_and_entropy(logits, tokens, scale)
    true = reference.token_logprob_and_entropy(logits.double(), tokens, scale.double())
    for ours, theirs in zip(found, true, strict=True):
        assert (ours - theirs).abs().max() <= 2e-5
    assert torch.equal(token_logprob(logits, tokens, scale), found[0])
    assert torch.equal(token_entropy(logits, scale), found[1])


@pytest.mark.parametrize("overwrite_logits", [False, True])
def test_gradients_are_those_of_fp64(device: str, overwrite_logits: bool) -> None:
    logits, tokens, scale = random_logits(5, 4097, device, torch.float32)
    found = gradient_of(
        token_logprob_and_entropy, logits, tokens, scale, overwrite_logits=overwrite_logits
    )
    true = gradient_of(reference.token_logprob_and_entropy, logits.double(), tokens, scale.double())
    assert (found - true).norm() <= 2e-6 * true.norm()


def test_the_gradient_can_take_the_logits_place(device: str) -> None:
    logits, tokens, scale = random_logits(2, 300, device, torch.bfloat16)
    logits = logits.requires_grad_() * 1
    logprob, _ = token_logprob_and_entropy(logits, tokens, scale, overwrite_logits=True)
    (gradient,) = torch.autograd.grad(logprob.sum(), logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="works once with overwrite_logits"):
        logprob.sum().backward()


def test_a_nearly_certain_token_keeps_its_gradient(device: str) -> None:
    logits = torch.zeros(1, 300, device=device, dtype=torch.bfloat16)
    logits[0, 7] = 16.0
    leaf = logits.clone().requires_grad_()
    token_logprob(leaf, torch.tensor([7], device=device)).backward()
    # 1 - p is 3.4e-5; had p been rounded to bf16, it would be 0
    assert float(leaf.grad[0, 7]) == pytest.approx(299 * 1.1253517e-7, rel=3e-2)
