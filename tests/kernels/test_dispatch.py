"""Which implementation is chosen, and what is said of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mage_kernels import backend_report, dispatch
from mage_kernels.dispatch import choose_backend
from tests.helpers.pages import ROOT, python_blocks

AMPERE, ADA, HOPPER, BLACKWELL, OLDER = (8, 0), (8, 9), (9, 0), (10, 0), (7, 5)


def test_a_hopper_gpu_with_triton_gets_the_kernels() -> None:
    backend = choose_backend("auto", capability=HOPPER, has_triton=True, device="H200")
    assert backend.fused_devices == {"cuda"}
    assert backend.reason == "Triton for CUDA tensors on H200"


def test_blackwell_gets_them_too() -> None:
    backend = choose_backend("auto", capability=BLACKWELL, has_triton=True, device="B200")
    assert (backend.fused_devices, backend.has_heads) == ({"cuda"}, True)


@pytest.mark.parametrize("capability", [AMPERE, ADA])
def test_older_tensor_cores_get_advantages_and_leave_the_head_to_pytorch(
    capability: tuple[int, int],
) -> None:
    backend = choose_backend("auto", capability=capability, has_triton=True, device="A100")
    assert (backend.fused_devices, backend.has_heads) == ({"cuda"}, False)
    assert backend.reason.startswith("Triton for advantages on A100; plain PyTorch for the head")


def test_a_head_without_kernels_goes_to_pytorch(
    triton_kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = dispatch.Backend(frozenset({triton_kernels}), "a test", has_heads=False)
    monkeypatch.setattr(dispatch, "BACKEND", backend)
    hidden = torch.zeros(2, 64, dtype=torch.bfloat16, device=triton_kernels)
    assert dispatch.is_fused_on(triton_kernels)
    assert not dispatch.is_fused_head(hidden)


@pytest.mark.parametrize(
    ("capability", "has_triton", "reason"),
    [
        (None, True, "plain PyTorch: no CUDA device"),
        (HOPPER, False, "plain PyTorch: Triton is not installed (pip install "),
        (
            OLDER,
            True,
            "plain PyTorch: the Triton kernels are for compute capability 8.0, 8.9, 9.0 or 10.0, "
            "T4 has 7.5",
        ),
    ],
)
def test_everything_else_gets_plain_pytorch_and_says_why(
    capability: tuple[int, int] | None, has_triton: bool, reason: str
) -> None:
    backend = choose_backend("auto", capability=capability, has_triton=has_triton, device="T4")
    assert not backend.fused_devices
    assert backend.reason.startswith(reason)


def test_plain_pytorch_can_be_asked_for() -> None:
    backend = choose_backend("torch", capability=HOPPER, has_triton=True)
    assert not backend.fused_devices
    assert backend.reason == "plain PyTorch: MAGE_KERNELS=torch"


def test_kernels_that_are_asked_for_must_be_there() -> None:
    with pytest.raises(ImportError, match="MAGE_KERNELS=triton, but Triton is not installed: pip"):
        choose_backend("triton", capability=HOPPER, has_triton=False)


def test_kernels_that_are_asked_for_without_a_device_are_reported_as_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with_device = choose_backend("triton", capability=HOPPER, has_triton=True)
    assert with_device.reason == "Triton: MAGE_KERNELS=triton"
    without = choose_backend("triton", capability=None, has_triton=True)
    assert without.reason.startswith("plain PyTorch for CPU tensors, and no CUDA device")


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(ValueError, match="must be auto, torch or triton, got 'cuda'"):
        choose_backend("cuda", capability=None, has_triton=False)


def test_the_report_is_one_line_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = choose_backend("auto", capability=None, has_triton=False)
    monkeypatch.setattr(dispatch, "BACKEND", backend)
    assert backend_report() == "mage_kernels: plain PyTorch: no CUDA device"


# fp32 would be rounded to 10 bits by tensor cores; 12 columns of bf16 do not fill 16 bytes.
@pytest.mark.parametrize(
    ("dtype", "width", "is_taken"),
    [
        (torch.bfloat16, 64, True),
        (torch.float32, 64, False),
        (torch.float64, 64, False),
        (torch.bfloat16, 12, False),
    ],
)
def test_the_triton_head_takes_what_tensor_cores_take(
    triton_kernels: str, dtype: torch.dtype, width: int, is_taken: bool
) -> None:
    hidden = torch.zeros(2, width, dtype=dtype, device=triton_kernels)
    assert dispatch.is_fused_head(hidden) is is_taken


IMPORTED_TWICE = """
import os, sys
import mage_kernels

print("triton" in sys.modules, flush=True)
for name in [name for name in sys.modules if name.startswith("mage_kernels")]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
os.environ["MAGE_KERNELS"] = "triton"
import mage_kernels
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton is wanted")
def test_without_a_gpu_triton_is_not_even_imported_and_a_broken_one_is_an_error_with_its_cause(
    tmp_path: Path,
) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('libcuda is missing')\n")
    package = Path(dispatch.__file__).parents[1]
    environment = os.environ | {"MAGE_KERNELS": "auto", "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", IMPORTED_TWICE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "False\n"), done.stderr
    assert done.stderr.endswith("ImportError: libcuda is missing\n")


def test_the_lines_of_the_readme_compute_log_probs(capsys: pytest.CaptureFixture[str]) -> None:
    (lines,) = python_blocks(ROOT / "kernels" / "README.md")
    given = {
        "hidden": torch.randn(4, 8),
        "head": torch.randn(6, 8),
        "tokens": torch.tensor([0, 5, 2, 1]),
        "temperature": 0.5,
        "mask": torch.tensor([True, True, False, True]),
    }
    exec(lines, given)
    logits = given["hidden"] @ given["head"].T / 0.5
    expected = logits.log_softmax(-1).gather(1, given["tokens"][:, None])[:, 0]
    torch.testing.assert_close(given["logprob"], expected * given["mask"])
    assert capsys.readouterr().out.startswith("mage_kernels: ")
