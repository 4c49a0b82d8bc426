"""GPUs by name: what their vendors say of them. Nothing here was measured."""

from dataclasses import dataclass, replace

from mage_async.config.sections.run import GPU
from mage_async.errors import ConfigError

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan needs to know of the hardware of a process."""

    name: str
    memory_bytes: int
    tflops_16: float = 0.0
    """10^12 dense operations a second in 16 bits, at most; 0: unknown."""
    tflops_32: float = 0.0
    """The same in float32, without TF32."""
    has_bfloat16: bool = True
    read_gb_s: float = 0.0
    """10^9 bytes a second out of its memory, at most; 0: unknown."""
    link_gb_s: float = 0.0
    """10^9 bytes a second to another GPU of its host, in each direction, at most: by NVLink, or by
    PCIe where it has none; 0: unknown."""

    def tflops(self, dtype: str, *, is_rounded: bool = False) -> float:
        """The most it can do in a type.

        Args:
            is_rounded: float32 is rounded to TF32, whose rate is half of that in 16 bits on every
                GPU that has it: those with bfloat16.
        """
        if dtype != "float32":
            return self.tflops_16
        has_tf32 = is_rounded and self.has_bfloat16
        return max(self.tflops_32, self.tflops_16 / 2) if has_tf32 else self.tflops_32


GPUS = {
    device.name: device
    for device in (
        Device("t4", 16 * GB, 65, 8.1, False, 320, 16),
        Device("v100", 32 * GB, 125, 15.7, False, 900, 150),
        Device("l4", 24 * GB, 121, 30.3, True, 300, 32),
        Device("rtx4090", 24 * GB, 165, 82.6, True, 1008, 32),
        Device("l40s", 48 * GB, 362, 91.6, True, 864, 32),
        Device("a100_40", 40 * GB, 312, 19.5, True, 1555, 300),
        Device("a100_80", 80 * GB, 312, 19.5, True, 2039, 300),
        Device("h100", 80 * GB, 989, 67, True, 3350, 450),
        Device("h200", 141 * GB, 989, 67, True, 4800, 450),
        Device("b200", 180 * GB, 2250, 80, True, 8000, 900),
    )
}
"""Data sheets of NVIDIA: memory in 10^9 bytes, which is less than what the driver shows."""


def device_of(name: GPU, memory_gb: float = 0.0) -> Device:
    """A GPU by its name, by its memory, or both.

    Raises:
        ConfigError: neither is given.
    """
    if not name and not memory_gb:
        raise ConfigError(
            f"the GPU is not known: set hardware.gpu to one of {', '.join(GPUS)}, or give "
            "`mage plan` --memory-gb"
        )
    known = GPUS[name] if name else Device("GPU", 0)
    return replace(known, memory_bytes=round(memory_gb * GB) or known.memory_bytes)


def check_dtype(dtype: str, device: Device, key: str) -> None:
    """Refuse a type that a GPU has no arithmetic for.

    Raises:
        ConfigError: with the key.
    """
    if dtype == "bfloat16" and not device.has_bfloat16:
        raise ConfigError(
            f'{key} = "bfloat16", which {device.name} does not compute in: set it to "float32", '
            "or take another GPU"
        )
