"""HTML that cannot be injected into: text is escaped unless it is `Markup`."""

from html import escape


class Markup(str):
    """Text that is HTML already; only `tag` and `join` make it."""

    __slots__ = ()


Child = str | float | int | None
_VOID = frozenset({"meta", "br", "hr"})
"""Elements that never have an end."""


def tag(name: str, /, *children: Child, **attributes: Child) -> Markup:
    """An element of its children, as `join` joins them.

    Attributes: `cls` is `class`, `_` is `-`, and one whose value is None is left out.
    """
    written = "".join(
        f' {_attribute(key)}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in _VOID else f"</{name}>"
    return Markup(f"<{name}{written}>{join(*children)}{end}")


def join(*children: Child) -> Markup:
    """Children one after another, escaped where they are not markup; None is nothing."""
    return Markup("".join(_escaped(child) for child in children if child is not None))


def _escaped(child: Child) -> str:
    return child if isinstance(child, Markup) else escape(_text(child))


def _attribute(name: str) -> str:
    return "class" if name == "cls" else name.replace("_", "-")


def _text(value: Child) -> str:
    """Numbers to a hundredth, which is enough for a drawing."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
