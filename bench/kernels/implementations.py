"""Compute log-probs of tokens from hidden states, by our kernels and by those of other projects.

Every implementation takes hidden states `[T, D]`, the LM head's weight `[V, D]`, tokens `[T]` and a
mask `[T]`. It returns log-probs `[T]` and, if it computes them, entropies `[T]`, both
differentiable. It skips masked tokens if it can. Another project's is imported only if it is
installed.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mage_kernels import linear_logprob

LogprobFn = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""An implementation, with the arguments and results that this module's docstring describes."""
IGNORED = -100
"""Target of a masked token: torch's convention for targets without a loss."""
FAILURES = (ImportError, RuntimeError, TypeError, ValueError, AttributeError, AssertionError)
"""Errors of a kernel that does not fit the machine, or the installed version of its project."""


def ours(host_mask: Tensor, vocabulary: int) -> dict[str, LogprobFn]:
    """Return our kernel twice: with logits recomputed in the backward, and with logits kept.

    Args:
        host_mask: bool `[T]` on the CPU, where the packing code of a run makes it.
    """
    keep_bytes = len(host_mask) * vocabulary * 2  # all logits in bfloat16

    def recompute(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor):
        return linear_logprob(hidden, head, tokens, mask=host_mask)

    def keep(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor):
        return linear_logprob(hidden, head, tokens, mask=host_mask, keep_bytes=keep_bytes)

    return {"ours, recompute": recompute, "ours, keep": keep}


def plain(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Compute all logits in the inputs' dtype, and softmax in fp32."""
    logprobs = (hidden @ head.T).float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, tokens[:, None]).squeeze(1), entropy


def other_implementations(device: str) -> Iterator[tuple[str, LogprobFn | str]]:
    """Yield the name of each implementation, and the implementation or why there is none."""
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
        yield name, _make_if_installed(package, make, device)


def _make_if_installed(package: str, make: Callable[[], LogprobFn], device: str) -> LogprobFn | str:
    """Return what `make` returns, or the reason that it cannot be used here."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if device != "cuda":
        return f"{package} needs a GPU"
    try:
        return make()
    except FAILURES as error:
        return f"{package} cannot be used: {error}"


def _torch_native() -> LogprobFn | str:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} has no chunked linear_cross_entropy"
    options = torch.nn.LinearCrossEntropyOptions()

    def implementation(
        hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        targets = tokens.masked_fill(~mask, IGNORED)
        loss = F.linear_cross_entropy(hidden, head, targets, reduction="none", options=options)
        return (-loss,)

    return implementation


def _liger_triton() -> LogprobFn:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="none")

    def implementation(
        hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        return (-loss(head, hidden, tokens.masked_fill(~mask, IGNORED)),)

    return implementation


def _liger_cute() -> LogprobFn:
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as sm90

    apply = sm90.LigerFusedScaledCrossEntropySM90Function.apply

    def implementation(
        hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        nll, entropy = apply(
            hidden, head, tokens.masked_fill(~mask, IGNORED), 1.0, IGNORED, 1, True
        )
        return -nll, entropy

    return implementation


def _cce(implementation: str) -> LogprobFn:
    from cut_cross_entropy import linear_cross_entropy

    def implementation(
        hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        targets = tokens.masked_fill(~mask, IGNORED)
        loss = linear_cross_entropy(hidden, head, targets, reduction="none", impl=implementation)
        return (-loss,)

    return implementation


def _verl() -> LogprobFn:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def implementation(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> Any:
        # Temperature, reduction, and the process group of a sharded vocabulary.
        return linear_cross_entropy(hidden, head, tokens, 1.0, "none", None)

    return implementation
