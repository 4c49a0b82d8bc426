"""Choose between Triton kernels and plain PyTorch, once, at import.

CUDA tensors are computed by the Triton kernels if Triton is installed and the GPU is supported:
compute capability 8.0, 8.9, 9.0 or 10.0 for advantages, 9.0 or 10.0 for the LM head, in 16 bits.
All other tensors are computed by plain PyTorch. The environment variable `MAGE_KERNELS` overrides
the choice: `torch` for plain PyTorch, `triton` for Triton on any CUDA device. Triton does not
compute CPU tensors in either case, except in its interpreter (`TRITON_INTERPRET=1`), and the report
says so. If Triton is installed but cannot be imported, that is an error, never a silent fallback.
"""

import importlib
import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_CAPABILITIES = {(9, 0), (10, 0)}
"""Compute capabilities that the LM head's kernels are compiled and checked for."""
ADVANTAGE_CAPABILITIES = HEAD_CAPABILITIES | {(8, 0), (8, 9)}
"""Compute capabilities that the kernels of advantages are compiled and checked for."""
INSTALL = 'pip install "triton>=3.6,<3.8"'
"""Command that installs Triton, for messages."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Hold which tensors the Triton kernels compute, and the reason for that."""

    fused_devices: frozenset[str]
    """Types of devices whose tensors the Triton kernels compute."""
    reason: str
    """The choice and its reason in words, such as "plain PyTorch: no CUDA device"."""
    has_heads: bool = True
    """Whether the kernels of the LM head run there too; if not, only those of advantages do."""


def choose_backend(
    wanted: str, *, capability: tuple[int, int] | None, has_triton: bool, device: str = "the GPU"
) -> Backend:
    """Choose between the Triton kernels and plain PyTorch.

    The environment variable `TRITON_INTERPRET` is read too, which the interpreter itself reads.

    Args:
        wanted: Value of `MAGE_KERNELS`: "auto", "torch" or "triton".
        capability: Compute capability of the CUDA device; None without one.
        has_triton: Whether Triton is installed.
        device: Name of the CUDA device, for `Backend.reason`.

    Raises:
        ValueError: `wanted` is another word.
        ImportError: "triton" is wanted and not installed.
    """
    torch_only = frozenset[str]()
    if wanted not in ("auto", "torch", "triton"):
        raise ValueError(f"MAGE_KERNELS must be auto, torch or triton, got {wanted!r}")
    if wanted == "torch":
        return Backend(torch_only, "plain PyTorch: MAGE_KERNELS=torch")
    if wanted == "triton":
        if not has_triton:
            raise ImportError(f"MAGE_KERNELS=triton, but Triton is not installed: {INSTALL}")
        reason = "Triton: MAGE_KERNELS=triton"
        if os.environ.get("TRITON_INTERPRET") == "1":
            return Backend(frozenset({"cuda", "cpu"}), reason)
        if capability is None:
            reason = "plain PyTorch for CPU tensors, and no CUDA device: MAGE_KERNELS=triton"
        return Backend(frozenset({"cuda"}), reason)
    if capability is None:
        return Backend(torch_only, "plain PyTorch: no CUDA device")
    version = ".".join(map(str, capability))
    if capability not in ADVANTAGE_CAPABILITIES:
        return Backend(
            torch_only,
            "plain PyTorch: the Triton kernels are for compute capability "
            f"{_versions_as_text(ADVANTAGE_CAPABILITIES)}, {device} has {version}",
        )
    if not has_triton:
        return Backend(torch_only, f"plain PyTorch: Triton is not installed ({INSTALL})")
    fused = frozenset({"cuda"})
    if capability in HEAD_CAPABILITIES:
        return Backend(fused, f"Triton for CUDA tensors on {device}")
    return Backend(
        fused,
        f"Triton for advantages on {device}; plain PyTorch for the head, whose Triton kernels are "
        f"for compute capability {_versions_as_text(HEAD_CAPABILITIES)}, not {version}",
        has_heads=False,
    )


def _versions_as_text(capabilities: set[tuple[int, int]]) -> str:
    """Return compute capabilities as text, such as "9.0 or 10.0"."""
    *most, last = (".".join(map(str, each)) for each in sorted(capabilities))
    return f"{', '.join(most)} or {last}"


def _backend_of_this_machine() -> Backend:
    """Return the backend of this machine."""
    has_cuda = torch.cuda.is_available()
    backend = choose_backend(
        os.environ.get("MAGE_KERNELS", "auto"),
        capability=torch.cuda.get_device_capability() if has_cuda else None,
        has_triton=importlib.util.find_spec("triton") is not None,
        device=torch.cuda.get_device_name() if has_cuda else "the GPU",
    )
    if backend.fused_devices:
        # A broken Triton must fail here, not in the first step.
        importlib.import_module("triton")
    return backend


BACKEND = _backend_of_this_machine()
"""The choice for this process."""


def is_fused_on(device_type: str) -> bool:
    """Return whether Triton kernels run on devices of this type."""
    return device_type in BACKEND.fused_devices


def is_fused_head(hidden: Tensor) -> bool:
    """Return whether the Triton kernels of the LM head take hidden states `[T, D]`.

    Tensor cores need 16 bits: they would round fp32 to 10 bits of mantissa. The tensor memory
    accelerator needs rows that start at multiples of 16 bytes.
    """
    if not (is_fused_on(hidden.device.type) and BACKEND.has_heads):
        return False
    return hidden.itemsize == 2 and hidden.shape[1] % 8 == 0


def backend_report() -> str:
    """Describe the choice and its reason in one line."""
    return f"mage_kernels: {BACKEND.reason}"


def advantage_report(device: torch.device) -> str:
    """Describe where and how advantages are computed, as part of a line."""
    way = "Triton" if is_fused_on(device.type) else "plain PyTorch"
    return f"advantages by {way} on {device}"
