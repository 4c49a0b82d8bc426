"""Every benchmark can be imported, and those that are commands answer `--help`."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {
    "bench.chaos.fuzz_coverage": "atheris",
    "bench.engine.sglang_kills": "sglang",
    "bench.engine.sglang_truth": "sglang",
    "bench.engine.llama_side": "llama_cpp",
    "bench.models.trl_side": "trl",
}
"""Libraries without which a module cannot be imported."""
STARTED = {
    "bench.chaos.fuzz_coverage",
    "bench.chaos.tapped_run",
    "bench.engine.llama_side",
    "bench.scale.ray_nodes",
}
"""Programs that benchmarks start with arguments of their own."""
SLOW = {"median_us": 400.0, "p10_us": 400.0, "p90_us": 400.0}
BYTES = {"bytes": 1, "peak_bytes": 1}
SCHEDULES = (
    *("seed", "sync_s", "async_s", "ideal_s", "train_s", "async_over_sync", "of_ideal"),
    *("rule_of_ideal", "staleness_mean", "staleness_max", "sync_staleness_max"),
)
"""Figures of a round of `bench.system.throughput`."""


async def slow_journal(folder: Path) -> tuple[float, int]:
    """Take the place of a round of `bench.system.journal`: 1,000 s, one sync."""
    return 1000.0, 1


FILES = sorted((ROOT / "bench").rglob("*.py"))
MODULES = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_imports_and_answers_help(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDED and find_spec(NEEDED[name]) is None:
        pytest.skip(f"{name} needs {NEEDED[name]}")
    module = import_module(name)
    if not hasattr(module, "main") or name in STARTED:
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert module.__doc__ is not None
    assert "usage: " in said
    assert module.__doc__.splitlines()[0] in said


@pytest.mark.parametrize(
    ("name", "figures", "said"),
    [
        (
            "wire",
            {
                "measure": lambda: {
                    "frames": dict.fromkeys(("encode", "decode", "both"), SLOW) | BYTES
                }
            },
            "missed: frames took 400.0 µs, at most 100",
        ),
        (
            "throughput",
            {"measure": lambda sigma, seed: dict.fromkeys(SCHEDULES, 0.5) | {"sigma": sigma}},
            "missed: async_over_sync 0.50 at sigma 0.6, at least 1.6; of_ideal 0.50 at sigma 0.6,",
        ),
        ("journal", {"plain": lambda *_: 1.0, "journal": slow_journal}, "missed: 1"),
        ("environments", {"turns_per_second": lambda *_: 7.0}, "missed: kuhn 7 turns/s, at least"),
    ],
)
def test_a_benchmark_that_misses_a_bound_says_so_last_and_fails(
    name: str,
    figures: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `bench/README.md` says."""
    module = import_module(f"bench.system.{name}")
    for each, value in figures.items():
        monkeypatch.setattr(module, each, value)
    monkeypatch.setattr(module, "write_baseline", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [name])
    assert module.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(said)
