"""The layout of the house: which package may import which, and what modules are called.

Each test collects every offender and prints all of them as one list.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOMES = {
    "mage_async": ROOT / "mage_async",
    "mage_kernels": ROOT / "kernels" / "mage_kernels",
    "mage_services": ROOT / "services" / "mage_services",
}

NOUNS = {
    "completion", "errors", "policy_version", "restriction", "trajectory", "user_modules",
}  # fmt: skip
"""Modules at the top of `mage_async` that everybody may import."""

MAY_IMPORT: dict[str, set[str]] = {
    "mage_async.errors": set(),
    "mage_async.user_modules": {"errors"},
    "mage_async.policy_version": set(),
    "mage_async.restriction": set(),
    "mage_async.trajectory": {"policy_version", "restriction"},
    "mage_async.completion": {"errors", "policy_version", "restriction"},
    "mage_async.methods.catalogue": {"user_modules"},
    "mage_async.environments.tools": {"errors"},
    "mage_async.config": {*NOUNS, "environments.tools", "methods.catalogue"},
    "mage_async.environments": NOUNS,
    "mage_async.methods.method": {*NOUNS, "config", "environments", "methods.catalogue"},
    "mage_async.tasks": {*NOUNS, "config", "environments"},
    "mage_async.trials": {*NOUNS, "environments", "methods.method", "tasks"},
    "mage_async.credit": {*NOUNS, "config"},
    "mage_async.protocol": {*NOUNS, "tasks"},
    "mage_async.admission": {*NOUNS, "config", "methods.method", "protocol", "tasks"},
    "mage_async.assembly": {
        *NOUNS, "config", "credit", "environments", "methods.method",
        "tasks", "trials",
    },
    "mage_async.results": {
        *NOUNS, "admission", "assembly", "config", "environments", "methods.catalogue", "tasks",
    },
    "mage_async.doctor": {*NOUNS, "admission", "assembly", "config", "environments", "results"},
    "mage_async.pages": {*NOUNS, "config", "doctor", "results", "tasks", "trials"},
    "mage_async.policy.model_files": {*NOUNS, "config"},
    "mage_async.inference": {*NOUNS, "policy.model_files", "trials"},
    "mage_async.learning": {
        *NOUNS, "admission", "assembly", "config", "credit", "environments", "inference",
        "mage_kernels", "methods.method", "policy.model_files", "trials",
    },
    "mage_async.methods": {
        *NOUNS, "admission", "assembly", "config", "credit", "environments", "learning",
        "mage_kernels", "methods.method", "tasks", "trials",
    },
    "mage_async.attribution": {
        *NOUNS, "admission", "config", "learning", "protocol", "tasks", "trials",
    },
    "mage_async.policy": {
        *NOUNS, "assembly", "config", "environments", "inference", "learning", "methods.method",
        "results",
        "trials",
    },
    "mage_async.plan": {
        *NOUNS, "assembly", "config", "environments", "inference", "learning", "mage_kernels",
        "methods.method", "policy", "results", "trials",
    },
    "mage_async.algorithm": {
        *NOUNS, "assembly", "config", "environments", "inference", "learning",
        "methods.method", "policy", "results", "tasks", "trials",
    },
    "mage_async.launch": {"mage_services.cli"},
    "mage_kernels": set(),
    "mage_services.terminal": {"mage_async"},
    "mage_services.processes": {"mage_async", "mage_services.terminal"},
    "mage_services.transport": {"mage_async"},
    "mage_services.weights": {"mage_async"},
    "mage_services.journal": {"mage_async"},
    "mage_services.engines": {"mage_async", "mage_services.processes", "mage_services.weights"},
    "mage_services.gateway": {
        "mage_async", "mage_services.engines", "mage_services.processes",
    },
    "mage_services.environments": {
        "mage_async", "mage_services.gateway", "mage_services.processes",
    },
    "mage_services.tracking": {"mage_async", "mage_services.processes"},
    "mage_services.learner": {
        "mage_async", "mage_services.journal", "mage_services.processes",
        "mage_services.transport", "mage_services.weights",
    },
    "mage_services.actor": {
        "mage_async", "mage_services.engines", "mage_services.environments",
        "mage_services.learner", "mage_services.processes", "mage_services.transport",
        "mage_services.weights",
    },
    "mage_services.view": {
        "mage_async", "mage_services.actor", "mage_services.journal", "mage_services.processes",
        "mage_services.weights",
    },
    "mage_services.cluster": {
        "mage_async", "mage_services.processes",
    },
    "mage_services.serving": {
        "mage_async", "mage_services.engines", "mage_services.environments",
        "mage_services.gateway",
    },
    "mage_services.verifiers": {"mage_async", "mage_services.processes"},
    "mage_services.api": {"mage_async", "mage_services"},
    "mage_services.cli": {"mage_async", "mage_services"},
    "mage_async.__init__": {"config", "errors", "mage_services.api", "mage_services.cli"},
}  # fmt: skip
"""Packages by what they may import, below one another: a package appears after those it imports.
Names without a dot are packages and modules of `mage_async`; a name covers all below it.
"""

FOR_TYPES = {"mage_async.config.components": {"credit", "learning", "tasks", "mage_services"}}
"""Packages that a module names for a type checker only, by the module: it loads their classes by
name, and says what each of them has.
"""

STANDARD = set(sys.stdlib_module_names) - {"pickle"}
WAITING = {"asyncio", "threading", "concurrent", "multiprocessing", "selectors", "socket", "time"}
DECIDING = STANDARD - WAITING - {"argparse", "fcntl"} | {"numpy", "msgpack", "msgspec"}
COMPUTING = DECIDING | {
    "huggingface_hub", "jinja2", "peft", "safetensors", "tokenizers", "torch", "transformers",
}  # fmt: skip
SERVING = STANDARD | {"numpy", "msgpack", "msgspec", "torch", "uvloop", "rich"}
LIBRARIES: dict[str, set[str]] = {
    "mage_async": DECIDING,
    "mage_async.config": DECIDING | {"tomli_w"},
    "mage_async.environments": DECIDING | {"pyspiel"},
    "mage_async.environments.legal_pattern": DECIDING | {"llguidance"},
    "mage_async.environments.loaders": DECIDING | {"aiohttp", "gymnasium"},
    "mage_async.trials": DECIDING | {"llguidance"},
    "mage_async.pages": DECIDING | {"jinja2", "markupsafe"},
    "mage_async.inference": COMPUTING,
    "mage_async.methods": COMPUTING,
    "mage_async.methods.method": DECIDING,
    "mage_async.methods.catalogue": DECIDING,
    "mage_async.learning": COMPUTING | {"torchao"},
    "mage_async.policy": COMPUTING | {"pyarrow"},
    "mage_async.algorithm": COMPUTING,
    "mage_async.plan": COMPUTING,
    "mage_kernels": STANDARD - WAITING | {"torch", "triton"},
    "mage_services": SERVING,
    "mage_services.transport": SERVING | {"zmq"},
    "mage_services.gateway": SERVING | {"aiohttp"},
    "mage_services.serving": SERVING | {"aiohttp"},
    "mage_services.verifiers": SERVING,
    "mage_services.verifiers.child": STANDARD | {"httpx", "verifiers"},
    "mage_services.cluster": SERVING | {"huggingface_hub", "ray"},
    "mage_services.journal": SERVING | {"pyarrow"},
    "mage_services.view": SERVING | {"aiohttp", "markupsafe"},
    "mage_services.api": SERVING | {"huggingface_hub", "pandas", "polars", "tqdm", "transformers"},
    "mage_services.cli": SERVING | {"optuna", "shtab", "tomli_w"},
    "mage_services.tracking": SERVING | {"mlflow", "tensorboard", "trackio", "wandb"},
    "mage_services.engines": SERVING | {"aiohttp"},
    "mage_services.engines.sglang": SERVING | {"sglang"},
}
"""Libraries by the nearest package named here."""

METHOD_WORDS = re.compile(
    r"graph_?memory|(?<![a-z])sac(?![a-z])|soft_?actor|expert|exploit(?!ab)|metacure|stepagent"
    r"|scaling_?inter|both_?seats|(?<![a-z])(sge|rema)(?![a-z])",
    re.IGNORECASE,
)
"""Names of methods and of their parts, which only the methods themselves may know."""
MAY_NAME_METHODS = {
    "mage_async/config/error_messages.py": "the new names of old keys",
    "mage_async/policy/model_files.py": "keys of HuggingFace configurations: num_experts",
}

FORBIDDEN_NAMES = {"types", "utils", "common", "base", "manager", "helpers", "misc"}


def product() -> Iterator[tuple[str, Path]]:
    """Every module of the three packages: its dotted name, and its file."""
    for name, folder in HOMES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((name, *parts)).removesuffix(".__init__"), path


def imported(source: str) -> set[str]:
    """Dotted names of all modules a file imports, at its top, inside functions or for types."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def nearest(name: str, table: dict[str, set[str]]) -> str:
    """The longest entry of a table that a dotted name lies in, or "" where there is none."""
    parts = name.split(".")
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((each for each in candidates if each in table), "")


def is_below(name: str, allowed: set[str]) -> bool:
    full = {each if each.startswith("mage_") else f"mage_async.{each}" for each in allowed}
    return any(name == each or name.startswith(f"{each}.") for each in full)


def import_offenders() -> Iterator[str]:
    for module, path in product():
        # The package itself only hands on names of the Python interface; no package lies below it.
        name = "mage_async.__init__" if module == "mage_async" else module
        room = nearest(name, MAY_IMPORT)
        libraries = LIBRARIES[nearest(module, LIBRARIES)]
        for name in sorted(imported(path.read_text(encoding="utf-8"))):
            if name.split(".")[0] not in HOMES:
                if name.split(".")[0] not in libraries:
                    yield f"{module} imports the library {name}"
            elif not is_below(
                name, {room} | MAY_IMPORT.get(room, set()) | FOR_TYPES.get(module, set())
            ):
                yield f"{module} imports {name}"


def table_offenders() -> Iterator[str]:
    """Entries that name a package which stands later: the table would have a circle."""
    seen: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        for each in allowed:
            full = each if each.startswith("mage_") else f"mage_async.{each}"
            later = [name for name in MAY_IMPORT if name not in seen and name == full]
            if later and room != "mage_async.launch" and full != "mage_kernels":
                yield f"{room} may import {full}, which stands below it in the table"
        seen.add(room)


def test_a_package_imports_only_what_the_table_says() -> None:
    source = "import a.b\nif TYPE_CHECKING:\n    from c import d\ndef f():\n    from .e import g\n"
    assert imported(source) == {"a.b", "c.d", ".e.g"}
    assert "\n".join([*import_offenders(), *table_offenders()]) == ""


def method_offenders() -> Iterator[str]:
    """Lines of the core, templates of pages included, that name a method."""
    for folder in HOMES.values():
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.html")]):
            file = path.relative_to(folder.parent).as_posix()
            if file.startswith("mage_async/methods/") or file in MAY_NAME_METHODS:
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if METHOD_WORDS.search(line):
                    yield f"{file}:{number}: {line.strip()}"


def test_the_core_names_no_method() -> None:
    assert METHOD_WORDS.search("from mage_async.methods.graph_memory import GraphMemory")
    assert not METHOD_WORDS.search("sacrifice, exploitability, remark")
    assert "\n".join(method_offenders()) == ""


def name_offenders() -> Iterator[str]:
    for module, path in product():
        if path.stem in FORBIDDEN_NAMES:
            yield f"{module} has a name that says nothing"
        if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text())):
            yield f"{module} does not say its purpose"
    packages = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    if packages != ["mage_async"]:
        yield f"a folder at the top became a package: {packages}"


def test_modules_have_names_that_say_something_and_packages_say_their_purpose() -> None:
    assert "\n".join(name_offenders()) == ""


def run_at_root(code: str) -> str:
    """Run Python in the repository root, as someone with a checkout does; what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LIGHT = """
import sys, mage_services.processes.supervisor, mage_services.cli.main
from mage_async.config.presets import presets; presets()
print("torch" in sys.modules, importlib.util.find_spec("kernels") is not None and
      importlib.util.find_spec("kernels").origin)
"""


def test_the_supervisor_and_the_command_line_import_no_torch() -> None:
    """Our folder `kernels` is no package either, which transformers would take for the library."""
    torch_is_in, origin = run_at_root("import importlib.util" + LIGHT).split()
    assert torch_is_in == "False"
    assert origin in ("None", "False") or not Path(origin).is_relative_to(ROOT)


def test_the_readers_of_a_journal_do_not_import_transformers() -> None:
    """Which takes seconds, and prints four lines about torchao before the command's result."""
    code = "import sys, mage_services.journal.export, mage_services.api.run"
    assert run_at_root(f"{code}; print('transformers' in sys.modules)") == "False\n"
