"""The tables of `docs/methods/presets.md`, against the presets that they describe."""

import json
from pathlib import Path

import pytest

from mage_async.config import presets

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "presets.md"
NONE = "–"
"""In the column of a preset that does not set the key."""


def tables():
    """Cells of each table whose first column is `key`: header and rows."""
    lines = [line.strip() for line in PAGE.read_text().splitlines()]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        for line in lines
    ]
    found = []
    for place, row in enumerate(rows):
        if row and row[0] == "key":
            end = next(n for n in range(place, len(rows)) if rows[n] is None)
            found.append((row, rows[place + 2 : end]))
    return found


def columns():
    """The page's keys and values of each preset that has a column."""
    known = presets.presets()
    for header, rows in tables():
        for place, name in enumerate(header):
            if name.strip("`") in known:
                cells = {row[0].strip("`"): row[place].strip("`") for row in rows}
                yield name.strip("`"), {k: json.loads(v) for k, v in cells.items() if v != NONE}


@pytest.mark.parametrize(("name", "stated"), list(columns()), ids=lambda each: str(each)[:24])
def test_the_page_states_every_key_of_a_preset_and_its_value(name, stated):
    assert stated == dict(presets.presets()[name])


def test_every_preset_of_the_core_that_trains_has_a_column():
    trained = {name for name, keys in presets.PRESETS.items() if keys.get("learner.steps") != 0}
    # `retry` is `gigpo` with another memory.
    assert {name for name, _ in columns()} == (trained - {"retry"}) | {"rema", "rema_separate"}


def test_every_row_says_what_the_authors_have():
    for header, rows in tables():
        for row in rows:
            assert len(row) == len(header)
            assert all(row)
