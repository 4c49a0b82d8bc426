"""Every benchmark can be imported, and those that are commands answer `--help`."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

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
