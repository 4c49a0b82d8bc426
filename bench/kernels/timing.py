"""Measure time and memory of several functions in alternation, after a warm-up."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Hold a function's median, fastest and slowest round, and its peak memory above that before
    it."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    rounds: int
    peak_bytes: int | None
    """None on a CPU, where torch does not count memory."""

    def figures(self) -> dict[str, Any]:
        """Return the figures for a baseline."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}

    def line(self, name: str, note: str = "") -> str:
        """Return the line of the table."""
        memory = "" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:7.2f} GiB"
        spread = f"{self.fastest_ms:.2f}..{self.slowest_ms:.2f}"
        return f"  {name:34} {self.median_ms:10.2f} ms  {spread:>20} {memory}  {note}".rstrip()


def timings(
    functions: dict[str, Callable[[], object]], *, device: str, rounds: int, warm_up: int = 2
) -> dict[str, Timing]:
    """Time every function once in each round, so that a drift of the machine affects all alike."""
    for function in functions.values():
        for _ in range(warm_up):
            function()
    peaks = {name: peak_bytes(function, device) for name, function in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(seconds_of(function, device))
    return {
        name: Timing(median(found) * 1e3, min(found) * 1e3, max(found) * 1e3, rounds, peaks[name])
        for name, found in seconds.items()
    }


def seconds_of(function: Callable[[], object], device: str) -> float:
    """Return the seconds of one call, including all work that it queues on the device."""
    if device != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def peak_bytes(function: Callable[[], object], device: str) -> int | None:
    """Return the peak memory of one call, beyond what was held before it."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
