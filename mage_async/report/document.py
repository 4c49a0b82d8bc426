"""The frame of every page: one file that needs no network."""

from pathlib import Path

from mage_async.report.markup import Markup, join, tag


def document(title: str, *content: Markup | None) -> str:
    """A whole page, self-contained."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style())),
    )
    body = tag("body", tag("main", *content))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def style() -> str:
    """The rules of every page, and of charts elsewhere."""
    return Path(__file__).with_name("style.css").read_text()


def section(title: str, *content: Markup | None) -> Markup:
    """A part of a page under its own heading."""
    return tag("section", tag("h2", title), join(*content), cls="part-of-page")


def folded(label: str, content: Markup) -> Markup:
    """What is there for those who open it."""
    return tag("details", tag("summary", label), content)
