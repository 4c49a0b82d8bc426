"""The head in plain PyTorch: chunks, company and precision change nothing that they must not."""

import pytest
import torch
from torch import Tensor

from mage_kernels import dispatch, linear_logprob
from mage_kernels.chunked import CHUNK_BYTES, ChunkedLogprob, chunk_bytes_on, gpu_chunk_bytes
from tests.helpers.random_heads import (
    Head,
    random_gradients,
    random_head,
    relative_error,
    run,
    truth,
)


def test_the_plain_form_gives_the_same_bits_in_small_chunks() -> None:
    hidden, head, tokens, _ = random_head(300, 257, 32, device="cpu", dtype=torch.float32)
    whole = ChunkedLogprob.apply(hidden, head, tokens, 0.7, 2**30)
    parts = ChunkedLogprob.apply(hidden, head, tokens, 0.7, 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])  # where MKL takes another way
def test_the_plain_form_gives_a_token_the_same_bits_in_any_company(num_tokens: int) -> None:
    arguments = random_head(200, 1003, 96, device="cpu", dtype=torch.float32)
    some = Head(arguments.hidden[:num_tokens], arguments.head, arguments.tokens[:num_tokens])
    gradients = random_gradients(200, "cpu")
    whole = run(arguments, gradients)
    part = run(some, [gradient[:num_tokens] for gradient in gradients])
    assert torch.equal(part.logprob, whole.logprob[:num_tokens])
    assert torch.equal(part.entropy, whole.entropy[:num_tokens])
    assert torch.equal(part.d_hidden, whole.d_hidden[:num_tokens])


GIB = 2**30


@pytest.mark.parametrize(
    ("free_bytes", "chunk_bytes"),
    [(70 * GIB, 2 * GIB), (8 * GIB, GIB), (0, CHUNK_BYTES)],
)
def test_a_gpu_takes_large_chunks_where_memory_is_free(free_bytes: int, chunk_bytes: int) -> None:
    assert gpu_chunk_bytes(free_bytes) == chunk_bytes


def test_a_cpu_takes_small_chunks() -> None:
    assert chunk_bytes_on(torch.device("cpu")) == CHUNK_BYTES == 64 * 2**20


@pytest.mark.parametrize("chunk_bytes", [1, 2**30])
def test_the_plain_form_is_differentiable_in_fp64(chunk_bytes: int) -> None:
    hidden, head, tokens, scale = random_head(
        70, 13, 4, device="cpu", inverse_temperature=0.6, dtype=torch.float64
    )

    def of_some(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return ChunkedLogprob.apply(hidden, head, tokens, scale, chunk_bytes)

    torch.autograd.gradcheck(
        of_some, (hidden.requires_grad_(), head.requires_grad_()), fast_mode=True
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_plain_form_runs_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BACKEND", dispatch.Backend(frozenset(), "a test"))
    arguments, gradients = random_head(200, 1003, 96, device="cuda"), random_gradients(200, "cuda")
    results, true = run(arguments, gradients), truth(arguments, gradients)
    assert (results.logprob - true.logprob).abs().max() <= 2e-5
    assert relative_error(results.d_hidden, true.d_hidden) <= 6e-3
    assert relative_error(results.d_head, true.d_head) <= 6e-3


def test_fp64_in_gives_fp64_out() -> None:
    arguments = random_head(5, 30, 8, device="cpu", dtype=torch.float64)
    assert [result.dtype for result in linear_logprob(*arguments)] == [torch.float64] * 2
