"""Others' ways to a token's log-prob, each imported only where it is installed.

Every way takes hidden states `[T, D]`, head `[V, D]`, tokens `[T]` and a mask `[T]`, and gives
log-probs and, where it knows them, entropies, both differentiable. Masked tokens are left out as
far as the way itself offers it.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mage_kernels import linear_logprob

Way = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
IGNORED = -100
FAILURES = (ImportError, RuntimeError, TypeError, ValueError, AttributeError, AssertionError)
"""What another project's kernel may raise where it does not fit the machine or the version."""


def ours(host_mask: Tensor, vocabulary: int) -> dict[str, Way]:
    """Least memory, and with everything kept; the mask lies where the packing made it."""
    keep_bytes = len(host_mask) * vocabulary * 2

    def recompute(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor):
        return linear_logprob(hidden, head, tokens, mask=host_mask)

    def keep(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor):
        return linear_logprob(hidden, head, tokens, mask=host_mask, keep_bytes=keep_bytes)

    return {"ours, recompute": recompute, "ours, keep": keep}


def plain(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Logits in the inputs' dtype, softmax in fp32: three lines."""
    logprobs = (hidden @ head.T).float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, tokens[:, None]).squeeze(1), entropy


def anchors(device: str) -> Iterator[tuple[str, Way | str]]:
    """Name and way; or name and, where it cannot be had, the reason."""
    yield "torch, plain", plain
    yield "torch.compile", torch.compile(plain, dynamic=False)
    yield "torch linear_cross_entropy", _torch_native()
    for name, package, make in (
        ("liger-kernel, Triton", "liger_kernel", _liger_triton),
        ("liger-kernel, CuTe sm90", "liger_kernel", _liger_cute),
        ("cut-cross-entropy, cce", "cut_cross_entropy", lambda: _cce("cce")),
        ("cut-cross-entropy, cce_exact", "cut_cross_entropy", lambda: _cce("cce_exact")),
        ("verl, Triton", "verl", _verl),
    ):
        yield name, _if_it_can_be_had(package, make, device)


def _if_it_can_be_had(package: str, make: Callable[[], Way], device: str) -> Way | str:
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if device != "cuda":
        return f"{package} needs a GPU"
    try:
        return make()
    except FAILURES as error:
        return f"{package} cannot be used: {error}"


def _torch_native() -> Way | str:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} has no chunked linear_cross_entropy"
    options = torch.nn.LinearCrossEntropyOptions()

    def way(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        targets = tokens.masked_fill(~mask, IGNORED)
        loss = F.linear_cross_entropy(hidden, head, targets, reduction="none", options=options)
        return (-loss,)

    return way


def _liger_triton() -> Way:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="none")

    def way(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return (-loss(head, hidden, tokens.masked_fill(~mask, IGNORED)),)

    return way


def _liger_cute() -> Way:
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as sm90

    apply = sm90.LigerFusedScaledCrossEntropySM90Function.apply

    def way(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        nll, entropy = apply(
            hidden, head, tokens.masked_fill(~mask, IGNORED), 1.0, IGNORED, 1, True
        )
        return -nll, entropy

    return way


def _cce(implementation: str) -> Way:
    from cut_cross_entropy import linear_cross_entropy

    def way(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        targets = tokens.masked_fill(~mask, IGNORED)
        loss = linear_cross_entropy(hidden, head, targets, reduction="none", impl=implementation)
        return (-loss,)

    return way


def _verl() -> Way:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def way(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> Any:
        return linear_cross_entropy(hidden, head, tokens, 1.0, "none", None)

    return way
