"""Read command lines, CPU times and memory of processes from `/proc` (Linux)."""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Yield process id and command line of every process on this machine."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended since
        yield int(entry.name), words.decode(errors="replace").split("\0")


def processor_s() -> dict[str, float]:
    """Return the CPU seconds so far of this process ("bench") and of its live descendants, by name.

    The name is the `--name` of the command line, else its module, else its program. Processes of
    the same name are added up.
    """
    total: dict[str, float] = defaultdict(float)
    total["bench"] = sum(os.times()[:2])
    for _, words, seconds in _descendants():
        total[_name(words)] += seconds
    return dict(total)


def held_bytes() -> int:
    """Return the bytes of resident memory of all live descendants of this process.

    Memory that several of them share is counted once (Linux's proportional set size).
    """
    return sum(_held_bytes(pid) for pid, _, _ in _descendants())


def _held_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0  # the process has ended since
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _descendants() -> Iterator[tuple[int, list[str], float]]:
    """Yield process id, command line and CPU seconds of each live descendant of this process."""
    lines = dict(command_lines())
    stats = {pid: stat for pid in lines if (stat := _stat(pid)) is not None}
    for pid, (_, seconds) in stats.items():
        if _is_descendant(pid, os.getpid(), stats):
            yield pid, lines[pid], seconds


def _stat(pid: int) -> tuple[int, float] | None:
    """Return the parent's id and the CPU seconds of a process; None if it has ended."""
    try:
        # Behind the program's name in parentheses, which may hold spaces: the state, the parent,
        # and from the 12th field on the ticks in user mode and in the kernel (`man proc_pid_stat`).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_descendant(pid: int, ancestor: int, stats: dict[int, tuple[int, float]]) -> bool:
    above = stats[pid][0]
    return above == ancestor or (above in stats and _is_descendant(above, ancestor, stats))


def _name(words: list[str]) -> str:
    """Return the name of a process, by the words of its command line."""
    if "--name" in words:
        return words[words.index("--name") + 1]
    if "-m" in words:
        module, argument = words[words.index("-m") + 1 :][:2]
        # `mage view` and a run are the same module: the command tells them apart.
        return " ".join([module.rpartition(".")[2], *([argument] if argument == "view" else [])])
    return words[0].rpartition("/")[2]
