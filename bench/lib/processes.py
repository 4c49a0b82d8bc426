"""Processes of this machine, by the words of their command lines (Linux, `/proc`)."""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Process id and command line of every process that lives."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended since
        yield int(entry.name), words.decode(errors="replace").split("\0")


def processor_s() -> dict[str, float]:
    """Processor seconds so far of this process, and of all that it started and that live still, by
    `--name`, module or program; those of one name together.
    """
    total: dict[str, float] = defaultdict(float)
    total["bench"] = sum(os.times()[:2])
    for _, words, seconds in _started():
        total[_name(words)] += seconds
    return dict(total)


def held_bytes() -> int:
    """Memory of all processes that this one started and that live still; what several of them map
    is counted once ("proportional set size").
    """
    return sum(_held_bytes(pid) for pid, _, _ in _started())


def _held_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0  # the process has ended since
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _started() -> Iterator[tuple[int, list[str], float]]:
    """Process id, command line and processor seconds of all below this process."""
    lines = dict(command_lines())
    stats = {pid: stat for pid in lines if (stat := _stat(pid)) is not None}
    for pid, (_, seconds) in stats.items():
        if _is_below(pid, os.getpid(), stats):
            yield pid, lines[pid], seconds


def _stat(pid: int) -> tuple[int, float] | None:
    """Its parent and its processor seconds; None: the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_below(pid: int, ancestor: int, stats: dict[int, tuple[int, float]]) -> bool:
    above = stats[pid][0]
    return above == ancestor or (above in stats and _is_below(above, ancestor, stats))


def _name(words: list[str]) -> str:
    if "--name" in words:
        return words[words.index("--name") + 1]
    if "-m" in words:
        module, argument = words[words.index("-m") + 1 :][:2]
        return " ".join([module.rpartition(".")[2], *([argument] if argument == "view" else [])])
    return words[0].rpartition("/")[2]
