"""Time and memory of several ways to do one thing: interleaved, on the same data, warmed up."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """One way's median, fastest and slowest round, and its memory above what lay there before."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    rounds: int
    peak_bytes: int | None
    """None on a CPU, where torch does not count."""

    def figures(self) -> dict[str, Any]:
        """For the baseline."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}

    def line(self, name: str, note: str = "") -> str:
        """For the table."""
        memory = "" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:7.2f} GiB"
        spread = f"{self.fastest_ms:.2f}..{self.slowest_ms:.2f}"
        return f"  {name:34} {self.median_ms:10.2f} ms  {spread:>20} {memory}  {note}".rstrip()


def timings(
    ways: dict[str, Callable[[], object]], *, device: str, rounds: int, warm_up: int = 2
) -> dict[str, Timing]:
    """Every way once a round, so that a drift of the machine meets all alike."""
    for way in ways.values():
        for _ in range(warm_up):
            way()
    peaks = {name: peak_bytes(way, device) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(seconds_of(way, device))
    return {
        name: Timing(median(found) * 1e3, min(found) * 1e3, max(found) * 1e3, rounds, peaks[name])
        for name, found in seconds.items()
    }


def seconds_of(way: Callable[[], object], device: str) -> float:
    """One run, from an idle device to an idle device."""
    if device != "cuda":
        start = time.perf_counter()
        way()
        return time.perf_counter() - start
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    way()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def peak_bytes(way: Callable[[], object], device: str) -> int | None:
    """The most memory held during one run, beyond what was held before it."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    way()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
