"""The arrows of the architecture: who may import whom, and what no file may be called."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "mage_async": ROOT / "mage_async",
    "mage_kernels": ROOT / "kernels" / "mage_kernels",
    "mage_services": ROOT / "services" / "mage_services",
}
WAITING = {"asyncio", "threading", "concurrent", "multiprocessing", "selectors", "socket", "time"}
STANDARD = set(sys.stdlib_module_names) - {"pickle"}
CORE = STANDARD - WAITING | {"numpy", "msgpack", "msgspec", "mage_async"}
LEARNING = {"torch", "transformers", "tokenizers", "safetensors", "mage_kernels"}
LEARNING |= {"huggingface_hub", "jinja2"}  # transformers' own, to find a model and render its chat
SERVICES = STANDARD | {"numpy", "msgpack", "msgspec", "torch", "uvloop", "rich"}
OPTIONAL = {
    "plots.py": {"matplotlib"},
    "sglang_process.py": {"sglang"},
    "sglang_weights.py": {"sglang"},
}
SPEAKING = {"channel.py", "curve.py", "links.py", "sockets.py"}
FORBIDDEN_NAMES = {"types", "utils", "common", "base", "manager"}

FILES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))


def package_of(path):
    return next(name for name, folder in PACKAGES.items() if path.is_relative_to(folder))


def has_torch(path):
    """Whether a file of `mage_async` is in one of the two folders that compute."""
    return path.relative_to(PACKAGES["mage_async"]).parts[0] in ("learning", "inference")


def allowed(path):
    """Top-level names of everything a file may import."""
    if package_of(path) == "mage_kernels":
        return STANDARD - WAITING | {"torch", "triton", "mage_kernels"}
    if package_of(path) == "mage_services" and path.name == "trial_export.py":
        return SERVICES | {"pyarrow", "mage_async"}
    if package_of(path) == "mage_services":
        zmq = {"zmq"} if path.name in SPEAKING else set()
        extra = OPTIONAL.get(path.name, set())
        return SERVICES | zmq | extra | {"mage_async", "mage_services"}
    if has_torch(path):
        return CORE | LEARNING
    is_game = path.is_relative_to(PACKAGES["mage_async"] / "environments")
    return CORE | ({"pyspiel"} if is_game else set())


def imported(source):
    """Dotted names of all modules a file imports, at its top, inside functions or for types."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def each_file(files):
    ids = [str(path.relative_to(ROOT)) for path in files]
    return pytest.mark.parametrize("path", files, ids=ids)


@each_file(FILES)
def test_a_file_imports_only_what_its_package_may(path):
    top = {name.split(".")[0] for name in imported(path.read_text(encoding="utf-8"))}
    assert top <= allowed(path)


@each_file([path for path in FILES if package_of(path) == "mage_async" and not has_torch(path)])
def test_the_core_does_not_reach_torch_through_the_folders_that_have_it(path):
    folders = ("mage_async.learning", "mage_async.inference")
    names = imported(path.read_text(encoding="utf-8"))
    assert not [name for name in names if name.startswith(folders)]


@each_file(FILES)
def test_a_file_is_named_after_what_it_knows(path):
    assert path.stem not in FORBIDDEN_NAMES


def test_imports_are_seen_wherever_they_stand():
    source = "import a.b\nif TYPE_CHECKING:\n    from c import d\ndef f():\n    from .e import g\n"
    assert imported(source) == {"a.b", "c.d", ".e.g"}


def test_the_folders_around_the_packages_are_no_packages():
    assert [path.parent.name for path in ROOT.glob("*/__init__.py")] == ["mage_async"]


def run_at_root(code):
    """Run Python in the repository root, as someone with a checkout does; what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


QWEN3 = """
import importlib.util
from transformers import Qwen3Config, Qwen3ForCausalLM
size = dict(hidden_size=16, intermediate_size=16, head_dim=8, num_hidden_layers=1, vocab_size=32)
model = Qwen3ForCausalLM(Qwen3Config(**size, num_attention_heads=2, num_key_value_heads=1))
kernels = importlib.util.find_spec("kernels")
print(sum(p.numel() for p in model.parameters()) > 0, kernels and kernels.origin)
"""


def test_transformers_builds_qwen3_at_the_root_because_our_kernels_folder_is_not_a_package():
    built, origin = run_at_root(QWEN3).split()[-2:]
    assert built == "True"
    assert not Path(origin).is_relative_to(ROOT)


def test_the_supervisor_imports_no_torch():
    printed = run_at_root(
        "import sys, mage_services.processes.supervisor; print('torch' in sys.modules)"
    )
    assert printed.strip() == "False"
