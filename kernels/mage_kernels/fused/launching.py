"""What every launch needs: descriptors, per-row scales, and whether Triton's interpreter runs.

The interpreter keeps bf16 as bare 16-bit integers, which `tl.dot` then multiplies as integers:
kernels with a `tl.dot` take UPCAST and convert their operands there.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

UPCAST = bool(triton.knobs.runtime.interpret)
LOG2E = 1.4426950408889634


def descriptor(matrix: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A matrix for the tensor memory accelerator: reads past its edges give 0."""
    return TensorDescriptor.from_tensor(matrix, [block_rows, block_columns])


def per_row(inverse_temperature: float | Tensor, num_rows: int, device: torch.device) -> Tensor:
    """The inverse temperature of every row, fp32 `[T]`."""
    if isinstance(inverse_temperature, Tensor):
        return inverse_temperature.to(device, torch.float32).expand(num_rows).contiguous()
    return torch.full((num_rows,), inverse_temperature, dtype=torch.float32, device=device)


def row_vectors(count: int, num_rows: int, device: torch.device) -> list[Tensor]:
    """Uninitialised fp32 vectors `[T]`."""
    return [torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(count)]


def padded_buffer(
    num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Uninitialised matrix whose rows start at multiples of 16 bytes, as a descriptor needs.

    What pads them is 0: a GEMM may read it and multiply it with zeros (oneDNN's for AMX does), and
    NaN times 0 is NaN.
    """
    columns = -(-num_columns // 16) * 16
    buffer = torch.empty((num_rows, columns), dtype=dtype, device=device)
    if columns > num_columns:
        buffer[:, num_columns:] = 0
    return buffer[:, :num_columns]


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, accumulated and returned in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, accumulated in fp32."""
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(product(left, right))
