"""The documentation is true where a test can tell: links, paths, modules and names exist."""

import inspect
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from pkgutil import resolve_name

import mage_async
import mage_async as mage
from mage_async.config import config_file
from mage_services.cli.main import command_tree
from mage_services.cluster import placement
from tests.helpers.pages import python_blocks, steps_of

ROOT = Path(__file__).resolve().parent.parent
IGNORED = {
    ".venv",
    ".sglang_env",
    ".openenv_env",
    ".verifiers_env",
    ".agents_env",
    "runs",
    "site",
    ".pytest_cache",
    "node_modules",
}
HOMES = ("", "mage_async", "services", "kernels", "kernels/mage_kernels", "tests", "configs")
"""Folders that a path in prose may be relative to, beside that of the file itself."""
OF_A_READER = {
    "agent.py",
    "agent_server.py",
    "buttons.py",
    "my_agent.py",
    "check.sh",
    "clocks.py",
    "guess.py",
    "wages.py",
    "my_model.toml",
    "config.toml",
    "run.toml",
    "sums.py",
}
"""Files that a reader writes, or that a run does."""
SUFFIXES = r"\.(?:py|toml|md|sh|svg)"
PATH = re.compile(
    r"(?<![\w/.:-])(?:(?:[\w.-]+|\{[\w,]+\})/)*(?:[\w*-]|\{[\w,]+\})+" + SUFFIXES + r"\b"
)
FOLDER = re.compile(
    r"(?<![\w/.-])(?:mage_async|services|kernels|configs|tests|bench|docs)/[\w/.-]*/(?![\w*{])"
)
MODULE = re.compile(r"python -m ((?:mage_async|bench)[\w.]*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUESTION = re.compile(r"^\| .*? \| [^|]*?`([\w/.]+\.py)` \| (?:`([^`/]+)`)?", re.MULTILINE)
STATION = re.compile(r"^\| `([\w/.]+\.py)` \| `([^`/]+)`", re.MULTILINE)


def pages() -> list[Path]:
    """Every Markdown file of the repository, without those of virtual environments in it."""
    environments = {file.parent.name for file in ROOT.glob("*/pyvenv.cfg")}
    ignored, found = IGNORED | environments, ROOT.rglob("*.md")
    return sorted(page for page in found if not ignored & set(page.relative_to(ROOT).parts))


def expanded(path: str) -> Iterator[str]:
    """A path once for each of its alternatives in braces, as a shell does."""
    parts = re.split(r"\{([\w,]+)\}", path)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    yield from ("".join(chosen) for chosen in product(*choices))


def is_there(page: Path, path: str) -> bool:
    """Whether a path of a page names a file: from the page, from a package, or by its name."""
    if Path(path).name in OF_A_READER:
        return True
    folders = [page.parent, *(ROOT / home for home in HOMES)]
    if any(any(folder.glob(path)) for folder in folders):
        return True
    below = ROOT if page.parent.name == "docs" else page.parent.parent
    return "/" not in path and any(below.rglob(path))


def anchors(page: Path) -> set[str]:
    """The headings of a page as a browser names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s]+", "-", heading) for heading in plain}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists():
            yield f"{page.relative_to(ROOT)} links to {link}"
        elif anchor and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)} links to {link}, which has no such heading"


def missing_paths(page: Path) -> Iterator[str]:
    text = re.sub(r"https?://\S+", "", page.read_text(encoding="utf-8"))
    saved = {name for name, _ in steps_of(page)}
    for written in {*PATH.findall(text), *FOLDER.findall(text)} - saved:
        for path in expanded(written):
            if not is_there(page, path.rstrip("/")):
                yield f"{page.relative_to(ROOT)} names {path}"
    for module in MODULE.findall(text):
        file = ROOT / module.rstrip(".").replace(".", "/")
        if not file.is_dir() and not file.with_suffix(".py").is_file():
            yield f"{page.relative_to(ROOT)} runs {module}"


def test_every_link_path_and_module_in_markdown_exists() -> None:
    offenders = [each for page in pages() for each in (*broken_links(page), *missing_paths(page))]
    assert not offenders, "\n".join(offenders)


def test_the_page_of_questions_names_files_and_what_is_in_them() -> None:
    found = QUESTION.findall((ROOT / "docs" / "find.md").read_text(encoding="utf-8"))
    assert len(found) >= 40
    missing = [
        f"{file} has no {name}"
        for file, name in found
        if not (ROOT / file).is_file()
        or not re.search(
            rf"(?<!\w){re.escape(name)}(?!\w)", (ROOT / file).read_text(encoding="utf-8")
        )
    ]
    assert not missing, "\n".join(missing)


def test_the_ways_of_a_key_and_of_a_trial_name_files_and_count_crossings() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = (ROOT / "docs" / "hops.md").read_text(encoding="utf-8")
    key = QUESTION.findall(page.split("## The way of a key")[1].split("\n## ")[0])
    trial = QUESTION.findall(text)
    stations = STATION.findall(page.split("## The way of a trial")[1].split("\n## ")[0])
    assert len(stations) >= 15
    assert set(stations) <= set(trial)
    missing = [
        f"{file} has no {name}"
        for file, name in (*key, *trial)
        if not (ROOT / file).is_file()
        or not re.search(rf"\b{name}\b", (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not missing, "\n".join(missing)
    files = [file for file, _ in trial]
    waits = [file.startswith("services/") for file in files]
    num_files, num_crossings = len(set(files)), sum(a != b for a, b in pairwise(waits))
    print(f"a key: {len(key)} hops; a trial: {num_files} files, {num_crossings} crossings")
    assert len(key) <= 14
    assert num_files <= 60
    assert num_crossings <= 25
    said = f"{len(trial)} hops through {num_files} files, with {num_crossings} crossings"
    assert said in " ".join(text.split())
    assert said in " ".join(page.split())


def crowded_tables(page: Path) -> Iterator[str]:
    """Lines that follow a table without a blank line, and are read as rows of it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, (row, after) in enumerate(pairwise(line.strip() for line in lines), start=2):
        if row.startswith("|") and after and not after.startswith("|"):
            yield f"{page.relative_to(ROOT)}:{number} belongs to the table above: add a blank line"


def test_a_blank_line_follows_each_table() -> None:
    offenders = [each for page in pages() for each in crowded_tables(page)]
    assert not offenders, "\n".join(offenders)


EXECUTED = {
    "README.md": ("environments/test_reset_step.py",),
    "docs/agents.md": ("end_to_end/test_own_task.py", "gateway/test_programs.py"),
    "docs/agents/coding_agent.md": ("other_libraries/test_agent_harnesses.py",),
    "docs/agents/langgraph.md": ("other_libraries/test_agent_harnesses.py",),
    "docs/agents/openai_agents.md": ("other_libraries/test_agent_harnesses.py",),
    "docs/agents/smolagents.md": ("other_libraries/test_agent_harnesses.py",),
    "docs/architecture.md": ("end_to_end/test_examples.py",),
    "docs/examples/game_for_two.md": ("environments/test_duels.py",),
    "docs/examples/own_environment.md": ("end_to_end/test_examples.py",) * 2,
    "docs/examples/own_model.md": ("end_to_end/test_examples.py",) * 2,
    "docs/examples/serve.md": ("end_to_end/test_examples.py",),
    "docs/other_trainers.md": ("gateway/test_programs.py",),
    "docs/environments_of_others.md": ("other_libraries/test_openenv_package.py",),
    "docs/methods.md": (
        "own_components/test_own_components.py",
        *["methods/test_own_method.py"] * 2,
    ),
    "docs/python.md": ("end_to_end/test_examples.py",) * 2,
    "kernels/README.md": ("kernels/test_dispatch.py",),
    "docs/your_environment.md": (
        "environments/test_reset_step.py",
        "environments/test_interchangeable_words.py",
        "trials/test_tool_trials.py",
        "environments/test_own_class.py",
    ),
}
"""Tests that execute the blocks of Python of a page, in the order of the blocks."""


def test_every_block_of_python_is_executed_by_a_test() -> None:
    for page in pages():
        name, blocks = str(page.relative_to(ROOT)), python_blocks(page)
        assert len(blocks) == len(EXECUTED.get(name, ())), name
        for test in EXECUTED.get(name, ()):
            said = (ROOT / "tests" / test).read_text(encoding="utf-8")
            assert page.name in said or f'"{page.stem}"' in said, (name, test)


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each command `mage` of a page, without what a reader fills in or pipes."""
    text = re.sub(r"\\\n +", "", page.read_text(encoding="utf-8"))
    for line in re.findall(r"^ {4}((?:mage|pip|python) .+)$", text, re.MULTILINE):
        for part in re.split(r" (?:&&|&|\||>) ?", line):
            words = shlex.split(part.replace("…", ""), comments=True)
            if words[:1] == ["mage"]:
                yield words[1:]
            elif words[:3] == ["python", "-m", "mage_async.launch"]:
                yield ["train", *words[3:]]


def test_every_command_of_a_page_has_arguments_that_exist() -> None:
    found = [(page, command) for page in pages() for command in commands(page)]
    assert len(found) > 80
    wrong = []
    for page, command in found:
        try:
            command_tree().parse_args(command)
        except SystemExit:
            wrong.append(f"{page.relative_to(ROOT)}: mage {' '.join(command)}")
    assert not wrong, "\n".join(wrong)


def test_a_cluster_accepts_the_configurations_that_its_page_names() -> None:
    files = ROOT / "docs" / "cluster.md", ROOT / "docs" / "cluster" / "slurm.sh"
    text = "\n".join(re.sub(r" \\\n#? +", " ", file.read_text("utf-8")) for file in files)
    named = re.findall(r"--config (\w+)(.*--actors.*)", text)
    assert len(named) >= 4
    for name, options in named:
        changes = re.findall(r"--set '?([^\s']+)", options)
        placement.check(config_file.load(config_file.find(name), changes))


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    addresses = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    for name in {*mage.__all__} - {"__version__"}:
        home = getattr(mage, name).__module__
        assert f"{home}.{name}" in addresses or home in addresses, name


def test_the_readme_is_short_and_has_both_commands_word_for_word() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 155
    assert "pip install -e . && python -m mage_async.launch --actors 4 --learner 1\n" in text
    assert 'pip install -e ".[dev]" && pytest\n' in text


KINDS = inspect.isclass, inspect.isroutine, lambda member: isinstance(member, property)


def public_objects() -> Iterator[tuple[str, object]]:
    """What `import mage_async as mage` lists and the reference shows, with their public members."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    interface = [(f"mage.{name}", getattr(mage_async, name)) for name in mage_async._HOMES]
    shown = [(name, resolve_name(name)) for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)]
    assert len(shown) >= 8
    waiting = interface + shown
    while waiting:
        name, found = waiting.pop()
        yield name, found
        if inspect.isclass(found) or inspect.ismodule(found):
            home = found.__name__ if inspect.ismodule(found) else found.__module__
            for key, member in vars(found).items():
                is_own = getattr(member, "__module__", home) == home
                # A field of a struct is documented by the text below it, which no object has.
                is_documented = any(is_kind(member) for is_kind in KINDS)
                if is_own and is_documented and not key.startswith("_"):
                    waiting.append((f"{name}.{key}", member))


def test_every_public_name_has_a_docstring() -> None:
    objects = list(public_objects())
    lacking = [name for name, found in objects if not (getattr(found, "__doc__", "") or "").strip()]
    print(f"{len(objects) - len(lacking)} of {len(objects)} public names have a docstring")
    assert lacking == []
