"""What `mage config` prints, and the page made of it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lib import reference_pages
from mage_async.config import config_file
from mage_async.config.config_file import find
from mage_async.config.configuration_page import (
    OTHER_DEFAULTS,
    _described,
    as_lines,
    key_names,
    sections,
)
from mage_async.config.error_messages import SYNONYMS
from mage_async.config.section import Section
from mage_async.config.tables import Table
from mage_async.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_schema_says() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference_pages.configuration(), (
        "python -m bench.lib.reference_pages configuration > the page"
    )


def test_every_key_has_a_sentence() -> None:
    found = sections()
    assert all(key.sentence.endswith(".") for each in found for key in each.keys)
    assert sum(len(each.keys) for each in found) > 100


def test_one_section_is_found_with_those_below_it() -> None:
    assert [each.path for each in sections("learner")] == ["learner", "learner.correction"]
    lines = "\n".join(as_lines(sections("engine")))
    assert "max_tokens = 8192 (tiny: 160; own class: 2048; CPU: 2048)" in lines
    assert "Only with sglang." in lines


def test_a_table_of_the_page_has_a_key_once() -> None:
    tables = reference_pages.configuration().split("| key | default | type | meaning |\n")[1:]
    named = [re.findall(r"^\| `(\w+)`", table, re.MULTILINE) for table in tables]
    assert len(named) > 40
    assert all(len(set(names)) == len(names) for names in named), named


class Inner(Section):
    """A table that may be left out."""


class Outer(Section):
    """A table inside which the other one is."""

    learner: Inner | None = None
    """A name that a section above all has too."""


def test_a_table_is_present_on_a_cpu_only_with_a_default_at_its_own_place() -> None:
    tables: list[Table] = [{}, {"learner": {}}]
    said = [[*_described("", {"": Outer}, {"CPU": table})][1].sentence for table in tables]
    assert ["(CPU: present)" in each for each in said] == [False, True]


def test_the_page_has_every_default_that_depends_on_the_run() -> None:
    def leaves(table: Table, path: str = "") -> Iterator[tuple[str, object]]:
        for name, value in table.items():
            full = f"{path}.{name}".strip(".")
            yield from leaves(value, full) if isinstance(value, dict) else [(full, value)]

    for label, table in OTHER_DEFAULTS.items():
        for path, value in leaves(table):
            keys = sections(path)[0].keys
            assert any(f"{label}: {json.dumps(value)}" in key.default for key in keys), path


def test_an_unknown_section_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no section or key 'lerner'.*; known: .*learner.correction"
    ):
        sections("lerner")


@pytest.mark.parametrize(("name", "most"), [("quickstart", 45), ("papers", 90), ("", 60)])
def test_shipped_files_are_short(name: str, most: int) -> None:
    folder = find(None).parent
    found = [path for path in folder.rglob("*.toml") if name in (path.stem, path.parent.name, "")]
    assert found
    for path in found:
        allowed = 90 if path.parent.name == "papers" else most
        assert len(path.read_text().splitlines()) <= allowed, path


def test_one_key_is_explained_alone() -> None:
    (found,) = sections("learner.steps")
    assert [key.name for key in found.keys] == ["steps"]
    (seed,) = sections("seed")
    assert (seed.path, [key.name for key in seed.keys]) == ("", ["seed"])
    with pytest.raises(
        ConfigError, match=r"no section or key 'learner.step' \(did you mean `learn"
    ):
        sections("learner.step")


def test_names_of_other_libraries_lead_to_keys_that_exist() -> None:
    assert {*SYNONYMS.values()} <= {*key_names(sections())}
    with pytest.raises(ConfigError, match=r"'lr' \(did you mean `learner\.learning_rate`\?\)"):
        sections("lr")
    with pytest.raises(ConfigError, match=r"\(did you mean `admission\.trials_per_group`\?\)"):
        config_file.load(find(None), ["learner.group_size=3"])


def test_the_page_on_other_trainers_and_errors_name_the_same_keys() -> None:
    text = (ROOT / "docs" / "other_trainers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]*) \| ([^|]*) \| `(\w+\.[\w.]+)` \|", text, re.MULTILINE)
    assert len(rows) >= 20
    known = key_names(sections())
    for *theirs, ours in rows:
        assert ours in known
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", " ".join(theirs)):
            assert SYNONYMS.get(name) == ours or name == ours.rpartition(".")[2], name
