"""The check of machine code: what is a fault, and that a kernel compiles without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USAGE = "Function k: REG:171 STACK:{stack} SHARED:0 LOCAL:{local} CONSTANT[0]:640 TEXTURE:0"
GEMM = "UTMALDG.2D [UR8], [UR4] ;\nHGMMA.64x256x16.F32.BF16 R24 ;\nUTMASTG.2D [UR8] ;\n"


@pytest.fixture
def static_check(triton_kernels: str):
    from bench.kernels import static_check

    return static_check


def test_numbers_are_read_from_the_tools_text(static_check) -> None:
    usage = USAGE.format(stack=0, local=0)
    found = static_check.read_resources(usage, GEMM, shared_bytes=147480)
    assert (found.registers, found.spilled_bytes, found.shared_bytes) == (171, 0, 147480)
    assert (found.num_mma, found.num_tma) == (1, 2)
    assert found.faults(is_gemm=True) == []


@pytest.mark.parametrize(
    ("stack", "local", "sass", "num_bytes"),
    [(16, 0, GEMM, 16), (0, 8, GEMM, 8), (0, 0, GEMM + "STL [R1], R2 ;\n", 4)],
)
def test_a_spill_is_a_fault(
    static_check, stack: int, local: int, sass: str, num_bytes: int
) -> None:
    usage = USAGE.format(stack=stack, local=local)
    found = static_check.read_resources(usage, sass, shared_bytes=0)
    assert found.faults(is_gemm=True) == [f"spills {num_bytes} bytes"]


def test_a_gemm_without_wgmma_is_a_fault_and_another_kernel_is_not(static_check) -> None:
    usage = USAGE.format(stack=0, local=0)
    found = static_check.read_resources(usage, "HMMA.16816.F32.BF16 R4 ;", shared_bytes=0)
    assert found.faults(is_gemm=True) == ["has no wgmma"]
    assert found.faults(is_gemm=False) == []


def test_each_architecture_has_its_own_limits(static_check) -> None:
    usage = USAGE.format(stack=0, local=0)
    ada = static_check.read_resources(usage, "", shared_bytes=100 * 1024, architecture=89)
    assert ada.faults(is_gemm=False) == ["needs more shared memory than 99 KiB"]
    sass = "UTCHMMA gdesc[UR4] ;\n"
    blackwell = static_check.read_resources(usage, sass, shared_bytes=0, architecture=100)
    assert blackwell.faults(is_gemm=True) == []
    hopper = static_check.read_resources(usage, sass, shared_bytes=0, architecture=90)
    assert hopper.faults(is_gemm=True) == ["has no wgmma"]


def test_every_kernel_is_checked(static_check) -> None:
    folder = ROOT / "kernels" / "mage_kernels" / "fused"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    kernels = set(re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", text))
    assert kernels
    assert {specimen.kernel.fn.__name__ for specimen in static_check.specimens()} == kernels


@pytest.mark.parametrize("spilled_bytes", [0, 8])
def test_one_fault_fails_the_check(
    static_check, monkeypatch: pytest.MonkeyPatch, spilled_bytes: int
) -> None:
    found = static_check.Resources(171, spilled_bytes, 0, num_mma=4, num_tma=6)
    monkeypatch.setattr(static_check, "compiled_resources", lambda *_: found)
    lines: list[str] = []
    assert static_check.report(lines.append) is (not spilled_bytes)
    assert lines[-1] == f"static check: {'FAILED' if spilled_bytes else 'passed'}"


def run_compiled(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process where Triton compiles instead of interpreting."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )


ONE_GEMM = """
from bench.kernels.static_check import compiled_resources, specimens
gemm = next(specimen for specimen in specimens() if specimen.is_gemm)
print(compiled_resources(gemm, 90).faults(is_gemm=True))
"""


@pytest.mark.usefixtures("triton_kernels")
def test_the_forward_compiles_for_hopper_without_a_gpu() -> None:
    done = run_compiled("-c", ONE_GEMM)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow  # .ci/run calls the same command
@pytest.mark.usefixtures("triton_kernels")
def test_no_kernel_spills_and_every_gemm_uses_the_matrix_units() -> None:
    done = run_compiled("-m", "bench.kernels.measure", "--static")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("static check: passed\n")
