"""Compile every kernel for its GPUs, without a GPU, and check registers, spills and instructions.

Triton and the assembler that it ships need no device. A register spill, or a GEMM without the GPU's
own matrix instructions, is a fault: neither changes a result, but both cost much time. Under
TRITON_INTERPRET=1 nothing can be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mage_kernels.dispatch import HEAD_CAPABILITIES
from mage_kernels.fused import group_advantage, head_kernels
from mage_kernels.group_advantage import EPSILON, ROUNDING
from mage_kernels.surrogate import MAX_LOG_RATIO

SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that a program may have, by compute capability (90: Hopper)."""
MATRIX_UNITS = {90: ("wgmma", r"\bHGMMA\b"), 100: ("tcgen05", r"\bUTCHMMA\b")}
"""Name of the instructions that multiply 16-bit matrices, and a pattern of their machine code."""
TOOLS = Path(nvidia.__file__).parent / "bin"
"""Folder of the disassembler and of `cuobjdump`, which Triton ships."""
# Pointers to int64.
INT64 = {
    "tokens_ptr",
    "source_rows_ptr",
    "order_ptr",
    "cell_starts_ptr",
    "part_starts_ptr",
    "part_stops_ptr",
}
ALIGNED = {"V", "D", "first_column", "num_columns", "kept_stride", "gradient_stride"}
"""Integer arguments that are multiples of 16 at all shapes of a run, which Triton is told. Pointers
always are."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """A kernel with all that determines its machine code."""

    name: str
    kernel: Any
    blocks: Mapping[str, int]
    options: Mapping[str, int]
    constants: dict[str, Any] = field(default_factory=dict)
    """Arguments that are known when the kernel is compiled; None is a pointer that is absent."""
    bf16: frozenset[str] = frozenset()
    """Names of pointers to bf16. Others point to `floats`, or to int64 if INT64 names them."""
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Block shapes of bf16 matrices that are read or written through tensor descriptors (TMA)."""
    floats: str = "*fp32"
    is_gemm: bool = False

    def source(self) -> ASTSource:
        """Return Triton's source of the kernel."""
        names = self.kernel.arg_names
        constants = {**self.blocks, **self.constants}
        signature = {name: self._type_of(name, constants) for name in names}
        place = {name: (at,) for at, name in enumerate(names)}
        aligned = [n for n in names if signature[n].startswith("*") or n in ALIGNED]
        return ASTSource(
            self.kernel,
            signature,
            {place[name]: value for name, value in constants.items()},
            {place[name]: [["tt.divisibility", 16]] for name in aligned},
        )

    def _type_of(self, name: str, constants: dict[str, Any]) -> str:
        if name in constants:
            return "constexpr"
        if name in self.descriptors:
            return f"tensordesc<bf16[{','.join(map(str, self.descriptors[name]))}]>"
        if name.endswith("_ptr"):
            return "*i64" if name in INT64 else "*bf16" if name in self.bf16 else self.floats
        return "i32"


@dataclass(frozen=True, slots=True)
class Resources:
    """Hold the registers and memory of a compiled kernel, and its counts of special
    instructions."""

    registers: int
    spilled_bytes: int
    """Stack and local memory of a thread, plus 4 for each store to local memory."""
    shared_bytes: int
    num_mma: int
    """Number of the architecture's matrix instructions (`MATRIX_UNITS`)."""
    num_tma: int
    """Number of loads and stores by the tensor memory accelerator."""
    architecture: int = 90

    def faults(self, *, is_gemm: bool) -> list[str]:
        """Return the faults of the kernel, as phrases."""
        faults = [f"spills {self.spilled_bytes} bytes"] if self.spilled_bytes else []
        if self.shared_bytes > 1024 * SHARED_KIB[self.architecture]:
            faults.append(f"needs more shared memory than {SHARED_KIB[self.architecture]} KiB")
        if is_gemm and not self.num_mma:
            faults.append(f"has no {MATRIX_UNITS[self.architecture][0]}")
        return faults


def read_resources(
    usage: str, sass: str, *, shared_bytes: int, architecture: int = 90
) -> Resources:
    """Read the output of `cuobjdump --dump-resource-usage` and of `nvdisasm`."""
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    spills = len(re.findall(r"\bSTL\b", sass))
    return Resources(
        registers=numbers["REG"],
        spilled_bytes=numbers["STACK"] + numbers["LOCAL"] + 4 * spills,
        shared_bytes=shared_bytes,
        num_mma=len(re.findall(MATRIX_UNITS[architecture][1], sass))
        if architecture in MATRIX_UNITS
        else 0,
        num_tma=len(re.findall(r"\bUTMA(?:LDG|STG)\b", sass)),
        architecture=architecture,
    )


def compiled_resources(specimen: Specimen, architecture: int) -> Resources:
    """Compile a kernel for a compute capability, such as 90, and read its resources."""
    compiled = triton.compile(
        specimen.source(),
        target=GPUTarget("cuda", architecture, 32),
        options=dict(specimen.options),
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", cubin.name)
        sass = _tool("nvdisasm", "-c", cubin.name)
    return read_resources(
        usage, sass, shared_bytes=compiled.metadata.shared, architecture=architecture
    )


def specimens(architecture: int = 90) -> Iterator[Specimen]:
    """Yield every kernel that `dispatch` chooses on an architecture, in every form that a run
    uses."""
    if divmod(architecture, 10) in HEAD_CAPABILITIES:
        yield from _gemms()
        yield from _rows()
        yield from _losses()
    yield from _advantages()


def report(write: Callable[[str], object] = print) -> bool:
    """Compile all kernels, write a table for each architecture, and return whether there are no
    faults."""
    is_well = [_reported(architecture, write) for architecture in SHARED_KIB]
    write("static check: " + ("passed" if all(is_well) else "FAILED"))
    return all(is_well)


def _reported(architecture: int, write: Callable[[str], object]) -> bool:
    """Write the table of one architecture; return whether no kernel has a fault."""
    write(f"triton {triton.__version__}, sm_{architecture}")
    write(f"{'kernel':34} {'registers':>9} {'spills':>6} {'shared':>7} {'MMA':>5} {'TMA':>4}")
    is_well = True
    for specimen in specimens(architecture):
        found = compiled_resources(specimen, architecture)
        faults = found.faults(is_gemm=specimen.is_gemm)
        is_well &= not faults
        write(
            f"{specimen.name:34} {found.registers:9} {found.spilled_bytes:6} "
            f"{found.shared_bytes:7} {found.num_mma:5} {found.num_tma:4}  "
            f"{'; '.join(faults)}".rstrip()
        )
    return is_well


def _gemms() -> Iterator[Specimen]:
    """Yield the LM head's kernels that multiply matrices."""
    tile_t, tile_v, tile_d = (
        head_kernels.PARTIALS_BLOCKS[name] for name in ("BLOCK_T", "BLOCK_V", "BLOCK_D")
    )
    operands = {"hidden_desc": (tile_t, tile_d), "head_desc": (tile_v, tile_d)}
    for keep in (False, True):
        absent = {} if keep else {"kept_desc": None, "tile_max_ptr": None}
        yield Specimen(
            f"logit_partials{', keep' * keep}",
            head_kernels.logit_partials_kernel,
            head_kernels.PARTIALS_BLOCKS,
            head_kernels.PARTIALS_OPTIONS,
            {"SPLITS": head_kernels.SPLITS, "KEEP": keep, "UPCAST": False, **absent},
            descriptors=operands | ({"kept_desc": (tile_t, tile_v)} if keep else {}),
            is_gemm=True,
        )
    for has_slope in (False, True):
        yield Specimen(
            f"recomputed_gradient{', entropy' * has_slope}",
            head_kernels.recomputed_gradient_kernel,
            head_kernels.RECOMPUTED_BLOCKS,
            head_kernels.RECOMPUTED_OPTIONS,
            {"HAS_SLOPE": has_slope, "UPCAST": False} | _slope(has_slope),
            descriptors=operands | {"gradient_desc": (tile_t, tile_v)},
            is_gemm=True,
        )


def _rows() -> Iterator[Specimen]:
    """Yield the LM head's kernels that read or write logits and partial sums row by row."""
    yield Specimen(
        "merged_partials",
        head_kernels.merged_partials_kernel,
        head_kernels.MERGE_BLOCKS,
        head_kernels.MERGE_OPTIONS,
        {"PARTS": head_kernels.SPLITS},
        bf16=frozenset({"hidden_ptr", "head_ptr"}),
    )
    yield Specimen(
        "sampled_token_gradient",
        head_kernels.sampled_token_gradient_kernel,
        head_kernels.SAMPLED_BLOCKS,
        head_kernels.SAMPLED_OPTIONS,
        bf16=frozenset({"gradient_ptr"}),
    )
    for has_slope in (False, True):
        yield Specimen(
            f"kept_gradient{', entropy' * has_slope}",
            head_kernels.kept_gradient_kernel,
            head_kernels.KEPT_BLOCKS,
            head_kernels.KEPT_OPTIONS,
            {"HAS_SLOPE": has_slope} | _slope(has_slope),
            bf16=frozenset({"gradient_ptr", "kept_ptr"}),
        )


def _losses() -> Iterator[Specimen]:
    """Yield the kernel of the policy loss, with the fewest terms and with all."""
    plain = {"DUAL_CLIP": None, "KL_COEFFICIENT": 0.0}
    plain |= {"reference_ptr": None, "entropy_rate_ptr": None}
    full = {"DUAL_CLIP": 3.0, "KL_COEFFICIENT": 0.1}
    bounds = {"CLIP_LOW": 0.2, "CLIP_HIGH": 0.28, "MAX_LOG_RATIO": MAX_LOG_RATIO}
    for name, constants in (("surrogate_gradient", plain), ("surrogate_gradient, all terms", full)):
        yield Specimen(
            name,
            head_kernels.surrogate_gradient_kernel,
            head_kernels.SURROGATE_BLOCKS,
            head_kernels.SURROGATE_OPTIONS,
            bounds | constants,
        )


def _advantages() -> Iterator[Specimen]:
    """Yield the kernels of advantages in all forms of baseline and scale."""
    rule = {"LEAVE_ONE_OUT": False, "KEEP_LONE": False, "DIVIDE_BY_STD": False, "EPSILON": EPSILON}
    equal, weighted = {"IS_WEIGHTED": False, "weights_ptr": None}, {"IS_WEIGHTED": True}
    no_parts = {"part_starts_ptr": None, "part_stops_ptr": None}
    for name, constants in (
        ("minus_baseline", equal | no_parts),
        ("minus_baseline, trials", weighted | no_parts),
        ("minus_baseline, others", weighted | {"LEAVE_ONE_OUT": True}),
        ("minus_baseline, std", equal | no_parts | {"KEEP_LONE": True, "DIVIDE_BY_STD": True}),
    ):
        constants = rule | constants
        kernel = group_advantage.minus_baseline_kernel
        yield Specimen(
            name, kernel, group_advantage.BLOCKS, group_advantage.OPTIONS, constants, floats="*fp64"
        )
    for name, constants in (("over_rms", equal), ("over_rms, trials", weighted)):
        kernel = group_advantage.over_rms_kernel
        constants = constants | {"ROUNDING": ROUNDING, "EPSILON": 0.05}
        yield Specimen(
            name, kernel, group_advantage.BLOCKS, group_advantage.OPTIONS, constants, floats="*fp64"
        )


def _slope(has_slope: bool) -> dict[str, None]:
    return {} if has_slope else {"slope_ptr": None}


def _tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
