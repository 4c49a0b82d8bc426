"""The page, from its first line to the folded configuration."""

from typing import Any

from mage_async import config_file
from mage_async.report.markup import Markup, join, tag
from mage_async.run_directory import RunDirectory
from mage_async.run_records import read_records


def render(run: RunDirectory, summary: dict[str, Any]) -> str:
    """One self-contained HTML page about a run; `summary` is what `summarise` made of it."""
    records = read_records(run)
    sections = [
        tag("h1", summary["environment"]["name"]),
        tag(
            "details", tag("summary", "configuration"), tag("pre", config_file.dump(records.config))
        ),
    ]
    return "<!doctype html>\n" + tag("html", tag("body", join(*sections)), lang="en")


__all__ = ["Markup", "render"]
